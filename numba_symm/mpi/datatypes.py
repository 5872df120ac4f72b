"""Where the elements of an MPI datatype are, from the calls that made it.

MPI keeps the calls that made a derived datatype as its envelope. From these follow the
offsets of all elements, which kernels gather and scatter (``packing.py``).
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

from numba_symm.mpi.errors import refusal, unsupported


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

    def blocks(displacements: Any, lengths: Any) -> Any:
        made = [
            displacement + np.arange(length, dtype=np.int64) * extent
            for displacement, length in zip(displacements, lengths, strict=True)
        ]
        return np.concatenate([np.empty(0, np.int64), *made])

    count = info.get("count", 0)
    if name in ("DUP", "RESIZED"):
        return np.zeros(1, np.int64)
    if name == "CONTIGUOUS":
        return np.arange(count, dtype=np.int64) * extent
    if name in ("VECTOR", "HVECTOR"):
        stride = info["stride"] * (extent if name == "VECTOR" else 1)
        return blocks(np.arange(count) * stride, [info["blocklength"]] * count)
    if name in ("INDEXED", "HINDEXED"):
        factor = extent if name == "INDEXED" else 1
        displacements = np.array(info["displacements"], np.int64) * factor
        return blocks(displacements, info["blocklengths"])
    if name in ("INDEXED_BLOCK", "HINDEXED_BLOCK"):
        factor = extent if name == "INDEXED_BLOCK" else 1
        displacements = np.array(info["displacements"], np.int64) * factor
        return blocks(displacements, [info["blocklength"]] * len(displacements))
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
