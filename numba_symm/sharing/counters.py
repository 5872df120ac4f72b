"""Counters of shared arrays, in memory that all processes see, and who is alive.

A file has a counter for each array: how many references are out. Changes are made
under a lock on the file, so that they are atomic between processes. These locks are
Linux' open-file-description locks, which the kernel drops when the process that holds
them ends, however it ends. Each open of an array locks a byte of its own; a byte that
is marked as open but locked by nobody tells of a process that was killed.

Source: the reference-counter file of PyTorch's ``CudaIPCTypes``.
"""

import ctypes
import fcntl
import heapq
import itertools
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from numba_symm.errors import BackendError, ClosedError

SLOTS = 10_000
"""Counters in a file."""

OPENS = 1 << 18
"""Opens of a file's arrays that can be alive at the same time."""

_LAYOUT = np.dtype(
    [
        ("counter", np.int64, SLOTS),  # references that are out
        ("unopened", np.int64, SLOTS),  # of these, not yet taken by an open
        ("serial", np.int64, SLOTS),  # which use of the slot this is
        ("next", np.int64, SLOTS),  # links slots whose counter has come to 0
        ("released", np.int64, 1),  # the first of these, from 1; 0: none
        ("slot", np.uint16, OPENS),  # of each open, from 1; 0: this one is free
    ]
)
_REGION = 4096  # opens of one process lie together, where their locks can merge

# What the locked bytes stand for. They lie beyond the file's end, which locks may.
_MUTEX = 1 << 40
_PRODUCER = _MUTEX + 1
_CONSUMERS = 1 << 41
_OPEN = 1 << 42

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


class CounterFile:
    """The counters, as any process may use them.

    One thread at a time; between processes everything is atomic.

    Args:
        fd: a description of the file that no other process has; closed by ``close``.
        consumer: this process' number among those that use the file; 0: its producer.
    """

    def __init__(self, fd: int, consumer: int):
        self._fd = fd
        self._start = consumer * _REGION % OPENS
        self._held: set[int] = set()
        self._memory = mmap.mmap(fd, _LAYOUT.itemsize)
        fields = np.frombuffer(self._memory, _LAYOUT)[0]
        self._counter = fields["counter"]
        self._unopened = fields["unopened"]
        self._serial = fields["serial"]
        self._next = fields["next"]
        self._released = fields["released"]
        self._slot = fields["slot"]

    def value(self, slot: int) -> int:
        """Return how many references to a slot's array are out."""
        return int(self._counter[slot])

    def unopened(self, slot: int) -> int:
        """Return how many of these no open has taken yet."""
        return int(self._unopened[slot])

    def serial(self, slot: int) -> int:
        """Return which use of the slot the present one is."""
        return int(self._serial[slot])

    @property
    def idle(self) -> bool:
        """Whether this process has nothing open that the file counts."""
        return not self._held

    def take(self, slot: int, serial: int) -> int:
        """Take a reference: an unopened one, or one more; return the open's number.

        Raises:
            ClosedError: all references were given back, so the array may be gone.
            BackendError: too many opens are alive, or the kernel has no lock left.
        """
        with self._updating():
            self._check_alive(slot, serial)
            number = self._free_number()
            try:
                self._lock(_OPEN + number)
            except OSError as error:
                raise BackendError(f"cannot lock an open's byte: {error}") from error
            if self._unopened[slot]:
                self._unopened[slot] -= 1
            else:
                self._counter[slot] += 1
            self._slot[number] = slot + 1
        self._held.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Give back the reference that the open of this number took."""
        with self._updating():
            slot = int(self._slot[number]) - 1
            self._slot[number] = 0
            self._lower(slot, 1)
            self._unlock(_OPEN + number)
        self._held.discard(number)

    def add(self, slot: int, serial: int, opens: int) -> None:
        """Add references for opens to come.

        Raises:
            ClosedError: all references were given back.
        """
        with self._updating():
            self._check_alive(slot, serial)
            self._unopened[slot] += opens
            self._counter[slot] += opens

    def cancel(self, slot: int, serial: int) -> int:
        """Give back all unopened references and return how many there were."""
        with self._updating():
            if self._serial[slot] != serial:
                return 0
            opens = int(self._unopened[slot])
            self._unopened[slot] = 0
            if opens:
                self._lower(slot, opens)
            return opens

    def producer_is_alive(self) -> bool:
        """Return whether the process that made the file still runs."""
        return self._locked_by_another(_PRODUCER, _PRODUCER + 1) is not None

    def close(self) -> None:
        """Let go of the file, and so of all locks. No method may be called after."""
        os.close(self._fd)
        del self._counter, self._unopened, self._serial
        del self._next, self._released, self._slot
        self._memory.close()

    def _check_alive(self, slot: int, serial: int) -> None:
        if self._serial[slot] != serial or self._counter[slot] <= 0:
            raise ClosedError(
                "this array is shared no more: all its references were given back or "
                "cancelled, and its memory may be gone; have the producer share it "
                "again, with opens= as many as there will be consumers"
            )

    def _lower(self, slot: int, by: int) -> None:
        self._counter[slot] -= by
        if self._counter[slot] == 0:
            self._next[slot] = self._released[0]
            self._released[0] = slot + 1

    def _free_number(self) -> int:
        for first in range(self._start, self._start + OPENS, _REGION):
            first %= OPENS
            free = np.flatnonzero(self._slot[first : first + _REGION] == 0)
            if free.size:
                return first + int(free[0])
        raise BackendError(
            f"{OPENS} opens of one producer's arrays are alive: too many"
        )

    @contextmanager
    def _updating(self) -> Iterator[None]:
        self._lock(_MUTEX, wait=True)
        try:
            yield
        finally:
            self._unlock(_MUTEX)

    def _lock(self, byte: int, *, wait: bool = False) -> None:
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        _lock(self._fd, byte, command)

    def _unlock(self, byte: int) -> None:
        request = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)

    def _locked_by_another(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return a range of bytes in [start, stop) that another description locks."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request)
        kind, _, first, length, _ = _FLOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            return None
        return max(first, start), min(first + length, stop)


class RefCounterFile(CounterFile):
    """The counters of the process whose arrays they count, which hands out slots.

    A slot that was returned is used again. There is always one that comes next, as
    in the source: :meth:`get_offset`, :meth:`set_counter` and :meth:`counter_ptr` are
    about it, and :meth:`rotate_offset` goes on to the one after.

    Args:
        handle: a name for the file.

    Source: ``CudaIPCRefCountersFile`` of PyTorch, whose slots are never used again.
    """

    def __init__(self, handle: str):
        fd = os.memfd_create("numba_symm-counters", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _LAYOUT.itemsize)
            _lock(fd, _PRODUCER, fcntl.F_OFD_SETLK)
            super().__init__(fd, consumer=0)
        except BaseException:
            os.close(fd)
            raise
        self._handle = handle
        self._free = list(range(SLOTS))  # a heap: the lowest slot comes next
        self._used: set[int] = set()
        self._numbers = itertools.count(1)
        self._consumers: set[int] = set()

    def handle(self) -> str:
        """Return the file's name."""
        return self._handle

    def have_offsets(self) -> bool:
        """Return whether a slot is free."""
        return bool(self._free)

    def offsets_in_use(self) -> int:
        """Return how many slots are taken."""
        return len(self._used)

    def get_offset(self) -> int:
        """Return the slot that comes next.

        Raises:
            BackendError: all slots are taken.
        """
        if not self._free:
            raise BackendError(f"all {SLOTS} counters of {self._handle} are in use")
        return self._free[0]

    def counter_ptr(self) -> int:
        """Return the address of the next slot's counter, an int64."""
        return self.address(self.get_offset())

    def set_counter(self, value: int) -> None:
        """Set the next slot's counter; all its references are unopened."""
        slot = self.get_offset()
        with self._updating():
            self._counter[slot] = self._unopened[slot] = value

    def rotate_offset(self) -> None:
        """Take the next slot, so that another one comes next."""
        self._used.add(heapq.heappop(self._free))

    def return_offset(self, offset: int) -> None:
        """Have a slot used again; whoever still names it is told that it is over."""
        self._used.remove(offset)
        with self._updating():
            self._serial[offset] += 1
            self._counter[offset] = self._unopened[offset] = 0
        heapq.heappush(self._free, offset)

    def address(self, offset: int) -> int:
        """Return the address of a slot's counter in this process."""
        return int(self._counter.ctypes.data) + offset * ctypes.sizeof(ctypes.c_int64)

    def unopened_in_all(self) -> int:
        """Return how many references no open has taken yet, in all slots."""
        return int(self._unopened.sum())

    def describe(self) -> tuple[int, int]:
        """Return a new description of the file for a consumer, and its number.

        The consumer's presence is locked on it, before it has it: once it has ended,
        nobody holds that lock. May be called by any thread.
        """
        # Not os.dup: locks belong to the description, which a duplicate would share.
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            number = next(self._numbers)
            _lock(fd, _CONSUMERS + number, fcntl.F_OFD_SETLK)
        except BaseException:
            os.close(fd)
            raise
        self._consumers.add(number)
        return fd, number

    def take_released(self) -> list[int]:
        """Return the slots whose counter has come to 0 since the last call.

        Counts again, all slots, only if a consumer has ended: it may have been killed
        with arrays open, or amid a change.
        """
        gone = [
            number
            for number in list(self._consumers)
            if not self._locked_by_another(_CONSUMERS + number, _CONSUMERS + number + 1)
        ]
        if gone:
            self._consumers.difference_update(gone)
            return self._recount()
        if not self._released[0]:
            return []
        slots = []
        with self._updating():
            following = int(self._released[0])
            while following:
                slots.append(following - 1)
                following = int(self._next[following - 1])
            self._released[0] = 0
        return slots

    def _recount(self) -> list[int]:
        """Take back dead consumers' references; return the slots that have none now."""
        with self._updating():
            marked = np.flatnonzero(self._slot)
            alive = np.isin(marked, self._alive())
            self._slot[marked[~alive]] = 0
            slots = self._slot[marked[alive]].astype(np.int64) - 1
            opened = np.bincount(slots, minlength=SLOTS)
            used = np.array(sorted(self._used), np.int64)
            self._counter[used] = self._unopened[used] + opened[used]
            self._released[0] = 0
            return [int(slot) for slot in used[self._counter[used] == 0]]

    def _alive(self) -> list[int]:
        """Return the numbers of all opens whose byte somebody has locked."""
        found = list(self._held)
        ranges = [(_OPEN, _OPEN + OPENS)]
        while ranges:  # each answer splits a range in two
            start, stop = ranges.pop()
            locked = self._locked_by_another(start, stop) if start < stop else None
            if locked is not None:
                found.extend(range(locked[0] - _OPEN, locked[1] - _OPEN))
                ranges += [(start, locked[0]), (locked[1], stop)]
        return found


def _lock(fd: int, byte: int, command: int) -> None:
    fcntl.fcntl(fd, command, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
