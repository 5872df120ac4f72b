"""The host's waits and events that only a GPU needs, with a driver that executes them.

Each branch that the simulator does not take is named by a test of its order, here or
elsewhere (``tests/orders.py``).
"""

import itertools
import sys
from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext
from threading import RLock
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from mpi4py import MPI

from numba_symm import engines
from numba_symm.collectives import communicator, equality, lifetime, requests
from numba_symm.engines import mpi as engine
from numba_symm.errors import DriverError
from numba_symm.gpu import events, streams
from numba_symm.gpu.arrays import ArrayView
from numba_symm.mpi import host_only, jobs, p2p, rooms, win
from numba_symm.sharing import received, sent
from numba_symm.sharing.received import Reference
from tests.executing import ExecutingDriver, Unordered
from tests.orders import guarded, orders, places_in_tests

STREAM, OTHER = 0xA0, 0xB0
DATA, MORE, HOST = 0x1000, 0x2000, 0x3000


class Driver(ExecutingDriver):
    """The driver, and the program's work that stores to DATA on STREAM."""

    def __init__(self, monkeypatch):
        super().__init__()
        self._patch = monkeypatch
        self.create(STREAM)
        self.create(OTHER)
        self.bind(monkeypatch, streams, events)

    def take(self, *modules):
        """Let modules take the branches of a GPU, after work of the program."""
        for module in modules:
            self._patch.setattr(module, "SIMULATED", False, raising=False)
        return self.work()

    def work(self, stream=STREAM):
        self.launch("work", stream, (), DATA)
        return self

    def reads(self, what, answer=None):
        """Return a function of the host that needs the work to be done."""
        return self.host(what, DATA, answer=answer)

    def frees(self, what):
        """Return one that lets others use the memory."""
        return self.host(what, (), DATA)

    @property
    def names(self):
        """The names of all calls, from which it starts anew."""
        found, self.calls = self.calls, []
        return found


@pytest.fixture
def gpu(monkeypatch):
    return Driver(monkeypatch)


def an_event(gpu):
    event = object.__new__(events.Event)
    _, event._handle = gpu.cuEventCreate(2)
    return event


def recorded(gpu, stream):
    event = an_event(gpu)
    event.record(stream)
    return event


def a_stream():
    stream = object.__new__(events.Stream)
    stream._core = SimpleNamespace(handle=STREAM)
    return stream


def test_every_branch_that_orders_a_gpu_is_named_by_a_test():
    found, named = guarded(), places_in_tests()
    assert len(found) > 25
    assert "mpi.p2p.on_host" in found
    missing = found - named.keys()
    assert not missing, f"no test records the order in {missing}: add one, by @orders"
    gone = named.keys() - found
    assert not gone, f"tests name {gone}, which order nothing on a GPU"


@orders(
    *("gpu.events.Event.record", "gpu.events.Event.wait"),
    *("gpu.events.Event.query", "gpu.events.Event.synchronize"),
)
def test_events(gpu):
    event = an_event(gpu)
    gpu.work()
    event.record(STREAM)
    event.wait(OTHER)
    gpu.launch("after", OTHER, DATA)
    event.record(OTHER)
    gpu.unready = {event._handle}
    assert not event.query()
    gpu.unready = set()
    for wait in (event.query, event.synchronize):
        gpu.work(OTHER)
        event.record(OTHER)
        assert wait() in (None, True)
        gpu.reads("read")()


@orders("gpu.events.Point.move", "gpu.events.Point.wait")
def test_points(gpu):
    events_of_others = [an_event(gpu)]
    gpu.work()
    point = events.Point(events_of_others, STREAM)
    point.wait(OTHER)
    gpu.launch("after", OTHER, DATA)
    gpu.launch("more", STREAM, (), MORE)
    point.move(STREAM)
    point.wait(OTHER)
    gpu.launch("after", OTHER, MORE)
    event = point.handle
    del point
    assert [each._handle for each in events_of_others] == [event]


@orders(
    "gpu.events.Stream.query",
    "gpu.events.Stream.synchronize",
    "gpu.events.Stream.wait_stream",
)
def test_streams(gpu):
    stream = a_stream()
    for wait in (stream.query, stream.synchronize):
        gpu.work()
        assert wait() in (None, True)
        gpu.reads("read")()
    gpu.create(OTHER)
    gpu.launch("other", OTHER, (), MORE)
    stream.wait_stream(OTHER)
    gpu.launch("after", STREAM, MORE)
    assert gpu.names[-2:] == ["cuEventDestroy", "cuCtxPopCurrent"]


@orders(
    *("gpu.streams.copy", "gpu.streams.copy_to_host", "gpu.streams.copy_from_host"),
    "gpu.streams.spoil_capture",
    "gpu.streams.Fill.__call__",
)
def test_copies_are_enqueued_on_their_stream(gpu):
    gpu.work()
    streams.copy(MORE, DATA, 8, STREAM)
    streams.copy_to_host(HOST, MORE, 8, STREAM)
    streams.copy_from_host(DATA, HOST, 8, STREAM)
    streams.Fill(DATA, 3 << 32 | 5)(STREAM)
    gpu.launch("after", STREAM, DATA)
    fills = [what for what, _ in gpu.works if "fill" in what]
    assert fills == ["a fill with 5", "a fill with 3"]
    with pytest.raises(Unordered, match=r"copy on stream 0xb0 .* work on stream 0xa0"):
        streams.copy(MORE, DATA + 4, 4, OTHER)


@orders("gpu.streams.give_back")
def test_dropped_memory_is_released_when_the_gpu_is_idle(gpu):
    gpu.take(streams)
    streams.defer(gpu.frees("release"))
    gpu.failing = {"cuCtxSynchronize"}
    streams.give_back()
    gpu.failing = set()
    streams.give_back()
    assert gpu.names[-2:] == ["cuCtxSynchronize", "release"]


@orders("collectives.communicator.Communicator.synchronize", "gpu.streams.synchronize")
def test_a_communicator_waits_for_the_stream_before_it_looks(gpu):
    gpu.take(communicator)
    comm = MagicMock(check=gpu.reads("check"))
    comm._calls.streams.default.return_value = STREAM
    comm._calls.members.closed = False
    comm._calls.requests.settle = gpu.reads("settle")
    communicator.Communicator.synchronize(comm, STREAM)
    assert gpu.names[-2:] == ["settle", "check"]


@orders("collectives.equality.Digests.of")
def test_a_digest_is_read_after_its_kernel_has_run(gpu, monkeypatch):
    gpu.take(equality)
    view = ArrayView(64, (3,), np.dtype(np.int64), "C", False)
    monkeypatch.setattr(equality.arrays, "view", lambda *_: view)
    monkeypatch.setattr(equality.kernel, "bind_digest", lambda *_: None)
    sums = MagicMock(copy_to_host=gpu.reads("read", np.ones((1, 4), np.int64)))
    monkeypatch.setattr(equality.arrays, "empty", lambda *_: sums)
    calls = MagicMock()
    calls.streams.of.return_value = STREAM
    calls.usable.side_effect = lambda view, what: view
    calls.enqueuer.run = lambda *_: gpu.work()
    calls.members.check = gpu.reads("check")
    digests = equality.Digests(calls, "x", STREAM, "digest")
    assert digests.of(0, 2) == ([4], 2)
    assert gpu.names[-2:] == ["check", "read"]


@orders("collectives.lifetime.close")
def test_a_communicator_is_unmapped_after_all_work_of_all_ranks(gpu, monkeypatch):
    gpu.take(lifetime)
    calls = MagicMock(requests=None)
    calls.members.closed = False
    calls.members.failure_after_meeting = gpu.frees("meet")  # the peers unmap it
    monkeypatch.setattr(lifetime, "_close", gpu.frees("unmap"))
    lifetime.close(calls)
    assert gpu.names[-2:] == ["meet", "unmap"]


@orders("collectives.requests.Requests.start")
def test_no_memory_is_freed_while_a_request_is_pending(gpu, monkeypatch):
    gpu.take(requests)

    @contextmanager
    def deferring():
        gpu.calls.append("defer frees")
        yield
        gpu.calls.append("free")

    ended = []
    lane = SimpleNamespace(start=gpu.host("start"), idle=lambda: bool(ended))
    monkeypatch.setattr(requests.cuda, "defer_cleanup", deferring)
    all_of_them = object.__new__(requests.Requests)
    all_of_them._settling, all_of_them._busy = RLock(), False
    all_of_them._unfreed, all_of_them._lanes = ExitStack(), {(1, False): lane}
    for _ in range(2):
        all_of_them.start(requests.RequestCall(lane, None), STREAM, None, None)
    assert gpu.names == ["defer frees", "start", "start"]
    ended.append(True)
    all_of_them.settle()
    assert gpu.names == ["free"]


@orders("collectives.requests._Direction.close")
def test_the_messages_of_a_direction_have_ended_at_its_end(gpu):
    gpu.take(requests)
    lane = object.__new__(requests._Direction)
    lane._worker, lane._entries = None, deque([gpu])
    lane._side = SimpleNamespace(stream=STREAM, close=gpu.frees("the arrays"))
    lane.close()
    assert not lane._entries


@orders("engines._tried")
def test_an_engine_has_worked_once_its_stream_is_done(gpu):
    gpu.take(engines)
    look = gpu.host("look", MORE)
    islands = SimpleNamespace(look=look, abandon=gpu.host("abandon"))
    with engines._tried(islands, "test"):
        gpu.launch("the first", streams.LEGACY_DEFAULT, (), MORE)
    assert gpu.names[-1] == "look"
    gpu.failing = {"cuStreamSynchronize"}
    with pytest.raises(DriverError), engines._tried(islands, "test"):
        pass
    assert gpu.names == ["cuStreamSynchronize", "abandon"]


@orders("engines.mpi.MpiEngine.exchange", "engines.mpi.MpiEngine._running")
def test_mpi_moves_what_the_stream_has_stored(gpu):
    gpu.take(engine)
    moving = object.__new__(engine.MpiEngine)
    moving._look, moving._move = gpu.reads("look"), gpu.reads("move")
    moving.exchange([], [], STREAM)
    assert gpu.names[-2:] == ["look", "move"]
    side = streams.SideStream(1)

    def beside(*_):
        gpu.launch("beside", side.stream, (), MORE)

    given = beside, SimpleNamespace(across=side)
    gpu.work()
    moving.exchange([], [], STREAM, *given)
    gpu.launch("after", STREAM, MORE)

    def fail(*_):
        raise ZeroDivisionError

    moving._move = fail
    with pytest.raises(ZeroDivisionError):
        moving.exchange([], [], STREAM, *given)
    gpu.launch("after a failure", STREAM, MORE)


@orders("mpi.rooms.CopyStream.settle")
def test_the_stream_of_copies_is_destroyed_when_it_is_done(gpu):
    gpu.take(rooms)
    of_messages = rooms.CopyStream()
    stream = of_messages.stream
    gpu.launch("a late copy", stream, (), MORE)
    of_messages.close()
    gpu.host("the program", MORE)()
    with pytest.raises(AssertionError, match="it was destroyed"):
        gpu.launch("another", stream)


@orders("mpi.p2p.on_host")
def test_data_for_another_island_is_read_when_its_copy_has_ended(gpu):
    gpu.take(p2p)
    whole = SimpleNamespace(runs=None)
    data = p2p.on_host(SimpleNamespace(address=DATA, nbytes=8, layout=whole), STREAM)
    gpu.host("MPI", data.ctypes.data)()


@orders("mpi.host_only.Op.Reduce_local")
def test_a_local_reduction_waits_for_its_kernel_and_refuses_a_capture(gpu, monkeypatch):
    gpu.take(host_only)
    found = SimpleNamespace(number=1, array=None, view=SimpleNamespace(readonly=False))
    monkeypatch.setattr(host_only, "on_device", lambda *specs: True)
    monkeypatch.setattr(host_only, "message", lambda spec: found)
    monkeypatch.setattr(host_only.arrays, "stream_of", lambda array: STREAM)
    monkeypatch.setattr(host_only, "reduced", lambda *args: [gpu.work])
    host_only.constant(MPI.SUM).Reduce_local(None, None)
    gpu.reads("the program")()
    done = len(gpu.works)
    gpu.capture(STREAM)
    with pytest.raises(ValueError, match="Reduce_local: the host waits for the stream"):
        host_only.constant(MPI.SUM).Reduce_local(None, None)
    assert len(gpu.works) == done


@orders("mpi.jobs.wait")
def test_a_blocking_call_waits_before_it_looks_but_not_in_a_capture(gpu, monkeypatch):
    gpu.take(jobs)
    jobs.wait(SimpleNamespace(check=gpu.reads("check")), STREAM)
    assert gpu.names[-1] == "check"
    capture = gpu.capture(STREAM)
    jobs.wait(None, STREAM)
    assert capture.valid


@orders("mpi.win.Win._settle")
def test_a_window_waits_for_each_stream_while_it_keeps_the_steps(gpu):
    gpu.take(win).launch("another", OTHER, (), MORE)
    used = {0: (STREAM, ["step"]), 1: (OTHER, ["another"]), 2: (OTHER, [])}
    window = SimpleNamespace(_used=dict(used))
    gpu.failing = {"cuStreamSynchronize"}
    with pytest.raises(DriverError):
        win.Win._settle(window)
    gpu.failing = set()
    win.Win._settle(window)  # it has not forgotten any
    gpu.host("the peers", [DATA, MORE])()
    assert not window._used


@orders("mpi.win.Win._settle")
def test_threads_wait_for_what_each_other_enqueued(gpu, monkeypatch):
    """Each second thread is a call in the middle of the first one's."""
    gpu.take(win)
    window = SimpleNamespace(_used={}, _numbers=itertools.count(), _comm=MagicMock())
    window._comm.post.stream_of.return_value = STREAM

    def step(stream):
        win.Win._settle(window)  # finds the call, but not this step on the stream
        gpu.work(stream)

    win.Win._run(window, [step], None)
    win.Win._settle(window)
    gpu.reads("the peers")()
    gpu.calls.clear()

    def synchronize(stream):
        gpu.calls.append("begin")
        if gpu.calls.count("begin") == 1:
            win.Win._settle(window)
        gpu.calls.append("end")

    monkeypatch.setattr(streams, "synchronize", synchronize)
    win.Win._run(window, [gpu.host("enqueue")], None)
    win.Win._settle(window)
    assert gpu.names == ["enqueue", "begin", "begin", "end", "end"]
    assert not window._used


@orders("sharing.received.Reference.wait")
def test_an_array_is_given_back_when_its_stream_is_done(gpu, monkeypatch):
    gpu.take(sys.modules[Reference.__module__])
    reference = object.__new__(Reference)
    reference.stream = STREAM
    monkeypatch.setattr(Reference, "in_context", lambda self: nullcontext())
    assert reference.wait()
    gpu.frees("the producer")()
    gpu.capture(STREAM)
    assert not reference.wait()


@orders("sharing.received._open_there", "sharing.received.share_again")
def test_an_array_of_another_process_follows_its_producer(gpu, monkeypatch):
    gpu.take(received)
    event = an_event(gpu)
    event.record(STREAM)  # in the producer
    opened = SimpleNamespace(from_ipc_handle=lambda handle: event)
    monkeypatch.setattr(received, "Event", opened)
    monkeypatch.setattr(received.kinds, "current_ordinal", lambda: 0)
    monkeypatch.setattr(received, "_take", lambda *_: None)
    handle = SimpleNamespace(
        **{"producer": SimpleNamespace(name="x"), "kind": "none", "base": 0},
        **{"event": b"", "event_sync_required": True},
    )
    reference = SimpleNamespace(
        handle=handle,
        mapped=None,
        stream=OTHER,
        again=gpu.reads("again", "the same handle"),
    )
    received._open_there(reference)
    gpu.work(OTHER)
    found = received.share_again(reference, 0, None, 1, OTHER)
    assert found == "the same handle"


@orders("sharing.sent.SentData.record")
def test_consumers_wait_for_an_event_or_the_host_for_the_stream(gpu, monkeypatch):
    gpu.take(sent)
    block = object.__new__(sent.SentData)
    block.device, block.event = 0, None
    monkeypatch.setattr(sent, "on_device_of", lambda stream, device: nullcontext())
    producer = SimpleNamespace(events=0, guard=SimpleNamespace(do=lambda step: step()))
    monkeypatch.setattr(sent, "producer", producer)
    event = an_event(gpu)
    monkeypatch.setattr(events.Event, "ipc_handle", lambda event: b"")
    monkeypatch.setattr(sent, "Event", lambda **_: event)
    block.record(STREAM)
    assert block.event is event
    event.wait(OTHER)
    gpu.launch("the consumer", OTHER, DATA)
    assert block.event_sync_required
    producer.events = sent.EVENTS
    block.event_sync_required = False
    gpu.work(OTHER)
    block.record(OTHER)
    gpu.reads("the consumer")()
    assert not block.event_sync_required
