"""The reduction of several shards in this rank's memory into one of them.

In calls over several islands, ranks receive the shards from other islands, and reduce
them by the tree of the islands. Each thread reads and writes vectors of its own. No
other rank takes part.

A thread reduces ``MOST`` shards at a time, and stores the results of more than these in
the first shard of each group, until the last group is all of them.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.workspace import THREADS, VECTOR
from numba_symm.device import intrinsics, lanes, order
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch

MOST = 8
"""The most shards of which a thread has a vector at a time."""


def make_reduce_shards(number: int, more: bool, element: Element, op: Op) -> Any:
    """Return the kernel.

    Args:
        number: of how many shards a thread loads a vector at a time.
        more: whether there are more shards.
        element: their type.
        op: the operator.
    """
    access = lanes.make_lanes(element, op, False, number)
    pack, of_first = access.pack, order.make_of_first(number, access)

    @intrinsics.device_function
    def reduced(at: int, apart: int, taken: int, low: Any, high: Any) -> Any:
        for i in range(number):
            if i < taken:
                low[i], high[i] = intrinsics.ld_v2_u64(at + i * apart)
        return pack(of_first(low, high, 0, taken))

    def reduce_shards(
        grid: int, shards: int, result: int, vectors: int, total: int
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        low = cuda.local.array(number, types.int64)
        high = cuda.local.array(number, types.int64)
        vector = block * THREADS + cuda.threadIdx.x
        while vector < vectors:
            begin, apart, taken = shards + VECTOR * vector, VECTOR * vectors, number
            if more:
                left = total  # shards at a distance of ``apart``
                while left > number:
                    for first in range(0, left, number):
                        taken, at = min(number, left - first), begin + first * apart
                        words = reduced(at, apart, taken, low, high)
                        intrinsics.st_v2_u64(at, words)
                    left, apart = (left + number - 1) // number, number * apart
                taken = left
            words = reduced(begin, apart, taken, low, high)
            intrinsics.st_v2_u64(result + VECTOR * vector, words)
            vector += grid * THREADS

    return reduce_shards


def kernel(number: int, element: Element, op: Op) -> Kernel:
    """Return the kernel for a number of shards, compiled when first bound."""
    return _kernel(min(number, MOST), number > MOST, element, op)


@functools.cache
def _kernel(number: int, more: bool, element: Element, op: Op) -> Kernel:
    signature = types.int64, *(binding.ADDRESS,) * 2, *(types.int64,) * 2
    constants = number, more, element, op
    return Kernel(make_reduce_shards, constants, signature, THREADS, workspace.HELD)


def bind(
    end: binding.Endpoint,
    shards: int,
    vectors: int,
    own: int,
    number: int,
    element: Element,
    op: Op,
) -> Launch:
    """Return the packed launch.

    Args:
        end: this rank's end of its island.
        shards: address of the first shard, on a 16-byte boundary; the others follow.
        vectors: whole vectors of each shard.
        own: the number of the shard that gets the result.
        number: how many shards there are.
        element: their type.
        op: the operator.
    """
    grid = min(workspace.divide_up(vectors, THREADS), end.max_blocks)
    held = workspace.divide_up(grid, end.multiprocessors)
    result = shards + own * VECTOR * vectors
    of_call = kernel(number, element, op)
    return of_call.bind(grid, grid, shards, result, vectors, number, held=held)
