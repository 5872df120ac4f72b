"""The ring: how a rank counts the others, from the next one on.

All ranks then turn to different ones at any time, and what a rank does with its k-th
neighbour is written without knowing its own number. What is reduced in rank order gives
the same bits on every rank.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba_symm.device.intrinsics import device_function
from numba_symm.device.lanes import Lanes


@functools.cache
def make_mirror(size: int) -> Callable[[int], int]:
    """Return a device function: as whose k-th neighbour a rank's k-th neighbour has it.

    ``(k)`` is for ``size`` ranks.
    """

    @device_function
    def mirror(k: int) -> int:
        return size - 2 - k  # explore: mirror

    return mirror


@functools.cache
def make_in_rank_order(size: int) -> Callable[[int, Any, Any, Any], None]:
    """Return a device function that puts vectors in the order of their ranks.

    ``(rank, low, high, spare)``: two local arrays of ``size`` words, of the own vector
    and then the ring's, are turned; ``spare`` is another array of that size.
    """
    turns = (size - 1).bit_length()

    @device_function
    def in_rank_order(rank: int, low: Any, high: Any, spare: Any) -> None:
        # By 1, 2, 4 … places, so that every index is a constant: registers have none.
        for bit in range(turns):
            turning = rank >> bit & 1 != 0  # explore: turning
            for r in range(size):
                before = (r + size - (1 << bit)) % size
                spare[r] = low[before] if turning else low[r]
            for r in range(size):
                low[r] = spare[r]
            for r in range(size):
                before = (r + size - (1 << bit)) % size
                spare[r] = high[before] if turning else high[r]
            for r in range(size):
                high[r] = spare[r]

    return in_rank_order


@functools.cache
def make_total(size: int, lanes: Lanes) -> Callable[[Any, Any, int], Any]:
    """Return a device function that reduces one vector of each rank, in rank order.

    ``(low, high, first)`` returns the two words of the result; the words of rank r are
    in the local arrays at ``first + r``.
    """
    unpack, pack, combine, _, _ = lanes

    @device_function
    def total(low: Any, high: Any, first: int) -> Any:
        result = unpack(low[first], high[first])
        for r in range(1, size):
            result = combine(result, unpack(low[first + r], high[first + r]))
        return pack(result)

    return total
