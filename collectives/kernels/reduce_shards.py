"""The reduction of several shards in this rank's memory into one of them.

In calls over several islands, ranks receive the shards from the other islands, and
reduce them in the order of the islands. Each thread reads and writes vectors of its
own. No other rank takes part.
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


def make_reduce_shards(number: int, element: Element, op: Op) -> Any:
    """Return the kernel for a number of shards."""
    total = order.make_total(number, lanes.make_lanes(element, op, False, number))

    def reduce_shards(grid: int, shards: int, result: int, vectors: int) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        low = cuda.local.array(number, types.int64)
        high = cuda.local.array(number, types.int64)
        vector = block * THREADS + cuda.threadIdx.x
        while vector < vectors:
            for i in range(number):
                at = shards + VECTOR * (i * vectors + vector)
                low[i], high[i] = intrinsics.ld_v2_u64(at)
            intrinsics.st_v2_u64(result + VECTOR * vector, total(low, high, 0))
            vector += grid * THREADS

    return reduce_shards


@functools.cache
def kernel(number: int, element: Element, op: Op) -> Kernel:
    """Return the kernel, compiled when first bound."""
    signature = types.int64, binding.ADDRESS, binding.ADDRESS, types.int64
    return Kernel(
        make_reduce_shards, (number, element, op), signature, THREADS, workspace.HELD
    )


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
    return of_call.bind(grid, grid, shards, result, vectors, held=held)
