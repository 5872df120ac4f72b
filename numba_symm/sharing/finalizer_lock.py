"""A lock that finalizers may take, and that no signal leaves held.

A signal handler may raise, as that of Ctrl-C does. CPython runs handlers in the main
thread only, and at three places: when a function written in Python starts, when a call
ends, and at the end of each pass of a loop. So, here and in the counters,

- the first call in a ``finally``, of a C function, undoes what must be undone;
- changes that must be complete are in lines without a call.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from numba_symm.errors import SymmError

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
