"""All-gather, all-to-all and partial reductions with signals, for larger messages.

As ``exchange.py``, but a block moves a chunk of rows at a time through the workspace
and signals it with one flag a rank, as ``two_shot_signalled.py`` does, whose slots and
flags these are: where that one sends back results, this one tells that it has read.

Memory order. ``flags.py`` orders a chunk's stores before its flag and its reading after
it. Chunk k+2 goes into the half of chunk k after every rank has told that it has read
chunk k, this call's or an earlier one's.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives import workspace
from numba_symm.collectives.exchange import Exchange, Output, make_reduced, of_none
from numba_symm.collectives.flags import make_flags
from numba_symm.collectives.workspace import (
    ADDRESS,
    LOADS,
    MAX_BLOCKS,
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
    ld_u32,
    ld_v2_u64,
    st_u32,
    st_v2_u64,
    word_of,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.device.signals import EXCHANGE
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch


def make_exchange_signalled(
    size: int, element: Element, op: Op, ragged: bool, kind: Exchange
) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    lanes = make_lanes(element, op, ragged, size)
    load, store = lanes.load, lanes.store
    reduced = make_reduced(size, lanes, kind.output)
    none_stored, none_low, none_high = of_none(element, op, kind.output)
    tell, told = make_flags(size, EXCHANGE)
    at = layout(size).two_shot_signalled
    epochs, flags, slots = at.epochs, at.flags, at.slots
    rows = SIGNALLED.steps(size)
    rank_stride = rows * ROW
    half_stride = 2 * (size - 1) * rank_stride  # of which the first part is used here
    read_flags = flags + 4 * size * MAX_BLOCKS
    others = size - 1
    batch = min(rows, max(1, LOADS // size))
    held = batch * size
    parts_in, parts_out = kind.parts_in, kind.output is Output.PARTS

    def exchange_signalled(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        source: int,
        target: int,
        part: int,
        count: int,
        vectors: int,
        taken: int,
        height: int,
        chunks: int,
    ) -> None:
        follow_previous_grid(early)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        own_low = cuda.local.array(size, types.int64)
        own_high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        stride = cuda.gridDim.x * height * THREADS
        epoch_at = own + epochs + 4 * block
        before = word_of(ld_u32(epoch_at))
        first = block * height * THREADS + thread
        mine = source + guard.rank * part if parts_in else source
        sent = flags + 4 * size * block
        read = read_flags + 4 * size * block
        failed = False
        for turn in range(chunks + 2):
            if turn >= 2:
                epoch = (before + turn - 1) & 0xFFFFFFFF
                failed = told(guard, own + read, block, epoch, failed)
            if turn < chunks:
                epoch = (before + turn + 1) & 0xFFFFFFFF
                slot = slots + (2 * block + (epoch & 1)) * half_stride
                vector = first + turn * stride
                for row in range(0, height, batch):
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        at = vector + step * THREADS
                        if step < height and at < vectors:
                            if parts_in:
                                r = (guard.rank + 1 + k) % size
                                words = load(source + r * part, at, count)
                                low[i], high[i] = words
                            elif k == 0:
                                words = load(source, at, count)
                                low[i], high[i] = words
                            else:
                                low[i], high[i] = low[i - 1], high[i - 1]
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        if step < height and vector + step * THREADS < vectors:
                            # The sender is its k-th neighbour's (n - 2 - k)-th.
                            to = ring[k] + slot + (others - 1 - k) * rank_stride
                            place = to + step * ROW + VECTOR * thread
                            st_v2_u64(place, (low[i], high[i]))
                tell(ring, sent, guard.rank, epoch)
            if 1 <= turn <= chunks:
                epoch = (before + turn) & 0xFFFFFFFF
                failed = told(guard, own + sent, block, epoch, failed)
                slot = own + slots + (2 * block + (epoch & 1)) * half_stride
                slot += VECTOR * thread
                vector = first + (turn - 1) * stride
                for row in range(0, height, batch):
                    for i in range(held):
                        step, j = row + i // size, i % size
                        at = vector + step * THREADS
                        if step < height and at < vectors:
                            if j == 0:
                                low[i], high[i] = load(mine, at, count)
                            else:
                                here = slot + (j - 1) * rank_stride
                                low[i], high[i] = ld_v2_u64(here + step * ROW)
                    for i in range(batch):
                        at = vector + (row + i) * THREADS
                        if row + i < height and at < vectors:
                            for j in range(size):
                                own_low[j] = low[i * size + j]
                                own_high[j] = high[i * size + j]
                            if parts_out:
                                for j in range(size):
                                    to = target + (guard.rank + j) % size * part
                                    store(to, at, count, own_low[j], own_high[j])
                            elif taken > 0:
                                words = reduced(
                                    guard.rank, taken, own_low, own_high, spare
                                )
                                store(target, at, count, words[0], words[1])
                            elif none_stored:
                                store(target, at, count, none_low, none_high)
                # What this block has read of the chunk, it has read before it tells so.
                tell(ring, read, guard.rank, epoch)
        # All threads have read the epoch before it changes.
        cuda.syncthreads()
        if thread == 0:
            st_u32(epoch_at, (before + chunks) & 0xFFFFFFFF)

    return exchange_signalled


@functools.cache
def kernel(size: int, element: Element, op: Op, ragged: bool, kind: Exchange) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged, kind)
    arguments = (ADDRESS, ADDRESS, *6 * (types.int64,))
    return workspace.make_kernel(make_exchange_signalled, constants, *arguments)


def bind(
    kind: Exchange,
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
) -> Launch:
    """Return the packed launch; see ``Bind`` in ``select.py``."""
    vectors = divide_up(count, element.lanes)
    grid, height, chunks = chunks_of(vectors, comm.size, comm.max_blocks)
    ragged = is_ragged(source, target, count, element.lanes)
    part = count * element.itemsize
    return workspace.launch(
        kernel(comm.size, element, op, ragged, kind),
        *(comm, grid, source, target, part, count, vectors),
        *(kind.output.taken(comm.rank, comm.size, root=0), height, chunks),
    )
