"""Calls on any streams follow each other, on a driver that executes the order."""

import gc
import importlib.util
import threading
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from numba_symm.collectives import requests
from numba_symm.collectives.enqueueing import Enqueuer, PackedCall
from numba_symm.collectives.protocols.binding import Series
from numba_symm.gpu import driver, entry, events
from numba_symm.launch.call_records import Description
from tests.executing import ExecutingDriver, Unordered
from tests.gates import gate
from tests.orders import orders

ZERO = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
WORKSPACE, X, Y = 0x1000, 0x2000, 0x3000
A, B, C = 0xA0, 0xB0, 0xC0


@contextmanager
def on_driver(zero_is_per_thread=False):
    """Yield the module as it is where handle 0 has this meaning, and its driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ZERO, str(int(zero_is_per_thread)))
        spec = importlib.util.find_spec("numba_symm.gpu.streams")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cuda = ExecutingDriver(zero_is_per_thread).bind(patch, module)
        yield module, cuda, patch


class Program:
    """Calls of a communicator, each of which uses the workspace, by compiled code."""

    def __init__(self, streams, cuda, patch):
        self.cuda = cuda
        made = gate(patch, **cuda.table())
        self.order, self.board = streams.StreamOrder(), made.board
        self.board.open(self.order.gate)
        self.work = streams.Copy(WORKSPACE, X, 8)
        about = Description("a call")
        self.packed = PackedCall(self.order.gate, about, self.work, entry.NEVER)
        for handle in (A, B, C):
            cuda.create(handle)

    def call(self, handle):
        """Make a call; return whether it waited."""
        cuda = self.cuda
        cuda.calls.clear()
        cuda.unordered = None
        status = self.packed.enqueue(handle, entry.CHECKED)
        if cuda.unordered is not None:
            raise cuda.unordered
        if status == entry.CAPTURED:
            with self.order.captured(handle):
                self.work(handle)
                self.order.gate.thread = 0
        else:
            assert status == entry.DONE
        return "cuStreamWaitEvent" in cuda.calls

    def call_in_a_thread(self, handle):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.call(handle)))
        thread.start()
        thread.join()
        assert found, "the call failed"
        return found[0]


HANDLES = st.sampled_from([0, 1, 2, A, B, C])
STEPS = st.lists(st.tuples(st.sampled_from(["call", "replace", "thread"]), HANDLES))


@settings(max_examples=80, deadline=None, database=None)
@given(zero_is_per_thread=st.booleans(), steps=STEPS)
@example(False, [("call", A), ("replace", A), ("call", A), ("call", A)])
@example(False, [("call", 2), ("thread", 2), ("thread", 2), ("call", 2)])
@example(True, [("call", 0), ("thread", 0), ("call", 1), ("call", 2)])
def test_each_call_follows_the_last_one_and_waits_only_if_it_must(
    zero_is_per_thread, steps
):
    """A destroyed stream's handle, and a thread's default stream, name others, too."""
    with on_driver(zero_is_per_thread) as (streams, cuda, patch):
        program, last = Program(streams, cuda, patch), None
        for step, handle in steps:
            if step == "replace":
                if handle > 2:
                    cuda.create(handle)
                continue
            legacy = streams.named(handle) == streams.LEGACY_DEFAULT
            if step == "thread":
                waited = program.call_in_a_thread(handle)
                place = object() if streams.named(handle) == 2 else None
            else:
                waited, place = program.call(handle), None
            place = place or (1 if legacy else cuda.cuStreamGetId(handle)[1])
            assert waited == (last not in (None, place)), (step, hex(handle))
            assert not legacy or "cuStreamGetId" not in cuda.calls
            last = place
        program.order.close()


@orders("gpu.streams._Trail.end")
def test_a_missing_wait_is_found_and_named():
    """As is a wait of another stream, and a call that is not recorded."""
    with on_driver() as (streams, cuda, patch):
        program = Program(streams, cuda, patch)
        program.call(A)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "cuStreamWaitEvent", lambda *_: 0)
            text = "copy on stream 0xb0 stores to 0x1000, .* copy on stream 0xa0"
            with pytest.raises(Unordered, match=text):
                program.call(B)
        program.call(A)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "cuEventRecord", lambda *_: 0)
            program.call(A)
        with pytest.raises(Unordered, match=r"0xb0 stores to .* a copy on stream 0xa0"):
            program.call(B)


def test_in_a_capture_a_call_right_behind_the_last_one_does_not_wait():
    """Its nodes show it, because the driver cannot identify a stream in a capture."""
    with on_driver() as (streams, cuda, patch):
        program = Program(streams, cuda, patch)
        program.call(C)
        capture, event = cuda.capture(A), cuda.cuEventCreate(2)[1]
        cuda.launch("the program's", A)
        cuda.cuEventRecord(event, A)
        cuda.cuStreamWaitEvent(B, event, 0)  # joins the capture
        found = [program.call(handle) for handle in (A, A, B, B, A)]
        assert found == [False, False, True, False, True]
        cuda.launch("the program's", A)
        assert [program.call(A), program.call(A)] == [True, False]
        assert not program.call(C)  # outside, where C had the last call
        assert capture.valid
        assert streams.spoil_capture(A)
        assert not capture.valid
        assert not streams.spoil_capture(C)
        assert cuda.calls[-1] == "cuStreamIsCapturing"  # a query would spoil nothing


def test_a_call_follows_what_python_has_enqueued_of_the_last_one():
    """The compiled function takes the steps before and after that of Python."""
    with on_driver() as (streams, cuda, patch):
        program = Program(streams, cuda, patch)
        members = SimpleNamespace(
            board=program.board, engine=object(), gpu=SimpleNamespace(ordinal=0)
        )
        enqueuer = Enqueuer(members, program.order, None)
        step = partial(cuda.launch, "Python's", stores=WORKSPACE)
        work = Series(program.work, step, program.work, step, program.work)
        enqueuer.run(enqueuer.pack(Description("a call"), work), A)
        found = [what for what, _ in cuda.works]
        assert found == ["a copy", "Python's", "a copy", "Python's", "a copy"]
        program.call(B)


def work_beside(streams, cuda, fail=False):
    """Have a side stream store into Y, between two parts of a call on stream A."""
    side = streams.SideStream(2)
    cuda.launch("the first part", A, X, Y)
    side.follow(A, 0)
    with side.joined(A):
        cuda.launch("beside", side.stream, Y, Y)
        if fail:
            raise ZeroDivisionError
        side.mark(1)
        cuda.launch("the second part", A, X, WORKSPACE)
        side.lead(A, 1)
    return side


def test_a_side_stream_follows_and_leads():
    """After a failure, too: what it runs may still write the call's output."""
    for fail in (False, True):
        with on_driver() as (streams, cuda, _):
            cuda.create(A)
            try:
                work_beside(streams, cuda, fail).close()
            except ZeroDivisionError:
                assert fail
            cuda.launch("the program's", A, Y, Y)


class Lane:
    """A direction of requests, whose messages load X, on an executing driver."""

    def __init__(self, streams, cuda, patch):
        gate(patch, **cuda.table())
        patch.setattr(requests, "SIMULATED", False)
        patch.setattr(requests, "SideStream", streams.SideStream)
        patch.setattr(requests, "streams", streams)
        patch.setattr(requests, "Point", partial(Point, cuda))
        self.lane, self.steps = requests._Direction(), [streams.Copy(Y, X, 8)]

    def start(self, keep=None):
        about, steps = Description("isend"), Series(*self.steps)
        call = PackedCall(self.lane.gate, about, steps, entry.NEVER)
        return self.lane.start(call, A, keep, print)


class Point:
    """A point in a stream's work, on an executing driver."""

    def __init__(self, cuda, idle, stream):
        _, self.handle = cuda.cuEventCreate(0)
        self._cuda = cuda
        self.move(stream)

    def move(self, stream):
        self._cuda.cuEventRecord(self.handle, stream)

    def wait(self, stream):
        self._cuda.cuStreamWaitEvent(stream, self.handle, 0)

    def query(self):
        return False


@pytest.mark.parametrize("python", [False, True])
def test_a_request_follows_the_program_and_the_program_its_end(python):
    """Messages with a step of Python, such as one that compiles a copy, too."""
    with on_driver() as (streams, cuda, patch):
        lane = Lane(streams, cuda, patch)
        cuda.create(A)
        if python:
            lane.steps.append(lambda stream: cuda.launch("a step", stream, (), Y))
        for _ in range(2):
            cuda.launch("the program's", A, (), X)
            request = lane.start()
            with pytest.raises(Unordered, match=r"program's .* after .* on"):
                cuda.launch("the program's", A, (), Y)
            request.wait(A)
            cuda.launch("the program's", A, Y, X)
        lane.lane.close()


def test_closed_requests_are_done_before_their_arrays_are_dropped():
    """Memory that a pool hands out again is never written by a late kernel."""
    with on_driver() as (streams, cuda, patch):
        lane = Lane(streams, cuda, patch)
        lane.steps = [streams.Copy(X, Y, 8)]
        cuda.create(A)
        kept = {object()}
        alive = weakref.ref(kept)
        again = cuda.host("the program's", stores=X)
        weakref.finalize(kept, again)
        lane.start(kept)
        del kept
        with pytest.raises(Unordered, match=r"program's on the host .* after .* on"):
            again()
        lane.lane.close()
        assert alive() is None
        again()


def test_an_event_whose_constructor_was_interrupted_is_dropped_silently(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "function", interrupted)
    with pytest.raises(KeyboardInterrupt):
        events._Owned(1)
    gc.collect()  # an error of a finalizer fails the test
