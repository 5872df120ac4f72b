"""Checks of the arguments of collectives and messages; each raises ArgumentError."""

import sys
from typing import Any

from numba_symm.arguments import is_integer, shown
from numba_symm.arrays import ArrayView
from numba_symm.errors import ArgumentError


def check_rank(rank: Any, size: int, what: str, also: str = "") -> int:
    """Return a rank as a Python int, or refuse a value that is not a rank."""
    if not is_integer(rank) or not 0 <= rank < size:
        raise ArgumentError(
            f"{what}: expected a rank from 0 to {size - 1}{also}, got {shown(rank)}"
        )
    return int(rank)


def check_peer(peer: Any, size: int, what: str) -> int | None:
    """Return the other rank of a message, or None for no rank, or refuse the value."""
    if peer is None:
        return None
    # Without this import, no caller has MPI's constant.
    null = getattr(sys.modules.get("mpi4py.MPI"), "PROC_NULL", None)
    if is_integer(peer) and peer == null:
        return None
    return check_rank(peer, size, what, ", or None or MPI.PROC_NULL for no rank")


def check_writable(view: ArrayView, what: str) -> None:
    """Refuse a read-only array."""
    if view.readonly:
        raise ArgumentError(f"{what}: expected a writable array, got a read-only one")


def check_order(view: ArrayView, what: str) -> None:
    """Refuse an array whose elements are not in C order."""
    if view.order != "C":
        raise ArgumentError(
            f"{what}: expected an array in C order, got one in Fortran order, in which "
            "a rank's shard is not contiguous; pass its transpose, or a copy"
        )


def check_shards(x: ArrayView, size: int, what: str) -> None:
    """Refuse an array whose first axis is not a multiple of the number of ranks."""
    check_order(x, f"{what}: x")
    if not x.shape or x.shape[0] % size:
        raise ArgumentError(
            f"{what}: expected x with a multiple of {size} along its first axis, of "
            f"which each rank has a shard, got shape {x.shape}; use {what}_v"
        )


def check_type(target: ArrayView, source: ArrayView, what: str) -> None:
    """Refuse an output of another dtype than the input."""
    if target.dtype != source.dtype:
        raise ArgumentError(
            f"{what}: expected out of x's dtype, {source.dtype.name}, got "
            f"{target.dtype.name}"
        )


def check_length(view: ArrayView, count: int, what: str, name: str) -> None:
    """Refuse an array of another number of elements."""
    if view.size != count:
        raise ArgumentError(
            f"{what}: expected {count} elements, which is {name}, got {view.size}"
        )


def are_apart(source: ArrayView, target: ArrayView) -> bool:
    """Return whether two arrays share no memory."""
    return (
        source.address >= target.address + target.nbytes
        or target.address >= source.address + source.nbytes
    )


def check_apart(source: ArrayView, target: ArrayView, what: str) -> None:
    """Refuse arrays that share memory."""
    if not are_apart(source, target):
        raise ArgumentError(
            f"{what}: expected out apart from x, got arrays that overlap"
        )
