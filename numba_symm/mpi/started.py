"""Requests: calls that were started, and are waited for later."""

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, ParamSpec, Self, TypeVar

from mpi4py import MPI

from numba_symm.arguments import shown
from numba_symm.gpu import arrays
from numba_symm.mpi.buffers import Kind
from numba_symm.mpi.datatypes import translated
from numba_symm.mpi.errors import MPITypeError, refusal
from numba_symm.mpi.waited import (
    StartedCall,
    any_of,
    describe,
    seen,
    some_of,
    status_at,
    tested,
    waited,
)

P = ParamSpec("P")
T = TypeVar("T")


def _mixed(method: Callable[P, T]) -> Callable[P, T]:
    """Leave requests that are all mpi4py's to its method of the same name."""
    name = method.__name__

    @functools.wraps(method)
    def called(cls: Any, requests: Any, *args: Any, **options: Any) -> Any:
        if not _has_own(requests, name):
            return getattr(MPI.Request, name)(requests, *args, **options)
        return method(cls, requests, *args, **options)

    return called  # type: ignore[return-value]


class Request(StartedCall, metaclass=Kind):
    """A call that was started. Its methods are those of ``mpi4py.MPI.Request``.

    The class methods take requests of mpi4py, too, so that a program may wait for its
    host and its device arrays together.

    Args:
        request: a request of either kind, of which this is another object; None: this
            is a null request.
    """

    _plain = MPI.Request

    def __init_subclass__(cls) -> None:
        # mpi4py's own class methods refuse objects that are not its requests: "Cannot
        # convert ... to mpi4py.MPI.Request", with at most 200 bytes of the name.
        if cls.__module__.startswith("numba_symm."):  # else a program's subclass
            cls.__name__ = (
                "a request of numba_symm.mpi (import numba_symm.mpi as MPI there, or "
                "call its install() first; its MPI.Request.Waitall and the others take "
                "requests of both kinds)"
            )

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Take what mpi4py's takes, which a program's subclass passes on."""
        return super().__new__(cls)

    def __init__(self, request: Any = None):
        if request is not None:
            _has_own([request], "Request")
        super().__init__(active=bool(request))
        self._of = request

    def __eq__(self, other: object) -> bool:
        of = other._of if type(other) is Request and other._of is not None else other
        if self._of is None or not isinstance(of, MPI.Request | StartedCall):
            return super().__eq__(of)
        return bool(self._of == of)

    __hash__ = StartedCall.__hash__

    def _finish(self, status: MPI.Status | None) -> None:
        self._ask(getattr(self._of, "_complete", self._of.Wait), status)

    def _is_done(self) -> bool:
        return self._ask(self._of.Get_status)

    @translated
    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return what :meth:`Test` would return; the request stays active."""
        if self._active:
            return self._ask(self._of.Get_status, status)
        return super().Get_status(status)

    def _ask(self, method: Any, status: MPI.Status | None = None) -> bool:
        try:
            return bool(method(status))
        finally:  # a call that has failed is over
            self._active = bool(self._of)

    def _await_start(self) -> None:
        if isinstance(self._of, StartedCall):
            self._of._await_start()

    def Cancel(self) -> None:
        """Cancel a receive that no message has matched. Do nothing for other calls."""
        if self._active:
            self._of.Cancel()

    @classmethod
    @translated
    def Waitall(
        cls,
        requests: Sequence[Any],
        statuses: list[MPI.Status] | None = None,
    ) -> bool:
        """Wait for all requests."""
        begin: list[Any] = []
        for request in requests:
            if not isinstance(request, StartedCall):
                _has_own(requests, "Waitall")
            elif request._starts:
                begin.append(request)
        ended = None
        if len(begin) == 1 and statuses is None:
            ended = begin[0]
            ended._complete(None)
        else:
            for request in begin:  # start all copies before any is waited for
                request._await_start()
        for index, request in enumerate(requests):
            status = None if statuses is None else status_at(statuses, index)
            if not isinstance(request, StartedCall):
                request.Wait(status)
            elif request is not ended:
                request._complete(status)
        return True

    @classmethod
    @translated
    def Testall(
        cls,
        requests: Sequence[Any],
        statuses: list[MPI.Status] | None = None,
    ) -> bool:
        """Return whether all requests are done; until then, all stay active."""
        _has_own(requests, "Testall")
        if not all([request.Get_status() for request in requests]):
            return False
        return cls.Waitall(requests, statuses)

    @classmethod
    @translated
    @_mixed
    def Waitany(cls, requests: Sequence[Any], status: MPI.Status | None = None) -> int:
        """Wait for one request; return its index, MPI.UNDEFINED if none is active."""
        return cls.waitany(requests, status)[0]

    @classmethod
    @translated
    @_mixed
    def Testany(
        cls, requests: Sequence[Any], status: MPI.Status | None = None
    ) -> tuple[int, bool]:
        """Return the index of a request that is done, and whether there is one."""
        return any_of(requests, status, tested)[:2]

    @classmethod
    @translated
    @_mixed
    def Waitsome(
        cls,
        requests: Sequence[Any],
        statuses: list[MPI.Status] | None = None,
    ) -> list[int] | None:
        """Wait for some requests; return their indices, None if none is active."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    @translated
    @_mixed
    def Testsome(
        cls,
        requests: Sequence[Any],
        statuses: list[MPI.Status] | None = None,
    ) -> list[int] | None:
        """Return the indices of requests that are done, None if none is active."""
        return some_of(requests, statuses, tested)[0]

    @classmethod
    @translated
    def waitall(
        cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None
    ) -> list[Any]:
        """Wait for all requests; return the objects of mpi4py's receives."""
        _has_own(requests, "waitall")
        return [
            request.wait(status_at(statuses, index))
            for index, request in enumerate(requests)
        ]

    # Like these, with the objects of mpi4py's receives; of ours, None.

    @classmethod
    @translated
    def testall(
        cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Return whether all requests are done, and if so, their objects."""
        _has_own(requests, "testall")
        if not all([request.Get_status() for request in requests]):
            return False, None
        return True, cls.waitall(requests, statuses)

    @classmethod
    @translated
    @_mixed
    def testany(
        cls, requests: Sequence[Any], status: MPI.Status | None = None
    ) -> tuple[int, bool, Any]:
        """Return the index of a request that is done, whether there is one, its object.

        If no request is active, the index is MPI.UNDEFINED.
        """
        return any_of(requests, status, tested)

    @classmethod
    @translated
    @_mixed
    def waitany(
        cls, requests: Sequence[Any], status: MPI.Status | None = None
    ) -> tuple[int, Any]:
        """Wait for one request; return its index and its object."""
        look = functools.partial(cls.testany, requests, status)
        index, _, found = waited(look, is_found=itemgetter(1))
        return index, found

    @classmethod
    @translated
    @_mixed
    def testsome(
        cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Return the indices of requests that are done, and their objects."""
        return some_of(requests, statuses, tested)

    @classmethod
    @translated
    @_mixed
    def waitsome(
        cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Wait for some requests; return their indices and their objects."""
        look = functools.partial(cls.testsome, requests, statuses)
        done, objects = waited(look, is_found=lambda some: some[0] != [])
        return done, objects

    # What MPI 4.1 adds.

    @classmethod
    @translated
    @_mixed
    def Get_status_all(
        cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None
    ) -> bool:
        """Return whether all requests are done; they stay active."""
        found = list(enumerate(requests))
        return all(
            [each.Get_status(status_at(statuses, index)) for index, each in found]
        )

    @classmethod
    @translated
    @_mixed
    def Get_status_any(
        cls, requests: Sequence[Any], status: MPI.Status | None = None
    ) -> tuple[int, bool]:
        """Return what :meth:`Testany` would return; the requests stay active."""
        return any_of(requests, status, seen)[:2]

    @classmethod
    @translated
    @_mixed
    def Get_status_some(
        cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None
    ) -> list[int] | None:
        """Return what :meth:`Testsome` would return; the requests stay active."""
        return some_of(requests, statuses, seen)[0]

    get_status_all, get_status_any = Get_status_all, Get_status_any
    get_status_some = Get_status_some


class Own(Request):
    """The base class of requests of device arrays; their calls are active."""

    _of, _starts = None, False
    # Of all objects, until one of them changes it: so making an object takes less time.
    _active = True

    def __init__(self) -> None:
        pass

    _finish, _is_done = StartedCall._finish, StartedCall._is_done
    Cancel, Get_status = StartedCall.Cancel, StartedCall.Get_status


def _has_own(requests: Sequence[Any], what: str) -> bool:
    """Return whether some requests are this library's; else mpi4py waits for them."""
    for request in requests:
        if not isinstance(request, StartedCall | MPI.Request):
            raise MPITypeError(
                MPI.ERR_REQUEST,
                f"{what}: expected requests of numba_symm.mpi or mpi4py, got "
                f"{shown(request)}; pass MPI.REQUEST_NULL where there is none",
            )
    return any(isinstance(request, StartedCall) for request in requests)


class Started(Own):
    """A request of a call that is enqueued, or was done when it was started.

    Args:
        wait: waits until it is done.
        test: returns whether it is done.
        source: of its status.
    """

    def __init__(
        self,
        wait: Callable[[], object] = int,
        test: Callable[[], bool] = lambda: True,
        source: int = MPI.ANY_SOURCE,
    ):
        self._wait, self._test, self._source = wait, test, source

    def _is_done(self) -> bool:
        return self._test()

    def _finish(self, status: MPI.Status | None) -> None:
        self._wait()
        describe(status, self._source)


def _place(array: Any) -> tuple[Any, ...]:
    """Return the address and the shape of a device array."""
    return arrays.fields(array, "Start")[:2]


class Prequest(Request):
    """A call that was prepared, to be started many times.

    Args:
        begin: starts the call, and returns its request.
        used: the device arrays of the call, which has their addresses.
    """

    _plain = MPI.Prequest
    __eq__, __hash__ = StartedCall.__eq__, StartedCall.__hash__

    def __new__(cls, begin: Any = None, *args: Any, **options: Any) -> Any:
        """Return a new request, or another object of one of mpi4py."""
        if cls is Prequest and isinstance(begin, MPI.Request):
            return MPI.Prequest(begin)
        return super().__new__(cls)

    def __init__(self, begin: Callable[[], Request], used: Sequence[Any] = ()):
        if not callable(begin):
            raise MPITypeError(
                MPI.ERR_REQUEST,
                "Prequest: expected a call that was prepared, got "
                f"{type(begin).__name__}; prepare one, such as with Allreduce_init",
            )
        super().__init__()
        self._used = [(array, _place(array)) for array in used]
        self._begin: Callable[[], Request] | None = begin

    def __bool__(self) -> bool:
        return self._begin is not None

    @translated
    def Start(self) -> None:
        """Start the call."""
        self._start()

    def _start(self) -> None:
        if self._begin is None:
            raise refusal(
                MPI.ERR_REQUEST,
                "Start: Free was called on the persistent request; prepare it again",
            )
        if self._active:
            raise refusal(
                MPI.ERR_REQUEST,
                "Start: expected a persistent request that is not active; wait for it "
                "first",
            )
        # torch can replace the memory of a tensor, by set_ or resize_ for example.
        for array, place in self._used:
            if _place(array) != place:
                raise refusal(
                    MPI.ERR_BUFFER,
                    "Start: expected arrays of the addresses and shapes that they had "
                    "when the request was prepared, got others; prepare it again",
                )
        self._of, self._active = self._begin(), True

    @classmethod
    @translated
    def Startall(cls, requests: Sequence[Any]) -> None:
        """Start all requests."""
        for request in requests:
            if hasattr(request, "_start"):  # an instance of Prequest may be mpi4py's
                request._start()
            else:
                _has_own([request], "Startall")
                request.Start()

    def _complete(self, status: MPI.Status | None) -> bool:
        """Wait for the call; return immediately if it was not started."""
        if not self._active:
            return super()._complete(status)
        try:
            done: bool = self._of._complete(status)
        finally:  # a call that has failed is over
            self._active = self._of._active
        return done

    def Free(self) -> None:
        """Give the request up."""
        self._begin = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.Free()
