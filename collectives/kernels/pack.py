"""Copies between an array with gaps and contiguous memory of this rank.

The kernel waits for no rank, and stores only on its own. It moves words, the largest
that all addresses and strides are multiples of. Axes whose elements follow one another
are one axis.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

from numba.cuda import types

from numba_symm import dtypes
from numba_symm.collectives.protocols.workspace import (
    HELD,
    MAX_BLOCKS,
    THREADS,
    divide_up,
)
from numba_symm.device.intrinsics import block_index, thread_index_x
from numba_symm.device.lanes import make_access
from numba_symm.kernels import Kernel, Launch


def make_pack(word: int, axes: int, packing: bool) -> Any:
    """Return the kernel.

    Args:
        word: bytes that are moved at a time: 1, 2, 4 or 8.
        axes: the number of axes.
        packing: whether to copy to contiguous memory; else from there.
    """
    load, store = make_access(dtypes.element(f"uint{8 * word}", "pack"))

    def pack(
        packed: int, spread: int, count: int, grid: int, lengths: Any, strides: Any
    ) -> None:
        index = block_index() * THREADS + thread_index_x()
        while index < count:
            rest, place = index, spread
            for step in range(axes):
                axis = axes - 1 - step
                above = rest // lengths[axis]
                place += (rest - above * lengths[axis]) * strides[axis]
                rest = above
            if packing:
                store(packed + word * index, load(place))
            else:
                store(place, load(packed + word * index))
            index += grid * THREADS

    return pack


@functools.cache
def kernel(word: int, axes: int, packing: bool) -> Kernel:
    """Return the kernel, compiled when first bound."""
    listed = types.UniTuple(types.int64, axes)
    signature = *(types.int64,) * 4, listed, listed
    return Kernel(make_pack, (word, axes, packing), signature, THREADS, HELD)


def bind(
    packed: int,
    spread: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    packing: bool,
) -> Launch:
    """Return the packed launch of a copy of at least one element.

    Args:
        packed: the address of the contiguous memory, a multiple of 8.
        spread: the address of the array's first element.
        shape: the array's shape.
        strides: its strides, in bytes.
        itemsize: the bytes of an element.
        packing: whether to copy to the contiguous memory; else from there.
    """
    axes = _joined([*zip(shape, strides, strict=True), (itemsize, 1)])
    run = axes[-1][0]
    word = math.gcd(8, spread, run, *(stride for _, stride in axes[:-1]))
    axes[-1] = run // word, word
    count = math.prod(length for length, _ in axes)
    grid = min(divide_up(count, THREADS), MAX_BLOCKS)
    lengths, steps = zip(*axes, strict=True)
    bound = kernel(word, len(axes), packing)
    return bound.bind(grid, packed, spread, count, grid, lengths, steps, held=HELD)


def _joined(axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return as few axes, as lengths and strides, for elements in the same order."""
    found = [axes[-1]]
    for length, stride in reversed(axes[:-1]):
        inner, step = found[0]
        if length == 1:
            continue
        if stride == inner * step:
            found[0] = length * inner, step
        else:
            found.insert(0, (length, stride))
    return found
