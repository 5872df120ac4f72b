"""Datatypes, integers and objects among a call's arguments.

Where the elements of an MPI datatype are, from the calls that made it.

MPI keeps the calls that made a derived datatype as its envelope. From these follow the
offsets of all elements, which kernels gather and scatter (``mpi/buffers.py``).

Integers and objects among a call's arguments, read as mpi4py reads them, first.

All methods of this package have the decorator :func:`translated`. It reads each
argument whose parameter is annotated as an integer or as an object of mpi4py.
"""

import functools
import inspect
import re
import struct
from collections.abc import Callable, Iterator
from operator import index
from typing import Any, NamedTuple, cast, get_args

import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

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
    unsupported,
)


class ItemLayout(NamedTuple):
    """The elements of one item of a datatype.

    Attributes:
        base: NumPy's dtype of all elements, uint8 if they differ in type.
        elements: the number of elements of ``base`` in an item.
        extent: bytes from one item to the next.
        low: the byte of an item's lowest element.
        high: the byte after its highest element.
        runs: the offset of each run of ``run`` bytes, in the order of the elements;
            None if the items are contiguous.
        run: the bytes of a run.
        uniform: whether all elements have the type ``base``.
        axes: the lengths and strides, in bytes, of the axes on which the runs are; None
            if they are at irregular places.
    """

    base: np.dtype[Any]
    elements: int
    extent: int
    low: int
    high: int
    runs: np.ndarray[Any, np.dtype[np.int64]] | None
    run: int
    uniform: bool = True
    axes: tuple[tuple[int, int], ...] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the elements of one item."""
        return self.elements * self.base.itemsize


def layout(datatype: MPI.Datatype) -> ItemLayout:
    """Return where a datatype's elements are.

    Raises:
        MPIError: the datatype is null, or this library cannot read it.
    """
    if datatype == MPI.DATATYPE_NULL:
        raise refusal(
            MPI.ERR_TYPE, "datatype: expected one, got MPI.DATATYPE_NULL; pass a type"
        )
    if datatype.is_named:
        return _named(datatype.handle)
    found: Any = datatype.Get_attr(_kept())
    if found is None:
        found = _derived(datatype)
        datatype.Set_attr(_kept(), found)
    return cast(ItemLayout, found)


@functools.cache
def _kept() -> int:
    """Return the key of the attribute by which a datatype keeps its layout."""
    return MPI.Datatype.Create_keyval()


@functools.lru_cache(maxsize=256)
def _named(handle: int) -> ItemLayout:
    """Return the layout of a predefined datatype, whose handle never changes."""
    datatype = MPI.Datatype.fromhandle(handle)
    dtype = dtlib.to_numpy_dtype(datatype)
    base = np.dtype(np.uint8) if dtype.char == "S" else np.dtype(dtype)
    if base.char in "gG":
        raise unsupported(
            f"datatype: {datatype.Get_name()} does not exist on a GPU; use MPI.DOUBLE"
        )
    return dense(base)


def dense(dtype: np.dtype[Any]) -> ItemLayout:
    """Return the layout of items of a dtype, one after the other."""
    return ItemLayout(dtype, 1, dtype.itemsize, 0, dtype.itemsize, None, dtype.itemsize)


def _derived(datatype: MPI.Datatype) -> ItemLayout:
    runs: list[tuple[np.dtype[Any], Any]] = list(_elements(datatype))
    _, extent = datatype.Get_extent()
    bases = {base for base, offsets in runs if len(offsets)}
    if len(bases) == 1:
        (base,) = bases
    else:  # as bytes, which can be moved, not reduced
        base = np.dtype(np.uint8)
        runs = [
            (base, np.add.outer(offsets, np.arange(of.itemsize)).ravel())
            for of, offsets in runs
        ]
    offsets = np.concatenate([np.empty(0, np.int64), *(each for _, each in runs)])
    size, count = base.itemsize, len(offsets)
    if not count:
        return ItemLayout(base, 0, extent, 0, 0, None, 0, len(bases) < 2)
    low, high = int(offsets.min()), int(offsets.max()) + size
    starts, run = _joined(offsets, size)
    gapless = len(starts) == 1 and starts[0] == 0 and run == extent
    runs_of_item = None if gapless else starts
    uniform = len(bases) < 2
    axes = None if runs_of_item is None else _axes(starts)
    return ItemLayout(base, count, extent, low, high, runs_of_item, run, uniform, axes)


def _axes(starts: Any) -> tuple[tuple[int, int], ...] | None:
    """Return the lengths and strides of the axes on which runs begin, if they do."""
    axes: list[tuple[int, int]] = []
    while len(starts) > 1:
        steps = np.diff(starts)
        ends = np.flatnonzero(steps != steps[0])
        length = int(ends[0]) + 1 if len(ends) else len(starts)
        if len(starts) % length:
            return None
        lines = starts.reshape(-1, length)
        if (np.diff(lines) != steps[0]).any():
            return None
        axes.insert(0, (length, int(steps[0])))
        starts = lines[:, 0]
    return tuple(axes)


def _joined(offsets: Any, size: int) -> tuple[Any, int]:
    """Join consecutive elements to runs, all of the greatest length that they have."""
    first = np.flatnonzero(np.diff(offsets, prepend=offsets[0] - size - 1) != size)
    lengths = np.diff(np.append(first, len(offsets)))
    elements = int(np.gcd.reduce(lengths))
    return np.ascontiguousarray(offsets[::elements], np.int64), elements * size


def _elements(datatype: MPI.Datatype) -> Iterator[tuple[np.dtype[Any], Any]]:
    """Yield the base dtypes of a datatype, and the offsets of elements in bytes."""
    if datatype.is_named:
        yield _named(datatype.handle).base, np.zeros(1, np.int64)
        return
    basetype, name, info = datatype.decode()
    members = info["datatypes"] if name == "STRUCT" else [basetype]
    if name == "STRUCT":
        columns = zip(info["blocklengths"], info["displacements"], strict=True)
        places = [
            displacement + np.arange(length, dtype=np.int64) * member.Get_extent()[1]
            for member, (length, displacement) in zip(members, columns, strict=True)
        ]
    else:
        places = [_starts(name, info, basetype.Get_extent()[1], basetype)]
    for member, starts in zip(members, places, strict=True):
        parts = list(_elements(member))
        if len({base for base, _ in parts}) == 1:
            parts = [(parts[0][0], np.concatenate([each for _, each in parts]))]
        # Each start has all of the member's parts, before the next start.
        for some in [starts] if len(parts) == 1 else starts[:, None]:
            for base, offsets in parts:
                yield base, np.add.outer(some, offsets).ravel()
        if not member.is_predefined:  # a new handle
            member.Free()


def _starts(name: str, info: Any, extent: int, basetype: MPI.Datatype) -> Any:
    """Return the offsets of the items of the basetype, in order, in bytes."""
    count = info.get("count", 0)
    if name in ("DUP", "RESIZED"):
        return np.zeros(1, np.int64)
    if name == "CONTIGUOUS":
        return np.arange(count, dtype=np.int64) * extent
    if name.lstrip("H") in ("VECTOR", "INDEXED", "INDEXED_BLOCK"):
        places = info.get("displacements")
        if places is None:
            places = np.arange(count) * info["stride"]
        starts = np.asarray(places, np.int64) * (1 if name[0] == "H" else extent)
        lengths = info.get("blocklengths")
        if lengths is None:
            lengths = [info["blocklength"]] * len(starts)
        made = [
            start + np.arange(length, dtype=np.int64) * extent
            for start, length in zip(starts, lengths, strict=True)
        ]
        return np.concatenate([np.empty(0, np.int64), *made])
    if name == "SUBARRAY":
        return _subarray(info) * extent
    raise unsupported(
        f"datatype: a type made by MPI's {name} of {basetype.Get_name() or 'a type'} "
        "is not packed here; make it of contiguous, vector, indexed, subarray or "
        "struct types, or copy the elements to a contiguous array"
    )


def _subarray(info: Any) -> Any:
    axes = list(zip(info["sizes"], info["subsizes"], info["starts"], strict=True))
    if info["order"] == MPI.ORDER_FORTRAN:
        axes.reverse()  # the last one varies fastest
    places = np.zeros(1, np.int64)
    for size, part, first in axes:
        places = np.add.outer(places * size, first + np.arange(part)).ravel()
    return places


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


_TEXTS: dict[Any, Any] = {"int": int, "Info": MPI.Info, "Group": MPI.Group}
_TEXTS |= {"Status | None": MPI.Status | None, "Info | None": MPI.Info | None}
"""mpi4py's annotations."""

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


_Read = Callable[[Any, str, str], Any]


def _parameters(
    method: Callable[..., Any],
) -> Iterator[tuple[str, tuple[type, ...], _Read]]:
    """Yield the parameters of a call that are read.

    With each name come the types of arguments that need no reading, and what returns
    the argument, or refuses it.
    """
    for name, each in inspect.signature(method).parameters.items():
        kind = _TEXTS.get(each.annotation, each.annotation)
        if kind is int and name not in _AGREED:
            code = _CODES.get(name, MPI.ERR_ARG)
            fine = (int,) if name in _CODES else ()  # else mpi4py gets it, as C's
            yield name, fine, functools.partial(integer, code=code)
        elif name in _LISTS:
            yield name, (list,) if name == "requests" else (), _LISTS[name]
        elif kind in _OBJECTS:
            fine = get_args(kind) or (kind,)
            yield name, fine, functools.partial(_instance, kind)


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

_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}

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
    known: dict[str, Any] = {"__name__": method.__module__, "method": method}
    known |= {"SymmError": SymmError, "as_raised": functools.partial(_as_raised, call)}
    taken: list[str] = []
    passed: list[str] = []
    for each in inspect.signature(like or method).parameters.values():
        own = each.name
        word = _STARS.get(each.kind, "")
        passed.append(word + own)
        if each.default is not each.empty:
            known[f"{own}_0"], own = each.default, f"{own}={own}_0"
        taken.append(word + own)
    steps = []
    for own, fine, read in _parameters(like or method):
        known[f"fine_{own}"], known[f"read_{own}"] = fine, read
        test = f"type({own}) not in fine_{own}"
        if f"{own}_0" in known:  # what the program has not passed
            test = f"{own} is not {own}_0 and {test}"
        steps.append(f"if {test}: {own} = read_{own}({own}, {call!r}, {own!r})")
    # With the call's own parameters, because packing and unpacking them takes longer
    # than most calls have to say.
    lines = "\n        ".join([*steps, f"return method({', '.join(passed)})"])
    text = f"""def raising({", ".join(taken)}):
    try:
        {lines}
    except SymmError as error:
        made, cause = as_raised(error)
        raise made from cause
"""
    exec(compile(text, __file__, "exec"), known)
    raising: Callable[P, T] = functools.wraps(method)(known["raising"])
    return raising


def like(plain: Any, method: Callable[..., Any]) -> Any:
    """Return a method with the name, the parameters and the text of mpi4py's."""
    found = translated(method, plain, plain.__name__)
    return functools.update_wrapper(found, plain)


def _as_raised(call: str, error: SymmError) -> tuple[MPIError, BaseException | None]:
    """Return an error that a call has raised as one of MPI, and its cause."""
    own = isinstance(error, MPIError)
    made = error if isinstance(error, MPIError) else as_mpi(error)
    if isinstance(made, MPIArgumentError) and not _CALLED.match(made.text):
        made.text = f"{call}: {made.text}"
    # Without frames of the library, as notebooks show all.
    return made.with_traceback(None), error.__cause__ if own else error
