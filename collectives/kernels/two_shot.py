"""All-reduce in two phases: each rank reduces a shard, and sends the result to all.

For medium messages. The input is divided into one shard for each rank. Every thread
posts a vector of every shard to that shard's owner (scatter). It reduces the vectors
that it receives for its own rank's shard, and posts the result to every other rank. It
stores the results that it receives (gather). ``mailboxes.py`` explains why that needs
no barrier, and the order of memory accesses: in both phases of an epoch, each pair
exchanges in both directions.

Each element is reduced by one rank, by their tree, so all ranks get the same bits. A
rank without an output, in a reduction to one rank, stores nothing.

Source: the all-reduce of MSCCL++ in two phases, with packets.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import (
    binding,
    mailboxes,
    partition,
    workspace,
)
from numba_symm.collectives.protocols.exchanges import EVERYONE
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import intrinsics, order
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.kernels import Kernel, Launch
from numba_symm.launch import failures

SCATTER, GATHER = 0, 1  # the two sets of mailboxes
LOADS = 4  # vectors that a thread loads before it posts them


def make_two_shot(
    size: int, element: Element, op: Op, ragged: bool, transport: str, tiles: int
) -> Any:
    """Return the kernel; see ``one_shot.make_one_shot``."""
    region: workspace.Region = getattr(workspace.layout(size), f"two_shot_{transport}")
    lanes = make_lanes(element, op, ragged, size)
    load, store, total = lanes.load, lanes.store, order.make_total(size, lanes)
    mail = mailboxes.make_mailboxes(
        size, transport, region, workspace.TWO_SHOT[transport], 2, failures.TWO_SHOT
    )
    next_epoch, box, sent, post_one, receive, wipe, between_epochs = mail
    in_rank_order = order.make_in_rank_order(size)
    epochs, others = region.epochs, size - 1
    batch = min(tiles, max(1, LOADS // size))
    held = max(size, batch * others)

    def two_shot(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        count: int,
        share: int,
    ) -> None:
        thread = cuda.threadIdx.x
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        spare = cuda.local.array(size, types.int64)
        stride = grid * THREADS
        epoch, failed = workspace.resume(own, epochs, block)
        start = block * THREADS + thread
        # While the block's first thread has a vector, because all synchronize here.
        while start - thread < share:
            epoch = next_epoch(epoch)
            for group in range(0, tiles, batch):
                for tile in range(batch):
                    vector = start + (group + tile) * stride
                    if vector < share:
                        for k in range(others):
                            r = (guard.rank + 1 + k) % size
                            at = tile * others + k
                            low[at], high[at] = load(source, r * share + vector, count)
                for tile in range(batch):
                    if start + (group + tile) * stride < share and not failed:
                        boxes = box(block, epoch, SCATTER, 0, group + tile, thread)
                        for k in range(others):
                            at = tile * others + k
                            post_one(ring, k, boxes, low[at], high[at], epoch)
            # All threads have read the epoch before it changes. Here, because the
            # vectors take longer to arrive.
            workspace.sync_block()  # explore: resumed
            for tile in range(tiles):
                vector = start + tile * stride
                if vector < share and not failed:
                    mine = guard.rank * share + vector
                    boxes = own + box(block, epoch, SCATTER, 0, tile, thread)
                    low[0], high[0] = load(source, mine, count)
                    failed = not receive(
                        guard, boxes, epoch, block, low, high, EVERYONE
                    )
                    if failed:  # explore: give-up-scatter
                        break
                    in_rank_order(guard.rank, low, high, spare)
                    packed = total(low, high, 0)
                    result = sent(packed[0], packed[1])
                    boxes = box(block, epoch, GATHER, 0, tile, thread)
                    for k in range(others):
                        post_one(ring, k, boxes, result[0], result[1], epoch)
                    if target != 0:
                        # explore: result
                        store(target, mine, count, result[0], result[1])
            for tile in range(tiles):
                vector = start + tile * stride
                if vector < share and not failed:
                    boxes = own + box(block, epoch, GATHER, 0, tile, thread)
                    failed = not receive(
                        guard, boxes, epoch, block, low, high, EVERYONE
                    )
                    if failed:  # explore: give-up-gather
                        break
                    if target != 0:
                        for k in range(others):
                            at = (guard.rank + 1 + k) % size * share + vector
                            store(target, at, count, low[k + 1], high[k + 1])
            if not failed:
                wipe(own, block, epoch, thread)
            start += tiles * stride
            if start - thread < share:
                failed = between_epochs(failed)
        workspace.keep(own, epochs, block, epoch, failed)

    return two_shot


@functools.cache
def kernel(
    size: int, element: Element, op: Op, ragged: bool, transport: str, tiles: int
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged, transport, tiles)
    arguments = (binding.ADDRESS, binding.ADDRESS, types.int64, types.int64)
    weight = mailboxes.TRANSPORTS[transport].weight
    return binding.make_kernel(make_two_shot, constants, arguments, weight=weight)


def bind(transport: str, end: binding.Endpoint, call: binding.Call) -> Launch:
    """Return the packed launch."""
    share = partition.shard(call.vectors, end.size)
    grid, tiles = mailboxes.mailed_grid(
        end, transport, workspace.TWO_SHOT[transport], share
    )
    ragged = partition.is_ragged(call, share, end.size)
    arguments = call.source, call.target, call.count, share
    of_call = kernel(end.size, call.element, call.op, ragged, transport, tiles)
    return binding.launch(of_call, end, grid, arguments)
