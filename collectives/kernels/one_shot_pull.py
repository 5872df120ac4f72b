"""All-reduce by reading: every rank stages its input, then reads every peer's.

The plain reference the other algorithms are compared with. A block copies its part
of the input into its rank's workspace, tells the same block of every peer, waits for
theirs, and reduces what it reads from all workspaces. Staging keeps the algorithm
independent of what peers cannot see (where an array lies, how it is aligned) and,
with two halves by parity, needs one barrier a round instead of two.

Memory order. ``syncthreads`` puts the whole block's staging before the release of its
flags; each flag is acquired by one thread and ``syncthreads`` makes it everybody's.
Round k+2 overwrites the half of round k only after every peer's flag of round k+1,
which a peer releases after its whole block has finished reading round k.

Source: the one-shot all-reduce of PyTorch's symmetric memory and of vLLM.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding
from numba_symm.collectives.protocols.binding import ADDRESS, Call, Endpoint
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.order import make_total
from numba_symm.collectives.protocols.partition import is_ragged
from numba_symm.collectives.protocols.workspace import (
    PULL,
    ROW,
    THREADS,
    divide_up,
    follow_previous_grid,
    keep,
    layout,
    resume,
)
from numba_symm.device.intrinsics import ld_v2_u64, st_v2_u64
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch
from numba_symm.waits import ONE_SHOT_PULL


def make_one_shot_pull(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    lanes = make_lanes(element, op, ragged, size)
    load, store, total = lanes.load, lanes.store, make_total(size, lanes)
    at = layout(size).pull
    epochs, flags, slots = at.epochs, at.flags, at.slots
    half_bytes = PULL.rows * ROW
    raise_flags, await_flags = make_flags(size, ONE_SHOT_PULL)

    def one_shot_pull(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        source: int,
        target: int,
        count: int,
        vectors: int,
        share: int,
        peers: Any,
    ) -> None:
        follow_previous_grid(early)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        epoch, failed = resume(own, epochs, block)
        own_flags = flags + 4 * size * block
        start = block * share
        while start < vectors:  # explore: rounds
            epoch = (epoch + 1) & 0xFFFFFFFF
            half = slots + (2 * block + (epoch & 1)) * half_bytes  # explore: half
            end = min(start + share, vectors)
            for vector in range(start + thread, end, THREADS):
                slot = own + half + 16 * (vector - start)
                words = load(source, vector, count)
                if not failed:
                    st_v2_u64(slot, words)
            failed = raise_flags(ring, own_flags, guard.rank, epoch, failed)
            failed = await_flags(guard, own + own_flags, block, epoch, failed)
            if failed:
                break
            for vector in range(start + thread, end, THREADS):
                slot = half + 16 * (vector - start)
                for r in range(size):
                    low[r], high[r] = ld_v2_u64(peers[r] + slot)
                result = total(low, high, 0)
                store(target, vector, count, result[0], result[1])
            start += cuda.gridDim.x * share
        keep(own, epochs, block, epoch, failed)

    return one_shot_pull


@functools.cache
def kernel(size: int, element: Element, op: Op, ragged: bool) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged)
    peers = types.UniTuple(ADDRESS, size)
    arguments = (ADDRESS, ADDRESS, types.int64, types.int64, types.int64, peers)
    return binding.make_kernel(make_one_shot_pull, constants, *arguments)


def bind(end: Endpoint, call: Call) -> Launch:
    """Return the packed launch."""
    vectors = call.vectors
    grid = min(divide_up(vectors, THREADS), end.max_blocks, PULL.most(end.size))
    # Equal parts, of whole sweeps of the block, that fit the staging slots.
    sweeps = min(divide_up(divide_up(vectors, grid), THREADS), PULL.rows)
    share = sweeps * THREADS
    grid = min(grid, divide_up(vectors, share))
    return binding.launch(
        kernel(end.size, call.element, call.op, is_ragged(call)),
        *(end, grid, call.source, call.target, call.count, vectors, share),
        end.workspaces,
    )
