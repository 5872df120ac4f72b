"""Sends of device arrays: a copy to memory of this process, then an envelope of MPI.

The envelope of a small message contains the data.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, NamedTuple

import numpy as np
from mpi4py import MPI

from numba_symm import arrays, streams
from numba_symm.environment import SIMULATED
from numba_symm.memory.allocator import SymmetricMemoryAllocator
from numba_symm.mpi import buffers, inline, packing
from numba_symm.mpi.channels import Channel, Receipts
from numba_symm.mpi.copies import CopyStream
from numba_symm.mpi.crossings import Data, on_host
from numba_symm.mpi.envelopes import announced, with_data
from numba_symm.mpi.errors import FREED, MPIError, P, T, refusal, unsupported
from numba_symm.mpi.flow import Flow
from numba_symm.mpi.inline import HostRoom
from numba_symm.mpi.rooms import Room, Rooms, rooms_of
from numba_symm.own_arrays import Memory


def alone(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """Let one thread at a time make such a call. None of them waits for a peer."""

    @functools.wraps(method)
    def locked(post: Any, /, *args: P.args, **options: P.kwargs) -> T:
        with post._lock:
            return method(post, *args, **options)

    return locked


class StagedSend(NamedTuple):
    """A message that is being copied to its room, or to the host.

    Attributes:
        dest: the rank to which it is sent.
        tag: its tag.
        nbytes: its size.
        room: the room; None if the message is empty or small.
        stream: of the copy.
        on_host: host memory for a small message.
    """

    dest: int
    tag: int
    nbytes: int
    room: Room | None
    stream: int
    on_host: HostRoom | None = None


class Sends:
    """The sending part of :class:`numba_symm.mpi.messages.Post`, which sets all this.

    Attributes:
        flow: what the other ranks have not received.
        outgoing: copies of messages that were postponed.
        timeout: seconds that such a message waits at most; 0: indefinitely.
        islands: the number of each rank's island.
        allocator: allocates the memory through which messages pass.
    """

    flow: Flow
    outgoing: CopyStream
    timeout: float
    islands: list[int]
    allocator: SymmetricMemoryAllocator
    _envelopes: Channel
    _receipts: Receipts
    _data: Data
    _by_mpi: dict[int, list[MPI.Request]]  # by number, those of data by MPI
    _tags: int
    _rank: int
    _freed: bool
    _numbers: Iterator[int]
    _stream: Any
    _lock: threading.RLock
    _threads: threading.local
    _enter: Callable[[str], None]

    def reap(self) -> None:
        """Send the receipts of messages, and reuse the memory of those received."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise if the communicator has failed, also after it was freed."""
        raise NotImplementedError

    def _check_open(self, what: str) -> None:
        """Begin a call: refuse it after Free, and make the GPU current."""
        if self._freed:
            raise MPIError(MPI.ERR_COMM, f"{what}: {FREED}")
        if not hasattr(self._threads, "ready"):
            self._enter(what)
            self._threads.ready = True

    def stream_of(self, array: Any, what: str) -> int:
        """Return the stream for copies of an array."""
        named = None if array is None else arrays.stream_of(array)
        found = streams.handle_or_default(self._stream) if named is None else named
        if not SIMULATED and streams.is_capturing(found):
            raise unsupported(
                f"{what}: expected a stream that is not being captured, because the "
                "ranks' hosts take part in this call; make it before or after the "
                "capture, or use comm.communicator.send and recv"
            )
        return found

    def send(
        self, found: buffers.Items, dest: int, tag: int, matched: bool = False
    ) -> MPI.Request:
        """Send a message, regardless of the limit; its array may be used afterwards.

        Returns:
            The request of the envelope. If ``matched``, it is done when a receive has
            matched it.
        """
        return self.announce(self.stage(found, dest, tag), matched)

    def admits(self, found: buffers.Items, dest: int, tag: int) -> bool:
        """Return whether a message may be sent now, or refuse its destination."""
        self.check_send(dest, tag)
        nbytes = found.nbytes
        if self.flow.admits(dest, nbytes):
            return True
        self.stream_of(found.array, "Send")  # refuses a capture before events are asked
        self.reap()
        return self.flow.admits(dest, nbytes)

    def check_send(self, dest: int, tag: int) -> None:
        """Begin a send, or refuse its destination or its tag."""
        self.check_message("Send", dest, tag)

    def check_receive(self, source: int, tag: int, what: str = "Recv") -> None:
        """Begin a receive or a probe, or refuse its source or its tag."""
        any_source, any_tag = source == MPI.ANY_SOURCE, tag == MPI.ANY_TAG
        self.check_message(what, 0 if any_source else source, 0 if any_tag else tag)

    def check_message(self, what: str, rank: int, tag: int) -> None:
        """Begin a call, or refuse a rank or a tag that no message can have."""
        self._check_open(what)
        if not 0 <= rank < len(self.islands):
            raise refusal(
                MPI.ERR_RANK,
                f"{what}: expected a rank from 0 to {len(self.islands) - 1} or "
                f"MPI.PROC_NULL, got {rank}; pass one of these",
            )
        if not 0 <= tag < self._tags:
            raise refusal(
                MPI.ERR_TAG,
                f"{what}: expected a tag from 0 to {self._tags - 1}, got {tag}; pass "
                "one of these",
            )

    def stage(self, found: buffers.Items, dest: int, tag: int) -> StagedSend:
        """Start the copy of a message to its room.

        :meth:`announce` or :meth:`drop` follows.
        """
        self.check_send(dest, tag)
        nbytes, stream = found.nbytes, self.stream_of(found.array, "Send")
        if not nbytes:
            return StagedSend(dest, tag, 0, None, stream)
        if nbytes <= inline.MOST and found.layout.runs is None:
            small = inline.take()
            streams.copy_to_host(small.address, found.address, nbytes, stream)
            return StagedSend(dest, tag, nbytes, None, stream, small)
        room = self._room_for(nbytes)
        try:
            if found.layout.runs is None:
                streams.copy(room.address, found.address, nbytes, stream)
            else:
                memory = Memory(room.address, nbytes, room.memory)
                packed = memory.array(nbytes, np.dtype(np.uint8))
                packing.pack(found, packed)(stream)
        except BaseException:
            self._give_back(room)
            raise
        return StagedSend(dest, tag, nbytes, room, stream)

    def announce(self, staged: StagedSend, matched: bool = False) -> MPI.Request:
        """Wait for the copy of a message, and send its envelope; see :meth:`send`."""
        dest, tag, nbytes, room, stream, small = staged
        data = None
        if nbytes:
            self._wait(staged)
        if room is not None and self.is_apart(dest):
            try:
                self.reap()  # drops data that MPI has sent
                data = on_host(room, nbytes, stream)
            finally:
                self._give_back(room)
            room = None
        offset = 0 if room is None else room.offset
        with self._lock:
            self._data.reap()
            number = next(self._numbers)
            if data is not None:
                self.send_data(data, dest, number)  # first, because it may fail
            if small is not None:
                text = with_data(number, small.data[:nbytes])
                inline.give_back(small)
            else:
                text = announced(number, nbytes, offset, room)
            if room is not None or small is not None:
                self.lend(room, dest, number, nbytes)
            try:
                return self._envelopes.send(text, dest, tag, matched)
            except Exception:
                self._give_back(self._receipts.unread.pop(number, None))
                self.flow.received(number)
                raise

    def lend(self, room: Room | None, dest: int, number: int, nbytes: int) -> None:
        """Keep the room of a message, if it has one, until its receipt arrives."""
        self._receipts.unread[number] = room
        self.flow.sent(number, dest, nbytes)

    def send_data(self, data: Any, dest: int, number: int) -> None:
        """Send the data of a message by MPI, to a rank of another island."""
        requests = self._data.send_parts(data, dest, number)
        self._by_mpi[number] = requests
        self.flow.sent(number, dest, data.nbytes)

    def _take_receipts(self) -> None:
        """Reuse the memory of messages that were received."""
        for number, room in self._receipts.take():
            self.flow.received(number)
            self._give_back(room)
        for number, requests in list(self._by_mpi.items()):
            if all([request.Test() for request in requests]):
                del self._by_mpi[number]
                self.flow.received(number)

    def is_apart(self, dest: int) -> bool:
        """Return whether a rank is in another island."""
        return self.islands[dest] != self.islands[self._rank]

    def _wait(self, staged: StagedSend) -> None:
        """Wait for the copy of a message; if that fails, give its room back.

        Host memory is not given back then, because the copy may still write it.
        """
        try:
            if not SIMULATED:
                streams.synchronize(staged.stream)
        except BaseException:
            self._give_back(staged.room)
            raise

    def drop(self, staged: StagedSend) -> None:
        """Give the room of a message back, which is not sent."""
        if staged.nbytes:
            self._wait(staged)
        self._give_back(staged.room)
        if staged.on_host is not None:
            inline.give_back(staged.on_host)

    @alone
    def has_ended(self, request: MPI.Request) -> bool:
        """Return whether a send has ended; two threads must not ask MPI at a time."""
        return request.Test()

    @functools.cached_property
    def _rooms(self) -> Rooms:
        return rooms_of(self.allocator)

    def _room_for(self, nbytes: int) -> Room:
        """Return room; look for receipts before it takes more memory."""
        found = self._rooms.take_free(nbytes)
        if found is None:
            self.reap()
            found = self._rooms.take(nbytes)
        return found

    def _give_back(self, room: Room | None) -> None:
        if room is not None:
            self._rooms.give_back(room)
