"""Broadcast between the ranks' own arrays: for larger messages, of three ranks or more.

The message is cut into a shard for each rank but the root, its owner. An owner reads
its shard in the root's array and stores it in its own and in the other owners', vector
by vector: so the root sends the message once, each other rank receives it once, and
nothing waits between the first vector and the last. The arrays must be symmetric:
``direct.py`` says how the ranks learn where they are, and what happens if one is not.

Memory order. ``direct.py`` orders the streams' earlier work before all this; the flags
at the end (``flags.py``) put what others stored here, and their reading of the root's
array, before what follows on each rank's stream.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives import broadcast_signalled, workspace
from numba_symm.collectives.direct import (
    make_meet,
    make_refused,
    make_where,
    offered,
)
from numba_symm.collectives.flags import make_flags
from numba_symm.collectives.launches import Enqueue, InTurn, digest_of
from numba_symm.collectives.two_shot import shard
from numba_symm.collectives.workspace import (
    ADDRESS,
    SIGNALLED,
    THREADS,
    divide_up,
    follow_previous_grid,
    layout,
)
from numba_symm.device.intrinsics import ld_u32, ld_v2_u64, st_u32, word_of
from numba_symm.device.lanes import make_lanes
from numba_symm.device.signals import BROADCAST_DIRECT
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel

BATCH = 4  # vectors that a thread loads before it stores them


def make_broadcast_direct(size: int, element: Element, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks and a type that is only moved."""
    _, _, _, load, store = make_lanes(element, "sum", ragged, size)
    meet = make_meet(size, BROADCAST_DIRECT)
    refused, where = make_refused(size), make_where(size)
    tell, told, _ = make_flags(size, BROADCAST_DIRECT)
    at = layout(size).direct
    epochs, flags = at.epochs, at.flags
    others = size - 1

    def broadcast_direct(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        array: int,
        count: int,
        vectors: int,
        share: int,
        root: int,
        digest: int,
        seen: Any,
    ) -> None:
        follow_previous_grid(early)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        low = cuda.local.array(BATCH, types.int64)
        high = cuda.local.array(BATCH, types.int64)
        theirs = cuda.local.array(others, types.int64)
        epoch_at = own + epochs + 4 * block
        flag = flags + 4 * size * block
        epoch = word_of((ld_u32(epoch_at) + 1) & 0xFFFFFFFF)
        meet(guard, ring, own, block, epoch, digest, seen, seen)
        direct = not refused(own, block)
        if direct:
            # Owners are numbered from the one after the root on.
            owner = (guard.rank + others - root) % size
            first = owner * share
            mine = min(share, vectors - first)
            if owner < others:
                to_root = others - 1 - owner  # its place in the ring
                from_root, _ = ld_v2_u64(own + where(block, to_root))
                for k in range(others):
                    theirs[k], _ = ld_v2_u64(own + where(block, k))
                stride = cuda.gridDim.x * THREADS
                start = block * THREADS + thread
                while start < mine:
                    for i in range(BATCH):
                        vector = start + i * stride
                        if vector < mine:
                            low[i], high[i] = load(from_root, first + vector, count)
                    for i in range(BATCH):
                        vector = start + i * stride
                        if vector < mine:
                            store(array, first + vector, count, low[i], high[i])
                            for k in range(others):
                                if k != to_root:
                                    there = first + vector
                                    into = word_of(theirs[k])
                                    store(into, there, count, low[i], high[i])
                    start += BATCH * stride
        # After a refusal, too: flags must not be 2**31 calls old.
        tell(ring, flag, guard.rank, epoch)
        if direct:
            told(guard, own + flag, block, epoch, False)
        # All threads have read the epoch before they met.
        if thread == 0:
            st_u32(epoch_at, epoch)

    return broadcast_direct


@functools.cache
def kernel(size: int, element: Element, ragged: bool) -> Kernel:
    """Return the kernel, compiled when first bound."""
    seen = types.UniTuple(ADDRESS, size - 1)
    arguments = (ADDRESS, *5 * (types.int64,), seen)
    constants = (size, element, ragged)
    return workspace.make_kernel(make_broadcast_direct, constants, *arguments)


def bind(
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
    root: int,
) -> Enqueue:
    """Return what enqueues it; see ``Bind`` in ``select.py``, ``operations.py``.

    ``source`` and ``target`` are one.
    """
    args = (comm, source, target, count, element, op, root)
    if comm.size <= 2:  # nothing is relayed
        return broadcast_signalled.bind(*args)
    call = f"broadcast of {count} {element.name} from {root}"
    vectors = divide_up(count, element.lanes)
    share = shard(vectors, comm.size - 1)
    most = min(comm.max_blocks, SIGNALLED.most(comm.size))
    direct = workspace.launch(
        kernel(comm.size, element, count % element.lanes != 0),
        *(comm, min(divide_up(share, THREADS), most)),
        *(target, count, vectors, share, root, digest_of(call)),
        offered(comm, target, count * element.itemsize),
    )
    return InTurn(direct, broadcast_signalled.bind(*args, left_over=True))
