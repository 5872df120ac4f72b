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

from numba_symm.collectives.workspace import (
    PULL_VECTORS,
    THREADS,
    divide_up,
    layout,
    reduction_arguments,
    reduction_types,
)
from numba_symm.device.intrinsics import (
    ld_u32,
    ld_v2_u64,
    st_release_sys_u32,
    st_u32,
    st_v2_u64,
    word_of,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.device.signals import ALL_REDUCE_PULL, wait_for_epoch, wait_record
from numba_symm.dtypes import Element
from numba_symm.kernels import Kernel, Launch


def make_kernel(size: int, element: Element, op: str) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    unpack, pack, combine, load_word, store_word = make_lanes(element, op)
    at = layout(size)
    epochs, flags, slots = at.pull_epochs, at.pull_flags, at.pull_slots
    half_bytes = 16 * PULL_VECTORS
    per_vector = 2 * element.lanes

    def one_shot_pull(
        guard: Any,
        peers: Any,
        own: int,
        source: int,
        source_aligned: bool,
        target: int,
        target_aligned: bool,
        count: int,
        vectors: int,
        share: int,
    ) -> None:
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        epoch_at = own + epochs + 4 * block
        epoch = word_of(ld_u32(epoch_at))
        own_flags = flags + 4 * size * block
        start = block * share
        failed = False
        while start < vectors:
            epoch = (epoch + 1) & 0xFFFFFFFF
            half = slots + (2 * block + (epoch & 1)) * half_bytes
            end = min(start + share, vectors)
            for vector in range(start + thread, end, THREADS):
                slot = own + half + 16 * (vector - start)
                if source_aligned and (vector + 1) * per_vector <= count:
                    st_v2_u64(slot, ld_v2_u64(source + 16 * vector))
                else:
                    first = load_word(source, 2 * vector, count, False)
                    second = load_word(source, 2 * vector + 1, count, False)
                    st_v2_u64(slot, (first, second))
            # The block's part is staged before any of its flags says so.
            cuda.syncthreads()
            for r in range(size):
                if thread == r % THREADS:
                    flag = peers[r] + own_flags + 4 * guard.rank
                    st_release_sys_u32(flag, epoch)
            for r in range(size):
                if thread == r % THREADS and not failed:
                    record = wait_record(ALL_REDUCE_PULL, guard.rank, r, block, epoch)
                    flag = own + own_flags + 4 * r
                    failed = not wait_for_epoch(guard, flag, epoch, record)
            # Every peer's part, acquired by one thread each, is visible to all.
            cuda.syncthreads()
            for vector in range(start + thread, end, THREADS):
                slot = half + 16 * (vector - start)
                for r in range(size):
                    low[r], high[r] = ld_v2_u64(peers[r] + slot)
                # In rank order on every rank: all get the same bits.
                first_total = unpack(low[0])
                second_total = unpack(high[0])
                for r in range(1, size):
                    first_total = combine(first_total, unpack(low[r]))
                    second_total = combine(second_total, unpack(high[r]))
                first = pack(first_total)
                second = pack(second_total)
                if target_aligned and (vector + 1) * per_vector <= count:
                    st_v2_u64(target + 16 * vector, (first, second))
                else:
                    store_word(target, 2 * vector, count, False, first)
                    store_word(target, 2 * vector + 1, count, False, second)
            start += cuda.gridDim.x * share
        # All threads have read the epoch before it changes.
        cuda.syncthreads()
        if thread == 0:
            st_u32(epoch_at, epoch)

    return one_shot_pull


@functools.cache
def kernel(size: int, element: Element, op: str) -> Kernel:
    """Return the kernel, compiled when first bound."""
    signature = (*reduction_types(size), types.int64, types.int64)
    return Kernel(make_kernel, (size, element, op), signature, THREADS)


def bind(
    comm: Any, source: int, target: int, count: int, element: Element, op: str
) -> Launch:
    """Return the packed launch; see ``AllReduce.bind`` in ``select.py``."""
    vectors = divide_up(count, 2 * element.lanes)
    grid = min(divide_up(vectors, THREADS), comm.max_blocks)
    # Equal parts, of whole sweeps of the block, that fit the staging slots.
    share = min(divide_up(divide_up(vectors, grid), THREADS) * THREADS, PULL_VECTORS)
    grid = min(grid, divide_up(vectors, share))
    arguments = reduction_arguments(comm, source, target, count, alignment=16)
    return kernel(comm.size, element, op).bind(grid, *arguments, vectors, share)
