"""Kernels that the construction loads ahead, and loads within calls."""

import logging
import os
import sys
from types import SimpleNamespace

import pytest

from numba_symm import environment
from numba_symm.collectives import kernel_set, lifetime
from numba_symm.gpu import kernels, loads
from numba_symm.gpu.kernels import Kernel


@pytest.fixture
def gpu(monkeypatch, cache):
    """A GPU without a driver: a cubin is its kernel's name, a function the cubin."""
    import cuda.core

    found = SimpleNamespace(device_id=0, compute_capability=(9, 0), loaded=[])

    def load(code):
        found.loaded.append(code.decode())
        return code

    monkeypatch.setattr(cuda.core, "Device", lambda: found)
    monkeypatch.setattr(Kernel, "cubin", lambda kernel, cc: kernel.name.encode())
    monkeypatch.setattr(kernels, "_function", load)
    monkeypatch.setattr(loads, "_boards", [])
    monkeypatch.setattr(sys, "argv", ["program.py"])
    environment.warn_once.cache_clear()
    start(monkeypatch)
    yield found
    start(monkeypatch)
    kernels._leave_mark.cache_clear()


def start(monkeypatch):
    """Forget what a process knows, as the next start of the program has not it."""
    monkeypatch.setattr(loads, "_listed", loads.Listed())
    monkeypatch.setattr(loads.Count, "within_calls", 0)
    monkeypatch.setattr(kernels, "_ahead", {})
    kernels._loaded.cache_clear()
    kernels._leave_mark.cache_clear()


def make_first(size):
    return lambda out: None


def make_second(size):
    return lambda out: None


FIRST, SECOND = (Kernel(make, (2,), (), 128) for make in (make_first, make_second))


def construct(ranks=2):
    with loads.ahead():
        kernels.load_listed(ranks)


def test_a_second_start_loads_in_its_calls_what_is_new_only(gpu, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "numba_symm")
    construct()
    with loads.of("all_reduce"):
        FIRST.load()
        FIRST.load()
    assert loads.Count.within_calls == 1
    assert "loaded the kernel first within all_reduce" in caplog.text
    for others in ({"ranks": 4}, {"program": "other.py"}):
        start(monkeypatch)
        monkeypatch.setattr(sys, "argv", [others.pop("program", "program.py")])
        gpu.loaded.clear()
        construct(**others)
        assert gpu.loaded == []
    start(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    construct()
    assert gpu.loaded == ["first"]
    FIRST.load()
    assert (gpu.loaded, loads.Count.within_calls) == (["first"], 0)
    SECOND.load()
    construct()  # of a second communicator: the list is read once
    assert (gpu.loaded, loads.Count.within_calls) == (["first", "second"], 1)
    start(monkeypatch)
    construct()
    assert sorted(gpu.loaded[2:]) == ["first", "second"]


def test_the_variable_switches_it_off(gpu, monkeypatch):
    construct()
    FIRST.load()
    start(monkeypatch)
    monkeypatch.setenv("NUMBA_SYMM_LOAD_AHEAD", "0")
    construct()
    assert gpu.loaded == ["first"]


def test_what_is_not_cached_is_loaded_within_calls(gpu, monkeypatch):
    monkeypatch.setattr(Kernel, "cacheable", property(lambda kernel: kernel is FIRST))
    construct()
    for _ in range(2):
        FIRST.load()
        SECOND.load()
    start(monkeypatch)
    construct()
    SECOND.load()
    assert gpu.loaded == ["first", "second", "first", "second"]
    assert loads.Count.within_calls == 1


@pytest.mark.parametrize("content", [b"", b"a\nb\n", b"\xff" * 99, b"0" * 64, b"\0"])
def test_a_damaged_list_is_replaced(gpu, monkeypatch, content, recwarn):
    construct()
    FIRST.load()
    (place,) = loads.folder().glob("*.loads")
    place.write_bytes(content)
    start(monkeypatch)
    construct()
    assert gpu.loaded == ["first"]
    damaged = content != b""
    assert (
        len([each for each in recwarn if "is damaged" in str(each.message)]) == damaged
    )
    FIRST.load()
    start(monkeypatch)
    construct()
    assert gpu.loaded == ["first"] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_another_users_list_is_not_used(gpu, monkeypatch):
    construct()
    FIRST.load()
    (place,) = loads.folder().glob("*.loads")
    os.chown(place, 12345, -1)
    start(monkeypatch)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        construct()
    assert gpu.loaded == ["first"]


def test_a_list_that_cannot_be_written_is_said_once(gpu, monkeypatch):
    construct()
    monkeypatch.setattr(
        os, "open", lambda *args: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.warns(RuntimeWarning, match=r"\.loads is ignored \(full\)"):
        loads.remember("0" * 64)
    loads.remember("1" * 64)


class Board:
    def __init__(self):
        self.calls = []

    def note_load(self, what):
        self.calls.append(what)

    def end_load(self):
        self.calls.append("end")


def test_a_load_within_a_call_is_noted_on_the_boards(gpu, monkeypatch):
    board = Board()
    monkeypatch.setattr(loads, "_boards", [board])
    monkeypatch.setattr(kernels, "_function", lambda code: board.calls.append("load"))
    with loads.ahead(), loads.of("scan"):
        FIRST.load()
    with loads.of("scan"):
        SECOND.load()
    assert board.calls == ["load", "scan\nsecond", "load", "end"]


def test_the_default_set_is_loaded_as_far_as_it_is_cached(gpu, monkeypatch):
    end = kernel_set.endpoint(2)
    kernel_set.load_default(end)  # nothing is cached
    assert gpu.loaded == []
    found = kernel_set.kernels(["barrier", "all_gather"], ["float32"], ["sum"], end, "")
    for kernel in found:
        kernel.load()
    start(monkeypatch)
    gpu.loaded.clear()
    kernel_set.load_default(end)
    assert sorted(gpu.loaded) == sorted(kernel.name for kernel in found)
    start(monkeypatch)
    monkeypatch.setattr(kernel_set, "kernels", None)  # the set is known now
    kernel_set.load_default(end)
    for kernel in found:
        kernel.load()
    assert loads.Count.within_calls == 0


def test_each_kind_of_gpu_has_a_default_set_of_its_own(gpu, monkeypatch):
    """Nodes with other GPUs may share the cache; their code cannot be loaded here."""
    end = kernel_set.endpoint(2)
    (kernel,) = kernel_set.kernels(["barrier"], ["float32"], ["sum"], end, "")
    for cc in (9, 0), (8, 0):
        monkeypatch.setattr(gpu, "compute_capability", cc)
        kernels._loaded.cache_clear()
        kernel.load()
        kernel_set.load_default(end)
    start(monkeypatch)
    loaded = set()
    monkeypatch.setattr(kernel_set, "load_cached", loaded.update)
    kernel_set.load_default(end)
    assert kernel.key((8, 0)).hex() in loaded
    assert kernel.key((9, 0)).hex() not in loaded


@pytest.mark.parametrize(
    ("parts", "size", "variable", "loaded"),
    [
        (1, 2, "1", ["listed 4", "default"]),
        (2, 2, "1", ["listed 4"]),  # no rank sees the workspaces of all
        (1, 1, "1", []),
        (1, 2, "0", []),
    ],
)
def test_what_a_construction_loads(monkeypatch, parts, size, variable, loaded):
    found = []
    monkeypatch.setenv("NUMBA_SYMM_LOAD_AHEAD", variable)
    monkeypatch.setattr(
        lifetime, "load_listed", lambda ranks: found.append(f"listed {ranks}")
    )
    monkeypatch.setattr(kernel_set, "load_default", lambda end: found.append("default"))
    island = SimpleNamespace(comm=SimpleNamespace(size=4), parts=((),) * parts)
    lifetime._load_ahead(SimpleNamespace(size=size, members=island, end=None))
    assert found == loaded
