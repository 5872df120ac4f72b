"""Broadcast in two phases, of three ranks or more: for medium messages.

The message is divided into a shard for each rank but the root, its owner. The root
posts a vector of every shard to that shard's owner (scatter). The owner stores it, and
posts it to all other owners (relay), which store it. So the root sends the message
once, and each other rank receives it once.

``mailboxes.py`` explains why that needs no barrier, and the order of memory accesses.
In the scatter, thread 0 of each block exchanges with all ranks, in both directions, as
in ``one_shot.py``. From ranks that send it no data, it receives a digest of the call.

Calls may be in place, because the root only reads its array, and the others only store
in theirs.
"""

from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import (
    binding,
    exchanges,
    mailboxes,
    partition,
    workspace,
)
from numba_symm.collectives.protocols.exchanges import EVERYONE
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import intrinsics
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element
from numba_symm.gpu.kernels import Launch
from numba_symm.launch import failures

SCATTER, RELAY = 0, 1  # the two sets of mailboxes
TRANSPORT = "marked"  # marks keep every bit, as data that is not reduced needs


def make_two_shot_broadcast(
    size: int, element: Element, ragged: bool, tiles: int
) -> Any:
    """Return the kernel for ``size`` ranks and a type that is only moved.

    A thread has ``tiles`` vectors in transit at a time.
    """
    region = workspace.layout(size).two_shot_marked
    lanes = make_lanes(element, "sum", ragged, size)
    load, store = lanes.load, lanes.store
    protocol, operation = workspace.TWO_SHOT[TRANSPORT], failures.TWO_SHOT_BROADCAST
    mail = mailboxes.make_mailboxes(size, TRANSPORT, region, protocol, 2, operation)
    next_epoch, box, _, post_one, receive, _, between_epochs = mail
    of_root = exchanges.make_reduced(size, lanes, exchanges.Output.OF_ROOT)
    digests_match = exchanges.make_digests_match(size)
    epochs, others = region.epochs, size - 1

    def two_shot_broadcast(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        array: int,
        count: int,
        share: int,
        to_root: int,
        due_from: int,
        digest: int,
    ) -> None:
        thread = cuda.threadIdx.x
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        is_root = to_root == 0
        # The root's k-th neighbour owns shard k.
        mine = others - to_root
        owners = 0 if is_root else EVERYONE & ~due_from
        posts = is_root or thread == 0  # explore: posts
        wanted = EVERYONE if thread == 0 else due_from  # explore: wanted
        stride = grid * THREADS
        epoch, failed = workspace.resume(own, epochs, block)
        start = block * THREADS + thread
        # As long as the block's first thread has a vector, as in one_shot.py.
        while start - thread < share:
            epoch = next_epoch(epoch)
            for tile in range(tiles):
                vector = start + tile * stride
                if vector < share and posts and not failed:
                    boxes = box(block, epoch, SCATTER, 0, tile, thread)
                    for k in range(others):
                        low[k], high[k] = digest, exchanges.DIGEST
                        if is_root:
                            low[k], high[k] = load(array, k * share + vector, count)
                    for k in range(others):
                        post_one(ring, k, boxes, low[k], high[k], epoch)
            # All threads have read the epoch before it changes. Here, because the
            # vectors take longer to arrive.
            workspace.sync_block()  # explore: resumed
            for tile in range(tiles):
                vector = start + tile * stride
                if vector < share and wanted != 0 and not failed:
                    boxes = own + box(block, epoch, SCATTER, 0, tile, thread)
                    failed = not receive(guard, boxes, epoch, block, low, high, wanted)
                    if thread == 0 and not failed:
                        failed = not digests_match(guard, digest, due_from, low, high)
                    if failed:  # explore: give-up-scatter
                        break
                    if not is_root:
                        words = of_root(guard.rank, to_root, low, high, spare)
                        boxes = box(block, epoch, RELAY, 0, tile, thread)
                        for k in range(others):
                            if owners >> k & 1 != 0:
                                post_one(ring, k, boxes, words[0], words[1], epoch)
                        store(array, mine * share + vector, count, words[0], words[1])
            for tile in range(tiles):
                vector = start + tile * stride
                if vector < share and owners != 0 and not failed:
                    boxes = own + box(block, epoch, RELAY, 0, tile, thread)
                    failed = not receive(guard, boxes, epoch, block, low, high, owners)
                    if failed:  # explore: give-up-relay
                        break
                    for k in range(others):
                        if owners >> k & 1 != 0:
                            at = (mine + 1 + k) % size * share + vector
                            store(array, at, count, low[k + 1], high[k + 1])
            start += tiles * stride
            if start - thread < share:
                if thread == 0:  # explore: fence
                    intrinsics.fence_acq_rel_sys()  # as in one_shot.py
                failed = between_epochs(failed)
        workspace.keep(own, epochs, block, epoch, failed)

    return two_shot_broadcast


kernel = binding.kernels_of(
    make_two_shot_broadcast, binding.ADDRESS, *5 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


def bind(end: binding.Endpoint, call: binding.Call) -> Launch:
    """Return the packed launch, for three ranks or more."""
    share = partition.shard(call.vectors, end.size - 1)
    grid, tiles = mailboxes.mailed_grid(
        end, TRANSPORT, workspace.TWO_SHOT[TRANSPORT], share
    )
    ragged = partition.is_ragged(call, share, end.size - 1)
    words = f"broadcast of {call.count} {call.element.name}, root {call.root}"
    taken = exchanges.Output.OF_ROOT.taken(end.rank, end.size, call.root)
    _, sent = exchanges.Output.OF_ROOT.exchanged(end.rank, end.size, call.root)
    arguments = (
        call.target,
        call.count,
        share,
        taken,
        sent,
        exchanges.digest_word(words),
    )
    of_call = kernel(end.size, partition.moved_as(call, ragged), ragged, tiles)
    return binding.launch(of_call, end, grid, arguments)
