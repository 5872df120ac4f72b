"""All-gather, all-to-all and reduce-scatter in one flight, for small messages.

All three are one exchange: every thread posts a vector to its twin in every other rank
and takes what those post. They differ in what is sent (the same to all, or each rank
its own part) and in what becomes of it (stored, or reduced):

    all_gather       the same to all      stored, by rank
    all_to_all       each its part        stored, by rank
    reduce_scatter   each its part        reduced, in rank order

``mailboxes.py`` says how that needs no barrier, and orders the memory accesses. The
mailboxes are those of ``one_shot.py``: in every round each pair exchanges both ways.

In place is safe: a thread has loaded whatever it overwrites.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types

from numba_symm.collectives import workspace
from numba_symm.collectives.mailboxes import TRANSPORTS, make_mailboxes
from numba_symm.collectives.ring import make_in_rank_order
from numba_symm.collectives.workspace import (
    ADDRESS,
    ONE_SHOT,
    THREADS,
    divide_up,
    follow_previous_grid,
    is_ragged,
    layout,
)
from numba_symm.device.intrinsics import ld_u32, st_u32, word_of
from numba_symm.device.lanes import make_lanes
from numba_symm.device.signals import EXCHANGE
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch


class Exchange(NamedTuple):
    """What is sent, and what becomes of it.

    Attributes:
        parts_in: whether the input has a part for each rank, else one for all.
        parts_out: whether the output has a part of each rank, else their reduction.
    """

    parts_in: bool
    parts_out: bool


EXCHANGES = {
    "all_gather": Exchange(False, True),
    "all_to_all": Exchange(True, True),
    "reduce_scatter": Exchange(True, False),
}
"""The three operations, by name."""


def make_exchange(
    size: int,
    element: Element,
    op: Op,
    ragged: bool,
    transport: str,
    steps: int,
    kind: Exchange,
) -> Any:
    """Return the kernel; see ``one_shot.make_one_shot``."""
    at = layout(size)
    region = {"sentinel": at.one_shot_sentinel, "ll": at.one_shot_ll}[transport]
    unpack, pack, combine, load, store = make_lanes(element, op, ragged, size)
    mail = make_mailboxes(size, transport, region, ONE_SHOT[transport], 1, EXCHANGE)
    next_epoch, box, _, _, post_one, receive, wipe, next_round = mail
    in_rank_order = make_in_rank_order(size)
    epochs = region.epochs
    others = size - 1
    parts_in, parts_out = kind

    def exchange(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        source: int,
        target: int,
        part: int,
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
        epoch_at = own + epochs + 4 * block
        epoch = word_of(ld_u32(epoch_at))
        start = block * THREADS + thread
        first = block * THREADS
        mine = source + guard.rank * part if parts_in else source
        failed = False
        while first < vectors:
            epoch = next_epoch(epoch)
            for step in range(steps):
                vector = start + step * stride
                if vector < vectors:
                    own_low[step], own_high[step] = load(mine, vector, count)
                    for k in range(others):
                        r = (guard.rank + 1 + k) % size
                        if parts_in:
                            words = load(source + r * part, vector, count)
                        else:
                            words = own_low[step], own_high[step]
                        low[k], high[k] = words
                    boxes = box(block, epoch, 0, 0, step, thread)
                    for k in range(others):
                        post_one(ring, k, boxes, low[k], high[k], epoch)
            for step in range(steps):
                vector = start + step * stride
                if vector < vectors and not failed:
                    boxes = own + box(block, epoch, 0, 0, step, thread)
                    failed = not receive(guard, boxes, epoch, block, low, high)
                    low[0] = own_low[step]
                    high[0] = own_high[step]
                    if parts_out:
                        for j in range(size):
                            there = target + (guard.rank + j) % size * part
                            store(there, vector, count, low[j], high[j])
                    else:
                        in_rank_order(guard.rank, low, high, spare)
                        total = unpack(low[0], high[0])
                        for r in range(1, size):
                            total = combine(total, unpack(low[r], high[r]))
                        result = pack(total)
                        store(target, vector, count, result[0], result[1])
            wipe(own, block, epoch, thread)
            start += steps * stride
            first += steps * stride
            if first < vectors:
                next_round()
        # All threads have read the epoch before it changes.
        cuda.syncthreads()
        if thread == 0:
            st_u32(epoch_at, epoch)

    return exchange


@functools.cache
def kernel(
    size: int,
    element: Element,
    op: Op,
    ragged: bool,
    transport: str,
    steps: int,
    kind: Exchange,
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged, transport, steps, kind)
    arguments = (ADDRESS, ADDRESS, types.int64, types.int64, types.int64)
    weight = TRANSPORTS[transport].weight
    return workspace.make_kernel(make_exchange, constants, *arguments, weight=weight)


def bind(
    transport: str,
    kind: Exchange,
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
) -> Launch:
    """Return the packed launch; see ``Bind`` in ``select_exchange.py``."""
    protocol = ONE_SHOT[transport]
    vectors = divide_up(count, element.lanes)
    most = min(comm.max_blocks // TRANSPORTS[transport].weight, protocol.blocks)
    grid = min(divide_up(vectors, THREADS), most)
    steps = protocol.needed(vectors, grid, comm.size)
    ragged = is_ragged(source, target, count, element.lanes)
    part = count * element.itemsize
    return workspace.launch(
        kernel(comm.size, element, op, ragged, transport, steps, kind),
        *(comm, grid, source, target, part, count, vectors),
    )
