"""The engine of MPI by itself: memory that MPI cannot read, captures, wrong lengths."""

import contextlib
import ctypes
import gc
import time
import types
import weakref

import numpy as np
import pytest
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import engines
from numba_symm.engines import deadline, mpi
from numba_symm.engines.deadline import Deadline, TimedExchange
from numba_symm.engines.mpi import Direct, MpiEngine, PinnedSlots
from numba_symm.engines.nccl import Installation
from numba_symm.engines.protocol import Parcel
from numba_symm.environment import SIMULATED
from numba_symm.gpu import streams
from numba_symm.launch import ranks, waiting
from numba_symm.launch.ranks import Purpose, TaggedComm
from numba_symm.launch.waiting import Wait
from numba_symm.launch.watchdog import Questions
from tests.ranks.helpers import check_works, needs_peers, ordinary

pytestmark = needs_peers


class Pinned:
    """Pinned memory that is not: it counts what is copied and allocated."""

    def __init__(self):
        self.copied, self.slots = 0, {}

    def copy(self, target, source, nbytes):
        assert 0 < nbytes <= PinnedSlots.most
        ctypes.memmove(target, source, nbytes)
        self.copied += nbytes

    def allocate(self, nbytes):
        slot = ctypes.create_string_buffer(nbytes)
        self.slots[ctypes.addressof(slot)] = slot
        return ctypes.addressof(slot)

    def room(self):
        def copy_in(address, host, nbytes):
            self.copy(address, host, nbytes)

        return PinnedSlots(self.copy, copy_in, self.allocate, self.slots.pop)


@pytest.fixture
def pinned():
    return Pinned()


def unheard(comm):
    """Return questions that no watchdog answers."""
    return Questions(comm.part(range(comm.size), Purpose.WATCHDOG))


@pytest.fixture
def engine(world, pinned):
    if not SIMULATED:  # the engine synchronizes a stream
        cuda.select_device(world.rank % len(cuda.gpus))

    def wait():
        return Wait("exchange", world.rank, 20)

    own = ranks.whole(world.Dup(), owned=True)
    made = MpiEngine(own, wait, lambda: None, pinned.room(), unheard(own))
    yield made
    world.barrier()
    made.close()
    assert not pinned.slots


def neighbours(world):
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


@pytest.mark.parametrize("nbytes", [0, 1, PinnedSlots.most, 3 * PinnedSlots.most + 5])
def test_bytes_pass_through_slots_of_host_memory(world, engine, pinned, nbytes):
    right, left = neighbours(world)
    sent = np.random.default_rng(world.rank).integers(0, 256, nbytes, np.uint8)
    wanted = np.random.default_rng(left).integers(0, 256, nbytes, np.uint8)
    found, tail = np.zeros(nbytes, np.uint8), np.zeros(3, np.uint8)
    three = np.full(3, world.rank, np.uint8)
    engine.exchange(
        [Parcel(right, sent.ctypes.data, nbytes), Parcel(right, three.ctypes.data, 3)],
        [Parcel(left, found.ctypes.data, nbytes), Parcel(left, tail.ctypes.data, 3)],
        streams.LEGACY_DEFAULT,
    )
    assert (found == wanted).all()
    assert (tail == left).all()
    assert pinned.copied == 2 * (nbytes + 3)


def test_parcels_with_the_same_tag_are_moved_one_after_another(
    world, engine, monkeypatch
):
    """A group may have more messages to a rank than the engine has tags."""
    monkeypatch.setattr(mpi, "_TAGS", 2)
    monkeypatch.setattr(PinnedSlots, "most", 64)  # bytes, which MPI sends immediately
    right, left = neighbours(world)
    sent = [np.full(200 - 40 * k, k, np.uint8) for k in range(5)]
    found = [np.zeros_like(each) for each in sent]
    world.barrier()
    if world.rank == 0:
        time.sleep(0.1)  # so that a rank has begun to receive
    engine.exchange(
        [Parcel(right, each.ctypes.data, each.size) for each in sent],
        [Parcel(left, each.ctypes.data, each.size) for each in found],
        streams.LEGACY_DEFAULT,
    )
    assert [each.tolist() for each in found] == [each.tolist() for each in sent]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((4, 3), (4, 5)),
        *(
            (PinnedSlots.most + 5, PinnedSlots.most),
            (2 * PinnedSlots.most, PinnedSlots.most),
        ),
        *(
            (PinnedSlots.most, PinnedSlots.most + 5),
            (PinnedSlots.most, 2 * PinnedSlots.most),
        ),
    ],
)
def test_another_number_of_bytes_is_an_error(world, engine, given, expected):
    if world.rank == 0:  # in a communicator, its failure would end this exchange
        sent = np.zeros(given, np.uint8)
        sends = [Parcel(1, sent.ctypes.data, given)]
        engine.exchange(sends, [], streams.LEGACY_DEFAULT)
    if world.rank == 1:
        found = np.zeros(expected, np.uint8)
        receives = [Parcel(0, found.ctypes.data, expected)]
        with pytest.raises(ns.CallMismatch, match="receives another number of bytes"):
            engine.exchange([], receives, streams.LEGACY_DEFAULT)
        mpi._given_up.clear()


def test_a_message_that_is_too_long_is_not_received(world):
    """Open MPI would write past the end of the array, which may belong to others."""
    nbytes, more, done = 40_000, 4096, 77
    found = np.full(nbytes + more, world.rank == 0, np.uint8)
    parcel = Parcel(1 - world.rank, found.ctypes.data, nbytes + more * (not world.rank))

    def look():
        if world.rank == 0 and world.Iprobe(1, done):
            raise ns.CallMismatch("rank 1 has refused")

    wait = lambda: Wait("exchange", world.rank, 20)  # noqa: E731
    own = ranks.whole(world.Dup(), owned=True)
    direct = MpiEngine(own, wait, look, Direct(), unheard(own))
    if world.rank == 0:
        with contextlib.suppress(ns.CallMismatch):  # MPI may have taken all of it
            direct.exchange([parcel], [], streams.LEGACY_DEFAULT)
        world.recv(source=1, tag=done)
    elif world.rank == 1:
        with pytest.raises(ns.CallMismatch, match="another number of bytes than rank "):
            direct.exchange([], [parcel], streams.LEGACY_DEFAULT)
        assert not found.any()
        world.send(None, 0, done)
        own.mpi.Recv(found, 0)  # so that the send ends
    world.barrier()
    mpi.forget_served()
    assert not mpi._given_up
    direct.close()


def test_a_rank_that_sends_nothing_is_late(world, engine):
    _, left = neighbours(world)
    engine._wait = lambda: Wait("exchange", world.rank, 0.1, "timeout: 0.1 s")
    found = np.zeros(4, np.uint8)
    text = rf"rank {world.rank} waited for rank {left} in exchange \(timeout: 0.1 s\)"
    receives = [Parcel(left, found.ctypes.data, 4)]
    with pytest.raises(ns.CollectiveTimeout, match=text):
        engine.exchange([], receives, streams.LEGACY_DEFAULT)
    mpi._given_up.clear()


def test_memory_is_kept_until_every_request_on_it_has_ended(monkeypatch):
    """If one request has failed, MPI's test of all does not show which have ended."""

    def fail(requests):  # MPI may, while others are pending
        raise MPI.Exception(MPI.ERR_IN_STATUS)

    functions = types.SimpleNamespace(Exception=MPI.Exception)
    functions.Request = types.SimpleNamespace(Testall=fail)
    monkeypatch.setattr(mpi.ranks, "mpi_module", lambda: functions)
    alone, buffer = MPI.COMM_SELF, bytearray(4)
    fails, pending = alone.Irecv(buffer, 0, 6), alone.Irecv(bytearray(4), 0, 5)
    alone.Send(bytes(8), 0, 6)
    kept = mpi._Kept([fails, pending], [buffer])
    mpi._given_up.append(kept)
    mpi.forget_served()
    assert mpi._given_up
    assert kept.objects
    alone.Send(bytes(4), 0, 5)
    mpi.forget_served()
    assert not mpi._given_up
    assert not kept.objects


def test_the_deadline_counts_from_the_latest_message(world, engine, monkeypatch):
    right, left = neighbours(world)
    clock = types.SimpleNamespace(now=0.0, sleep=time.sleep)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(waiting, "time", clock)
    engine._wait = lambda: Wait("exchange", world.rank, 0.4)
    pieces, most = 5, PinnedSlots.most
    sent, found = np.ones(most * pieces, np.uint8), np.zeros(most * pieces, np.uint8)
    finished = mpi._Receive._finished

    def slowly(move):
        found = finished(move)
        clock.now += 0.15 * found  # the whole exchange takes longer than the deadline
        return found

    monkeypatch.setattr(mpi._Receive, "_finished", slowly)
    engine.exchange(
        [Parcel(right, sent.ctypes.data, sent.size)],
        [Parcel(left, found.ctypes.data, found.size)],
        streams.LEGACY_DEFAULT,
    )
    assert found.all()
    assert clock.now > 0.4


@pytest.mark.parametrize("kind", [ns.BackendError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["trying engine 'mpi'", "starting engine 'nccl'"])
def test_an_engine_that_fails_on_one_rank_ends_on_all(world, monkeypatch, step, kind):
    """It ends immediately on the others, because their engines wait for that rank."""

    def fail(*given):
        raise kind("broken")

    def start(unique, rank, size, most, wait, look, *given):
        if rank == 0:
            fail()
        waited = wait("Communicator")
        while not waited.pause([0]):
            look()
        raise waited.error([0])

    released = []
    monkeypatch.setenv("NUMBA_SYMM_ENGINE", step.split("'")[1])
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    with monkeypatch.context() as patch:
        if world.rank == 0:
            patch.setattr(MpiEngine, "exchange", fail)
        patch.setattr(engines, "Deadline", lambda _: types.SimpleNamespace(close=int))
        patch.setattr(engines.nccl, "found", lambda: Installation("NCCL 2.28.9", ""))
        patch.setattr(engines.nccl, "unique_id", bytes)
        patch.setattr(engines.nccl, "NcclEngine", start)
        patch.setattr(MpiEngine, "close", lambda engine: released.append("engine"))
        patch.setattr(TaggedComm, "release", lambda _: released.append("messages"))
        began = time.monotonic()
        with pytest.raises((kind, ns.RankLeft), match="broken") as error:
            ns.Communicator(world, timeout=600)
        if world.rank > 0:
            assert f"rank 0 left {step} with {kind.__name__}: " in str(error.value)
        assert time.monotonic() - began < 300
    # Only what was used before: messages of this failure may not have arrived.
    assert released == ["messages"]
    monkeypatch.setenv("NUMBA_SYMM_ENGINE", "mpi")
    with ns.Communicator(world, timeout=60) as comm:
        check_works(comm)


def test_ranks_agree_how_mpi_gets_the_bytes(world, pinned, monkeypatch):
    monkeypatch.setattr(engines, "reads_gpu_memory", lambda: world.rank != 0)
    if SIMULATED:
        monkeypatch.setattr(engines, "Pinned", pinned.room)
    monkeypatch.setenv("NUMBA_SYMM_ENGINE", "mpi")
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    with ns.Communicator(world, timeout=20) as comm:
        check_works(comm)
        assert bool(pinned.copied) == SIMULATED


def test_a_mark_is_stored_for_the_host(engine):
    default = streams.LEGACY_DEFAULT
    if SIMULATED:
        word = ctypes.c_uint64(1 << 32)
        deadline.kernel().bind(1, ctypes.addressof(word), 5)(default)
        assert word.value == 5
        return
    watched = Deadline(lambda what: Wait(what, 0, 60))
    exchange = TimedExchange("all_reduce", (1,))
    for mark, running in (
        (lambda: watched.begin(exchange, default, False), exchange),
        (lambda: watched.end(default, False), None),
    ):
        watched._state[1] = 1
        mark()
        streams.synchronize(default)
        assert watched.running == running
        assert watched._state[1] == 0
    watched.close()


def test_a_capture_is_refused(engine, monkeypatch):
    monkeypatch.setattr(mpi, "SIMULATED", False)
    monkeypatch.setattr(streams, "is_capturing", lambda stream: True)
    with pytest.raises(ns.ArgumentError, match="expected a stream that is not"):
        engine.exchange([], [], 7)


def of_one(world, timeout):
    """Return a communicator of islands of one rank each, with this engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
        patch.setenv("NUMBA_SYMM_ENGINE", "mpi")
        return ns.Communicator(world, timeout=timeout)


def call_alone(comm, out, way):
    if way == "strided":
        comm.all_reduce(out[::2], out=out[::2])
    elif way == "by codes":
        comm.all_reduce(out, out=out, wire="int8")
    else:
        comm.recv(out, src=1)


@pytest.mark.parametrize("way", ["alone", "in a group", "strided", "by codes"])
def test_arrays_that_mpi_may_still_write_are_kept(world, way):
    comm, out = of_one(world, 0.2), ordinary(8, np.float32)
    kept = weakref.ref(out)
    if comm.rank == 0:
        group = comm.group() if way == "in a group" else contextlib.nullcontext()
        said = r"\(timeout: 0\.2 s\); results"
        with pytest.raises(ns.CollectiveTimeout, match=said), group:
            call_alone(comm, out, way)
        del group
        staging = comm._calls.staging
        for room in staging._rooms + staging._scratch:  # MPI has its address
            kept = weakref.ref(room)
        if way in ("strided", "by codes"):
            assert kept() is not out
            del room
        del staging
    world.barrier()
    with contextlib.suppress(ns.CollectiveError):
        comm.close()
    del comm, out
    gc.collect()
    assert (kept() is not None) == (world.rank == 0)
    mpi._given_up.clear()
    gc.collect()
    assert kept() is None


def test_what_was_kept_for_mpi_is_dropped_after_that(world):
    comm, out = of_one(world, 0.2), ordinary(4, np.int64)
    kept = weakref.ref(out)
    if comm.rank == 0:
        with pytest.raises(ns.CollectiveTimeout):
            comm.recv(out, src=1)
        assert mpi._given_up
    world.barrier()
    with contextlib.suppress(ns.CollectiveError):
        comm.close()
    del comm, out
    with of_one(world, 60) as comm:
        check_works(comm)
    gc.collect()
    assert kept() is None
    assert not mpi._given_up
