"""Integers and objects among a call's arguments, read as mpi4py reads them, first.

All methods of this package have the decorator :func:`translated`. It reads each
argument whose parameter is annotated as an integer or as an object of mpi4py.
"""

import functools
import inspect
import re
import struct
from collections.abc import Callable, Iterator
from operator import index
from typing import Any, NamedTuple, get_args

from mpi4py import MPI

from numba_symm.arguments import shown
from numba_symm.errors import SymmError
from numba_symm.mpi.errors import (
    MPIArgumentError,
    MPIError,
    MPITypeError,
    P,
    T,
    as_mpi,
    refusal,
)

_CODES = {
    **dict.fromkeys(("dest", "source", "rank", "target_rank"), MPI.ERR_RANK),
    **dict.fromkeys(("tag", "sendtag", "recvtag"), MPI.ERR_TAG),
    "root": MPI.ERR_ROOT,
    "target_disp": MPI.ERR_DISP,
}
"""The error classes of integers whose range the call checks, by their names."""

_AGREED = ("size", "disp_unit")
"""Integers that all ranks refuse together, so their calls read them."""

_OBJECTS: dict[Any, tuple[int, str]] = {
    MPI.Status | None: (MPI.ERR_ARG, "an MPI.Status or None"),
    MPI.Info | None: (MPI.ERR_INFO, "an MPI.Info or None"),
    MPI.Info: (MPI.ERR_INFO, "an MPI.Info"),
    MPI.Group: (MPI.ERR_GROUP, "an MPI.Group"),
    MPI.Comm: (MPI.ERR_COMM, "a communicator"),
}


_INT = struct.Struct("i")  # C's


def integer(value: Any, call: str, name: str, code: int) -> int:
    """Return a rank, a root, a tag or the like, or refuse what is none.

    mpi4py converts these to integers of C, and therefore takes floats such as
    ``size / 2`` and integers of NumPy, but no text and no None.

    Args:
        value: the argument.
        call: the call.
        name: the argument's name.
        code: the error class.
    """
    try:
        number = int(type(value).__int__(value))
        _INT.pack(number)  # refuses one that C's does not have
        return number
    except Exception as error:  # an object's own method may raise anything
        raise MPITypeError(
            code,
            f"{call}: expected an integer as {name}, got {shown(value)}; pass an int",
        ) from error


def whole(value: Any, name: str, code: int) -> int:
    """Return a count or a displacement, for which mpi4py takes no floats."""
    try:
        return index(value)
    except Exception as error:  # an object's own method may raise anything
        raise MPITypeError(
            code,
            f"expecting an integer as {name}, got {shown(value)}; pass an int",
        ) from error


def natural(value: Any, name: str, code: int) -> int:
    """Return a count or a displacement from 0."""
    number = whole(value, name, code)
    if number < 0:
        raise refusal(code, f"negative {name} {number}; pass 0 or more")
    return number


def listed(values: Any, number: int, name: str, code: int) -> tuple[Any, ...]:
    """Return ``number`` values, or refuse others; ``name`` says what they are."""
    text = f"expecting {number} {name}, got"
    try:
        if isinstance(values, str | bytes):
            raise TypeError("its items are texts")
        found = tuple(values)
    except Exception as error:  # an object's own method may raise anything
        raise MPITypeError(code, f"{text} {shown(values)}; pass a list") from error
    if len(found) != number:
        raise refusal(code, f"{text} {len(found)}; pass {number}")
    return found


def naturals(values: Any, number: int, name: str, code: int) -> tuple[int, ...]:
    """Return ``number`` counts or displacements from 0."""
    found = listed(values, number, name, code)
    return tuple(natural(value, name, code) for value in found)


class _Parameter(NamedTuple):
    """A parameter that is read.

    Attributes:
        place: its place among the positional ones.
        name: its name.
        fine: the types of arguments that need no reading.
        read: returns the argument, or refuses it.
    """

    place: int
    name: str
    fine: tuple[type, ...]
    read: Callable[[Any, str, str], Any]


def _parameters(method: Callable[..., Any]) -> Iterator[_Parameter]:
    for place, (name, each) in enumerate(inspect.signature(method).parameters.items()):
        kind = each.annotation
        if kind in (int, "int") and name not in _AGREED:  # mpi4py's are texts
            code = _CODES.get(name, MPI.ERR_ARG)
            fine = (int,) if name in _CODES else ()  # else mpi4py gets it, as C's
            yield _Parameter(place, name, fine, functools.partial(integer, code=code))
        elif name in _LISTS:
            lists = (list,) if name == "requests" else ()
            yield _Parameter(place, name, lists, _LISTS[name])
        elif kind in _OBJECTS:
            read = functools.partial(_instance, kind)
            yield _Parameter(place, name, get_args(kind) or (kind,), read)


def _instance(kind: Any, value: Any, call: str, name: str) -> Any:
    code, expected = _OBJECTS[kind]
    if not isinstance(value, kind):
        raise MPITypeError(
            code,
            f"{call}: expected {expected} as {name}, got {shown(value)}; pass one",
        )
    return value


def _requests(value: Any, call: str, name: str) -> list[Any]:
    """Return a list of requests, because an iterator ends after one pass."""
    try:
        return list(value)
    except Exception as error:  # an object's own method may raise anything
        raise MPITypeError(
            MPI.ERR_REQUEST,
            f"{call}: expected a list of requests, got {shown(value)}; pass one",
        ) from error


def _statuses(value: Any, call: str, name: str) -> Any:
    given = [] if value is None else value
    fine = isinstance(given, list | tuple)
    if not fine or not all(isinstance(each, MPI.Status) for each in given):
        raise MPITypeError(
            MPI.ERR_ARG,
            f"{call}: expected a list of MPI.Status or None as {name}, got "
            f"{shown(value)}; pass one",
        )
    return value


_LISTS = {"requests": _requests, "statuses": _statuses}

_CALLED = re.compile(r"(?!MPI\.)[A-Z][\w.]*: ")  # how texts begin that name their call


def translated(
    method: Callable[P, T], like: Callable[..., Any] | None = None, name: str = ""
) -> Callable[P, T]:
    """Read a call's arguments, and raise errors as exceptions of MPI.

    The cause of each is the library's error. Errors of arguments name the call.

    Args:
        method: the call.
        like: has the parameters of the call; None: ``method`` itself.
        name: the name of the call; empty: that of ``method``.
    """
    own_name = method.__name__
    if own_name == "__new__":
        own_name = method.__qualname__.partition(".")[0]
    call = name or own_name
    parameters = list(_parameters(like or method))

    @functools.wraps(method)
    def raising(*args: Any, **options: Any) -> T:
        try:
            for place, each, fine, read in parameters:
                if place < len(args):
                    value = args[place]
                    if type(value) not in fine:
                        found = read(value, call, each)
                        args = (*args[:place], found, *args[place + 1 :])
                elif each in options and type(options[each]) not in fine:
                    options[each] = read(options[each], call, each)
            return method(*args, **options)
        except SymmError as error:
            own = isinstance(error, MPIError)
            made = error if isinstance(error, MPIError) else as_mpi(error)
            if isinstance(made, MPIArgumentError) and not _CALLED.match(made.text):
                made.text = f"{call}: {made.text}"
            if own:
                raise
            raise made from error

    return raising
