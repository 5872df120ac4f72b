"""The engine of MPI: works wherever mpi4py does, but waits on the host.

Each exchange waits for the stream, enqueues the kernel of the same call's messages
within the island, and moves the bytes while this rank's host waits. So a CUDA graph
cannot capture it. If MPI reads and writes GPU memory itself, it gets the addresses;
otherwise the bytes pass through pinned host memory, in chunks.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from typing import Any, NamedTuple, Protocol

from numba_symm import process
from numba_symm.engines.protocol import Parcel
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, CallMismatch
from numba_symm.gpu import driver, streams
from numba_symm.gpu.streams import SideStream, StreamOrder
from numba_symm.launch import failures, ranks
from numba_symm.launch.ranks import TAGS, Purpose, TaggedComm
from numba_symm.launch.waiting import Wait, begin
from numba_symm.launch.watchdog import Questions

_TAGS = TAGS - Purpose.PARCELS  # parcels of a pair are numbered by tags, which repeat
_DIRECT = 1 << 30  # bytes of a message at most
_STAGED = 1 << 19


class ParcelMemory(Protocol):
    """Where a parcel's bytes are while MPI moves them.

    Attributes:
        most: the most bytes of a message, equal on all ranks.
        roomy: whether a buffer has room for a message of ``most`` bytes, even if a
            shorter one is expected.
    """

    most: int
    roomy: bool

    def sent(self, slot: int, address: int, nbytes: int) -> Any:
        """Return a buffer with the bytes at an address of the GPU."""

    def free(self, slot: int, address: int, nbytes: int) -> Any:
        """Return a buffer that receives bytes for an address of the GPU."""

    def received(self, slot: int, address: int, nbytes: int) -> None:
        """Store what the buffer has received."""

    def close(self) -> None:
        """Free the buffers."""


class Direct:
    """For an MPI that reads and writes the arrays themselves."""

    most, roomy = _DIRECT, False

    def sent(self, slot: int, address: int, nbytes: int) -> Any:
        """Return the memory at the address."""
        return ranks.mpi_module().buffer.fromaddress(address, nbytes)

    free = sent

    def received(self, slot: int, address: int, nbytes: int) -> None:
        """Do nothing, because the bytes are where they belong."""

    def close(self) -> None:
        """Do nothing, because the arrays are the caller's."""


class PinnedSlots:
    """Pinned host memory, with a slot of ``most`` bytes for each parcel.

    Args:
        copy_out: ``(host, address, nbytes)`` copies from the GPU, and waits for that.
        copy_in: ``(address, host, nbytes)`` copies to the GPU, and waits for that.
        allocate: returns the address of pinned memory of that many bytes.
        release: frees it.
    """

    most, roomy = _STAGED, True

    def __init__(
        self,
        copy_out: Callable[[int, int, int], None],
        copy_in: Callable[[int, int, int], None],
        allocate: Callable[[int], int],
        release: Callable[[int], None],
    ):
        self._copy_out, self._copy_in = copy_out, copy_in
        self._allocate, self._release = allocate, release
        self._slots: list[int] = []

    def _slot(self, number: int) -> int:
        while len(self._slots) <= number:
            self._slots.append(self._allocate(self.most))
        return self._slots[number]

    def sent(self, slot: int, address: int, nbytes: int) -> Any:
        """Return a slot with the bytes."""
        host = self._slot(slot)
        if nbytes:
            self._copy_out(host, address, nbytes)
        return ranks.mpi_module().buffer.fromaddress(host, nbytes)

    def free(self, slot: int, address: int, nbytes: int) -> Any:
        """Return a slot."""
        return ranks.mpi_module().buffer.fromaddress(self._slot(slot), nbytes)

    def received(self, slot: int, address: int, nbytes: int) -> None:
        """Copy the slot to the address."""
        if nbytes:
            self._copy_in(address, self._slot(slot), nbytes)

    def close(self) -> None:
        """Free the slots."""
        while self._slots:
            self._release(self._slots.pop())


class Pinned(PinnedSlots):
    """Slots in memory that the driver pins, and a stream that follows no other one."""

    def __init__(self) -> None:
        self._stream = driver.call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
        super().__init__(
            lambda host, address, nbytes: self._copy("DtoH", host, address, nbytes),
            lambda address, host, nbytes: self._copy("HtoD", address, host, nbytes),
            lambda nbytes: int(driver.call("cuMemHostAlloc", nbytes, 0)),
            lambda host: driver.call("cuMemFreeHost", host),
        )

    def _copy(self, way: str, target: int, source: int, nbytes: int) -> None:
        driver.call(f"cuMemcpy{way}Async", target, source, nbytes, self._stream)
        driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Free the slots and the stream."""
        super().close()
        if self._stream is not None:
            driver.call("cuStreamDestroy", self._stream)
            self._stream = None


class MpiEngine:
    """Moves bytes by MPI's messages.

    Args:
        comm: the ranks, by messages of the engine alone, which it releases.
        wait: starts a wait with the communicator's deadline, which each message that
            has been moved postpones.
        look: raises if the communicator has failed.
        room: where the bytes are meanwhile, of one kind on all ranks.
        questions: answer for whom other ranks wait.
    """

    name = "mpi"
    capturable = False
    multiprocessors = 0

    def __init__(
        self,
        comm: TaggedComm,
        wait: Callable[[], Wait],
        look: Callable[[], None],
        room: ParcelMemory,
        questions: Questions,
    ):
        self._comm, self._wait, self._look = comm, wait, look
        # Both ranks of a pair count their parcels, however these are grouped.
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._kept: _Kept | None = None
        forget_served()
        self._moved = 0  # messages since the latest look
        self._simulated: Future[None] = Future()  # the end of the side stream's work
        self._simulated.set_result(None)
        self._room, self._questions = room, questions
        self.version = ranks.mpi_module().Get_library_version().split(",")[0]

    def exchange(
        self,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        stream: int,
        beside: Callable[[int], None] | None = None,
        order: StreamOrder | None = None,
    ) -> None:
        """Send and receive; return when all is done. See :class:`Engine`."""
        if streams.is_capturing(stream):
            raise ArgumentError(
                "a call between islands: expected a stream that is not being captured, "
                "got a capture; MPI moves the bytes on the host, so a graph cannot "
                "contain them; make the call outside of the capture"
            )
        streams.synchronize(stream)
        self._look()
        if beside is None:
            self._move(sends, receives)
            return
        assert order is not None
        with self._running(beside, stream, order.across):
            self._move(sends, receives)

    @contextmanager
    def _running(
        self, work: Callable[[int], None], stream: int, side: SideStream
    ) -> Iterator[None]:
        """Run work beside the block. What follows on ``stream`` follows both.

        The work is on another stream. MPI's own streams may wait for the legacy default
        stream, and the work for ranks that MPI must serve first.
        """
        if SIMULATED:  # launches block, so a thread has the part of the stream
            done = self._simulated = Future()
            args = partial(work, stream), done
            thread = Thread(target=_run, args=args, daemon=True)
            process.start(thread, "an exchange between islands")
            yield
            done.result()  # after a failure, settle() waits
            return
        with side.joined(stream):
            work(side.stream)
            side.mark(0)
            yield
            side.lead(stream, 0)

    def _move(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Move the bytes; the stream's earlier work is done."""
        wait = self._wait()
        moves: list[_ParcelMove] = []
        latest: dict[tuple[type, int, int], _ParcelMove] = {}
        for kind, parcels, counted in (
            (_Send, sends, self._sent),  # first: a receive may raise
            (_Receive, receives, self._received),
        ):
            for parcel in parcels:
                tag = counted[parcel.peer] % _TAGS
                counted[parcel.peer] += 1
                # MPI would mix the messages of two parcels that have the same tag.
                same = kind, parcel.peer, tag
                before, number = latest.get(same), self._comm.tag + tag
                latest[same] = kind(self, len(moves), parcel, number, before)
                moves.append(latest[same])
        try:
            while moves := [each for each in moves if not _advanced(each)]:
                self._look()
                if self._moved:
                    self._moved, wait = 0, self._wait()
                absent = sorted({each.parcel.peer for each in moves})
                self._questions.absent = tuple(absent)
                wait.pause(absent)
                if late := self._questions.late(wait):
                    self._look()  # for a failure that has been reported since
                    raise wait.error(late)
        except BaseException:
            requests = [each.give_up() for each in moves if each.requests]
            self._kept = _Kept(requests, [self._room])
            _given_up.append(self._kept)
            raise
        finally:
            self._questions.absent = ()

    def status(self) -> None:
        """Return None: an exchange raises its own errors."""

    def abort(self) -> None:
        """Do nothing: an exchange looks for failures itself."""

    def keep(self, *objects: Any) -> None:
        """Keep objects whose memory MPI may still use, after an exchange failed."""
        if self._kept is not None:
            self._kept.objects.extend(objects)

    def settle(self) -> None:
        """Wait for the simulator's kernel, which a failure ends."""
        self._simulated.exception()

    def close(self) -> None:
        """Free the buffers, and release the ranks. Collective."""
        self._room.close()
        self._comm.release()


def _advanced(move: "_ParcelMove") -> bool:
    """Continue a parcel's move, and return whether it has ended."""
    with ranks.living(move.parcel.peer):
        return move.advance()


def _run(work: Callable[[], None], done: Future[None]) -> None:
    try:
        work()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


class _Kept(NamedTuple):
    """Requests that MPI may still serve, and the objects whose memory they use."""

    requests: list[Any]
    objects: list[Any]


_given_up: list[_Kept] = []


def forget_served() -> None:
    """Drop what was kept for requests that MPI has finished or cancelled since."""
    for kept in list(_given_up):
        if all(map(_has_ended, kept.requests)):
            _given_up.remove(kept)
            kept.objects.clear()  # the engine itself may wait for a garbage collection


def _has_ended(request: Any) -> bool:
    """Return whether MPI has finished a request, cancelled it, or failed in it."""
    try:
        return bool(request.Test())
    except ranks.mpi_module().Exception:
        return True


class _ParcelMove:
    """A parcel that MPI moves by messages, one after another.

    The last one is shorter than the others, and may be empty. So a receiver that
    expects another number of bytes finds another length, whatever it expects.
    """

    def __init__(
        self,
        engine: MpiEngine,
        slot: int,
        parcel: Parcel,
        tag: int,
        before: "_ParcelMove | None",
    ):
        self.parcel = parcel
        self.ended = False
        self._engine, self._mpi, self._room = engine, engine._comm.mpi, engine._room
        self._there = engine._comm.ranks[parcel.peer]
        self._slot, self._tag, self._before = slot, tag, before
        self._begun = 0  # bytes of the messages that have begun
        self._last = 0  # bytes of the latest
        self.requests: list[Any] = []  # of the message in flight

    def advance(self) -> bool:
        """Finish the message in flight, if it is, and begin the next one.

        Returns:
            Whether all bytes have been moved.
        """
        while True:
            if self.requests:
                if not self._finished():
                    return False
                self.requests.clear()
                self._engine._moved += 1
                if self._last < self._room.most:
                    self.ended = True
                    return True
            self._last = min(self._room.most, self.parcel.nbytes - self._begun)
            if not self._may_begin():
                return False
            at = self._slot, self.parcel.address + self._begun, self._last
            self._begin(at)
            self._begun += self._last

    @property
    def _place(self) -> tuple[int, int, int]:
        """The slot, the address and the number of bytes of the latest message."""
        start = self.parcel.address + self._begun - self._last
        return self._slot, start, self._last

    def _may_begin(self) -> bool:
        """Return whether the next message may begin."""
        if self._before is not None and self._before.ended:
            self._before = None
        return self._before is None

    def _begin(self, at: tuple[int, int, int]) -> None:
        raise NotImplementedError

    def _finished(self) -> bool:
        raise NotImplementedError

    def give_up(self) -> Any:
        """Return the request, because MPI may still read or write its buffer."""
        with suppress(Exception):
            self.requests[0].Cancel()
        return self.requests[0]


class _Send(_ParcelMove):
    def _begin(self, at: tuple[int, int, int]) -> None:
        sent = [self._room.sent(*at), ranks.mpi_module().BYTE]
        begin(self.requests, self._mpi.Isend, sent, self._there, self._tag)

    def _finished(self) -> bool:
        return bool(self.requests[0].Test())


class _Receive(_ParcelMove):
    def _may_begin(self) -> bool:
        if not super()._may_begin():
            return False
        # Open MPI 5.0.11 writes a message that is too long past the end of the buffer,
        # from about 4 KiB on, and only then reports MPI_ERR_TRUNCATE.
        if self._room.roomy:
            return True
        mpi = ranks.mpi_module()
        status = mpi.Status()
        if not self._mpi.Iprobe(self._there, self._tag, status):
            return False
        if status.Get_count(mpi.BYTE) != self._last:
            self._refuse()
        return True

    def _begin(self, at: tuple[int, int, int]) -> None:
        room = [self._room.free(*at), ranks.mpi_module().BYTE]
        begin(self.requests, self._mpi.Irecv, room, self._there, self._tag)

    def _finished(self) -> bool:
        mpi = ranks.mpi_module()
        status = mpi.Status()
        try:
            if not self.requests[0].Test(status):
                return False
        except mpi.Exception as error:
            if error.Get_error_class() != mpi.ERR_TRUNCATE:
                raise
            self._refuse()
        if status.Get_count(mpi.BYTE) != self._last:
            self._refuse()
        self._room.received(*self._place)
        return True

    def _refuse(self) -> None:
        rank, peer = self._engine._comm.rank, self.parcel.peer
        words = failures.TABLE[failures.TRANSFER_MISMATCH].words
        raise CallMismatch(words.format(rank=rank, peer=peer), ranks=(rank, peer))


def reads_gpu_memory() -> bool:
    """Return whether MPI reports that it reads and writes the memory of GPUs itself."""
    if SIMULATED:
        return True  # the memory of simulated GPUs is the host's
    mpi = ranks.mpi_module()
    kinds = mpi.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or ""
    if "cuda" in kinds:
        return True
    # Open MPI's own function, found through the libraries that mpi4py has loaded.
    query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and query() == 1
