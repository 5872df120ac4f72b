"""The ring: how a rank numbers the others, from the next one on.

In this order, the ranks access different peers at any time, and the code for a rank's
k-th neighbour does not depend on the rank's number. Vectors are reduced in rank order
nevertheless, so the result has the same bits on every rank.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba_symm.device.intrinsics import device_function
from numba_symm.device.lanes import Lanes


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
def make_total(size: int, lanes: Lanes) -> Callable[[Any, Any, int], Any]:
    """Return a device function that reduces one vector of each rank, in rank order.

    ``(low, high, first)`` returns the two words of the result; the words of rank r are
    in the local arrays at ``first + r``.
    """
    unpack, pack, combine, *_ = lanes

    @device_function
    def total(low: Any, high: Any, first: int) -> Any:
        result = unpack(low[first], high[first])
        for r in range(1, size):
            result = combine(result, unpack(low[first + r], high[first + r]))
        return pack(result)

    return total
