"""Checks of what a collective or a message is given; each raises ArgumentError."""

from typing import Any

import numpy as np

from numba_symm.arrays import ArrayView
from numba_symm.errors import ArgumentError

_INTEGERS = (int, np.integer)


def is_integer(number: Any) -> bool:
    """Return whether a number is Python's or NumPy's, and no truth value."""
    kind = type(number)
    return kind is int or (isinstance(number, _INTEGERS) and kind is not bool)


def check_rank(rank: Any, size: int, what: str, also: str = "") -> int:
    """Return a rank as a plain integer, or refuse what is not one."""
    if not is_integer(rank) or not 0 <= rank < size:
        raise ArgumentError(f"{what}={rank!r}; give a rank from 0 to {size - 1}{also}")
    return int(rank)


def check_order(view: ArrayView, what: str) -> None:
    """Refuse an array whose elements are not in C order."""
    if view.order != "C":
        raise ArgumentError(
            f"{what} is in Fortran order, in which a rank's part is not contiguous; "
            "pass it in C order, or its transpose"
        )


def check_parts(x: ArrayView, size: int, what: str) -> None:
    """Refuse an array that cannot be cut into a part for each rank."""
    check_order(x, f"{what}: x")
    if not x.shape or x.shape[0] % size:
        raise ArgumentError(
            f"{what}: x has shape {x.shape}; the first axis is cut into a part for "
            f"each rank, so its length must be a multiple of {size}"
        )


def check_type(target: ArrayView, source: ArrayView, what: str) -> None:
    """Refuse arrays of two types."""
    if target.dtype != source.dtype:
        raise ArgumentError(
            f"{what}: out is of {target.dtype.name} and x of {source.dtype.name}; pass "
            "both of one type"
        )


def check_length(view: ArrayView, count: int, what: str, name: str) -> None:
    """Refuse an array of another number of elements."""
    if view.size != count:
        raise ArgumentError(f"{what} has {view.size} elements, and {name} is {count}")


def are_apart(source: ArrayView, target: ArrayView) -> bool:
    """Return whether two arrays share no memory."""
    return (
        source.address >= target.address + target.nbytes
        or target.address >= source.address + source.nbytes
    )


def check_apart(source: ArrayView, target: ArrayView, what: str) -> None:
    """Refuse arrays that share memory."""
    if not are_apart(source, target):
        raise ArgumentError(f"{what}: out overlaps x; pass an array apart")
