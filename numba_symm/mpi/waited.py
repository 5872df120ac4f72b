"""Calls that are waited for later, and the life of their communicators.

The object of this package for a communicator of mpi4py, stored as its attribute.

So a second call of ``Comm`` with the same communicator finds the first one's object.
MPI drops the reference when the communicator of mpi4py is freed. The object then stays
open, because closing it is collective.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.errors import ArgumentError, ClosedError, RankLeft
from numba_symm.gpu.streams import SideStream
from numba_symm.launch.failures import Failure
from numba_symm.mpi import progress
from numba_symm.mpi.datatypes import translated

PAUSE = 20e-6
"""Seconds between two looks for what other ranks do."""

BUSY = 200  # looks without a pause


def waited(
    look: Callable[[], Any],
    check: Callable[[], None] = lambda: None,
    is_found: Callable[[Any], bool] = bool,
) -> Any:
    """Look until something is found, and return it.

    Args:
        look: returns what it finds.
        check: raises if the communicator has failed, so that what other ranks should do
            may never happen; needless if ``look`` does.
        is_found: whether that is what was waited for.
    """
    looks = 0
    while not is_found(found := look()):
        looks = paused(looks, check)
    return found


def paused(looks: int, check: Callable[[], None]) -> int:
    """Let others go on after a look that has found nothing; return one look more.

    Args:
        looks: how many there were before.
        check: as of :func:`waited`.
    """
    os.sched_yield()  # to a rank that shares this processor
    progress.advance()
    check()
    if looks >= BUSY:
        time.sleep(PAUSE)
    return looks + 1


class StartedCall:
    """A call that was started; its methods are those of ``mpi4py.MPI.Request``."""

    _starts = True  # whether ``_await_start`` may wait

    def __init__(self, active: bool = True) -> None:
        self._active = active

    def __bool__(self) -> bool:
        return self._active

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MPI.Request):
            return not self and other == MPI.REQUEST_NULL
        if not isinstance(other, StartedCall):
            return NotImplemented
        return self is other or not (self or other)

    __hash__ = object.__hash__

    @property
    def is_active(self) -> bool:
        """Whether a call was started and has not been waited for."""
        return self._active

    def _finish(self, status: MPI.Status | None) -> None:
        """Wait for the call, and describe it; perhaps again."""
        raise NotImplementedError

    def _is_done(self) -> bool:
        """Return whether the call is done. Never wait."""
        raise NotImplementedError

    def _await_start(self) -> None:
        """Wait until what the call copies is being copied."""

    def _withdraw(self) -> None:
        """End after an exception: a receive without a message, a send with a copy."""

    @translated
    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until the arrays of the call may be used."""
        return self._complete(status)

    def _complete(self, status: MPI.Status | None) -> bool:
        if self._active:
            self._finish(status)
            self._active = False
        else:
            describe(status)
        return True

    @translated
    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the arrays of the call may be used."""
        progress.advance()
        if not self._active or self._is_done():
            self._complete(status)
        return not self._active

    @translated
    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return what :meth:`Test` would return; the request stays active."""
        progress.advance()
        if not self._active:
            describe(status)
            return True
        done = self._is_done()
        if done:
            self._finish(status)
        return done

    def wait(self, status: MPI.Status | None = None) -> None:
        """Do as :meth:`Wait`."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """Return what :meth:`Test` returns, and None."""
        return self.Test(status), None

    def get_status(self, status: MPI.Status | None = None) -> bool:
        """Do as :meth:`Get_status`."""
        return self.Get_status(status)

    def Cancel(self) -> None:
        """Cancel a receive that no message has matched. Do nothing for other calls."""

    def cancel(self) -> None:
        """Do as :meth:`Cancel`."""
        self.Cancel()

    def Free(self) -> None:
        """Give the request up; its call is completed."""
        self._active = False

    def free(self) -> None:
        """Do as :meth:`Free`, but nothing for a null request."""
        if self:
            self.Free()


def status_at(statuses: Sequence[MPI.Status] | None, index: int) -> MPI.Status | None:
    """Return a status of a list, which grows to have it; None without one.

    As in mpi4py, a tuple may have fewer statuses than there are requests.
    """
    if statuses is None or (not isinstance(statuses, list) and index >= len(statuses)):
        return None
    while isinstance(statuses, list) and len(statuses) <= index:
        statuses.append(MPI.Status())
    found: MPI.Status = statuses[index]
    return found


def describe(
    status: MPI.Status | None,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    nbytes: int = 0,
    cancelled: bool = False,
) -> None:
    """Set a status; without more arguments, to the empty one."""
    if status is None:
        return
    status.Set_source(source)
    status.Set_tag(tag)
    status.Set_error(MPI.SUCCESS)
    status.Set_elements(MPI.BYTE, nbytes)
    status.Set_cancelled(cancelled)


Found = tuple[bool, bool, Any]
"""Whether a request is active, whether it is done, and its object."""

Look = Callable[[Any, MPI.Status | None], Found]


def tested(request: Any, status: MPI.Status | None) -> Found:
    """Look at a request; one that is done is not active afterwards."""
    if isinstance(request, StartedCall):
        return request.is_active, *request.test(status)
    # A test of one request does not tell whether it was active; this does.
    index, done, found = MPI.Request.testany([request], status)
    return index == 0 or not done, done, found


def seen(request: Any, status: MPI.Status | None) -> Found:
    """Look at a request, which stays active."""
    if isinstance(request, StartedCall):
        return request.is_active, request.Get_status(status), None
    found = MPI.Status() if status is None else status
    done = request.Get_status(found)
    # Not each MPI library has MPI 4.1's call that tells whether such a request is
    # active. One that is not has the empty status.
    source, tag = found.source, found.tag
    empty = done and source == MPI.ANY_SOURCE and tag == MPI.ANY_TAG
    idle = isinstance(request, MPI.Prequest) and empty
    return bool(request) and not idle, done, None


def any_of(
    requests: Sequence[Any], status: MPI.Status | None, look: Look
) -> tuple[int, bool, Any]:
    """Return the index of a request that is done, whether there is one, its object.

    If no request is active, return MPI.UNDEFINED and True, and describe no message.
    """
    pending = False
    for index, request in enumerate(requests):
        active, done, found = look(request, status)
        if active and done:
            return index, True, found
        pending = pending or active
    if not pending:
        describe(status)
    return MPI.UNDEFINED, not pending, None


def some_of(
    requests: Sequence[Any], statuses: list[MPI.Status] | None, look: Look
) -> tuple[list[int] | None, list[Any] | None]:
    """Return the indices of requests that are done, and their objects.

    If no request is active, return None twice.
    """
    ended: list[int] = []
    objects: list[Any] = []
    pending = False
    for index, request in enumerate(requests):
        active, done, found = look(request, status_at(statuses, len(ended)))
        pending = pending or active
        if active and done:
            ended.append(index)
            objects.append(found)
    return (ended, objects) if pending else (None, None)


@functools.cache
def _key() -> int:
    return MPI.Comm.Create_keyval()  # MPI copies no attribute to a duplicate


def find(comm: Any) -> Any:
    """Return the object for a communicator, or None."""
    if not isinstance(comm, MPI.Comm) or not comm or comm.is_inter:
        return None
    return comm.Get_attr(_key())


def note(made: Any) -> None:
    """Make an object the one for its communicator."""
    made.host.Set_attr(_key(), made)


def forget(made: Any) -> None:
    """Let later calls make a new object."""
    if getattr(find(made.host), "_life", None) is made._life:
        made.host.Delete_attr(_key())


def check_equal(first: dict[str, Any], again: dict[str, Any]) -> None:
    """Refuse options that differ from those of the first call."""
    first, again = [
        {name: each for name, each in given.items() if each is not None}
        for given in (first, again)
    ]
    if not _equal(first, again):
        raise ArgumentError(
            "Comm: expected the options of the first MPI.Comm of this communicator, "
            f"{_named(first)}, got {_named(again)}; pass the same, pass comm.Dup(), or "
            "free the first one"
        )


def _equal(first: dict[str, Any], again: dict[str, Any]) -> bool:
    return first.keys() == again.keys() and all(
        each is again[name] or bool(each == again[name]) for name, each in first.items()
    )


def _named(given: dict[str, Any]) -> str:
    return ", ".join(f"{name}={each!r}" for name, each in sorted(given.items()))


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
