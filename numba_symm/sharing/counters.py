"""Reference counters of shared arrays, in files that all processes map.

Reference counters of shared arrays, in memory of all processes that use them.

A file has a counter for each array: its number of references. Changes are made under a
lock on the file, so they are atomic between processes. The locks are Linux'
open-file-description locks, which the Linux kernel releases when the process that holds
them ends, in whatever way. Each open of an array locks a byte of its own. A byte that
is marked as open, but not locked, belongs to a process that has ended.

Values that other processes can write are checked before use, because a process that
writes wrong values must not hang or end this one.

Source: the reference-counter file of PyTorch's ``CudaIPCTypes``.

A lock that finalizers may take, and that no signal leaves held.

A signal handler may raise, as that of Ctrl-C does. CPython runs handlers in the main
thread only, and at three places: when a function written in Python starts, when a call
ends, and at the end of each pass of a loop. So, here and in the counters,

- the first call in a ``finally``, of a C function, undoes what must be undone;
- changes that must be complete are in lines without a call.
"""

import ctypes
import fcntl
import heapq
import itertools
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from numba_symm.errors import (
    ArgumentError,
    BackendError,
    ClosedError,
    ExchangeError,
    SymmError,
)
from numba_symm.launch import locks
from numba_symm.memory.backends import memory_file

log = logging.getLogger("numba_symm.sharing")

T = TypeVar("T")


class FinalizerLock:
    """Lets one thread at a time change some state. Can be used in finalizers.

    The garbage collector may run a finalizer in any thread at any moment, also in one
    that holds the lock. So finalizers never wait: :meth:`later` queues their job, and
    the thread that holds the lock runs it before it releases the lock. A job that a
    signal handler ends by an exception is not repeated.

    Args:
        after: called without the lock, each time after the lock was held.
    """

    def __init__(self, after: Callable[[], None] = lambda: None) -> None:
        self._lock: Any = threading.RLock()  # only its holder can release it
        self._jobs: deque[Callable[[], None]] = deque()
        self._after = after

    def do(self, job: Callable[[], T]) -> T:
        """Return ``job()``, called under the lock. Its errors are raised here."""
        try:
            return under(self._lock, job)  # type: ignore[return-value]  # it waits
        finally:
            self.do_queued()

    def now(self, job: Callable[[], None]) -> None:
        """Run ``job`` under the lock, and return. Its errors are raised here."""
        if self._lock._is_owned():  # within a finalizer
            self.later(job)
        else:
            self.do(job)

    def later(self, job: Callable[[], None]) -> None:
        """Run ``job`` under the lock as soon as it is free. Errors are logged."""
        self._jobs.append(job)
        self.do_queued()

    def do_queued(self) -> None:
        """Run queued jobs, unless this or another thread will, then ``after``."""
        # Check again after the release: a job may have been queued in between.
        while self._jobs and not self._lock._is_owned():
            if not under(self._lock, self._do_jobs, wait=False):
                return  # the thread that holds the lock runs them
        if not self._lock._is_owned():
            self._after()

    def _do_jobs(self) -> bool:
        while self._jobs:
            job = self._jobs.popleft()
            try:
                job()
            except SymmError:  # others may be of a signal handler
                log.exception("giving back a shared array failed")
        return True


def under(lock: Any, job: Callable[[], T], *, wait: bool = True) -> T | None:
    """Return ``job()``, called with a ``threading.RLock`` held.

    Args:
        lock: the lock, which is released in any case.
        job: the function.
        wait: if False and another thread holds the lock, return None instead.
    """
    try:
        return job() if lock.acquire(blocking=wait) else None
    finally:
        try:  # noqa: SIM105  # suppress() would be called before the release
            lock.release()
        except RuntimeError:  # it was not acquired
            pass


SLOTS = 10_000
"""Counters in a file."""

OPENS = 1 << 18
"""The most opens of a file's arrays at a time."""

DIGEST_BYTES = 16
"""The size of the digest with which the handles of a slot are checked."""

PATIENCE = 10.0
"""Seconds to wait for another process that keeps a file's lock."""

LAYOUT = np.dtype(
    [
        ("counter", np.int64, SLOTS),  # the references
        ("unopened", np.int64, SLOTS),  # those that no open has taken yet
        ("serial", np.int64, SLOTS),  # the number of this use of the slot
        ("next", np.int64, SLOTS),  # links slots whose counter has reached 0
        ("released", np.int64, 1),  # the first of these, from 1; 0: none
        ("slot", np.uint16, OPENS),  # of each open, from 1; 0: this one is free
        ("holder", np.int64, 1),  # the process that holds the lock, for errors
        ("digest", np.uint8, (SLOTS, DIGEST_BYTES)),  # of its handle
    ]
)
_REGION = 4096  # opens of one process are adjacent, so that their locks can merge

# The meanings of the locked bytes, which are beyond the end of the file.
_MUTEX = 1 << 40
PRODUCER = _MUTEX + 1
CONSUMERS = 1 << 41  # plus the consumer's number
OPEN_BYTES = 1 << 42  # plus the open's number

_RELEASE_MUTEX = locks.unlocking(_MUTEX)


class Open:
    """An open of a shared array, in its counter file.

    Attributes:
        slot: the slot of the array's counter.
        serial: the number of the slot's use.
        number: the number of its locked byte; None while it has no reference.
        fresh: whether it was the first open to take its reference.
    """

    def __init__(self, slot: int, serial: int):
        self.slot = slot
        self.serial = serial
        self.number: int | None = None
        self.fresh = False


class CounterFile:
    """A file of counters, for any process.

    One thread at a time. Between processes, each method is atomic. If a signal handler
    ends a change by an exception, the change is complete or not made, and no lock stays
    held; see :mod:`numba_symm.sharing.counters`.

    Args:
        fd: a description of the file that no other process has; ``close`` closes it.
        consumer: this process' number among the users of the file; 0: its producer.

    Attributes:
        stuck: whether another process has kept the lock for too long.
    """

    def __init__(self, fd: int, consumer: int):
        self._fd = fd
        self._start = consumer * _REGION % OPENS
        self._process = os.getpid()
        self._held: dict[int, Open] = {}
        self.stuck = False
        self._memory = mmap.mmap(fd, LAYOUT.itemsize)
        fields = np.frombuffer(self._memory, LAYOUT)[0]
        self._counter = fields["counter"]
        self._unopened = fields["unopened"]
        self._serial = fields["serial"]
        self._next = fields["next"]
        self._released = fields["released"]
        self._slot = fields["slot"]
        self._holder = fields["holder"]
        self._digest = fields["digest"]

    def value(self, slot: int) -> int:
        """Return the number of references to a slot's array."""
        return int(self._counter[slot])

    def unopened(self, slot: int) -> int:
        """Return the number of references that no open has taken yet."""
        return int(self._unopened[slot])

    def serial(self, slot: int) -> int:
        """Return the number of the slot's present use."""
        return int(self._serial[slot])

    @property
    def idle(self) -> bool:
        """Whether this process has no array of this file open."""
        return not self._held

    def check(self, slot: int, serial: int, digest: bytes) -> None:
        """Check that a handle agrees with its producer's digest.

        Raises:
            ClosedError: the slot belongs to another array now.
            ArgumentError: the digests differ.
        """
        if self._serial[slot] != serial:
            raise ClosedError(OVER)
        if self._digest[slot].tobytes() != digest:
            raise ArgumentError(ALTERED)

    def take(self, opened: Open) -> None:
        """Take a reference for an open: one that no open has taken, or a new one.

        Raises:
            ClosedError: all references were given back; the memory may be free.
            BackendError: too many arrays are open, or the system has no lock left.
            ExchangeError: another process keeps the lock.
        """
        self._change(self._take, opened)

    def _take(self, opened: Open) -> None:
        self._check_alive(opened.slot, opened.serial)
        self._enter(opened, self._lock_free_byte())

    def _enter(self, opened: Open, number: int) -> None:
        # No calls: all of this is done, or nothing.
        slot = opened.slot
        opened.fresh = self._unopened[slot] > 0
        if opened.fresh:
            self._unopened[slot] -= 1
        else:
            self._counter[slot] += 1
        self._held[number] = opened
        self._slot[number] = slot + 1
        opened.number = number

    def give_back(self, opened: Open, *, unused: bool = False) -> None:
        """Give back the reference of an open, if it has one.

        Args:
            opened: the open.
            unused: whether the open has failed. If it was the first to take its
                reference, another open may take that.

        Raises:
            ExchangeError: another process keeps the lock; nothing was given back.
        """
        self._change(self._give_back, opened, unused)

    def _give_back(self, opened: Open, unused: bool) -> None:
        number = opened.number
        if number is not None:
            self._lower(opened.slot, opened, unused and opened.fresh)
            locks.unlock(self._fd, OPEN_BYTES + number)

    def _lower(self, slot: int, opened: Open | None, unused: bool = False) -> None:
        """Lower a slot's counter by one open, or by all that no open has taken."""
        # No calls: all of this is done, or nothing.
        if opened is None:
            self._counter[slot] -= self._unopened[slot]
            self._unopened[slot] = 0
        else:
            del self._held[opened.number]  # type: ignore[arg-type]  # it has one
            self._slot[opened.number] = 0
            opened.number = None
            if unused:
                self._unopened[slot] += 1
            else:
                self._counter[slot] -= 1
        if self._counter[slot] == 0:
            self._next[slot] = self._released[0]
            self._released[0] = slot + 1

    def add(self, slot: int, serial: int, opens: int) -> None:
        """Add references for later opens.

        Raises:
            ClosedError: all references were given back.
            ExchangeError: another process keeps the lock.
        """
        self._change(self._add, slot, serial, opens)

    def _add(self, slot: int, serial: int, opens: int) -> None:
        self._check_alive(slot, serial)
        self._unopened[slot] += opens
        self._counter[slot] += opens

    def cancel(self, slot: int, serial: int) -> int:
        """Give back all references that no open has taken. Return their number.

        Raises:
            ExchangeError: another process keeps the lock.
        """
        return self._change(self._cancel, slot, serial)

    def _cancel(self, slot: int, serial: int) -> int:
        if self._serial[slot] != serial:
            return 0
        opens = int(self._unopened[slot])
        if opens:
            self._lower(slot, None)
        return opens

    def producer_is_alive(self) -> bool:
        """Return whether the process that made the file still runs."""
        return locks.is_locked(self._fd, PRODUCER)

    def close(self) -> None:
        """Close the file, and so release all locks. No method may be called after."""
        os.close(self._fd)
        del self._counter, self._unopened, self._serial, self._next
        del self._released, self._slot, self._holder, self._digest
        self._memory.close()

    def _check_alive(self, slot: int, serial: int) -> None:
        if self._serial[slot] != serial or self._counter[slot] <= 0:
            raise ClosedError(OVER)

    def _lock_free_byte(self) -> int:
        """Lock a free byte, and return its number."""
        try:
            for first in range(self._start, self._start + OPENS, _REGION):
                first %= OPENS
                for free in np.flatnonzero(self._slot[first : first + _REGION] == 0):
                    number = first + int(free)
                    if locks.try_lock(self._fd, OPEN_BYTES + number):
                        return number
        except OSError as error:
            raise BackendError(f"open_shared: cannot lock a byte: {error}") from error
        raise BackendError(
            f"open_shared: expected at most {OPENS} open arrays of one producer, got "
            "one more; close some"
        )

    def _change(self, change: Callable[..., T], *args: Any) -> T:
        """Return ``change(*args)``, called under the file's lock."""
        try:
            self._acquire()
            return change(*args)
        finally:
            if self._holder[0] == self._process:
                self._holder[0] = 0
            # The first call here, because a signal handler may raise after it.
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _RELEASE_MUTEX)

    def _acquire(self) -> None:
        pause, end = 0.0, None
        while not locks.try_lock(self._fd, _MUTEX):
            now = time.monotonic()
            if end is None:  # wait once only for a process that is stuck
                end = now if self.stuck else now + PATIENCE
            if now >= end:
                raise self._keeps_the_lock()
            time.sleep(pause)  # 0 at first, as the lock is held for microseconds
            pause = min(pause + 5e-5, 1e-3)
        self._holder[0] = self._process
        self.stuck = False

    def _keeps_the_lock(self) -> ExchangeError:
        holder = int(self._holder[0])
        text = (
            f"{f'process {holder}' if holder else 'a process'} that uses the same "
            f"shared arrays has kept their counters locked for {PATIENCE:g} s: it is "
            "stopped (by a debugger, SIGSTOP, a frozen container); continue or kill it"
        )
        if not self.stuck:
            self.stuck = True
            log.warning(text)
        return ExchangeError(text)


OVER = (
    "this array is no longer shared: all its references were given back or cancelled, "
    "and its memory may be free; share it again in the producer, with opens= as large "
    "as the number of consumers"
)
"""The text for a handle whose sharing is over."""

ALTERED = (
    "open_shared: the handle differs from the producer's record: it was altered or "
    "damaged; pass a handle of share()"
)
"""The text for a handle that no producer made."""


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
