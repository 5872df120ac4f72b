"""Reduce with signals: to one rank, for larger messages.

The ranks but the root each own a shard: every rank sends each owner that one's shard,
the owners reduce and send to the root. So no link carries more than the message once
in each direction, where ``chunked_all_reduce.py`` needs more. Slots, flags and epochs
are that one's. (Of two ranks it is an exchange, or an all-reduce: see ``bind``.) A
block moves a chunk of rows at a time; in turn t each rank

    scatters  chunk t to its owners
    waits     until all have told that turn t-1 is over
    reduces   what was scattered of chunk t-1, and sends the results to the root
    collects  the results of chunk t-2, on the root
    tells     all that its turn t is over

those also that had nothing to send: the protocol is the same on every rank, and what
root follows what root does not matter.

Memory order. ``flags.py`` orders what a block did in a turn before its flag, and what
the others did in theirs after it. No slot is both scattered into and sent results, so
chunks have four parts of the slots in turn (``slots.py``). Chunk t is scattered into
the part of chunk t-4 after all have told turn t-2; owners read what was there in turn
t-3, and the root the results in turn t-2.

Each element is reduced by one rank, in rank order: to the bits of an all-reduce.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.kernels import chunked_all_reduce, chunked_exchange
from numba_symm.collectives.kernels.exchange import EXCHANGES, Output, make_total
from numba_symm.collectives.kernels.two_shot import shard
from numba_symm.collectives.protocols import workspace
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.handshake import make_left
from numba_symm.collectives.protocols.slots import after, make_place
from numba_symm.collectives.protocols.workspace import (
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
    keep,
    layout,
    resume,
)
from numba_symm.device.intrinsics import ld_v2_u64, st_v2_u64
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch
from numba_symm.waits import REDUCE_DIRECT, REDUCE_SIGNALLED


def make_chunked_reduce(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    lanes = make_lanes(element, op, ragged, size)
    load, store = lanes.load, lanes.store
    total = make_total(size, lanes, Output.AT_ROOT)
    tell, told = make_flags(size, REDUCE_SIGNALLED)
    left = make_left(size, REDUCE_DIRECT)
    at = layout(size).chunked
    epochs, flags = at.epochs, at.flags
    place = make_place(size)
    rows = SIGNALLED.steps(size)
    rank_stride = rows * ROW
    others = size - 1
    batch = min(rows, max(1, LOADS // size))
    held = batch * size

    def chunked_reduce(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        source: int,
        target: int,
        count: int,
        share: int,
        number: int,
        height: int,
        chunks: int,
        left_over: int,
    ) -> None:
        # Ranks are numbered from the one after the root on: number k owns shard k, and
        # the root, which has the last number, none.
        follow_previous_grid(early)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        if left_over != 0 and not left(guard, ring, own, block):  # explore: left
            return
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        own_low = cuda.local.array(batch, types.int64)
        own_high = cuda.local.array(batch, types.int64)
        rank = guard.rank
        root = others - 1 - number  # its place in the ring
        stride = cuda.gridDim.x * height * THREADS
        before, failed = resume(own, epochs, block)
        first = block * height * THREADS + thread
        mine = number * share
        flag = flags + 4 * size * block
        for turn in range(chunks + 2):
            epoch = (before + turn + 1) & 0xFFFFFFFF
            if turn < chunks:
                slot = place(block, before, turn) + VECTOR * thread
                vector = first + turn * stride
                for row in range(0, height, batch):
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        owner, at = (number + 1 + k) % size, vector + step * THREADS
                        if step < height and at < share and owner < others:
                            words = load(source, owner * share + at, count)
                            low[i], high[i] = words
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        owner, at = (number + 1 + k) % size, vector + step * THREADS
                        inside = step < height and at < share and owner < others
                        if inside and not failed:
                            # The sender is its k-th neighbour's (n - 2 - k)-th.
                            # explore: mirror
                            to = ring[k] + slot + (others - 1 - k) * rank_stride
                            st_v2_u64(to + step * ROW, (low[i], high[i]))
            if turn >= 1:  # explore: wait
                last = (before + turn) & 0xFFFFFFFF
                failed = told(guard, own + flag, block, last, failed)
                if failed:
                    break
            if 1 <= turn <= chunks and number < others:
                here = own + place(block, before, turn - 1) + VECTOR * thread
                slot = place(block, before, turn - 1) + VECTOR * thread
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
                        if step < height and vector + step * THREADS < share:
                            result = total(size, low, high, i * size)
                            for k in range(others):
                                if k == root:  # explore: to-root
                                    to = slot + (others - 1 - k) * rank_stride
                                    st_v2_u64(ring[k] + to + step * ROW, result)
            if turn >= 2 and target != 0:
                slot = own + place(block, before, turn - 2) + VECTOR * thread
                vector = first + (turn - 2) * stride
                for row in range(0, height, batch):
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        if step < height and vector + step * THREADS < share:
                            words = ld_v2_u64(slot + k * rank_stride + step * ROW)
                            low[i], high[i] = words
                    for i in range(batch * others):
                        # The root's k-th neighbour has number k.
                        step, k = row + i // others, i % others
                        at = vector + step * THREADS
                        if step < height and at < share:
                            # explore: store
                            store(target, k * share + at, count, low[i], high[i])
            if turn <= chunks:  # explore: tell
                failed = tell(ring, flag, rank, epoch, failed)
                if failed:
                    break
        keep(own, epochs, block, after(before, chunks, 2), failed)

    return chunked_reduce


@functools.cache
def kernel(size: int, element: Element, op: Op, ragged: bool) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged)
    arguments = (ADDRESS, ADDRESS, *6 * (types.int64,))
    return workspace.make_kernel(make_chunked_reduce, constants, *arguments)


def bind(
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
    root: int,
    left_over: bool = False,
) -> Launch:
    """Return the packed launch; see ``Bind`` in ``select.py``, ``operations.py``.

    ``left_over``: it follows ``reduce_direct``, and does what that one has not done.
    """
    args = (comm, source, target, count, element, op)
    vectors = divide_up(count, element.lanes)
    if comm.size <= 2:
        one_chunk = chunks_of(vectors, comm.size, comm.max_blocks).number == 1
        if one_chunk and not left_over:
            return chunked_exchange.bind(EXCHANGES["reduce"], *args, root)
        # Of more chunks, links in use both ways take less time.
        return chunked_all_reduce.bind(*args, REDUCE_DIRECT if left_over else 0)
    owners = comm.size - 1
    share = shard(vectors, owners)
    grid, height, chunks = chunks_of(share, comm.size, comm.max_blocks)
    ragged = share * owners != vectors or is_ragged(
        source, target, count, element.lanes
    )
    return workspace.launch(
        kernel(comm.size, element, op, ragged),
        *(comm, grid, source, target, count, share),
        *((comm.rank - root - 1) % comm.size, height, chunks),
        int(left_over),
    )
