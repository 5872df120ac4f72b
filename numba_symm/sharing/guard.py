"""A lock that finalisers may need, and that no signal leaves held.

A signal's handler may raise, as Ctrl-C's does. CPython runs handlers in the main
thread, when a function written in Python starts, when a call ends, and when a loop goes
back; not in between. So here and in the counters

- what must be undone is undone by the first call in a ``finally``, of a C function;
- what must be done as a whole stands in lines without a call.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from numba_symm.errors import SymmError

log = logging.getLogger("numba_symm.sharing")

T = TypeVar("T")


class Guard:
    """Lets one thread at a time change some state; safe to use from finalisers.

    The garbage collector may run a finaliser in any thread at any moment, also in one
    that holds the lock. So finalisers never wait: :meth:`later` queues their job,
    and whoever holds the lock does it when it is done. A job that a signal's handler
    ends by an exception is not done again by itself.

    Args:
        after: called without the lock after it was held.
    """

    def __init__(self, after: Callable[[], None] = lambda: None) -> None:
        self._lock: Any = threading.RLock()  # which only its holder can release
        self._jobs: deque[Callable[[], None]] = deque()
        self._after = after

    def do(self, job: Callable[[], T]) -> T:
        """Return ``job()``, called under the lock; its errors are the caller's."""
        try:
            return under(self._lock, job)  # type: ignore[return-value]  # it waits
        finally:
            self.do_queued()

    def now(self, job: Callable[[], None]) -> None:
        """Do ``job`` under the lock before returning; its errors are the caller's."""
        if self._lock._is_owned():  # within a finaliser after all
            self.later(job)
        else:
            self.do(job)

    def later(self, job: Callable[[], None]) -> None:
        """Do ``job`` under the lock as soon as it is free; errors are logged."""
        self._jobs.append(job)
        self.do_queued()

    def do_queued(self) -> None:
        """Do what was queued, unless this or another thread will, and ``after``."""
        # Look again after releasing: a job may have come in the meantime.
        while self._jobs and not self._lock._is_owned():
            if not under(self._lock, self._do_jobs, wait=False):
                return  # whoever has the lock does them
        if not self._lock._is_owned():
            self._after()

    def _do_jobs(self) -> bool:
        while self._jobs:
            job = self._jobs.popleft()
            try:
                job()
            except SymmError:  # no other: it may be a signal handler's
                log.exception("giving back a shared array failed")
        return True


def under(lock: Any, job: Callable[[], T], *, wait: bool = True) -> T | None:
    """Return ``job()``, called with a ``threading.RLock`` held.

    Args:
        lock: released again, whatever raises.
        job: what to do.
        wait: if False and another thread holds the lock, return None instead.
    """
    try:
        return job() if lock.acquire(blocking=wait) else None
    finally:
        try:  # noqa: SIM105  # suppress() would be called before the release
            lock.release()
        except RuntimeError:  # it was not acquired
            pass
