"""The ring: how a rank numbers the others, from the next one on.

In this order, the ranks access different peers at any time, and the code for a rank's
k-th neighbour does not depend on the rank's number. Vectors are reduced by the tree of
the ranks (``dtypes.in_tree``) nevertheless, so all ranks get the same bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_symm.device.intrinsics import device_function
from numba_symm.device.lanes import Lanes
from numba_symm.dtypes import Element, Op, UserOperator, identity, left_half


@functools.cache
def make_mirror(size: int) -> Callable[[int], int]:
    """Return a device function for ``size`` ranks.

    ``(k)`` returns which neighbour a rank is of its own k-th neighbour.
    """

    @device_function
    def mirror(k: int) -> int:
        return size - 2 - k  # explore: mirror

    return mirror


@functools.cache
def make_in_rank_order(size: int) -> Callable[[int, Any, Any, Any], None]:
    """Return a device function that puts vectors in the order of their ranks.

    ``(rank, low, high, spare)`` rotates two local arrays of ``size`` words: of the own
    vector, and then of the ring's. ``spare`` is another array of that size.
    """
    shifts = (size - 1).bit_length()

    @device_function
    def rotate(rank: int, words: Any, spare: Any) -> None:
        # By 1, 2, 4 … places, so that every index is a constant, as registers need.
        for bit in range(shifts):
            rotating = rank >> bit & 1 != 0  # explore: rotating
            for r in range(size):
                before = (r + size - (1 << bit)) % size
                spare[r] = words[before] if rotating else words[r]
            for r in range(size):
                words[r] = spare[r]

    @device_function
    def in_rank_order(rank: int, low: Any, high: Any, spare: Any) -> None:
        rotate(rank, low, spare)
        rotate(rank, high, spare)

    return in_rank_order


@functools.cache
def make_of_first(size: int, lanes: Lanes) -> Callable[[Any, Any, int, int], Any]:
    """Return a device function that reduces the vectors of the first ranks, by a tree.

    ``(low, high, first, taken)`` returns the elements of the result of ``taken`` ranks,
    at least one; the words of rank r are in the local arrays at ``first + r``. Each
    index is a constant, as registers need, so the ranks that are left out have code.
    """
    if size == 1:
        return _make_leaf(lanes)
    half = left_half(size)
    left, right = make_of_first(half, lanes), make_of_first(size - half, lanes)
    combine = lanes.combine

    @device_function
    def of_first(low: Any, high: Any, first: int, taken: int) -> Any:
        result = left(low, high, first, taken)
        if taken > half:
            result = combine(result, right(low, high, first + half, taken - half))
        return result

    return of_first


@functools.cache
def make_of_last(size: int, lanes: Lanes) -> Callable[[Any, Any, int, int], Any]:
    """Return the same for the last ranks; ``before`` ranks are left out.

    The tree is that of all ranks, without those.
    """
    if size == 1:
        return _make_leaf(lanes)
    half = left_half(size)
    left, right = make_of_last(half, lanes), make_of_last(size - half, lanes)
    combine = lanes.combine

    @device_function
    def of_last(low: Any, high: Any, first: int, before: int) -> Any:
        result = right(low, high, first + half, before - half)
        if before < half:
            result = combine(left(low, high, first, before), result)
        return result

    return of_last


@functools.cache
def _make_leaf(lanes: Lanes) -> Callable[[Any, Any, int, int], Any]:
    unpack = lanes.unpack

    @device_function
    def leaf(low: Any, high: Any, first: int, ranks: int) -> Any:
        return unpack(low[first], high[first])

    return leaf


def of_none(element: Element, op: Op) -> tuple[bool, int, int]:
    """Return whether a rank with nothing to reduce stores a vector, and its two words.

    It stores the operator's identity. It stores nothing if the operator is a user's
    function, whose identity is unknown.
    """
    if isinstance(op, UserOperator):
        return False, 0, 0
    vector = np.full(element.lanes, identity(op, element.dtype), element.dtype)
    low, high = vector.view(np.int64).tolist()
    return True, low, high


@functools.cache
def make_total(size: int, lanes: Lanes) -> Callable[[Any, Any, int], Any]:
    """Return a device function that reduces one vector of each rank, by their tree.

    ``(low, high, first)`` returns the two words of the result; the words of rank r are
    in the local arrays at ``first + r``.
    """
    pack, of_first = lanes.pack, make_of_first(size, lanes)

    @device_function
    def total(low: Any, high: Any, first: int) -> Any:
        return pack(of_first(low, high, first, size))

    return total
