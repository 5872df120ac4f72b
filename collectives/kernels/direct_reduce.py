"""Reduce between the ranks' own arrays: for larger messages.

The ranks but the root each own a shard; of two ranks the root owns all. An owner reads
its shard in all ranks' inputs, reduces it in rank order, and stores the result in the
root's output, vector by vector: so no link carries more than the message once in each
direction, and nothing waits between the first vector and the last. The inputs and the
root's output must be symmetric: ``handshake.py`` says how the ranks learn where they
are, and what happens otherwise.

Memory order: as ``direct_broadcast.py``. In place, the thread that reads a vector of
the root's input stores that vector of its output afterwards, and no other touches it.

Each element is reduced by one rank, in rank order: to the bits of an all-reduce.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.kernels import chunked_reduce
from numba_symm.collectives.kernels.exchange import Output, make_total
from numba_symm.collectives.kernels.two_shot import shard
from numba_symm.collectives.protocols import handshake, workspace
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.protocols.handshake import make_refused, make_where, offered
from numba_symm.collectives.protocols.workspace import (
    ADDRESS,
    THREADS,
    divide_up,
    follow_previous_grid,
)
from numba_symm.device.intrinsics import ld_v2_u64, word_of
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel
from numba_symm.waits import REDUCE_DIRECT

LOADS = 8  # vectors that a thread loads before it reduces them


def make_direct_reduce(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    lanes = make_lanes(element, op, ragged, size)
    load, store = lanes.load, lanes.store
    total = make_total(size, lanes, Output.AT_ROOT)
    refused, where = make_refused(size), make_where(size)
    others = size - 1
    after_owner = others if size > 2 else size
    batch = max(1, LOADS // size)
    held = batch * size

    def direct_reduce(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        source: int,
        target: int,
        count: int,
        vectors: int,
        share: int,
        root: int,
    ) -> None:
        follow_previous_grid(early)
        # Owners are numbered from the one after the root on, or from the root.
        owner = (guard.rank + after_owner - root) % size
        if refused(own) or owner == others:  # explore: refused
            return
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        theirs = cuda.local.array(size, types.int64)
        first = owner * share
        mine = min(share, vectors - first)
        into = target
        if size > 2:
            _, into = ld_v2_u64(own + where(others - 1 - owner))  # explore: into
        for r in range(size):
            # By rank: the order of the reduction.
            k = (r + others - guard.rank) % size
            theirs[r] = source
            if k < others:
                theirs[r], _ = ld_v2_u64(own + where(k))
        stride = cuda.gridDim.x * THREADS
        start = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while start < mine:
            for i in range(held):
                vector = start + i // size * stride
                if vector < mine:
                    array = word_of(theirs[i % size])
                    low[i], high[i] = load(array, first + vector, count)
            for i in range(batch):
                vector = start + i * stride
                if vector < mine:
                    words = total(size, low, high, i * size)
                    store(into, first + vector, count, words[0], words[1])
            start += batch * stride

    return direct_reduce


@functools.cache
def kernel(size: int, element: Element, op: Op, ragged: bool) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged)
    arguments = (ADDRESS, ADDRESS, *4 * (types.int64,))
    return workspace.make_kernel(make_direct_reduce, constants, *arguments)


def bind(
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
    root: int,
) -> Enqueue:
    """Return what enqueues it; see ``Bind`` in ``select.py``, ``operations.py``."""
    args = (comm, source, target, count, element, op, root)
    if comm.size == 1:
        return chunked_reduce.bind(*args)
    nbytes = count * element.itemsize
    inputs = outputs = offered(comm, source, nbytes)
    if comm.rank == root:
        outputs = offered(comm, target, nbytes)
        if outputs[0] == 0:
            inputs = outputs
    call = f"reduce of {count} {element.name} by {op!r} to {root}"
    vectors = divide_up(count, element.lanes)
    share = shard(vectors, comm.size - 1)
    grid = min(divide_up(share, THREADS), comm.max_blocks, handshake.BLOCKS)
    move = workspace.launch(
        kernel(comm.size, element, op, count % element.lanes != 0),
        *(comm, grid),
        *(source, target, count, vectors, share, root),
    )
    rest = chunked_reduce.bind(*args, left_over=True)
    return handshake.bind(comm, REDUCE_DIRECT, call, (inputs, outputs), move, rest)
