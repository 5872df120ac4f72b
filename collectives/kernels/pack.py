"""Copies between a strided array and contiguous memory of this rank.

The kernel waits for no rank, and stores only in its own rank's memory. It moves words
of the largest size that divides all addresses and strides. Axes whose elements follow
one another are treated as one axis. One kernel moves words of all sizes, in both
directions, so few kernels have to be loaded.
"""

import functools
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import intrinsics, lanes
from numba_symm.kernels import Kernel

MOST_AXES = 4
"""The most axes of a launch."""


def make_pack(axes: int) -> Any:
    """Return the kernel.

    Args:
        axes: the number of axes.
    """
    load_1, store_1 = _access(1)
    load_2, store_2 = _access(2)
    load_4, store_4 = _access(4)
    load_8, store_8 = _access(8)

    def pack(
        packed: int,
        spread: int,
        word: int,
        packing: int,
        count: int,
        grid: int,
        lengths: Any,
        strides: Any,
    ) -> None:
        index = intrinsics.block_index() * THREADS + intrinsics.thread_index_x()
        while index < count:
            rest, source = index, spread
            for step in range(axes):
                axis = axes - 1 - step
                above = rest // lengths[axis]
                source += (rest - above * lengths[axis]) * strides[axis]
                rest = above
            target = packed + word * index
            if not packing:
                source, target = target, source
            if word == 8:
                store_8(target, load_8(source))
            elif word == 4:
                store_4(target, load_4(source))
            elif word == 2:
                store_2(target, load_2(source))
            else:
                store_1(target, load_1(source))
            index += grid * THREADS

    return pack


def _access(word: int) -> Any:
    """Return device functions that load and store a word."""
    return lanes.make_access(word)


@functools.cache
def kernel(axes: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    listed = types.UniTuple(types.int64, axes)
    signature = *(types.int64,) * 6, listed, listed
    return Kernel(make_pack, (axes,), signature, THREADS, workspace.HELD)


def bind(
    packed: int,
    spread: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    packing: bool,
) -> binding.Enqueue:
    """Return the packed launch of a copy of at least one element.

    For more than ``MOST_AXES`` axes, there is a launch for each index of the others.

    Args:
        packed: the address of the contiguous memory.
        spread: the address of the array's first element.
        shape: the array's shape.
        strides: its strides, in bytes.
        itemsize: the bytes of an element.
        packing: whether to copy to the contiguous memory; else from there.
    """
    axes = _joined([*zip(shape, strides, strict=True), (itemsize, 1)])
    run = axes[-1][0]
    word = math.gcd(8, packed, spread, run, *(stride for _, stride in axes[:-1]))
    axes[-1] = run // word, word
    outer, axes = axes[:-MOST_AXES], axes[-MOST_AXES:]
    count = math.prod(length for length, _ in axes)
    grid = min(workspace.divide_up(count, THREADS), workspace.MAX_BLOCKS)
    lengths, steps = zip(*axes, strict=True)
    launches = []
    for number, indices in enumerate(product(*(range(n) for n, _ in outer))):
        first = sum(i * stride for i, (_, stride) in zip(indices, outer, strict=True))
        launch = kernel(len(axes)).bind(
            grid,
            packed + number * count * word,
            spread + first,
            word,
            int(packing),
            count,
            grid,
            lengths,
            steps,
            held=workspace.HELD,
        )
        launches.append(launch)
    return launches[0] if len(launches) == 1 else binding.Series(*launches)


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
