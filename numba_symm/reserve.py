"""Memory of outputs that the library makes, which is reused instead of freed.

``cuMemFree`` waits for the GPU. A kernel there may be waiting for another rank, and
that rank's host for this one. So memory of a dropped output is kept, and a later output
of that size gets it, when all work of the context that was enqueued before is done.
That includes work of streams that the library does not know.

The memory is of ``cuMemAlloc``, so that other processes can map it by legacy IPC.
"""

import functools
import threading
from collections import deque
from typing import Any

from numba_symm import driver, forks
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, DriverError

SHARE = 0.2
"""The most of a GPU's memory that is kept: as much as Numba keeps of its own arrays.
Beyond that, the host waits for the GPU."""

_FINEST = 512  # bytes: what cuMemAlloc aligns to
_LOOKS = 50  # queries of an event, about 1 µs each
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING

Freed = tuple[int, int]
"""An address and a number of bytes."""


class Reserve:
    """The kept memory of one CUDA context.

    A room is *dropped* when its array is, *awaited* from the next :meth:`take` on,
    until the work enqueued before that is done, and then *unused*.
    """

    def __init__(self, context: Any):
        self._context = context
        self._most = int(SHARE * driver.call("cuMemGetInfo")[1])
        # Finalizers append to it, in any thread and during any statement.
        self._dropped: deque[Freed] = deque()
        self._awaited: deque[tuple[Any, list[Freed]]] = deque()  # in order of events
        self._unused: dict[int, list[Freed]] = {}
        self._kept = 0  # bytes that are awaited or unused
        self._events: list[Any] = []
        self._busy: Any = None  # an event that had not passed in the last is_idle
        self._lock = threading.Lock()
        forks.watch(self)

    def disown(self) -> None:
        """Use nothing that a forked child has inherited."""
        self._dropped.clear()
        self._awaited.clear()
        self._unused.clear()
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Freed:
        """Return memory of at least ``nbytes``, which is at least 1.

        Raises:
            ArgumentError: a stream of the context is being captured.
            DriverError: there is not enough memory.
        """
        size = _rounded(nbytes)
        with self._lock:
            self._sort()
            if self._kept > self._most and not self._unused.get(size):
                self._wait()
                if not self._unused.get(size):
                    self._free_unused()
            same = self._unused.get(size)
            if same:
                self._kept -= size
                return same.pop()
        try:
            return int(driver.call("cuMemAlloc", size)), size
        except DriverError:
            self.release()
            return int(driver.call("cuMemAlloc", size)), size

    def drop(self, room: Freed) -> None:
        """Take memory back that no array views any more. For finalizers."""
        self._dropped.append(room)

    def release(self) -> None:
        """Free all that is kept; this waits for the GPU."""
        with self._lock:
            self._sort()
            self._wait()
            self._free_unused()

    def is_idle(self) -> bool:
        """Return whether the context has no work; see :func:`idle`."""
        with self._lock:
            query = driver.function("cuEventQuery")
            if self._busy is not None:
                if query(self._busy)[0]:  # the work at the last call is not done
                    return False
                self._events.append(self._busy)
                self._busy = None
            event = self._recorded()
            if event is None:
                return False
            # An idle GPU passes an event within microseconds.
            if any(not query(event)[0] for _ in range(_LOOKS)):
                self._events.append(event)
                return True
            self._busy = event
            return False

    def _sort(self) -> None:
        """Await what was dropped; what need not be awaited any more is unused."""
        number = len(self._dropped)  # others may be dropped after the event
        if number:
            event = self._recorded()
            rooms = [self._dropped.popleft() for _ in range(number)]
            self._kept += sum(size for _, size in rooms)
            self._awaited.append((event, rooms))
        while self._awaited:
            event, _ = self._awaited[0]
            if event is None or driver.function("cuEventQuery")(event)[0]:  # not yet
                return
            self._next_is_unused()

    def _wait(self) -> None:
        """Wait until all that is awaited is unused."""
        if self._awaited:
            driver.call("cuCtxSynchronize")
        while self._awaited:
            self._next_is_unused()

    def _next_is_unused(self) -> None:
        event, rooms = self._awaited.popleft()
        if event is not None:
            self._events.append(event)
        for room in rooms:
            self._unused.setdefault(room[1], []).append(room)

    def _free_unused(self) -> None:
        while self._unused:
            size, rooms = self._unused.popitem()
            for address, _ in rooms:
                self._kept -= size
                driver.call("cuMemFree", address)

    def _recorded(self) -> Any:
        """Return an event after all work of the context so far.

        With a driver before CUDA 12.5, return None; then only :meth:`_wait` shows it.
        """
        if not _records():
            return None
        event = self._events.pop() if self._events else _new_event()
        (status,) = driver.function("cuCtxRecordEvent")(self._context, event)
        if not status:
            return event
        self._events.append(event)
        if "CAPTURE" in status.name:  # which is invalid now
            raise ArgumentError(
                "pass out= while a stream is being captured into a graph; memory "
                "cannot be allocated then"
            )
        raise driver.failure("cuCtxRecordEvent", status)


def _rounded(nbytes: int) -> int:
    """Return a size that arrays of similar sizes share; it is at most 1/8 larger."""
    unit = max(_FINEST, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // unit) * unit


def _new_event() -> Any:
    return driver.call("cuEventCreate", _NO_TIMING)


@functools.cache
def _records() -> bool:
    """Return whether the driver can record an event after all work of a context."""
    if driver.call("cuDriverGetVersion") < 12050:
        return False
    try:
        driver.function("cuCtxRecordEvent")
    except AttributeError:  # bindings of an earlier CUDA
        return False
    return True


def idle() -> bool:
    """Return whether the GPU has no work of the current context. Hardly wait.

    With a driver before CUDA 12.5, return False.
    """
    return SIMULATED or current().is_idle()


_reserves: dict[int, Reserve] = {}


def current() -> Reserve:
    """Return the reserve of the current context."""
    context = driver.call("cuCtxGetCurrent")
    number = int(context)
    found = _reserves.get(number)
    if found is None:  # of two threads, one stores its own
        found = _reserves.setdefault(number, Reserve(context))
    return found


def release() -> bool:
    """Free what is kept of the current context; this waits for the GPU.

    Returns:
        Whether there may have been any.
    """
    if _reserves:
        current().release()
    return bool(_reserves)
