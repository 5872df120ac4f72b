"""Blocking calls that are one call of the communicator on the caller's own arrays.

Such a call is known by its arguments: the next one with arrays at the same places does
not read its specifications again.
"""

from typing import Any, NamedTuple

from mpi4py import MPI

from numba_symm import arrays
from numba_symm.environment import SIMULATED
from numba_symm.mpi.jobs import Job, stream_for

MOST = 1024
"""The number of calls that a communicator remembers, at most."""


_OF_ALL_RANKS = ("Reduce_scatter",)  # without recvcounts, it asks the other ranks


class Shortcut(NamedTuple):
    """A call of the communicator.

    Attributes:
        method: the communicator's method.
        x: which of the arguments has the array that the method reads.
        names: for each keyword of the method that is an array, which argument has it.
        options: the method's other keywords.
        named: which argument has the array that may name the stream.
    """

    method: Any
    x: int
    names: dict[str, int]
    options: dict[str, Any]
    named: int


def key_of(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return what determines a call, or None if it is not one of a plain form.

    Its arguments are arrays, pairs of an array and a type, operators, roots and
    MPI.IN_PLACE; an array is read anew, because it may have other memory now.
    """
    if name in _OF_ALL_RANKS:
        return None
    key: list[Any] = [name, *options]
    for value in (*args, *options.values()):
        kind = type(value)
        if value is MPI.IN_PLACE or kind is int:
            key.append((kind, int(value)))
        elif kind is MPI.Op:
            key.append(value.handle)
        elif kind is list or kind is tuple:
            if len(value) != 2 or type(value[1]) is not MPI.Datatype:
                return None
            if not value[1].is_predefined or not arrays.on_device(value[0]):
                return None
            key += arrays.fields(value[0], name), value[1].handle
        elif arrays.on_device(value):
            key.append(arrays.fields(value, name))
        else:
            return None
    return tuple(key)


def shortcut_of(job: Job, args: tuple[Any, ...]) -> Shortcut | None:
    """Return the shortcut for a job, if it is one call on the caller's arrays."""
    found = job.only_call()
    if found is None:
        return None
    method, (x,), options = found
    given = [id(_array(value)) for value in args]
    names = {name: value for name, value in options.items() if name == "out"}
    rest = {name: value for name, value in options.items() if name != "out"}
    needed = [id(x), *map(id, names.values()), id(job.array)]
    if x is None or any(each not in given for each in needed):
        return None
    places = {name: given.index(id(value)) for name, value in names.items()}
    return Shortcut(
        method, given.index(id(x)), places, rest, given.index(id(job.array))
    )


def take(shortcut: Shortcut, communicator: Any, args: tuple[Any, ...]) -> int:
    """Make the call; return its stream."""
    stream = stream_for(communicator, _array(args[shortcut.named]))
    outs = {name: _array(args[index]) for name, index in shortcut.names.items()}
    shortcut.method(
        _array(args[shortcut.x]),
        **outs,
        **shortcut.options,
        stream=None if SIMULATED else stream,
    )
    return stream


def _array(value: Any) -> Any:
    return value[0] if type(value) in (list, tuple) else value
