"""Conversion of an array to another type, and the division of an average.

Between islands, elements have the type in which they accumulate. So they are widened
before the first reduction. After the last one, they are divided by the number of ranks
for an average, and converted back. Each thread reads and writes elements of its own; no
other rank takes part.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import intrinsics
from numba_symm.device.lanes import make_access, make_conversion, make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch


def make_convert(source: Element, target: Element, op: Op, size: int) -> Any:
    """Return the kernel; its arguments are those of ``lanes.make_conversion``."""
    if source == target:  # whole vectors
        vectors = make_lanes(source, op, True, size)
        unpack, pack = vectors.unpack, vectors.pack
        load, store = vectors.load, vectors.store
        lanes = source.lanes

        def finish(grid: int, given: int, result: int, count: int) -> None:
            block = intrinsics.block_index()
            if block >= grid:
                return
            vector = block * THREADS + cuda.threadIdx.x
            while vector * lanes < count:
                low, high = load(given, vector, count)
                words = pack(unpack(low, high))
                store(result, vector, count, words[0], words[1])
                vector += grid * THREADS

        return finish

    one = make_conversion(source, target, op, size)
    load_one, _ = make_access(source.itemsize)
    _, store_one = make_access(target.itemsize)
    read, written = source.itemsize, target.itemsize

    def convert(grid: int, given: int, result: int, count: int) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        i = block * THREADS + cuda.threadIdx.x
        while i < count:
            store_one(result + written * i, one(load_one(given + read * i)))
            i += grid * THREADS

    return convert


@functools.cache
def kernel(source: Element, target: Element, op: Op, size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    signature = types.int64, binding.ADDRESS, binding.ADDRESS, types.int64
    return Kernel(
        make_convert, (source, target, op, size), signature, THREADS, workspace.HELD
    )


def bind(
    end: binding.Endpoint,
    kinds: tuple[Element, Element],
    given: int,
    result: int,
    count: int,
    op: Op = "sum",
    size: int = 1,
) -> Launch:
    """Return the launch for an array of ``count`` elements.

    Args:
        end: this rank's end.
        kinds: the types of the array and of the result.
        given: address of the array.
        result: address of the result.
        count: number of elements.
        op: the operator that is finished; "sum" only converts.
        size: the number of ranks, by which an average divides.
    """
    source, target = kinds
    lanes = source.lanes if source == target else 1
    grid = min(
        workspace.divide_up(workspace.divide_up(count, lanes), THREADS), end.max_blocks
    )
    held = workspace.divide_up(grid, end.multiprocessors)
    if op != "avg":
        size = 1  # one kernel for all numbers of ranks
    found = kernel(source, target, op, size)
    return found.bind(grid, grid, given, result, count, held=held)
