"""The blocking, the nonblocking and the persistent method of a collective."""

import functools
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from numba_symm import arrays
from numba_symm.cache import UNKNOWN
from numba_symm.mpi import addresses, shortcuts
from numba_symm.mpi.buffers import array_in, on_device
from numba_symm.mpi.errors import refusal, translated
from numba_symm.mpi.jobs import Job, wait
from numba_symm.mpi.requests import Prequest, Started

Build = Callable[..., Job | None]
"""Takes a ``Comm`` and the arguments of mpi4py's method; see ``collectives.py``."""

Method = Callable[..., Any]


def forms(name: str, build: Build) -> tuple[Method, Method, Method]:
    """Return the methods of a collective, such as Bcast, Ibcast and Bcast_init.

    If the arrays are on the host, each calls mpi4py's method of its name.
    """

    def blocking(self: Any, *args: Any, **options: Any) -> None:
        key, used = shortcuts.key_of(name, args, options)
        known = self.shortcuts.get(key)
        if known is not UNKNOWN:
            communicator = self.communicator
            stream = shortcuts.take(known, communicator, used)
            if stream is not None:
                if self.synchronizes:
                    wait(communicator, stream)
                return
        job = build(self, *args, **options)
        if job is None:
            getattr(self.host, name)(*args, **options)
            return
        job.start()
        found = None if key is None else shortcuts.shortcut_of(job, used)
        if found is not None:
            self.shortcuts.put(key, found)
        if self.synchronizes:
            job.wait()
        else:
            job.linger()

    def nonblocking(self: Any, *args: Any, **options: Any) -> Any:
        job = build(self, *args, **options)
        if job is None:
            return getattr(self.host, f"I{name.lower()}")(*args, **options)
        return _started(self, job)

    def persistent(self: Any, *args: Any, **options: Any) -> Any:
        given = args[:-1] if args and isinstance(args[-1], MPI.Info) else args
        kept = {key: value for key, value in options.items() if key != "info"}
        job = build(self, *given, **kept)
        if job is None:
            return getattr(self.host, f"{name}_init")(*args, **options)
        specs = [spec for spec in (*given, *kept.values()) if on_device(spec)]
        used = [addresses.there(array_in(spec)) for spec in specs]
        return Prequest(functools.partial(_started, self, job), used)

    return (
        _named(blocking, name, build, ""),
        _named(nonblocking, f"I{name.lower()}", build, _STARTED),
        _named(persistent, f"{name}_init", build, _PREPARED),
    )


_STARTED = "\n\nReturns a request; until it is done, use none of the arrays."
_PREPARED = "\n\nReturns a request, which ``Start()`` starts each time."


def _started(comm: Any, job: Job) -> Started:
    if job.captured:  # into a graph, whose later nodes follow it
        job.start()
        return Started(job.wait, lambda: True)
    done = job.start_beside(comm.side)
    wait = functools.partial(job.wait_for, done)
    return Started(wait, functools.partial(job.test_for, done))


_ROOMS = {"recv": (0, "buf"), "irecv": (0, "buf"), "sendrecv": (3, "recvbuf")}
"""The memory for a pickled object, among the arguments of mpi4py's methods."""


def _has_no_memory(kind: type) -> bool:
    """Return whether objects of a class neither are nor contain device arrays."""
    return not (
        hasattr(kind, "copy_to_host")
        or hasattr(kind, "__getattr__")
        or issubclass(kind, (list, tuple, *addresses.ASKED))
    )


_holds_none: Any = functools.lru_cache(maxsize=256)(_has_no_memory)


def of_objects(name: str) -> Method:
    """Return mpi4py's method of that name, which pickles objects.

    It refuses Numba's device arrays, which cannot be pickled, and buffers over
    addresses of the GPU. Arrays of CuPy and torch can be pickled, through host memory.
    No device array can be the memory for a pickled object.
    """
    place, room = _ROOMS.get(name, (0, ""))
    plain = getattr(MPI.Topocomm, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        # A program makes many of these calls, with numbers and shapes.
        for given in (*args, *options.values()) if options else args:
            if _holds_none(type(given)):
                continue
            for each in given if isinstance(given, list | tuple) else (given,):
                if not _holds_none(type(each)):
                    check(each)
        if room:
            memory = options.get(room, args[place] if len(args) > place else None)
            if memory is not None and addresses.on_device(memory):
                raise refused(memory, f"{room} on the host")
        return plain(self, *args, **options)

    def check(given: Any) -> None:
        own = hasattr(given, "copy_to_host") and arrays.on_device(given)
        if own or addresses.there(given) is not given:
            raise refused(given, "objects that can be pickled")

    def refused(given: Any, expected: str) -> Exception:
        return refusal(
            MPI.ERR_BUFFER,
            f"{name}: expected {expected}, got {type(given).__name__} on the device; "
            f"call {name.capitalize()}, or pass x.copy_to_host()",
        )

    return functools.update_wrapper(method, plain)


def _named(method: Method, name: str, build: Build, more: str) -> Method:
    found = translated(method)
    functools.update_wrapper(found, build)  # its arguments, for inspect.signature
    found.__name__ = name
    found.__qualname__ = f"Comm.{name}"
    found.__doc__ = f"{build.__doc__}{more}"
    return found
