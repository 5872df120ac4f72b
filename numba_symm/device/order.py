"""The ring: how a rank numbers the others, from the next one on.

In this order, the ranks access different peers at any time, and the code for a rank's
k-th neighbour does not depend on the rank's number. Vectors are reduced by the tree of
the ranks (``dtypes.in_tree``) nevertheless, so all ranks get the same bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.cuda import types

from numba_symm.device.intrinsics import cuda, device_function, word_of
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


MOST_WHOLE = 4
"""The most ranks whose whole vectors are reduced at a time. Those of more ranks are
reduced 32 bits at a time, because their elements need too many registers."""


@functools.cache
def _make_rotate(size: int) -> Callable[[int, Any, Any], None]:
    """Return a device function that rotates a local array of words by a rank.

    ``(rank, words, spare)``; ``spare`` is another array of that size.
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

    return rotate


@functools.cache
def make_in_rank_order(size: int) -> Callable[[int, Any, Any, Any], None]:
    """Return a device function that puts vectors in the order of their ranks.

    ``(rank, low, high, spare)`` rotates two local arrays of ``size`` words: of the own
    vector, and then of the ring's. ``spare`` is another array of that size.
    """
    rotate = _make_rotate(size)

    @device_function
    def in_rank_order(rank: int, low: Any, high: Any, spare: Any) -> None:
        rotate(rank, low, spare)
        rotate(rank, high, spare)

    return in_rank_order


Tree = Callable[[Any, Any, int, int], Any]
"""``(low, high, first, number)`` reduces vectors, whose words are in local arrays."""


def _make_first(size: int, unpack: Any, combine: Any) -> Tree:
    """Return the tree's function for the elements of the first ``number`` ranks."""
    if size == 1:
        return _make_leaf(unpack)
    half = left_half(size)
    left = _make_first(half, unpack, combine)
    right = _make_first(size - half, unpack, combine)

    @device_function
    def of_first(low: Any, high: Any, first: int, taken: int) -> Any:
        result = left(low, high, first, taken)
        if taken > half:
            result = combine(result, right(low, high, first + half, taken - half))
        return result

    return of_first


def _make_last(size: int, unpack: Any, combine: Any) -> Tree:
    """Return that of the last ranks; ``number`` ranks before them are left out."""
    if size == 1:
        return _make_leaf(unpack)
    half = left_half(size)
    left = _make_last(half, unpack, combine)
    right = _make_last(size - half, unpack, combine)

    @device_function
    def of_last(low: Any, high: Any, first: int, before: int) -> Any:
        result = right(low, high, first + half, before - half)
        if before < half:
            result = combine(left(low, high, first, before), result)
        return result

    return of_last


def _make_leaf(unpack: Any) -> Tree:
    @device_function
    def leaf(low: Any, high: Any, first: int, ranks: int) -> Any:
        return unpack(low[first], high[first])

    return leaf


def _make_half(size: int, lanes: Lanes, make_tree: Any, shift: int) -> Any:
    """Return a device function ``(words, first, number)`` for 32 bits of the words."""
    unpack_half, pack_half, combine = lanes.half  # type: ignore[misc]  # there is one

    @device_function
    def unpack(word: int, same: int) -> Any:
        return unpack_half(word >> shift)

    tree = make_tree(size, unpack, combine)

    @device_function
    def of_half(words: Any, first: int, number: int) -> Any:
        return word_of(pack_half(tree(words, words, first, number)) << shift)

    return of_half


def _make_tree(size: int, lanes: Lanes, make_tree: Any) -> Tree:
    """Return a device function that returns the two words of a tree's result."""
    if size > MOST_WHOLE and lanes.half is not None:
        lower = _make_half(size, lanes, make_tree, 0)
        upper = _make_half(size, lanes, make_tree, 32)

        @device_function
        def by_halves(low: Any, high: Any, first: int, number: int) -> Any:
            result = lower(low, first, number) | upper(low, first, number)
            return result, lower(high, first, number) | upper(high, first, number)

        return by_halves
    pack, tree = lanes.pack, make_tree(size, lanes.unpack, lanes.combine)

    @device_function
    def whole(low: Any, high: Any, first: int, number: int) -> Any:
        return pack(tree(low, high, first, number))

    return whole


@functools.cache
def make_of_first(size: int, lanes: Lanes) -> Tree:
    """Return a device function that reduces the vectors of the first ranks, by a tree.

    ``(low, high, first, taken)`` returns the two words of the result of ``taken``
    ranks, at least one; the words of rank r are in the local arrays at ``first + r``.
    Each index is a constant, as registers need, so the ranks that are left out have
    code.
    """
    return _make_tree(size, lanes, _make_first)


@functools.cache
def make_of_last(size: int, lanes: Lanes) -> Tree:
    """Return the same for the last ranks; ``before`` ranks are left out.

    The tree is that of all ranks, without those.
    """
    return _make_tree(size, lanes, _make_last)


@functools.cache
def make_of_ring(size: int, lanes: Lanes, last: bool) -> Callable[..., Any]:
    """Return a device function that reduces vectors that are in the ring's order.

    ``(rank, low, high, spare, number)``: the arrays are those of
    :func:`make_in_rank_order`. ``number`` is that of :func:`make_of_last` if ``last``,
    or else that of :func:`make_of_first`.
    """
    make_tree = _make_last if last else _make_first
    rotate = _make_rotate(size)
    if size > MOST_WHOLE and lanes.half is not None:
        of_half = _make_half(size, lanes, make_tree, 0)

        @device_function
        def part(rank: int, words: Any, shift: int, spare: Any, number: int) -> int:
            found = cuda.local.array(size, types.int64)
            for r in range(size):
                found[r] = words[r] >> shift & 0xFFFFFFFF
            rotate(rank, found, spare)
            return word_of(of_half(found, 0, number) << shift)

        @device_function
        def by_parts(rank: int, low: Any, high: Any, spare: Any, number: int) -> Any:
            first = part(rank, low, 0, spare, number)
            first |= part(rank, low, 32, spare, number)
            second = part(rank, high, 0, spare, number)
            return first, second | part(rank, high, 32, spare, number)

        return by_parts
    tree = _make_tree(size, lanes, make_tree)

    @device_function
    def of_ring(rank: int, low: Any, high: Any, spare: Any, number: int) -> Any:
        rotate(rank, low, spare)
        rotate(rank, high, spare)
        return tree(low, high, 0, number)

    return of_ring


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
    of_first = make_of_first(size, lanes)

    @device_function
    def total(low: Any, high: Any, first: int) -> Any:
        return of_first(low, high, first, size)

    return total
