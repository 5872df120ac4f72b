"""The counters of the process whose arrays they count."""

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
from numba_symm.sharing.guard import log


class RefCounterFile(CounterFile):
    """The counters of the process whose arrays they count, which hands out slots.

    A slot that was returned is used again. There is always one that comes next, as
    in the source: :meth:`get_offset`, :meth:`set_counter` and :meth:`counter_ptr` are
    about it, and :meth:`rotate_offset` goes on to the one after.

    Args:
        handle: a name for the file.

    Raises:
        BackendError: there is no memory or descriptor for the file.

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
        # A heap: the lowest slot comes next. Those in use do not count; so a signal
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
        """Return how many slots are taken."""
        return len(self._used)

    def get_offset(self) -> int:
        """Return the slot that comes next.

        Raises:
            BackendError: all slots are taken.
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
        """Set the next slot's counter; all its references are unopened."""
        slot = self.get_offset()  # which no other process changes before it is named
        self._counter[slot] = self._unopened[slot] = value

    def set_digest(self, offset: int, digest: bytes) -> None:
        """Say what handles of a slot are checked by."""
        self._digest[offset] = np.frombuffer(digest, np.uint8)

    def rotate_offset(self) -> None:
        """Take the next slot, so that another one comes next."""
        self._used.add(self.get_offset())

    def return_offset(self, offset: int) -> None:
        """Have a slot used again; whoever still names it is told that it is over.

        No references may be out, so that no other process changes it.
        """
        self._serial[offset] += 1
        self._counter[offset] = self._unopened[offset] = 0
        heapq.heappush(self._free, offset)
        self._used.discard(offset)

    def address(self, offset: int) -> int:
        """Return the address of a slot's counter in this process."""
        return int(self._counter.ctypes.data) + offset * ctypes.sizeof(ctypes.c_int64)

    def unopened_in_all(self) -> int:
        """Return how many references no open has taken yet, in all slots."""
        return int(self._unopened[list(self._used)].sum())

    def describe(self) -> tuple[int, int]:
        """Return a new description of the file for a consumer, and its number.

        The consumer's presence is locked on it, before it has it: once it has ended,
        nobody holds that lock. May be called by any thread.
        """
        # Not os.dup: locks belong to the description, which a duplicate would share.
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
        """Return the slots whose counter has come to 0 since the last call.

        Call :meth:`settled` once all are returned: else the next call finds them again.

        Counts again, all slots, only if a consumer has ended: it may have been killed
        with arrays open, or amid a change; or if another process has damaged the list.

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
        """Say that all slots that :meth:`take_released` gave were returned."""
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
                "another process has written to the counters of shared arrays where "
                "it should not; they are counted again"
            )
        return self._recount()

    def _recount(self) -> list[int]:
        """Take back dead consumers' references; return the slots that have none now."""
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
        """Return the numbers of all opens whose byte somebody has locked."""
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
