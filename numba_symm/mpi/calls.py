"""Calls that were started and are waited for later: their states and statuses."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from numba_symm.mpi import progress
from numba_symm.mpi.reading import translated

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
        progress.advance()
        check()
        looks += 1
        if looks > BUSY:
            time.sleep(PAUSE)
    return found


class StartedCall:
    """A call that was started; its methods are those of ``mpi4py.MPI.Request``."""

    def __init__(self, active: bool = True) -> None:
        self._active = active
        # Of a call that is done, until a caller gets it.
        self._ended: MPI.Status | None = None

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
        """Wait for the call, and describe it."""
        raise NotImplementedError

    def _poll(self, status: MPI.Status | None) -> bool:
        """Return whether the call is done, and describe it if so. Never wait."""
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
        if self._ended is not None:
            self._tell(status)
        elif self._active:
            self._finish(status)
            self._active = False
        else:
            describe(status)
        return True

    @translated
    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the arrays of the call may be used."""
        progress.advance()
        if self._ended is not None:
            self._tell(status)
        elif not self._active:
            describe(status)
        elif self._poll(status):
            self._active = False
        return not self._active

    @translated
    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return what :meth:`Test` would return; the request stays active."""
        progress.advance()
        if not self._active:
            describe(status)
            return True
        if self._ended is None:
            found = MPI.Status()
            if not self._poll(found):
                return False
            self._ended = found
            self._active = True  # the next caller gets the status
        _copy(self._ended, status)
        return True

    def _tell(self, status: MPI.Status | None) -> None:
        """Store the status of a call that is done, for one caller only."""
        assert self._ended is not None
        _copy(self._ended, status)
        self._ended, self._active = None, False

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
        self._ended, self._active = None, False

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


def _copy(found: MPI.Status, status: MPI.Status | None) -> None:
    nbytes, cancelled = found.Get_elements(MPI.BYTE), found.Is_cancelled()
    describe(status, found.source, found.tag, nbytes, cancelled)


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
