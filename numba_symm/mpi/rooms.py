"""Memory of this process through which its messages pass.

A sender copies a message here, and the receiver copies it from here. So up to the limit
in ``flow.py``, a send does not wait for its receiver. Each allocation is shared once
(:func:`numba_symm.share`), and opened once by each peer.

Rooms are kept and used again, up to ``Rooms.most`` bytes of blocks with one room. A
further block serves one message: its receiver unmaps it afterwards, and its sender
frees it. Both operations wait for the GPU. A kernel there may wait for a rank that
waits for this one. So each rank does it in a later call, in which it finds its GPU
idle.
"""

import functools
import itertools
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from numba_symm import reserve
from numba_symm.arrays import view
from numba_symm.environment import DEFAULT_MESSAGE_LIMIT, message_limit
from numba_symm.errors import ExchangeError
from numba_symm.memory.allocator import (
    Block,
    SymmetricMemoryAllocator,
    on_allocation_failure,
)
from numba_symm.own_arrays import Memory
from numba_symm.sharing import SharedHandle, collect, open_shared, share
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
        once: the handle, if the block is for one message only.
    """

    memory: Memory
    handle: bytes
    offset: int
    nbytes: int
    once: SharedHandle | None = None

    @property
    def address(self) -> int:
        """The room's address here."""
        return self.memory.address + self.offset


class Rooms:
    """The rooms of this process, by size.

    Args:
        allocator: allocates the blocks.

    Attributes:
        most: the bytes of blocks with one room that are kept.
    """

    def __init__(self, allocator: SymmetricMemoryAllocator):
        self.most = message_limit() or DEFAULT_MESSAGE_LIMIT
        self._allocator = allocator
        self._free: dict[int, list[Room]] = {}
        self._kept = 0  # bytes of blocks with one room
        self._leaving = 0  # blocks that are to be freed
        self._freeable: deque[Block] = deque()  # those that no process uses
        on_allocation_failure(self._free_for_others)

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
            if not free and size > BLOCK and self._kept + size > self.most:
                return self._for_once(size)
            while True:
                try:
                    return free.pop()
                except IndexError:
                    free += self._made(size)

    def give_back(self, room: Room) -> None:
        """Reuse a room, whose message was received, or free its block later."""
        if room.once is None:
            self._free[room.nbytes].append(room)
            return
        room.once.cancel()  # if no receiver has opened it
        with _lock:  # each communicator's lock is another one
            self._leaving += 1

    def shrink(self) -> None:
        """Free the blocks that no process uses any more, if the GPU is idle."""
        if not self._leaving or not reserve.idle():
            return
        try:
            collect()
        finally:
            with _lock:
                while self._freeable:
                    self._allocator.release(self._freeable.popleft())
                    self._leaving -= 1

    def _free_for_others(self) -> None:
        """Free such blocks after an allocation has failed."""
        with suppress(ExchangeError):  # a later call reports it; some were freed
            self.shrink()

    def _for_once(self, size: int) -> Room:
        block = self._allocator.allocate(size)
        memory = Memory(block.address, size, block)
        unused = weakref.finalize(memory, self._freeable.append, block)
        unused.atexit = False  # the process' end frees it
        shared = share(memory.array(size, _BYTE), opens=1)
        leave_out(shared)
        return Room(memory, shared.to_bytes(), 0, size, shared)

    def _made(self, size: int) -> list[Room]:
        nbytes = max(size, BLOCK)
        self._kept += nbytes if size >= BLOCK else 0
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
    """Return the size of the room for a message; large ones are at most 1/8 larger."""
    if nbytes > 8 * BLOCK:
        unit = 1 << nbytes.bit_length() - 4
        return -(-nbytes // unit) * unit
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
    _read.clear()


class Opened(NamedTuple):
    """The block of another process, mapped here.

    Attributes:
        array: keeps it mapped.
        address: its address here.
        once: whether it is for one message only.
    """

    array: Any
    address: int
    once: bool = False


@functools.lru_cache(maxsize=1024)
def opened(handle: bytes) -> Opened:
    """Return the block of another process, mapped here once."""
    array = open_shared(SharedHandle.from_bytes(handle))
    return Opened(array, view(array, "Recv").address)


def opened_once(handle: bytes) -> Opened:
    """Return a block for one message, which :func:`copied` unmaps."""
    return opened.__wrapped__(handle)._replace(once=True)


_read: "deque[Opened]" = deque()  # blocks for one message, which was copied


def copied(block: Opened | None) -> None:
    """Note that a message was copied; unmap a block later that served only this one."""
    if block is not None and block.once:
        _read.append(block)
        unmap_unused()


def unmap_unused() -> None:
    """Unmap such blocks if the GPU is idle."""
    if _read and reserve.idle():
        while _read:
            _read.popleft().array.close()
