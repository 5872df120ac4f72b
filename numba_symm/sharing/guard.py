"""A lock that finalisers may need: what they cannot do at once is done after."""

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("numba_symm.sharing")

FollowUp = Callable[[], None] | None
"""What a job leaves for when the lock is free again, because it may take long."""

Job = Callable[[], FollowUp]


class Guard:
    """Lets one thread at a time change some state; safe to use from finalisers.

    The garbage collector may run a finaliser in any thread at any moment, also in one
    that holds the lock. So finalisers never wait: :meth:`later` queues their job,
    and whoever holds the lock does it when it is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._jobs: deque[Job] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._owner = None
        self._lock.release()
        self._run_jobs()

    def now(self, job: Job) -> None:
        """Do ``job`` under the lock before returning; its errors are the caller's."""
        if self._owner == threading.get_ident():  # within a finaliser after all
            self.later(job)
            return
        with self:
            follow_up = job()
        if follow_up is not None:
            follow_up()

    def later(self, job: Job) -> None:
        """Do ``job`` under the lock as soon as it is free; errors are logged."""
        self._jobs.append(job)
        self._run_jobs()

    def _run_jobs(self) -> None:
        # Look again after releasing: a job may have come in the meantime.
        while self._jobs and self._lock.acquire(blocking=False):
            follow_ups: list[FollowUp] = []
            self._owner = threading.get_ident()  # finalisers may run within a job
            try:
                while self._jobs:
                    follow_ups.append(_logged(self._jobs.popleft()))
            finally:
                self._owner = None
                self._lock.release()
            for follow_up in follow_ups:
                if follow_up is not None:
                    _logged(follow_up)


def _logged(job: Job | Callable[[], None]) -> FollowUp:
    try:
        return job()
    except Exception:
        log.exception("giving back a shared array failed")
        return None
