"""The host's waits and events that only a GPU needs, with a driver that records them.

Each branch that the simulator does not take is named by a test of its order, here or
elsewhere (``tests/orders.py``).
"""

import itertools
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from threading import RLock
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from mpi4py import MPI

from numba_symm import deferred, driver, engines, events, streams
from numba_symm.arrays import ArrayView
from numba_symm.collectives import communicator, equality, lifetime, requests
from numba_symm.engines import mpi as engine
from numba_symm.errors import DriverError
from numba_symm.mpi import copies, crossings, host_only, jobs, postponed, sends, win
from numba_symm.sharing import received, sent
from numba_symm.sharing.consumer import Reference
from tests.orders import guarded, orders, places_in_tests

STREAM, OTHER, FIRST = 0xA0, 0xB0, 100


class Driver:
    """The driver's functions and others, whose calls are recorded in order.

    Attributes:
        calls: the names and arguments of all calls.
        failing: the names of those that fail.
    """

    def __init__(self, monkeypatch):
        self.calls, self.failing, self.capturing = [], set(), 0
        self._handles = itertools.count(FIRST)
        self._patch = monkeypatch
        monkeypatch.setattr(driver, "call", self.call)
        monkeypatch.setattr(driver, "function", self.function)

    def take(self, *modules):
        """Let modules take the branches of a GPU."""
        for module in modules:
            self._patch.setattr(module, "SIMULATED", False)
        return self

    def call(self, name, *args):
        self.calls.append((name, *args))
        if name in self.failing:
            raise DriverError(f"{name} failed")
        if name.endswith(("EventCreate", "StreamCreate", "GetCtx")):
            return next(self._handles)
        return {"cuStreamIsCapturing": self.capturing}.get(name)

    def function(self, name):
        def status_and_answer(*args):
            answer = self.call(name, *args)
            return (0,) if answer is None else (0, answer)

        return status_and_answer

    def noting(self, name, answer=None):
        """Return a function that records its calls, too, without arguments."""

        def function(*args, **options):
            self.calls.append(name)
            return answer

        return function

    @property
    def names(self):
        """The names of all calls, from which it starts anew."""
        found = [each if isinstance(each, str) else each[0] for each in self.calls]
        self.calls.clear()
        return found


@pytest.fixture
def gpu(monkeypatch):
    return Driver(monkeypatch).take(streams, events)


def an_event():
    event = object.__new__(events.Event)
    event._handle = 7
    return event


def a_stream():
    stream = object.__new__(events.Stream)
    stream._core = SimpleNamespace(handle=STREAM)
    return stream


def test_every_branch_that_orders_a_gpu_is_named_by_a_test():
    found, named = guarded(), places_in_tests()
    assert len(found) > 25
    assert "mpi.sends.Sends._wait" in found
    missing = found - named.keys()
    assert not missing, f"no test records the order in {missing}: add one, by @orders"
    gone = named.keys() - found
    assert not gone, f"tests name {gone}, which order nothing on a GPU"


@orders(
    *("events.Event.record", "events.Event.wait"),
    *("events.Event.query", "events.Event.synchronize"),
)
def test_events(gpu):
    event = an_event()
    event.record(STREAM)
    event.wait(OTHER)
    assert event.query()
    event.synchronize()
    assert gpu.calls == [
        ("cuEventRecord", 7, STREAM),
        ("cuStreamWaitEvent", OTHER, 7, 0),
        ("cuEventQuery", 7),
        ("cuEventSynchronize", 7),
    ]


@orders("events.Stream.query", "events.Stream.synchronize", "events.Stream.wait_stream")
def test_streams(gpu):
    stream = a_stream()
    assert stream.query()
    stream.synchronize()
    assert gpu.calls == [("cuStreamQuery", STREAM), ("cuStreamSynchronize", STREAM)]
    gpu.calls.clear()
    stream.wait_stream(OTHER)
    context, event = FIRST, FIRST + 1
    assert gpu.calls == [
        ("cuStreamGetCtx", OTHER),
        ("cuCtxPushCurrent", context),
        ("cuEventCreate", 2),
        ("cuEventRecord", event, OTHER),
        ("cuStreamWaitEvent", STREAM, event, 0),
        ("cuEventDestroy", event),
        ("cuCtxPopCurrent",),
    ]


@orders(
    *("streams.copy", "streams.copy_to_host", "streams.copy_from_host"),
    *("streams.spoil_capture"),
)
@orders("streams.Fill.__call__")
def test_copies_are_enqueued_on_their_stream(gpu):
    streams.copy(1, 2, 8, STREAM)
    streams.copy_to_host(1, 2, 8, STREAM)
    streams.copy_from_host(1, 2, 8, STREAM)
    streams.Fill(64, 3 << 32 | 5)(STREAM)
    assert gpu.calls == [
        ("cuMemcpyDtoDAsync", 1, 2, 8, STREAM),
        ("cuMemcpyDtoHAsync", 1, 2, 8, STREAM),
        ("cuMemcpyHtoDAsync", 1, 2, 8, STREAM),
        ("cuMemsetD32Async", 64, 5, 1, STREAM),
        ("cuMemsetD32Async", 68, 3, 1, STREAM),
    ]
    gpu.calls.clear()
    assert not streams.spoil_capture(STREAM)
    assert gpu.names == ["cuStreamIsCapturing"]  # a query would spoil nothing
    gpu.capturing = 1
    assert streams.spoil_capture(STREAM)
    assert gpu.names == ["cuStreamIsCapturing", "cuStreamQuery"]


@orders("deferred.give_back")
def test_dropped_memory_is_released_when_the_gpu_is_idle(gpu):
    gpu.take(deferred)
    deferred.defer(gpu.noting("release"))
    gpu.failing = {"cuCtxSynchronize"}
    deferred.give_back()
    assert gpu.names == ["cuCtxSynchronize"]
    gpu.failing = set()
    deferred.give_back()
    assert gpu.names == ["cuCtxSynchronize", "release"]


@orders("collectives.communicator.Communicator.synchronize")
def test_a_communicator_waits_for_the_stream_before_it_looks(gpu):
    gpu.take(communicator)
    comm = MagicMock(check=gpu.noting("check"))
    comm._calls.streams.default.return_value = STREAM, None
    comm._calls.members.closed = False
    comm._calls.requests.settle = gpu.noting("settle")
    communicator.Communicator.synchronize(comm, STREAM)
    assert gpu.names == ["cuStreamSynchronize", "settle", "check"]


@orders("collectives.equality.Digests.of")
def test_a_digest_is_read_after_its_kernel_has_run(gpu, monkeypatch):
    gpu.take(equality)
    view = ArrayView(64, (3,), np.dtype(np.int64), "C", False)
    monkeypatch.setattr(equality.arrays, "view", lambda *_: view)
    monkeypatch.setattr(equality.kernel, "bind", gpu.noting("bind"))
    sums = MagicMock(copy_to_host=gpu.noting("read", np.ones((1, 4), np.int64)))
    monkeypatch.setattr(equality.own_arrays, "empty", lambda *_: sums)
    calls = MagicMock()
    calls.streams.of.return_value = STREAM, None
    calls.usable.side_effect = lambda view, what: view
    calls.enqueuer.run = gpu.noting("run")
    calls.members.check = gpu.noting("check")
    monkeypatch.setattr(equality.streams, "is_capturing", lambda _: False)
    digests = equality.Digests(calls, "x", STREAM, "digest")
    assert digests.of(0, 2) == ([4], 2)
    assert gpu.names == ["bind", "run", "cuStreamSynchronize", "check", "read"]


@orders("collectives.lifetime.close")
def test_a_communicator_is_unmapped_after_all_work_of_all_ranks(gpu, monkeypatch):
    gpu.take(lifetime)
    calls = MagicMock(requests=None)
    calls.members.closed = False
    calls.members.failure_after_meeting = gpu.noting("meet")
    monkeypatch.setattr(lifetime, "_close", gpu.noting("unmap"))
    lifetime.close(calls)
    assert gpu.names == ["cuCtxSynchronize", "meet", "unmap"]


@orders("collectives.requests.Requests.start")
def test_no_memory_is_freed_while_a_request_is_pending(gpu, monkeypatch):
    gpu.take(requests)

    @contextmanager
    def deferring():
        gpu.calls.append("defer frees")
        yield
        gpu.calls.append("free")

    ended = []
    lane = SimpleNamespace(start=gpu.noting("start"), idle=lambda: bool(ended))
    monkeypatch.setattr(requests.cuda, "defer_cleanup", deferring)
    monkeypatch.setattr(requests, "_Direction", lambda: lane)
    all_of_them = object.__new__(requests.Requests)
    all_of_them._settling, all_of_them._busy = RLock(), False
    all_of_them._unfreed, all_of_them._lanes = ExitStack(), {}
    for _ in range(2):
        all_of_them.start((1, False), None, STREAM, None, None)
    assert gpu.names == ["defer frees", "start", "start"]
    ended.append(True)
    all_of_them.settle()
    assert gpu.names == ["free"]


@orders("engines._tried")
def test_an_engine_has_worked_once_its_stream_is_done(gpu):
    gpu.take(engines)
    islands = SimpleNamespace(look=gpu.noting("look"), abandon=gpu.noting("abandon"))
    with engines._tried(islands, "test"):
        gpu.calls.append("enqueue")
    assert gpu.names == ["enqueue", "cuStreamSynchronize", "look"]
    gpu.failing = {"cuStreamSynchronize"}
    with pytest.raises(DriverError), engines._tried(islands, "test"):
        pass
    assert gpu.names == ["cuStreamSynchronize", "abandon"]


@orders("engines.mpi.MpiEngine.exchange", "engines.mpi.MpiEngine._running")
def test_mpi_moves_what_the_stream_has_stored(gpu):
    gpu.take(engine)
    moving = object.__new__(engine.MpiEngine)
    moving._look, moving._move = gpu.noting("look"), gpu.noting("move")
    moving.exchange([], [], STREAM)
    first = ["cuStreamIsCapturing", "cuStreamSynchronize", "look"]
    assert gpu.names == [*first, "move"]
    side = streams.SideStream(1)
    across, end, end_of_failures = side.stream, FIRST + 1, FIRST + 2
    given = gpu.noting("work beside"), SimpleNamespace(across=side)
    gpu.calls.clear()
    moving.exchange([], [], STREAM, *given)
    joined = [("cuStreamWaitEvent", STREAM, end, 0)]
    assert gpu.calls[3:] == [
        "work beside",
        ("cuEventRecord", end, across),
        "move",
        *joined,
    ]

    def fail(*_):
        raise ZeroDivisionError

    gpu.calls.clear()
    moving._move = fail
    with pytest.raises(ZeroDivisionError):
        moving.exchange([], [], STREAM, *given)
    assert gpu.calls[-2:] == [
        ("cuEventRecord", end_of_failures, across),
        ("cuStreamWaitEvent", STREAM, end_of_failures, 0),
    ]


@orders("mpi.copies.CopyStream.settle")
def test_the_stream_of_copies_is_destroyed_when_it_is_done(gpu):
    gpu.take(copies)
    of_messages = copies.CopyStream()
    of_messages.settle()
    assert not gpu.calls
    stream = of_messages.stream
    gpu.calls.clear()
    of_messages.settle()
    assert gpu.calls[0] == ("cuStreamSynchronize", stream)
    assert gpu.calls[-1] == ("cuStreamDestroy", stream)


@orders("mpi.crossings.on_host")
def test_data_for_another_island_is_read_when_its_copy_has_ended(gpu):
    gpu.take(crossings)
    data = crossings.on_host(SimpleNamespace(address=64), 8, STREAM)
    assert gpu.calls == [
        ("cuMemcpyDtoHAsync", data.ctypes.data, 64, 8, STREAM),
        ("cuStreamSynchronize", STREAM),
    ]


@orders("mpi.sends.Sends._wait")
def test_an_envelope_is_sent_when_the_copy_of_its_message_has_ended(gpu):
    gpu.take(sends)
    room = SimpleNamespace(offset=0, handle=b"", once=None)
    post = MagicMock(
        _numbers=itertools.count(),
        _receipts=SimpleNamespace(unread={}),
        _give_back=gpu.noting("give back"),
    )
    post.is_apart.return_value = False
    post._envelopes.send = gpu.noting("envelope")
    post._wait = lambda staged: sends.Sends._wait(post, staged)
    staged = sends.StagedSend(1, 0, 8, room, STREAM)
    sends.Sends.announce(post, staged)
    assert gpu.calls == [("cuStreamSynchronize", STREAM), "envelope"]
    gpu.calls.clear()
    sends.Sends.drop(post, staged)
    assert gpu.names == ["cuStreamSynchronize", "give back"]
    gpu.failing = {"cuStreamSynchronize"}
    with pytest.raises(DriverError):
        sends.Sends.announce(post, staged)
    assert gpu.names == ["cuStreamSynchronize", "give back"]


@orders("mpi.postponed.Postponed._place")
def test_data_is_sent_by_mpi_when_its_copy_has_ended(gpu):
    gpu.take(postponed)
    send = MagicMock(_placing=[], _room=None, _number=1, _nbytes=8)
    send._found.address, send.post._by_mpi = 64, {}
    send.post.outgoing.stream = STREAM
    send.post.send_data = gpu.noting("data")
    postponed.Postponed._place(send)
    assert gpu.calls[0][2:] == (64, 8, STREAM)
    assert gpu.names == ["cuMemcpyDtoHAsync", "cuStreamSynchronize", "data"]


@orders("mpi.host_only.Op.Reduce_local")
def test_a_local_reduction_waits_for_its_kernel_and_refuses_a_capture(gpu, monkeypatch):
    gpu.take(host_only)
    found = SimpleNamespace(number=1, array=None, view=SimpleNamespace(readonly=False))
    monkeypatch.setattr(host_only, "on_device", lambda *specs: True)
    monkeypatch.setattr(host_only, "message", lambda spec: found)
    monkeypatch.setattr(host_only.arrays, "stream_of", lambda array: STREAM)
    steps = [gpu.noting("pack"), gpu.noting("reduce")]
    monkeypatch.setattr(host_only, "reduced", lambda *args: steps)
    host_only.constant(MPI.SUM).Reduce_local(None, None)
    assert gpu.names == ["cuStreamIsCapturing", "pack", "reduce", "cuStreamSynchronize"]
    monkeypatch.setattr(streams, "is_capturing", lambda stream: True)
    with pytest.raises(ValueError, match="Reduce_local: the host waits for the stream"):
        host_only.constant(MPI.SUM).Reduce_local(None, None)
    assert not gpu.calls


@orders("mpi.jobs.wait")
def test_a_blocking_call_waits_before_it_looks_but_not_in_a_capture(gpu, monkeypatch):
    gpu.take(jobs)
    comm = SimpleNamespace(check=gpu.noting("check"))
    jobs.wait(comm, STREAM)
    assert gpu.names == ["cuStreamIsCapturing", "cuStreamSynchronize", "check"]
    monkeypatch.setattr(streams, "is_capturing", lambda stream: True)
    jobs.wait(comm, STREAM)
    assert not gpu.calls


@orders("mpi.win.Win._settle")
def test_a_window_waits_for_each_stream_while_it_keeps_the_steps(gpu):
    gpu.take(win)
    window = SimpleNamespace(_used={0: (STREAM, []), 1: (OTHER, []), 2: (OTHER, [])})
    win.Win._settle(window)
    both = [("cuStreamSynchronize", STREAM), ("cuStreamSynchronize", OTHER)]
    assert gpu.calls == both
    assert not window._used
    window._used = {0: (STREAM, ["step"]), 1: (OTHER, ["another step"])}
    gpu.failing = {"cuStreamSynchronize"}
    with pytest.raises(DriverError):
        win.Win._settle(window)
    gpu.calls.clear()
    gpu.failing = set()
    win.Win._settle(window)
    assert gpu.calls == both  # it has not forgotten any


@orders("mpi.win.Win._settle")
def test_threads_wait_for_what_each_other_enqueued(gpu, monkeypatch):
    """Each second thread is a call in the middle of the first one's."""
    gpu.take(win)
    window = SimpleNamespace(_used={}, _numbers=itertools.count(), _comm=MagicMock())
    window._comm.post.stream_of.return_value = STREAM

    def step(stream):
        win.Win._settle(window)  # finds the call, but not this step on the stream
        gpu.calls.append("enqueue")

    win.Win._run(window, [step], None)
    win.Win._settle(window)
    assert gpu.names == ["cuStreamSynchronize", "enqueue", "cuStreamSynchronize"]

    def synchronize(stream):
        gpu.calls.append("begin")
        if gpu.calls.count("begin") == 1:
            win.Win._settle(window)
        gpu.calls.append("end")

    monkeypatch.setattr(streams, "synchronize", synchronize)
    win.Win._run(window, [gpu.noting("enqueue")], None)
    win.Win._settle(window)
    assert gpu.names == ["enqueue", "begin", "begin", "end", "end"]
    assert not window._used


@orders("sharing.consumer.Reference.wait")
def test_an_array_is_given_back_when_its_stream_is_done(gpu, monkeypatch):
    gpu.take(sys.modules[Reference.__module__])
    reference = object.__new__(Reference)
    reference._stream = STREAM
    monkeypatch.setattr(Reference, "in_context", lambda self: nullcontext())
    assert reference.wait()
    assert gpu.names == ["cuStreamIsCapturing", "cuStreamSynchronize"]
    monkeypatch.setattr(streams, "is_capturing", lambda stream: True)
    assert not reference.wait()
    assert not gpu.calls


@orders("sharing.received._open_there", "sharing.received.share_again")
def test_an_array_of_another_process_follows_its_producer(gpu, monkeypatch):
    gpu.take(received)
    event = an_event()
    opened = SimpleNamespace(from_ipc_handle=lambda handle: event)
    monkeypatch.setattr(received, "Event", opened)
    monkeypatch.setattr(received.kinds, "current_ordinal", lambda: 0)
    monkeypatch.setattr(received, "_take", gpu.noting("take"))
    handle = SimpleNamespace(
        **{"producer": SimpleNamespace(name="x"), "kind": "none", "base": 0},
        **{"event": b"", "event_sync_required": True},
    )
    reference = SimpleNamespace(
        handle=handle, mapped=None, again=gpu.noting("again", "the same handle")
    )
    received._open_there(reference, STREAM)
    assert gpu.calls == ["take", ("cuStreamWaitEvent", STREAM, 7, 0)]
    gpu.calls.clear()
    found = received.share_again(reference, 0, None, 1, STREAM)
    assert found == "the same handle"
    assert gpu.names == ["cuStreamSynchronize", "again"]


@orders("sharing.sent.SentData.record")
def test_consumers_wait_for_an_event_or_the_host_for_the_stream(gpu, monkeypatch):
    gpu.take(sent)
    block = object.__new__(sent.SentData)
    block.device, block.event = 0, None
    monkeypatch.setattr(sent, "on_device_of", lambda stream, device: nullcontext())
    producer = SimpleNamespace(events=0, guard=SimpleNamespace(do=lambda step: step()))
    monkeypatch.setattr(sent, "producer", producer)
    event = SimpleNamespace(
        record=gpu.noting("record"), ipc_handle=gpu.noting("export")
    )
    monkeypatch.setattr(sent, "Event", lambda **_: event)
    block.record(STREAM)
    assert gpu.names == ["record", "export"]
    assert block.event is event
    assert block.event_sync_required
    producer.events = sent.EVENTS
    block.event_sync_required = False
    block.record(STREAM)
    assert gpu.names == ["cuStreamSynchronize"]
    assert not block.event_sync_required
