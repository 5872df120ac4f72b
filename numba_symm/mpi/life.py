"""The changing state of a communicator, and whether its ranks have left or ended."""

import time
from collections.abc import Sequence
from contextlib import suppress

from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.errors import ClosedError, RankLeft
from numba_symm.failures import Failure
from numba_symm.streams import SideStream

_BETWEEN_LOOKS = 0.01  # seconds between two looks for processes that have ended


class Life:
    """What changes in a communicator's life, for all objects of it.

    Attributes:
        owned: whether ``Free`` frees mpi4py's communicator, too.
        name: that of mpi4py's constant in whose place it is, such as ``COMM_WORLD``.
        made: the library's communicator, once it is needed.
        side: the stream of nonblocking collectives, once it is needed.
        freed: whether it was freed.
        wraps: calls of ``Comm``, or of the method that made it, less those of ``Free``.
        watched: the library's communicator whose failures count while this one has
            none: the parent's, or after ``Free`` the one that was closed.
    """

    def __init__(self, owned: bool):
        self.owned, self.name = owned, ""
        self.made: Communicator | None = None
        self.side: SideStream | None = None
        self.freed, self.wraps = False, 0
        self.watched: Communicator | None = None
        self._parent: Communicator | None = None
        self._numbers: Sequence[int] = ()  # by rank, its number in the parent
        self._ended: int | None = None  # a rank without a process
        self._due = 0.0  # when to look again for processes that have ended

    def descend(self, parent: "Life", numbers: Sequence[int]) -> None:
        """Look for the processes of a parent's ranks until this has its own.

        Args:
            parent: the parent's.
            numbers: by rank, its number in the parent.
        """
        if parent.made is not None:
            self._parent, self._numbers = parent.made, numbers
        elif parent._parent is not None:
            self._parent = parent._parent
            self._numbers = [parent._numbers[number] for number in numbers]

    @property
    def failure(self) -> Failure | None:
        """The failure that :meth:`check` raises, if this rank knows of one."""
        found = self.made or self.watched
        return None if found is None else inside(found).ranks.known_failure

    def check(self) -> None:
        """Raise if the library's communicator has failed, or a process has ended.

        Until it is made, the parent's counts in its place, if ``watched`` is set.
        Otherwise a rank would wait for a message of a rank that has left.
        """
        self._look_for_processes()
        if self._ended is not None:
            raise RankLeft(
                f"rank {self._ended} has ended without closing its communicators",
                ranks=(self._ended,),
            )
        if self.made is not None:
            self.made.check()
        elif self.watched is not None:
            with suppress(ClosedError):  # the program may close the parent first
                self.watched.check()
            if self.failure is not None:  # the parent failed before it was closed
                raise self.failure.exception()

    def has_failed(self) -> bool:
        """Return whether :meth:`check` would raise, which makes a failure known."""
        self._look_for_processes()
        found = self.made or self.watched
        failed = found is not None and inside(found).ranks.failed
        return failed or self._ended is not None

    def _look_for_processes(self) -> None:
        """Find a rank of this island whose process has ended without a close."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _BETWEEN_LOOKS
        if self.made is not None:
            inside(self.made).ranks.board.report_ended("numba_symm.mpi")
        elif self._parent is not None:
            for number in inside(self._parent).ranks.ended():
                if number in self._numbers:
                    self._ended = self._numbers.index(number)
