"""Memory of this process through which its messages pass, and streams of copies.

A sender copies a message here, and the receiver copies it from here. So up to the limit
in ``sends.py``, a send does not wait for its receiver. Each allocation is shared once
(:func:`numba_symm.share`), and opened once by each peer.

Rooms are kept and used again, up to ``Rooms.most`` bytes of blocks with one room. A
further block serves one message: its receiver unmaps it afterwards, and its sender
frees it. Both operations wait for the GPU. A kernel there may wait for a rank that
waits for this one. So each rank does it in a later call, in which it finds its GPU
idle.
"""

import weakref
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from numba_symm import reserve, streams
from numba_symm.arrays import view
from numba_symm.environment import DEFAULT_MESSAGE_LIMIT, SIMULATED, message_limit
from numba_symm.errors import ExchangeError
from numba_symm.events import Event
from numba_symm.memory.allocator import (
    Block,
    SymmetricMemoryAllocator,
    on_allocation_failure,
)
from numba_symm.mpi.progress import MOST
from numba_symm.mpi.rings import LINE, NO_SLOT, READ, READY, ROOMS, Stack
from numba_symm.own_arrays import Memory
from numba_symm.sharing import SharedHandle, collect, open_shared, share
from numba_symm.sharing.sent import leave_out
from numba_symm.streams import SideStream

LEAST = 1 << 12
"""Bytes of the smallest room; others are twice as large, and so on."""

BLOCK = 1 << 21
"""Bytes of the smallest block."""

_OPENS = 1 << 20  # more than there are peers: the memory stays until the process ends
_BYTE = np.dtype(np.uint8)


class Room(NamedTuple):
    """Room for one message.

    Attributes:
        memory: the block.
        block: its number in this rank's list of blocks.
        offset: the room's first byte in it.
        nbytes: the room's size.
        number: its number among this rank's rooms that are used again; -1: it is not.
        once: the handle, if the block is for one message only.
    """

    memory: Memory
    block: int
    offset: int
    nbytes: int
    number: int
    once: SharedHandle | None = None

    @property
    def address(self) -> int:
        """The room's address here."""
        return self.memory.address + self.offset


class Rooms:
    """The rooms of this process, by size.

    Args:
        allocator: allocates the blocks.
        blocks: the words, whose list of blocks the peers read.
        port: has the rooms for the compiled functions.

    Attributes:
        most: the bytes of blocks with one room that are kept.
    """

    def __init__(self, allocator: SymmetricMemoryAllocator, blocks: Any, port: Any):
        self.most = message_limit() or DEFAULT_MESSAGE_LIMIT
        self._allocator, self._blocks, self._port = allocator, blocks, port
        self.all: list[Room] = []
        """Those that are used again, by index."""
        self._free: dict[int, Any] = {}
        self._kept = 0  # bytes of blocks with one room
        self._leaving = 0  # blocks that are to be freed
        self._freeable: deque[tuple[Block, int]] = deque()  # those that no process uses
        on_allocation_failure(self._free_for_others)

    def stack(self, size: int) -> Any:
        """Return the rooms of a size that are free."""
        found = self._free.get(size)
        if found is None:
            found = self._free[size] = Stack()
        return found

    def take_free(self, size: int) -> Room | None:
        """Return room of a size, or None if none is free."""
        stack = self.stack(size)
        if not stack.free:
            return None
        stack.free -= 1
        room: Room = self.all[stack.rooms[stack.free]]
        return room

    def take(self, size: int) -> Room | None:
        """Return room of a size, which may be new; None: there are too many."""
        if not self.stack(size).free:
            if size > BLOCK and self._kept + size > self.most:
                return self._for_once(size)
            self._make(size)
        return self.take_free(size)

    def give_back(self, room: Room) -> None:
        """Reuse a room, whose message was received, or free its block later."""
        if room.once is None:
            stack = self._free[room.nbytes]
            stack.rooms[stack.free] = room.number
            stack.free += 1
            return
        room.once.cancel()  # if no receiver has opened it
        self._leaving += 1

    def shrink(self) -> None:
        """Free the blocks that no process uses any more, if the GPU is idle."""
        if not self._leaving or not reserve.idle():
            return
        try:
            collect()
        finally:
            while self._freeable:
                block, number = self._freeable.popleft()
                self._blocks.remove(number)
                self._allocator.release(block)
                self._leaving -= 1

    def _free_for_others(self) -> None:
        """Free such blocks after an allocation has failed."""
        with suppress(ExchangeError):  # a later call reports it; some were freed
            self.shrink()

    def _for_once(self, size: int) -> Room | None:
        made = self._shared(size, 1)
        if made is None:
            return None
        memory, number, shared = made
        unused = weakref.finalize(memory, self._freeable.append, (memory.owner, number))
        unused.atexit = False  # the process' end frees it
        return Room(memory, number, 0, size, -1, shared)

    def _make(self, size: int) -> None:
        """Make rooms of a size, unless there are too many blocks or rooms."""
        nbytes, places = max(size, BLOCK), self._port.rooms
        starts = range(0, nbytes - size + 1, size)
        if len(self.all) + len(starts) > ROOMS:
            return
        made = self._shared(nbytes, _OPENS)
        if made is None:
            return
        memory, number, _ = made
        self._kept += nbytes if size >= BLOCK else 0
        for offset in starts:
            room = Room(memory, number, offset, size, len(self.all))
            first = 3 * room.number
            places[first : first + 3] = room.address, number, offset
            self.all.append(room)
            self.give_back(room)

    def _shared(
        self, nbytes: int, opens: int
    ) -> tuple[Memory, int, SharedHandle] | None:
        """Return a new block, its number and its handle; None: there are too many."""
        block = self._allocator.allocate(nbytes)
        memory = Memory(block.address, nbytes, block)
        shared = share(memory.array(nbytes, _BYTE), opens=opens)
        leave_out(shared)  # the program itself has not shared it
        number = self._blocks.add(shared.to_bytes())
        if number is not None:
            return memory, number, shared
        shared.cancel()
        self._allocator.release(block)
        return None


def size_of(nbytes: int) -> int:
    """Return the size of the room for a message; large ones are at most 1/8 larger."""
    if nbytes > 8 * BLOCK:
        unit = 1 << nbytes.bit_length() - 4
        return -(-nbytes // unit) * unit
    return max(LEAST, 1 << (nbytes - 1).bit_length())


class Unread:
    """The messages of a communicator that were not read, and the memory they need.

    Args:
        words: of this rank's island.
        data: brings data to other islands.
        ranks: the number of ranks.

    Attributes:
        limit: the bytes of messages to a rank that it has not read, at most; above it,
            a message is postponed. 0: there is no limit.
        unread: by rank, the bytes that it has not read.
    """

    def __init__(self, words: Any, data: Any, ranks: int):
        self.words, self._data, self._lock = words, data, words.lock
        self.limit = message_limit()
        self.unread = [0] * ranks
        self._unread: dict[Any, None] = {}  # of ``sends.Sending``
        self._looks = MOST

    def lend(self, made: Any, slot: int, number: int, room: Room | None) -> None:
        """Keep what a message needs until it was read: slot and room, or requests."""
        made.slot, made.number, made.room = slot, number, room
        self._unread[made] = None
        self.unread[made.outgoing.dest] += made.outgoing.nbytes
        # The limit grows with what is kept, so a message costs the same on average.
        if len(self._unread) >= self._looks:
            self.take_back()
            self._looks = MOST + 2 * len(self._unread)

    def take_back(self) -> None:
        """Reuse the memory of messages that were read."""
        with self._lock:
            self._data.reap()
            for each in [each for each in self._unread if self._was_read(each)]:
                self.release(each)
            self.words.rooms.shrink()  # here, as a rank that only sends makes no reap

    def _was_read(self, made: Any) -> bool:
        if made.slot == NO_SLOT:
            return all([request.Test() for request in made._requests])
        # A message may be refused before it was copied.
        at, values = LINE * made.slot, self.words.values
        return bool(min(values[at + READ], values[at + READY]) >= made.number)

    def release(self, made: Any) -> None:
        """Use the memory of a message again."""
        del self._unread[made]
        self.unread[made.outgoing.dest] -= made.outgoing.nbytes
        self.give_back(made)
        if made.slot != NO_SLOT:
            self.words.give_back(made.slot)

    def give_back(self, made: Any) -> None:
        """Let other messages use a message's room, if it has one."""
        room, made.room = made.room, None
        if room is not None:
            self.words.rooms.give_back(room)

    def admits(self, outgoing: Any) -> bool:
        """Return whether a message may be sent now; above the limit, only alone."""
        dest, nbytes = outgoing.dest, outgoing.nbytes
        if not self.limit or not nbytes or self.unread[dest] + nbytes <= self.limit:
            return True
        self.take_back()
        before = self.unread[dest]
        return not before or before + nbytes <= self.limit

    def room_for(self, size: int) -> Room | None:
        """Return room; look for messages that were read before it takes more memory.

        It returns None if there are too many blocks.
        """
        rooms: Rooms = self.words.rooms
        found = rooms.take_free(size)
        if found is None:
            self.take_back()
            found = rooms.take(size)
        return found


class CopyStream:
    """The stream of one communicator's copies, which may run beside the program's work.

    Its events are used again, because to make one takes longer than to record it.

    Attributes:
        stream: its handle.
    """

    def __init__(self) -> None:
        self._side = SideStream(0)
        self.stream = self._side.stream
        self._events: list[Event] = []  # those that are not in use

    def event(self, stream: int) -> Event:
        """Return the end of a stream's work so far."""
        try:
            found = self._events.pop()
        except IndexError:
            found = Event()
        found.record(stream)
        return found

    def reuse(self, event: Event) -> None:
        """Take back an event that no caller will query any more."""
        self._events.append(event)

    def settle(self) -> None:
        """Wait for all copies."""
        if not SIMULATED:
            streams.synchronize(self.stream)

    def close(self) -> None:
        """Wait for all copies; there are none later."""
        self.settle()
        self._side.close()


class Opened(NamedTuple):
    """The block of another process, mapped here.

    Attributes:
        array: keeps it mapped.
        address: its address here.
        once: whether it is for one message only.
    """

    array: Any
    address: int
    once: bool


def opened(handle: bytes, once: bool) -> Opened:
    """Return the block of another process, mapped here."""
    array = open_shared(SharedHandle.from_bytes(handle))
    return Opened(array, view(array, "Recv").address, once)


_read: "deque[Opened]" = deque()  # blocks for one message, which was copied


def copied(block: Opened) -> None:
    """Unmap a block later that served only one message, which was copied."""
    _read.append(block)
    unmap_unused()


def unmap_unused() -> None:
    """Unmap such blocks if the GPU is idle."""
    if _read and reserve.idle():
        while _read:
            _read.popleft().array.close()
