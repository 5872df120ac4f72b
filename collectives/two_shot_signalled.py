"""All-reduce in two flights with signals: for large messages of any type.

As ``two_shot.py``, but a block moves a chunk of rows at a time and signals it with one
flag a rank, so that nothing but data crosses the links. A block's rounds overlap. In
turn t each rank

    waits     until all have told that turn t-1 is over
    reduces   what was scattered of chunk t-1, and sends the results to all
    scatters  chunk t to its owners
    gathers   the results of chunk t-2
    tells     all that its turn t is over

Memory order. ``flags.py`` orders what a block did in a turn before its flag, and what
the others did in theirs after it. Chunks alternate between two halves of the slots,
each with a set for what is scattered and one for results. Chunk t is scattered into the
half of chunk t-2 after all have told turn t-1, in which they read what was there.
Results of chunk t are sent, in turn t+1, into the half of chunk t-2 after all have told
turn t, in which they read those.

Between calls, of this kernel and the others that have these slots, flags and epochs
(``broadcast_signalled.py``, ``reduce_signalled.py``, ``exchange_signalled.py``): a
call's first chunk goes into the half that follows from its first epoch, of which every
rank has read everything by then; anything else is written after all have told turn 0,
and so have left the call before. This call ends before a rank knows that the others
have read the last chunk's results; so it counts one more epoch than it has turns, that
the next call begins in the other half.

Each element is reduced by one rank, in rank order, so all ranks get the same bits. A
rank without an output, in a reduction to one rank, stores nothing.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives import workspace
from numba_symm.collectives.exchange import Output, make_total
from numba_symm.collectives.flags import make_flags
from numba_symm.collectives.two_shot import shard
from numba_symm.collectives.workspace import (
    ADDRESS,
    LOADS,
    ROW,
    SIGNALLED,
    THREADS,
    VECTOR,
    chunks_of,
    divide_up,
    follow_previous_grid,
    is_ragged,
    layout,
)
from numba_symm.device.intrinsics import (
    device_function,
    ld_u32,
    ld_v2_u64,
    st_u32,
    st_v2_u64,
    word_of,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.device.signals import TWO_SHOT_SIGNALLED
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch

SCATTERED, REDUCED = 0, 1  # what a set of slots holds


def make_two_shot_signalled(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    lanes = make_lanes(element, op, ragged, size)
    load, store = lanes.load, lanes.store
    total = make_total(size, lanes, Output.REDUCED)
    tell, told = make_flags(size, TWO_SHOT_SIGNALLED)
    at = layout(size).two_shot_signalled
    epochs, flags, slots = at.epochs, at.flags, at.slots
    rows = SIGNALLED.steps(size)
    rank_stride = rows * ROW
    set_stride = (size - 1) * rank_stride
    half_stride = 2 * set_stride
    others = size - 1
    batch = min(rows, max(1, LOADS // size))
    held = batch * size

    @device_function
    def place(block: int, epoch: int, which: int) -> int:
        half = slots + (2 * block + (epoch & 1)) * half_stride
        return half + which * set_stride

    def two_shot_signalled(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        source: int,
        target: int,
        count: int,
        share: int,
        height: int,
        chunks: int,
    ) -> None:
        follow_previous_grid(early)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        own_low = cuda.local.array(batch, types.int64)
        own_high = cuda.local.array(batch, types.int64)
        rank = guard.rank
        stride = cuda.gridDim.x * height * THREADS
        epoch_at = own + epochs + 4 * block
        before = word_of(ld_u32(epoch_at))
        first = block * height * THREADS + thread
        mine = rank * share
        flag = flags + 4 * size * block
        failed = False
        for turn in range(chunks + 2):
            epoch = (before + turn + 1) & 0xFFFFFFFF
            if turn >= 1:
                last = (before + turn) & 0xFFFFFFFF
                failed = told(guard, own + flag, block, last, failed)
            if 1 <= turn <= chunks:
                here = own + place(block, epoch - 1, SCATTERED) + VECTOR * thread
                slot = place(block, epoch - 1, REDUCED) + VECTOR * thread
                vector = first + (turn - 1) * stride
                for row in range(0, height, batch):
                    for i in range(batch):
                        at = vector + (row + i) * THREADS
                        if row + i < height and at < share:
                            own_low[i], own_high[i] = load(source, mine + at, count)
                    for i in range(batch * size):
                        step, r = row + i // size, i % size
                        if step < height and vector + step * THREADS < share:
                            k = (r + others - rank) % size
                            if k < others:
                                words = ld_v2_u64(here + k * rank_stride + step * ROW)
                                low[i], high[i] = words
                            else:
                                low[i] = own_low[i // size]
                                high[i] = own_high[i // size]
                    for i in range(batch):
                        step = row + i
                        at = vector + step * THREADS
                        if step < height and at < share:
                            result = total(size, low, high, i * size)
                            for k in range(others):
                                # The sender is its k-th neighbour's (n - 2 - k)-th.
                                there = slot + (others - 1 - k) * rank_stride
                                st_v2_u64(ring[k] + there + step * ROW, result)
                            if target != 0:
                                at += mine
                                store(target, at, count, result[0], result[1])
            if turn < chunks:
                slot = place(block, epoch, SCATTERED) + VECTOR * thread
                vector = first + turn * stride
                for row in range(0, height, batch):
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        at = vector + step * THREADS
                        if step < height and at < share:
                            at += (rank + 1 + k) % size * share
                            low[i], high[i] = load(source, at, count)
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        if step < height and vector + step * THREADS < share:
                            to = ring[k] + slot + (others - 1 - k) * rank_stride
                            st_v2_u64(to + step * ROW, (low[i], high[i]))
            if turn >= 2 and target != 0:
                slot = own + place(block, epoch - 2, REDUCED) + VECTOR * thread
                vector = first + (turn - 2) * stride
                for row in range(0, height, batch):
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        if step < height and vector + step * THREADS < share:
                            words = ld_v2_u64(slot + k * rank_stride + step * ROW)
                            low[i], high[i] = words
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        at = vector + step * THREADS
                        if step < height and at < share:
                            at += (rank + 1 + k) % size * share
                            store(target, at, count, low[i], high[i])
            if turn <= chunks:
                tell(ring, flag, rank, epoch)
        # All threads have read the epoch before it changes.
        cuda.syncthreads()
        if thread == 0:
            st_u32(epoch_at, (before + chunks + 2) & 0xFFFFFFFF)

    return two_shot_signalled


@functools.cache
def kernel(size: int, element: Element, op: Op, ragged: bool) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged)
    arguments = (ADDRESS, ADDRESS, *4 * (types.int64,))
    return workspace.make_kernel(make_two_shot_signalled, constants, *arguments)


def bind(
    comm: Any, source: int, target: int, count: int, element: Element, op: Op
) -> Launch:
    """Return the packed launch; see ``Bind`` in ``select.py``."""
    vectors = divide_up(count, element.lanes)
    share = shard(vectors, comm.size)
    grid, height, chunks = chunks_of(share, comm.size, comm.max_blocks)
    ragged = share * comm.size != vectors or is_ragged(
        source, target, count, element.lanes
    )
    return workspace.launch(
        kernel(comm.size, element, op, ragged),
        *(comm, grid, source, target, count, share, height, chunks),
    )
