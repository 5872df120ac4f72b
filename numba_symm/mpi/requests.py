"""Requests: calls that were started, and are waited for later."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from mpi4py import MPI

from numba_symm import arrays
from numba_symm.mpi import progress
from numba_symm.mpi.errors import refusal, translated, unsupported

PAUSE = 20e-6
"""Seconds between two looks for what other ranks do."""

_BUSY = 200  # looks without a pause


def waited(look: Callable[[], Any], check: Callable[[], None]) -> Any:
    """Look until something is found, and return it.

    Args:
        look: returns what it finds.
        check: raises if the communicator has failed, so that what other ranks should do
            may never happen.
    """
    looks = 0
    while not (found := look()):
        progress.advance()
        check()
        looks += 1
        if looks > _BUSY:
            time.sleep(PAUSE)
    return found


def _of_objects(name: str) -> Any:
    """Return mpi4py's class method of that name, of requests for pickled objects."""
    plain = getattr(MPI.Request, name)

    @functools.wraps(plain)
    def method(requests: Sequence[Any], *args: Any, **options: Any) -> Any:
        if _has_own(requests):
            raise unsupported(
                f"{name}: expected requests of mpi4py, got some of device arrays; call "
                f"{name.capitalize()}"
            )
        return plain(requests, *args, **options)

    return staticmethod(method)


class Request:
    """A call that was started. Its methods are those of ``mpi4py.MPI.Request``.

    The class methods also take requests of mpi4py, so that a program may wait for its
    host and its device arrays together. ``Request()`` is a null request.
    """

    def __init__(self) -> None:
        self._active = type(self) is not Request
        # Of a call that is done, until a caller gets it.
        self._ended: MPI.Status | None = None

    def __bool__(self) -> bool:
        return self._active

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MPI.Request):
            return not self and other == MPI.REQUEST_NULL
        return self is other

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

    def _progress(self) -> bool:
        """Start what can be started now; return whether all was. Never wait."""
        return True

    def _withdraw(self) -> None:
        """End after an exception: a receive without a message, a send with a copy."""

    @translated
    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until the arrays of the call may be used."""
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

    def Cancel(self) -> None:
        """Cancel a receive that no message has matched. Do nothing for other calls."""

    def Free(self) -> None:
        """Give the request up; its call is completed."""
        self._ended, self._active = None, False

    free = Free

    @classmethod
    @translated
    def Waitall(
        cls,
        requests: Sequence[Any],
        statuses: list[MPI.Status] | None = None,
    ) -> bool:
        """Wait for all requests."""
        requests = list(requests)  # an iterator ends after one pass
        own = [request for request in requests if isinstance(request, Request)]
        if len(own) > 1:  # start all copies before any is waited for
            waited(lambda: all([each._progress() for each in own]), lambda: None)
        for index, request in enumerate(requests):
            request.Wait(_status(statuses, index))
        return True

    @classmethod
    def Testall(
        cls,
        requests: Sequence[Any],
        statuses: list[MPI.Status] | None = None,
    ) -> bool:
        """Return whether all requests are done; until then, all stay active."""
        requests = list(requests)
        if not all([request.Get_status() for request in requests]):
            return False
        return cls.Waitall(requests, statuses)

    @classmethod
    def Waitany(cls, requests: Sequence[Any], status: MPI.Status | None = None) -> int:
        """Wait for one request; return its index, MPI.UNDEFINED if none is active."""
        if not _has_own(requests):
            return MPI.Request.Waitany(requests, status)
        while True:
            index, found = cls.Testany(requests, status)
            if found:
                return index
            time.sleep(PAUSE)

    @classmethod
    def Testany(
        cls, requests: Sequence[Any], status: MPI.Status | None = None
    ) -> tuple[int, bool]:
        """Return the index of a request that is done, and whether there is one."""
        if not _has_own(requests):
            return MPI.Request.Testany(requests, status)
        active = _active(requests)
        if not active:
            describe(status)
            return MPI.UNDEFINED, True
        for index in active:
            if requests[index].Test(status):
                return index, True
        return MPI.UNDEFINED, False

    @classmethod
    def Waitsome(
        cls,
        requests: Sequence[Any],
        statuses: list[MPI.Status] | None = None,
    ) -> list[int] | None:
        """Wait for some requests; return their indices, None if none is active."""
        if not _has_own(requests):
            return MPI.Request.Waitsome(requests, statuses)
        while True:
            found = cls.Testsome(requests, statuses)
            if found is None or found:
                return found
            time.sleep(PAUSE)

    @classmethod
    def Testsome(
        cls,
        requests: Sequence[Any],
        statuses: list[MPI.Status] | None = None,
    ) -> list[int] | None:
        """Return the indices of requests that are done, None if none is active."""
        if not _has_own(requests):
            return MPI.Request.Testsome(requests, statuses)
        active = _active(requests)
        if not active:
            return None
        done: list[int] = []
        for index in active:
            if requests[index].Test(_status(statuses, len(done))):
                done.append(index)
        return done

    @classmethod
    def waitall(
        cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None
    ) -> list[Any]:
        """Wait for all requests; return the objects of mpi4py's receives."""
        return [
            request.wait(_status(statuses, index))
            for index, request in enumerate(requests)
        ]

    testall: Any = _of_objects("testall")
    testany: Any = _of_objects("testany")
    testsome: Any = _of_objects("testsome")
    waitany: Any = _of_objects("waitany")
    waitsome: Any = _of_objects("waitsome")


def _has_own(requests: Sequence[Any]) -> bool:
    """Return whether some requests are this library's; else mpi4py waits for them."""
    return any(isinstance(request, Request) for request in requests)


def _active(requests: Sequence[Any]) -> list[int]:
    """Return the indices of requests that are to be waited for."""
    return [
        index
        for index, request in enumerate(requests)
        if (request.is_active if isinstance(request, Request) else request)
    ]


def _status(statuses: list[MPI.Status] | None, index: int) -> MPI.Status | None:
    if statuses is None:
        return None
    while len(statuses) <= index:
        statuses.append(MPI.Status())
    return statuses[index]


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


class Started(Request):
    """A request of a call that is enqueued.

    Args:
        wait: waits until it is done.
        test: returns whether it is done.
    """

    def __init__(self, wait: Callable[[], None], test: Callable[[], bool]):
        super().__init__()
        self._wait, self._test = wait, test

    def _finish(self, status: MPI.Status | None) -> None:
        self._wait()
        describe(status)

    def _poll(self, status: MPI.Status | None) -> bool:
        if not self._test():
            return False
        describe(status)
        return True


def _place(array: Any) -> tuple[Any, ...]:
    """Return the address and the shape of a device array."""
    return arrays.fields(array, "Start")[:2]


class Prequest(Request):
    """A call that was prepared, to be started many times.

    Args:
        begin: starts the call, and returns its request.
        used: the device arrays of the call, which has their addresses.
    """

    def __init__(self, begin: Callable[[], Request], used: Sequence[Any] = ()):
        super().__init__()
        self._used = [(array, _place(array)) for array in used]
        self._begin: Callable[[], Request] | None = begin
        self._running: Request | None = None

    def __bool__(self) -> bool:
        return self._begin is not None

    @property
    def is_active(self) -> bool:
        """Whether the call was started and has not been waited for."""
        return self._running is not None and self._running.is_active

    @translated
    def Start(self) -> None:
        """Start the call."""
        if self._begin is None:
            raise refusal(
                MPI.ERR_REQUEST,
                "Start: Free was called on the persistent request; prepare it again",
            )
        if self.is_active:
            raise refusal(
                MPI.ERR_REQUEST,
                "Start: expected a persistent request that is not active; wait for it "
                "first",
            )
        # torch can replace the memory of a tensor, by set_ or resize_ for example.
        if any(_place(array) != place for array, place in self._used):
            raise refusal(
                MPI.ERR_BUFFER,
                "Start: expected arrays of the addresses and shapes that they had when "
                "the request was prepared, got others; prepare it again",
            )
        self._running = self._begin()

    @classmethod
    def Startall(cls, requests: Sequence[Any]) -> None:
        """Start all requests."""
        for request in requests:
            request.Start()

    def _progress(self) -> bool:
        return self._running is None or self._running._progress()

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait for the call; return immediately if it was not started."""
        if self._running is None:
            describe(status)
            return True
        return self._running.Wait(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the call is done or was not started."""
        if self._running is None:
            describe(status)
            return True
        return self._running.Test(status)

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return what :meth:`Test` would return; the request stays active."""
        if self._running is None:
            describe(status)
            return True
        return self._running.Get_status(status)

    def Cancel(self) -> None:
        """Cancel a receive that no message has matched."""
        if self._running is not None:
            self._running.Cancel()

    def Free(self) -> None:
        """Give the request up."""
        self._begin = None

    free = Free

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.Free()
