"""Blocking calls that are one call of the communicator on the caller's own arrays.

The module remembers such a call by its arguments. The next call with arrays at the same
places does not read the specifications again.
"""

from typing import Any, NamedTuple

from mpi4py import MPI

from numba_symm import arrays
from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.collectives.plans import Detached
from numba_symm.mpi.jobs import Job, stream_for

MOST = 1024
"""The number of calls that a communicator remembers, at most."""


_OF_ALL_RANKS = ("Reduce_scatter",)  # without recvcounts, ranks exchange their counts


class Shortcut(NamedTuple):
    """A call of the communicator.

    Attributes:
        call: the call, without its arrays.
        named: which of its arrays may name the stream.
    """

    call: Detached
    named: int


def key_of(
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
    return tuple(key), found


def shortcut_of(job: Job, given: list[Any]) -> Shortcut | None:
    """Return the shortcut for a job, if it is one call on these arrays."""
    found = job.only_call()
    # In debug mode, all ranks compare the call, so all must prepare it.
    if found is None or inside(job.communicator).debug:
        return None
    method, x, options = found
    places = [id(array) for array in given]
    needed = [job.array, *x, options.get("out")]
    if any(id(each) not in places for each in needed if each is not None):
        return None
    prepare = getattr(job.communicator, f"{method.__name__}_init")
    call = prepare(*x, **options, stream=job.stream).detached()
    return Shortcut(call, places.index(id(job.array)))


def take(
    shortcut: Shortcut, communicator: Communicator, given: list[Any]
) -> int | None:
    """Make the call on these arrays; return its stream, or None if it was not made."""
    stream = stream_for(communicator, given[shortcut.named])
    return stream if shortcut.call((stream, None), *given) else None
