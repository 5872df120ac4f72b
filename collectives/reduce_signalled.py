"""Reduce with signals: to one rank, for larger messages.

The ranks but the root each own a shard: every rank sends each owner that one's shard,
the owners reduce and send to the root. So no link carries more than the message once
in each direction. Of two ranks the root owns everything.

A block moves a chunk of rows at a time and signals it with one flag a rank, as
``two_shot_signalled.py`` does, whose slots, flags and epochs these are. All ranks tell
all others after each of two steps, those also that had nothing to send: the protocol
is the same on every rank, and what root follows what root does not matter.

Memory order. ``flags.py`` orders what comes before a flag and after it. Of a chunk k

    1. all ranks write into the owners' first slots, and tell all ("scattered")
    2. told so by all, owners read these, write into the root's second slots; all tell
       all ("reduced")
    3. told so by all, the root reads its second slots

in which a block turns to step 3 of chunk k before step 1 of chunk k+2, and to that
before step 2 of chunk k+1. Chunks alternate between two halves; the ones before this
call's are another call's, of this kernel or another on these slots. First slots of
chunk k+2 lie where those of chunk k did: a rank writes them after all have told
"reduced" of chunk k, having read them. Second slots of chunk k+2 are written after the
root has told "scattered" of it, having read those of chunk k. A call ends with all
ranks told "reduced" of its last chunk, so the next one begins with its first slots
free, as ``exchange_signalled.py`` ends and needs it.

Each element is reduced by one rank, in rank order: to the bits of an all-reduce.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives import workspace
from numba_symm.collectives.exchange import Output, make_reduced
from numba_symm.collectives.flags import make_flags
from numba_symm.collectives.two_shot import shard
from numba_symm.collectives.two_shot_signalled import REDUCED, SCATTERED
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
    device_function,
    ld_u32,
    ld_v2_u64,
    st_u32,
    st_v2_u64,
    word_of,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.device.signals import REDUCE_SIGNALLED
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch


def owners_of(size: int) -> int:
    """Return how many of ``size`` ranks own a shard: the root only if it must."""
    return size - 1 if size > 2 else 1


def make_reduce_signalled(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    lanes = make_lanes(element, op, ragged, size)
    load, store = lanes.load, lanes.store
    reduced = make_reduced(size, lanes, Output.AT_ROOT)
    tell, told = make_flags(size, REDUCE_SIGNALLED)
    at = layout(size).two_shot_signalled
    epochs, flags, slots = at.epochs, at.flags, at.slots
    rows = SIGNALLED.steps(size)
    rank_stride = rows * ROW
    set_stride = (size - 1) * rank_stride
    half_stride = 2 * set_stride
    flag_set = 4 * size * MAX_BLOCKS
    others = size - 1
    owners = owners_of(size)
    root_owns = owners == 1
    batch = min(rows, max(1, LOADS // size))
    held = batch * size

    @device_function
    def place(block: int, epoch: int, which: int) -> int:
        half = slots + (2 * block + (epoch & 1)) * half_stride
        return half + which * set_stride

    @device_function
    def flag_place(block: int, which: int) -> int:
        return flags + which * flag_set + 4 * size * block

    def reduce_signalled(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        source: int,
        target: int,
        count: int,
        share: int,
        number: int,
        root: int,
        height: int,
        chunks: int,
    ) -> None:
        # A rank whose ``number`` is below ``owners`` owns the shard of that number; the
        # k-th of the ring has ``number + 1 + k``. The root is the ``root``-th of it.
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
        mine = number * share
        failed = False
        # The order of these steps is what the halves rest on.
        for turn in range(chunks + 2):
            if turn >= 2:
                epoch = (before + turn - 1) & 0xFFFFFFFF
                flag = own + flag_place(block, REDUCED)
                failed = told(guard, flag, block, epoch, failed)
                slot = own + place(block, epoch, REDUCED) + VECTOR * thread
                vector = first + (turn - 2) * stride
                if target != 0 and not root_owns:
                    for row in range(0, height, batch):
                        for i in range(batch * others):
                            step, k = row + i // others, i % others
                            if step < height and vector + step * THREADS < share:
                                here = slot + k * rank_stride + step * ROW
                                low[i], high[i] = ld_v2_u64(here)
                        for i in range(batch * others):
                            # The root's k-th neighbour has number k.
                            step, k = row + i // others, i % others
                            at = vector + step * THREADS
                            if step < height and at < share:
                                store(target, k * share + at, count, low[i], high[i])
            if turn < chunks:
                epoch = (before + turn + 1) & 0xFFFFFFFF
                slot = place(block, epoch, SCATTERED) + VECTOR * thread
                vector = first + turn * stride
                for row in range(0, height, batch):
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        owner, at = (number + 1 + k) % size, vector + step * THREADS
                        if step < height and at < share and owner < owners:
                            words = load(source, owner * share + at, count)
                            low[i], high[i] = words
                    for i in range(batch * others):
                        step, k = row + i // others, i % others
                        owner, at = (number + 1 + k) % size, vector + step * THREADS
                        if step < height and at < share and owner < owners:
                            # The sender is its k-th neighbour's (n - 2 - k)-th.
                            to = ring[k] + slot + (others - 1 - k) * rank_stride
                            st_v2_u64(to + step * ROW, (low[i], high[i]))
                tell(ring, flag_place(block, SCATTERED), guard.rank, epoch)
            if 1 <= turn <= chunks:
                epoch = (before + turn) & 0xFFFFFFFF
                flag = own + flag_place(block, SCATTERED)
                failed = told(guard, flag, block, epoch, failed)
                here = own + place(block, epoch, SCATTERED) + VECTOR * thread
                slot = place(block, epoch, REDUCED) + VECTOR * thread
                vector = first + (turn - 1) * stride
                if number < owners:
                    for row in range(0, height, batch):
                        for i in range(held):
                            step, j = row + i // size, i % size
                            at = vector + step * THREADS
                            if step < height and at < share:
                                if j == 0:
                                    low[i], high[i] = load(source, mine + at, count)
                                else:
                                    from_k = here + (j - 1) * rank_stride
                                    words = ld_v2_u64(from_k + step * ROW)
                                    low[i], high[i] = words
                        for i in range(batch):
                            step = row + i
                            at = vector + step * THREADS
                            if step < height and at < share:
                                for j in range(size):
                                    own_low[j] = low[i * size + j]
                                    own_high[j] = high[i * size + j]
                                result = reduced(
                                    guard.rank, size, own_low, own_high, spare
                                )
                                if root_owns:
                                    at += mine
                                    store(target, at, count, result[0], result[1])
                                for k in range(others):
                                    if k == root:
                                        to = slot + (others - 1 - k) * rank_stride
                                        st_v2_u64(ring[k] + to + step * ROW, result)
                tell(ring, flag_place(block, REDUCED), guard.rank, epoch)
        # All threads have read the epoch before it changes.
        cuda.syncthreads()
        if thread == 0:
            st_u32(epoch_at, (before + chunks) & 0xFFFFFFFF)

    return reduce_signalled


@functools.cache
def kernel(size: int, element: Element, op: Op, ragged: bool) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged)
    arguments = (ADDRESS, ADDRESS, *6 * (types.int64,))
    return workspace.make_kernel(make_reduce_signalled, constants, *arguments)


def bind(
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
    root: int,
) -> Launch:
    """Return the packed launch; see ``Bind`` in ``select.py``, ``operations.py``."""
    vectors = divide_up(count, element.lanes)
    owners = owners_of(comm.size)
    share = shard(vectors, owners)
    grid, height, chunks = chunks_of(share, comm.size, comm.max_blocks)
    ragged = share * owners != vectors or is_ragged(
        source, target, count, element.lanes
    )
    root_along_ring = (root - comm.rank - 1) % comm.size
    first_owner = root if owners == 1 else root + 1
    return workspace.launch(
        kernel(comm.size, element, op, ragged),
        *(comm, grid, source, target, count, share),
        *((comm.rank - first_owner) % comm.size, root_along_ring, height, chunks),
    )
