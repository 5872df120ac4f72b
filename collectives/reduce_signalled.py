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
    MAX_BLOCKS,
    ROW,
    SIGNALLED,
    THREADS,
    VECTOR,
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
        chunks: int,
    ) -> None:
        # A rank whose ``number`` is below ``owners`` owns the shard of that number; the
        # k-th of the ring has ``number + 1 + k``. The root is the ``root``-th of it.
        follow_previous_grid(early)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        stride = cuda.gridDim.x * rows * THREADS
        epoch_at = own + epochs + 4 * block
        before = word_of(ld_u32(epoch_at))
        first = block * rows * THREADS + thread
        mine = number * share
        failed = False
        # The order of these steps is what the halves rest on.
        for turn in range(chunks + 2):
            if turn >= 2:
                epoch = (before + turn - 1) & 0xFFFFFFFF
                flag = own + flag_place(block, REDUCED)
                failed = told(guard, flag, block, epoch, failed)
                slot = own + place(block, epoch, REDUCED) + VECTOR * thread
                for row in range(rows):
                    vector = first + (turn - 2) * stride + row * THREADS
                    if vector < share and target != 0 and not root_owns:
                        here = slot + row * ROW
                        for k in range(others):
                            low[k], high[k] = ld_v2_u64(here + k * rank_stride)
                        for k in range(others):
                            # The root's k-th neighbour has number k.
                            store(target, k * share + vector, count, low[k], high[k])
            if turn < chunks:
                epoch = (before + turn + 1) & 0xFFFFFFFF
                slot = place(block, epoch, SCATTERED) + VECTOR * thread
                for row in range(rows):
                    vector = first + turn * stride + row * THREADS
                    if vector < share:
                        there = slot + row * ROW
                        for k in range(others):
                            owner = (number + 1 + k) % size
                            if owner < owners:
                                at = owner * share + vector
                                low[k], high[k] = load(source, at, count)
                        for k in range(others):
                            if (number + 1 + k) % size < owners:
                                # The sender is its k-th neighbour's (n - 2 - k)-th.
                                to = ring[k] + there + (others - 1 - k) * rank_stride
                                st_v2_u64(to, (low[k], high[k]))
                tell(ring, flag_place(block, SCATTERED), guard.rank, epoch)
            if 1 <= turn <= chunks:
                epoch = (before + turn) & 0xFFFFFFFF
                flag = own + flag_place(block, SCATTERED)
                failed = told(guard, flag, block, epoch, failed)
                here = own + place(block, epoch, SCATTERED) + VECTOR * thread
                slot = place(block, epoch, REDUCED) + VECTOR * thread
                for row in range(rows):
                    vector = first + (turn - 1) * stride + row * THREADS
                    if vector < share and number < owners:
                        low[0], high[0] = load(source, mine + vector, count)
                        for k in range(others):
                            words = ld_v2_u64(here + row * ROW + k * rank_stride)
                            low[k + 1], high[k + 1] = words
                        result = reduced(guard.rank, size, low, high, spare)
                        if root_owns:
                            store(target, mine + vector, count, result[0], result[1])
                        for k in range(others):
                            if k == root:
                                there = slot + (others - 1 - k) * rank_stride
                                st_v2_u64(ring[k] + there + row * ROW, result)
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
    arguments = (ADDRESS, ADDRESS, *5 * (types.int64,))
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
    rows = SIGNALLED.steps(comm.size)
    grid = min(divide_up(share, rows * THREADS), comm.max_blocks, SIGNALLED.blocks)
    ragged = share * owners != vectors or is_ragged(
        source, target, count, element.lanes
    )
    root_along_ring = (root - comm.rank - 1) % comm.size
    first_owner = root if owners == 1 else root + 1
    return workspace.launch(
        kernel(comm.size, element, op, ragged),
        *(comm, grid, source, target, count, share),
        *((comm.rank - first_owner) % comm.size, root_along_ring),
        divide_up(share, grid * rows * THREADS),
    )
