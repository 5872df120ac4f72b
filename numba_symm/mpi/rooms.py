"""Memory of this process through which its messages pass.

A sender copies a message here, and the receiver copies it from here. So a send never
waits for its receiver, whatever its size, and the receiver needs nothing of the sender.
Each allocation is shared once (:func:`numba_symm.share`), and opened once by each peer.
"""

import functools
import itertools
import threading
from typing import Any, NamedTuple

import numpy as np

from numba_symm.arrays import view
from numba_symm.memory.allocator import SymmetricMemoryAllocator
from numba_symm.own_arrays import Memory
from numba_symm.sharing import SharedHandle, open_shared, share
from numba_symm.sharing.sent import leave_out

LEAST = 1 << 12
"""Bytes of the smallest room; others are twice as large, and so on."""

BLOCK = 1 << 21
"""Bytes of the smallest block."""

_OPENS = 1 << 20  # more than there are peers: the memory stays until the process ends
_BYTE = np.dtype(np.uint8)
_lock = threading.RLock()  # the communicators of several threads share the rooms


class Room(NamedTuple):
    """Room for one message.

    Attributes:
        memory: the block.
        handle: names the block in other processes.
        offset: the room's first byte in it.
        nbytes: the room's size.
    """

    memory: Memory
    handle: bytes
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """The room's address here."""
        return self.memory.address + self.offset


class Rooms:
    """The rooms of this process, by size. They are reused, and never freed.

    Args:
        allocator: allocates the blocks.
    """

    def __init__(self, allocator: SymmetricMemoryAllocator):
        self._allocator = allocator
        self._free: dict[int, list[Room]] = {}

    def take_free(self, nbytes: int) -> Room | None:
        """Return room for at least ``nbytes``, or None if none is free."""
        free = self._free.get(_size(nbytes))
        try:
            return free.pop() if free else None
        except IndexError:  # another thread took it
            return None

    def take(self, nbytes: int) -> Room:
        """Return room for at least ``nbytes``, which may be new."""
        size = _size(nbytes)
        with _lock:
            free = self._free.setdefault(size, [])
            while True:
                try:
                    return free.pop()
                except IndexError:
                    free += self._made(size)

    def give_back(self, room: Room) -> None:
        """Reuse a room, whose message was received."""
        self._free[room.nbytes].append(room)

    def _made(self, size: int) -> list[Room]:
        nbytes = max(size, BLOCK)
        block = self._allocator.allocate(nbytes)
        memory = Memory(block.address, nbytes, block)
        shared = share(memory.array(nbytes, _BYTE), opens=_OPENS)
        leave_out(shared)  # the program itself has not shared it
        handle = shared.to_bytes()
        starts = itertools.count(0, size)
        return [
            Room(memory, handle, offset, size)
            for offset, _ in zip(starts, range(nbytes // size), strict=False)
        ]


def _size(nbytes: int) -> int:
    """Return the size of the room for a message."""
    return max(LEAST, 1 << (nbytes - 1).bit_length())


_of: dict[SymmetricMemoryAllocator, Rooms] = {}


def rooms_of(allocator: SymmetricMemoryAllocator) -> Rooms:
    """Return the rooms of this process."""
    with _lock:
        if allocator not in _of:
            _of[allocator] = Rooms(allocator)
        return _of[allocator]


def give_back_all() -> None:
    """Unmap the blocks of other processes, for the end of the program."""
    opened.cache_clear()


class Opened(NamedTuple):
    """The block of another process, mapped here.

    Attributes:
        array: keeps it mapped.
        address: its address here.
    """

    array: Any
    address: int


@functools.lru_cache(maxsize=1024)
def opened(handle: bytes) -> Opened:
    """Return the block of another process, mapped here once."""
    array = open_shared(SharedHandle.from_bytes(handle))
    return Opened(array, view(array, "Recv").address)
