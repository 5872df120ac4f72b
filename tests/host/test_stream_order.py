"""A call waits for the one before unless both are on one stream."""

import ctypes
import gc
import importlib.util
import itertools
import threading
import weakref

import pytest

from numba_symm import driver, entry, events
from numba_symm.collectives import requests
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.record import Description
from tests.gates import answered, gate
from tests.orders import orders

ZERO = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"


class Driver:
    """The driver's streams and events, as far as the order of calls needs them."""

    def __init__(self):
        self.numbers = itertools.count(100)
        self.own = threading.local()  # the thread's default stream
        self.streams = {}
        self.calls = []
        self.capturing = 0

    def create(self, handle):
        """Make a new stream of that handle, in the place of one that was destroyed."""
        self.streams[handle] = next(self.numbers)

    def identity(self, handle):
        if handle in self.streams:
            return self.streams[handle]
        assert handle in (0, 2)
        if not hasattr(self.own, "number"):
            self.own.number = next(self.numbers)
        return self.own.number

    def table(self):
        """Return the functions that packed calls call."""

        def noted(name, answer=lambda *args: None):
            return lambda *args: answer(*args, self.calls.append(name))

        return {
            "cuStreamIsCapturing": noted(
                "cuStreamIsCapturing",
                lambda _, at, __: answered(at, self.capturing, ctypes.c_int),
            ),
            "cuStreamGetId": noted(
                "cuStreamGetId",
                lambda handle, at, _: answered(at, self.identity(handle)),
            ),
            "cuStreamWaitEvent": noted("cuStreamWaitEvent"),
            "cuEventRecord": noted("cuEventRecord"),
        }


@pytest.fixture(params=["0", "1"], ids=["0 is legacy", "0 is the thread's"])
def zero(request, monkeypatch):
    monkeypatch.setenv(ZERO, request.param)
    return request.param


@pytest.fixture
def streams(zero, monkeypatch):
    """The module as it is where handle 0 has this meaning."""
    spec = importlib.util.find_spec("numba_symm.streams")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cuda():
    return Driver()


@pytest.fixture
def waits(streams, cuda, monkeypatch):
    """Return whether a call on a stream waits for the one before, in a new thread."""
    monkeypatch.setattr(driver, "call", lambda name, *args: 7)
    made = gate(monkeypatch, **cuda.table())
    order = streams.StreamOrder(4)
    made.board.open(order.gate)
    about = Description("a call")
    call = PackedCall(order.gate, about, None, entry.NEVER)

    def make(handle):
        cuda.calls.clear()
        status = call.enqueue(handle, entry.CHECKED)
        if status == entry.CAPTURED:
            with order.captured(handle):
                order.gate.thread = 0
        else:
            assert status == entry.DONE
        assert "cuEventRecord" in cuda.calls

    def run(*handles, threads=1):
        found = []

        def work():
            for handle in handles:
                make(handle)
                found.append("cuStreamWaitEvent" in cuda.calls)

        for _ in range(threads):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return found

    return run


@orders("streams._Trail.end")
def test_the_first_call_waits_for_nothing_and_one_on_another_stream_for_the_last(
    cuda, waits
):
    cuda.create(0xA0)
    cuda.create(0xB0)
    assert waits(0xA0, 0xA0, 0xB0, 0xB0, 0xA0) == [False, False, True, False, True]


def test_a_stream_that_has_the_handle_of_a_destroyed_one_waits(cuda, waits):
    cuda.create(0xA0)
    assert waits(0xA0, 0xA0) == [False, False]
    cuda.create(0xA0)
    assert waits(0xA0, 0xA0) == [True, False]


def test_a_threads_default_stream_is_another_one_in_each_thread(waits):
    assert waits(2, 2, threads=3) == [False, False, True, False, True, False]


def test_the_legacy_default_stream_is_recognized_without_a_query(
    streams, cuda, waits, zero
):
    handles = (1, 1) if zero == "1" else (0, 1, 0)
    assert not any(waits(*handles, threads=2))
    assert "cuStreamGetId" not in cuda.calls
    assert streams.LEGACY_DEFAULT in handles
    assert {streams.named(handle) for handle in handles} == {streams.LEGACY_DEFAULT}


def test_handle_0_is_what_cuda_bindings_take_it_for(streams, waits, zero):
    per_thread = zero == "1"
    assert waits(0, threads=2) == [False, per_thread]
    assert waits(2) == [True]
    assert streams.named(0) == (2 if per_thread else 0)
    assert streams.named(2) == 2


def test_in_a_capture_a_call_right_behind_the_last_one_does_not_wait(
    streams, cuda, waits, monkeypatch
):
    """Its nodes show it, because the driver cannot identify a stream in a capture."""
    nodes = {0xA0: [1], 0xB0: [1]}
    record = itertools.count(2)

    def call(name, *args):
        cuda.calls.append(name)
        if name == "cuStreamGetCaptureInfo":
            return (0, 77, None, nodes[args[0]], len(nodes[args[0]]))
        if name == "cuEventRecord":  # a call's kernel came before
            nodes[args[1]] = [next(record)]
        return 7

    cuda.capturing = 1
    monkeypatch.setattr(streams.driver, "call", call)
    assert waits(0xA0, 0xA0, 0xB0, 0xB0, 0xA0) == [False, False, True, False, True]
    nodes[0xA0] = [100]  # the program's own kernel
    assert waits(0xA0, 0xA0) == [True, False]
    assert "cuStreamGetId" not in cuda.calls


def test_after_a_failure_the_call_s_stream_follows_the_side_stream(
    streams, monkeypatch
):
    """What was enqueued there may still write the call's output."""
    numbers, calls = itertools.count(1), []

    def call(name, *args):
        if name.endswith("Create"):
            return next(numbers)
        calls.append((name, *args))
        return None

    monkeypatch.setattr(streams.driver, "call", call)
    side = streams.SideStream(2)
    side.follow(0xA0, 0)
    _, event, followed = calls[0]
    assert calls == [
        ("cuEventRecord", event, followed),
        ("cuStreamWaitEvent", side.stream, event, 0),
    ]
    assert followed == 0xA0
    calls.clear()
    with pytest.raises(ZeroDivisionError), side.joined(0xA0):
        raise ZeroDivisionError
    *_, last = range(1, next(numbers))  # an event that no step has
    assert calls == [
        ("cuEventRecord", last, side.stream),
        ("cuStreamWaitEvent", 0xA0, last, 0),
    ]


def test_closed_requests_are_done_before_their_arrays_are_dropped(monkeypatch):
    """Memory that a pool hands out again is never written by a late kernel."""
    numbers, calls = itertools.count(1), []
    kept = {object()}
    alive = weakref.ref(kept)

    def call(name, *args):
        calls.append((name, alive() is not None))
        return next(numbers) if name.endswith("Create") else None

    monkeypatch.setattr(requests.streams.driver, "call", call)
    monkeypatch.setattr(requests, "end_of", lambda stream: None)
    lane = requests._Direction()
    lane.start(lambda stream: None, 0xA0, kept, lambda error: None)
    del kept
    calls.clear()
    lane.close()
    assert calls[0] == ("cuStreamSynchronize", True)
    assert alive() is None


def test_an_event_whose_constructor_was_interrupted_is_dropped_silently(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "function", interrupted)
    with pytest.raises(KeyboardInterrupt):
        events._Owned(1)
    gc.collect()  # an error of a finalizer fails the test
