"""The counter file of a producer."""

import ctypes
import heapq
import itertools
import os

import numpy as np

from numba_symm.backends.host import memory_file
from numba_symm.errors import BackendError
from numba_symm.launch import locks
from numba_symm.sharing.counters import (
    CONSUMERS,
    LAYOUT,
    OPEN_BYTES,
    OPENS,
    PRODUCER,
    SLOTS,
    CounterFile,
)
from numba_symm.sharing.finalizer_lock import log


class RefCounterFile(CounterFile):
    """A file of counters, for the producer, which assigns its slots to arrays.

    One slot is the next one, as in PyTorch: :meth:`get_offset`, :meth:`set_counter` and
    :meth:`counter_ptr` refer to it, and :meth:`rotate_offset` selects another one. A
    slot that was returned is used again.

    Args:
        handle: a name for the file.

    Raises:
        BackendError: the node has no memory or file descriptor for the file.

    Source: ``CudaIPCRefCountersFile`` of PyTorch, whose slots are never used again.
    """

    def __init__(self, handle: str):
        try:
            fd = memory_file("numba_symm-counters", LAYOUT.itemsize)
            try:
                locks.lock(fd, PRODUCER)
                super().__init__(fd, consumer=0)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise BackendError(f"cannot make a file of counters: {error}") from error
        self._handle = handle
        self._used: set[int] = set()
        # A heap: the lowest slot is the next one. Slots in use are skipped, so a signal
        # between two changes does no harm.
        self._free = list(range(SLOTS))
        self._numbers = itertools.count(1)
        self._consumers: set[int] = set()
        self._settled = True
        self._damaged = False

    def handle(self) -> str:
        """Return the file's name."""
        return self._handle

    def have_offsets(self) -> bool:
        """Return whether a slot is free."""
        return len(self._used) < SLOTS

    def offsets_in_use(self) -> int:
        """Return the number of slots in use."""
        return len(self._used)

    def get_offset(self) -> int:
        """Return the next slot.

        Raises:
            BackendError: all slots are in use.
        """
        if not self.have_offsets():
            raise BackendError(f"all {SLOTS} counters of {self._handle} are in use")
        while self._free[0] in self._used:
            heapq.heappop(self._free)
        return self._free[0]

    def counter_ptr(self) -> int:
        """Return the address of the next slot's counter, an int64."""
        return self.address(self.get_offset())

    def set_counter(self, value: int) -> None:
        """Set the next slot's counter. No open has taken any of the references."""
        slot = self.get_offset()  # no other process knows it yet
        self._counter[slot] = self._unopened[slot] = value

    def set_digest(self, offset: int, digest: bytes) -> None:
        """Set the digest with which the handles of a slot are checked."""
        self._digest[offset] = np.frombuffer(digest, np.uint8)

    def rotate_offset(self) -> None:
        """Mark the next slot as used, so that another one is the next."""
        self._used.add(self.get_offset())

    def return_offset(self, offset: int) -> None:
        """Free a slot. For handles that still name it, the sharing is over.

        No references may remain, so that no other process changes the slot.
        """
        self._serial[offset] += 1
        self._counter[offset] = self._unopened[offset] = 0
        heapq.heappush(self._free, offset)
        self._used.discard(offset)

    def address(self, offset: int) -> int:
        """Return the address of a slot's counter in this process."""
        return int(self._counter.ctypes.data) + offset * ctypes.sizeof(ctypes.c_int64)

    def unopened_in_all(self) -> int:
        """Return the number of references, in all slots, that no open has taken."""
        return int(self._unopened[list(self._used)].sum())

    def describe(self) -> tuple[int, int]:
        """Return a new description of the file for a consumer, and its number.

        The description holds a lock for the consumer. The lock is released when the
        consumer has ended. May be called in any thread.
        """
        # Not by os.dup: locks belong to the description, which a duplicate would share.
        fd = locks.reopened(self._fd)
        try:
            number = next(self._numbers)
            locks.lock(fd, CONSUMERS + number)
        except BaseException:
            os.close(fd)
            raise
        self._consumers.add(number)
        return fd, number

    def take_released(self) -> list[int]:
        """Return the slots whose counter has reached 0 since the last call.

        Call :meth:`settled` when all were returned; otherwise the next call finds them
        again.

        All slots are counted again if a consumer has ended, because it may have been
        killed with arrays open, or during a change. The same happens if another process
        has damaged the list.

        Raises:
            ExchangeError: another process keeps the lock.
        """
        gone = [
            number
            for number in list(self._consumers)
            if not locks.is_locked(self._fd, CONSUMERS + number)
        ]
        if gone:
            self._settled = False
            self._consumers.difference_update(gone)
        if self._settled and not self._released[0]:
            return []
        return self._change(self._take_released)

    def settled(self) -> None:
        """Note that all slots of :meth:`take_released` were returned."""
        self._settled = True

    def _take_released(self) -> list[int]:
        if not self._settled:
            return self._recount()
        slots: dict[int, None] = {}
        following = int(self._released[0])
        while following:
            slot = following - 1
            if slot in slots or slot not in self._used or self._counter[slot] != 0:
                return self._recount_damaged()
            slots[slot] = None
            following = int(self._next[slot])
        self._settled = False
        self._released[0] = 0
        return list(slots)

    def _recount_damaged(self) -> list[int]:
        if not self._damaged:
            self._damaged = True
            log.warning(
                "another process has overwritten the counters of shared arrays; they "
                "are counted again"
            )
        return self._recount()

    def _recount(self) -> list[int]:
        """Take back ended consumers' references. Return the slots that have none."""
        self._settled = False
        marked = np.flatnonzero(self._slot)
        alive = np.isin(marked, self._alive())
        self._slot[marked[~alive]] = 0
        slots = self._slot[marked[alive]].astype(np.int64) - 1
        opened = np.bincount(slots[slots < SLOTS], minlength=SLOTS)
        used = np.array(sorted(self._used), np.int64)
        self._unopened[used] = np.maximum(self._unopened[used], 0)
        self._counter[used] = self._unopened[used] + opened[used]
        self._released[0] = 0
        return [int(slot) for slot in used[self._counter[used] == 0]]

    def _alive(self) -> list[int]:
        """Return the numbers of all opens whose byte is locked."""
        found = list(self._held)
        ranges = [(OPEN_BYTES, OPEN_BYTES + OPENS)]
        while ranges:  # each answer splits a range in two
            start, stop = ranges.pop()
            locked = None
            if start < stop:
                locked = locks.locked_by_another(self._fd, start, stop)
            if locked is not None:
                found.extend(range(locked[0] - OPEN_BYTES, locked[1] - OPEN_BYTES))
                ranges += [(start, locked[0]), (locked[1], stop)]
        return found
