"""The blocking, the nonblocking and the persistent method of a collective."""

import functools
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from numba_symm import arrays
from numba_symm.collectives.communicator import inside
from numba_symm.mpi import addresses
from numba_symm.mpi.buffers import array_in, on_device
from numba_symm.mpi.errors import refusal
from numba_symm.mpi.jobs import Job, stream_for, wait
from numba_symm.mpi.reading import translated
from numba_symm.mpi.requests import Prequest, Started

Build = Callable[..., Job | None]
"""Takes a ``Comm`` and the arguments of mpi4py's method; see ``collectives.py``."""

Method = Callable[..., Any]


def forms(name: str, build: Build) -> tuple[Method, Method, Method]:
    """Return the methods of a collective, such as Bcast, Ibcast and Bcast_init.

    If the arrays are on the host, each calls mpi4py's method of its name.
    """

    def blocking(self: Any, *args: Any, **options: Any) -> None:
        key, used = _key_of(name, args, options)
        if key is not None:
            communicator = self.communicator
            within = inside(communicator)
            known = within.memory.young.get(key)
            if known is not None:
                call, number = known
                stream = stream_for(communicator, used[number])
                if within.made(call.enqueue(stream), call, stream, used):
                    if self.synchronizes:
                        wait(communicator, stream)
                    return
        job = build(self, *args, **options)
        if job is None:
            getattr(self.host, name)(*args, **options)
            return
        job.start()
        if key is not None:
            _remember(key, job, used)
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


_OF_ALL_RANKS = ("Reduce_scatter",)  # without recvcounts, ranks exchange their counts


def _key_of(
    name: str, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """Return the key of a call, None if it is not of a plain form, and its arrays.

    The arguments of a plain form are arrays, pairs of an array and a type, operators,
    roots and MPI.IN_PLACE. An array is read anew, because its memory may differ now.
    """
    found: list[Any] = []
    if name in _OF_ALL_RANKS:
        return None, found
    key: list[Any] = [name]
    if options:
        key += options
        args = (*args, *options.values())
    for value in args:
        kind = type(value)
        if kind is list or kind is tuple:
            if len(value) != 2 or not isinstance(value[1], MPI.Datatype):
                return None, found
            value, datatype = value
            if not datatype.is_predefined or not arrays.on_device(value):
                return None, found
            key.append(datatype.handle)
        elif isinstance(value, MPI.Op):
            key.append(value.handle)
            continue
        elif kind is int or value is MPI.IN_PLACE:
            key += kind, int(value)
            continue
        elif not arrays.on_device(value):
            return None, found
        key.append(arrays.fields(value, name))
        found.append(value)
    return tuple(key) if found else None, found


def _remember(key: Any, job: Job, given: list[Any]) -> None:
    """Remember a job that is one call of the communicator on these arrays.

    The value is the packed call, and which of the arrays may name the stream.
    """
    found, within = job.only_call(), inside(job.communicator)
    # In debug mode, all ranks compare the call, so all must prepare it.
    if found is None or within.debug:
        return
    method, x, options = found
    places = [id(array) for array in given]
    needed = [job.array, *x, options.get("out")]
    if any(id(each) not in places for each in needed if each is not None):
        return
    prepare = getattr(job.communicator, f"{method.__name__}_init")
    call = prepare(*x, **options, stream=job.stream).call
    within.memory.put(key, (call, places.index(id(job.array))))


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
    found = translated(method, build, name)
    functools.update_wrapper(found, build)  # its arguments, for inspect.signature
    found.__name__ = name
    found.__qualname__ = f"Comm.{name}"
    found.__doc__ = f"{build.__doc__}{more}"
    return found
