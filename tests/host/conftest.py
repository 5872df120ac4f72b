"""Fixtures of several files."""

import ctypes
import types
from collections import defaultdict

import pytest

from numba_symm.engines import deadline
from numba_symm.gpu import driver, loads, streams
from numba_symm.launch import waiting
from tests import isolation


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """Settings of the tests are for ranks; here they would change what is tested."""
    for name in isolation.KEPT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Use an empty cache here and in other processes; return its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loads, "_warned", False)
    loads._files.cache_clear()
    yield loads.folder()
    loads._files.cache_clear()


class Gpu:
    """Has the host memory of the marks, into which they are stored immediately.

    In a capture, a mark is appended to a graph, whose nodes are numbered.
    """

    def __init__(self):
        self.memory = ctypes.create_string_buffer(b"\xff" * 8)
        self.stored = []
        self.captured = {}  # by stream: its capture
        self.nodes = []
        self.places = defaultdict(frozenset)  # by stream: what its next node follows

    def kernel(self):
        return self

    def bind(self, grid, address, number):
        assert address == ctypes.addressof(self.memory)
        return Mark(self, number)

    def add(self, stream, work):
        """Capture a kernel."""
        self.places[stream] = frozenset([len(self.nodes)])
        self.nodes.append(work)

    def in_capture(self, stream):
        return self.captured[stream], self.places[stream]


class Mark:
    """A launch that stores a number."""

    def __init__(self, gpu, number):
        self.gpu, self.number = gpu, number

    def __call__(self, stream):
        if stream in self.gpu.captured:
            self.gpu.add(stream, self.number)
            return
        self.gpu.stored.append((stream, self.number))
        ctypes.c_uint64.from_buffer(self.gpu.memory).value = self.number

    def replace(self, node):
        self.gpu.nodes[node] = self.number


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(driver, "call", lambda *_: ctypes.addressof(gpu.memory))
    monkeypatch.setattr(deadline, "kernel", gpu.kernel)
    monkeypatch.setattr(streams, "is_capturing", lambda stream: stream in gpu.captured)
    monkeypatch.setattr(streams, "in_capture", gpu.in_capture)
    return gpu


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(waiting, "time", clock)
    return clock
