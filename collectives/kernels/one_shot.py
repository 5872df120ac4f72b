"""All-reduce in one flight: every rank posts its whole input to every other rank.

For small messages. Every thread posts its vectors to its twin in every other rank,
waits for theirs, and reduces them with its own; ``mailboxes.py`` says how that needs no
barrier, and orders the memory accesses.

Source: the one-shot all-reduces of NCCL (LL), MSCCL++ and TensorRT-LLM (Lamport).
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import workspace
from numba_symm.collectives.protocols.mailboxes import (
    EVERYONE,
    TRANSPORTS,
    make_mailboxes,
    most_blocks,
)
from numba_symm.collectives.protocols.order import make_in_rank_order
from numba_symm.collectives.protocols.workspace import (
    ADDRESS,
    ONE_SHOT,
    THREADS,
    Region,
    divide_up,
    follow_previous_grid,
    is_ragged,
    keep,
    layout,
    resume,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch
from numba_symm.waits import ONE_SHOT_LL, ONE_SHOT_MARKED, ONE_SHOT_SENTINEL

_OPERATIONS = {
    "sentinel": ONE_SHOT_SENTINEL,
    "marked": ONE_SHOT_MARKED,
    "ll": ONE_SHOT_LL,
}


def make_one_shot(
    size: int, element: Element, op: Op, ragged: bool, transport: str, steps: int
) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction.

    Args:
        size: number of ranks.
        element: the element type.
        op: the operator.
        ragged: see ``lanes.make_lanes``.
        transport: a name of ``mailboxes.TRANSPORTS``.
        steps: vectors that a thread has on the way at once.
    """
    region: Region = getattr(layout(size), f"one_shot_{transport}")
    unpack, pack, combine, load, store = make_lanes(element, op, ragged, size)
    mail = make_mailboxes(
        size, transport, region, ONE_SHOT[transport], 1, _OPERATIONS[transport]
    )
    next_epoch, box, sent, post, _, receive, wipe, next_round = mail
    in_rank_order = make_in_rank_order(size)
    epochs = region.epochs

    def one_shot(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        source: int,
        target: int,
        count: int,
        vectors: int,
    ) -> None:
        follow_previous_grid(early)
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        own_low = cuda.local.array(steps, types.int64)
        own_high = cuda.local.array(steps, types.int64)
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        stride = cuda.gridDim.x * THREADS
        epoch, failed = resume(own, epochs, block)
        start = block * THREADS + thread
        # As long as the block's first thread has a vector: the block meets in between.
        while start - thread < vectors:
            epoch = next_epoch(epoch)
            for step in range(steps):
                vector = start + step * stride
                if vector < vectors:
                    words = load(source, vector, count)
                    # explore: sent
                    own_low[step], own_high[step] = sent(words[0], words[1])
            for step in range(steps):
                if start + step * stride < vectors and not failed:
                    boxes = box(block, epoch, 0, 0, step, thread)
                    post(ring, boxes, own_low[step], own_high[step], epoch)
            for step in range(steps):
                vector = start + step * stride
                if vector < vectors and not failed:
                    boxes = own + box(block, epoch, 0, 0, step, thread)
                    failed = not receive(
                        guard, boxes, epoch, block, low, high, EVERYONE
                    )
                    if failed:  # explore: give-up
                        break
                    low[0] = own_low[step]
                    high[0] = own_high[step]
                    in_rank_order(guard.rank, low, high, spare)
                    # In rank order on every rank: all get the same bits.
                    total = unpack(low[0], high[0])
                    for r in range(1, size):
                        total = combine(total, unpack(low[r], high[r]))
                    result = pack(total)
                    store(target, vector, count, result[0], result[1])
            if not failed:
                wipe(own, block, epoch, thread)
            start += steps * stride
            if start - thread < vectors:
                failed = next_round(failed)
        keep(own, epochs, block, epoch, failed)

    return one_shot


@functools.cache
def kernel(
    size: int, element: Element, op: Op, ragged: bool, transport: str, steps: int
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged, transport, steps)
    arguments = (ADDRESS, ADDRESS, types.int64, types.int64)
    weight = TRANSPORTS[transport].weight
    return workspace.make_kernel(make_one_shot, constants, *arguments, weight=weight)


def bind(
    transport: str,
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
) -> Launch:
    """Return the packed launch; see ``Bind`` in ``select.py``."""
    protocol = ONE_SHOT[transport]
    vectors = divide_up(count, element.lanes)
    most = most_blocks(comm, transport, protocol)
    grid = min(divide_up(vectors, THREADS), most)
    steps = protocol.needed(vectors, grid, comm.size)
    ragged = is_ragged(source, target, count, element.lanes)
    return workspace.launch(
        kernel(comm.size, element, op, ragged, transport, steps),
        *(comm, grid, source, target, count, vectors),
    )
