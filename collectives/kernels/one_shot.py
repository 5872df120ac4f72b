"""One exchange of every rank with every other: for small messages.

Every thread posts a vector to the thread of the same index on every other rank, and
receives the vectors that these post. The operations (``exchanges.py``) differ in two
things. A rank sends the same vectors to all ranks, or a shard to each. It stores the
vectors of all ranks, or reduces them by the ranks' tree.

``mailboxes.py`` explains why that needs no barrier, and the order of memory accesses.
In every epoch, thread 0 of each block exchanges with all ranks, in both directions.
Otherwise the mailboxes could not be used again. From a rank whose data it does not
need, thread 0 receives a digest of that rank's call. The call fails if the digest
differs, or if it arrives instead of data. Otherwise, ranks with different roots would
fill mailboxes that no rank empties.

Calls may be in place, because a thread has loaded whatever it overwrites.

Source: the one-shot all-reduces of NCCL (LL), MSCCL++ and TensorRT-LLM (Lamport).
"""

import functools
from collections.abc import Callable
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
from numba_symm.device.lanes import Lanes, Load, make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.kernels import Kernel, Launch


def mailboxes_of(
    size: int, transport: str, operation: int
) -> tuple[int, mailboxes.Mailboxes]:
    """Return where the epochs of a transport are, and its device functions."""
    region: workspace.Region = getattr(workspace.layout(size), f"one_shot_{transport}")
    protocol = workspace.ONE_SHOT[transport]
    return region.epochs, mailboxes.make_mailboxes(
        size, transport, region, protocol, 1, operation
    )


@functools.cache
def make_load_own(
    load: Load, batch: int, kind: exchanges.Exchange, sent: Callable[[int, int], Any]
) -> Callable[..., None]:
    """Return a device function that loads this rank's vectors of ``batch`` tiles.

    ``(call, first, low, high)``: from the tile ``first`` on. ``call`` is ``(array,
    start, stride, vectors, count)``.
    """
    # All ranks reduce the same vectors, so each uses its own as the others receive it.
    same_bits = kind.output is exchanges.Output.REDUCED and not kind.sends_shards

    @intrinsics.device_function
    def load_own(call: Any, first: int, low: Any, high: Any) -> None:
        array, start, stride, vectors, count = call
        for tile in range(first, first + batch):
            vector = start + tile * stride
            if vector < vectors:
                words = load(array, vector, count)
                if same_bits:  # explore: sent
                    words = sent(words[0], words[1])
                low[tile], high[tile] = words

    return load_own


@functools.cache
def make_post(
    size: int,
    load: Load,
    sends_shards: bool,
    rooted: bool,
    post_one: Callable[..., None],
) -> Callable[..., None]:
    """Return a device function that posts a vector to each other rank.

    ``(rank, ring, boxes, epoch, shard, words, to, low, high)``: of its shard, or
    ``words`` for all. ``shard`` is ``(source, shard_bytes, vector, count)``. ``to`` is
    ``(post_to, sent_to, digest)``: to which ranks the thread posts, to which of them
    data, and what to the others. ``low`` and ``high`` are local arrays.
    """
    others = size - 1

    @intrinsics.device_function
    def post(
        rank: int,
        ring: Any,
        boxes: int,
        epoch: int,
        shard: Any,
        words: Any,
        to: Any,
        low: Any,
        high: Any,
    ) -> None:
        source, shard_bytes, vector, count = shard
        post_to, sent_to, digest = to
        for k in range(others):
            if sends_shards:
                r = (rank + 1 + k) % size
                low[k], high[k] = load(source + r * shard_bytes, vector, count)
            else:
                low[k], high[k] = words
        for k in range(others):
            if post_to >> k & 1 != 0:
                data = low[k], high[k]
                if rooted and sent_to >> k & 1 == 0:
                    data = digest, exchanges.DIGEST
                post_one(ring, k, boxes, data[0], data[1], epoch)

    return post


@functools.cache
def make_use(
    size: int, element: Element, op: Op, lanes: Lanes, output: exchanges.Output
) -> Callable[..., None]:
    """Return a device function that reduces or stores the vectors of all ranks.

    ``(rank, shard, taken, low, high, spare)``: the own vector, and then the ring's.
    ``shard`` is ``(target, shard_bytes, vector, count)``.
    """
    store = lanes.store
    reduced = exchanges.make_reduced(size, lanes, output)
    none_stored, none_low, none_high = exchanges.of_none(element, op, output)
    stores_shards = output is exchanges.Output.SHARDS

    @intrinsics.device_function
    def use(rank: int, shard: Any, taken: int, low: Any, high: Any, spare: Any) -> None:
        target, shard_bytes, vector, count = shard
        if stores_shards:
            for j in range(size):
                there = target + (rank + j) % size * shard_bytes
                store(there, vector, count, low[j], high[j])
        elif taken > 0:
            result = reduced(rank, taken, low, high, spare)
            store(target, vector, count, result[0], result[1])
        elif none_stored:
            store(target, vector, count, none_low, none_high)

    return use


def _send_order(tiles: int, kind: exchanges.Exchange) -> tuple[int, bool]:
    """Return how many tiles are loaded before they are posted, and ``late``.

    If ``late``, the kernel uses two words from memory, the epoch and the mark of a
    failure, only after a batch's loads. Otherwise no load needs them, either. But the
    compiler puts loads and branches in another order, with up to 6 % of difference in
    time (bench/README.md).
    """
    # A post makes the next load wait for it. Of more than two tiles, each is posted
    # before the next is loaded, because many stores at a time congest the links.
    return tiles if tiles <= 2 else 1, kind.sends_shards or kind.output.rooted


def make_one_shot(
    size: int,
    element: Element,
    op: Op,
    ragged: bool,
    transport: str,
    tiles: int,
    kind: exchanges.Exchange,
) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction.

    A thread has ``tiles`` vectors in transit at a time.
    """
    lanes = make_lanes(element, op, ragged, size)
    epochs, mail = mailboxes_of(size, transport, kind.operation)
    next_epoch, box, sent, post_one, receive, wipe, between_epochs = mail
    sends_shards, rooted = kind.sends_shards, kind.output.rooted
    batch, late = _send_order(tiles, kind)
    load_own = make_load_own(lanes.load, batch, kind, sent)
    post = make_post(size, lanes.load, sends_shards, rooted, post_one)
    use = make_use(size, element, op, lanes, kind.output)
    digests_match = exchanges.make_digests_match(size)

    def one_shot(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        shard_bytes: int,
        count: int,
        vectors: int,
        taken: int,
        sent_to: int,
        due_from: int,
        digest: int,
    ) -> None:
        thread = cuda.threadIdx.x
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        post_to = sent_to if rooted and thread != 0 else EVERYONE  # explore: post-to
        wanted = due_from if rooted and thread != 0 else EVERYONE  # explore: wanted
        own_low = cuda.local.array(tiles, types.int64)
        own_high = cuda.local.array(tiles, types.int64)
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        stride = grid * THREADS
        epoch, failed = workspace.resume(own, epochs, block)
        start = block * THREADS + thread
        rank = guard.rank
        mine = source + rank * shard_bytes if sends_shards else source
        # While the block's first thread has a vector, because all synchronize here.
        while start - thread < vectors:
            if not late:
                epoch = next_epoch(epoch)
            call = mine, start, stride, vectors, count
            for first in range(0, tiles, batch):
                load_own(call, first, own_low, own_high)
                if late and first == 0:
                    epoch = next_epoch(epoch)
                if not (late and failed):
                    for tile in range(first, first + batch):
                        vector = start + tile * stride
                        if vector < vectors and (late or not failed):
                            boxes = box(block, epoch, 0, 0, tile, thread)
                            words = own_low[tile], own_high[tile]
                            shard = source, shard_bytes, vector, count
                            to = post_to, sent_to, digest
                            post(rank, ring, boxes, epoch, shard, words, to, low, high)
            # All have read the epoch before it changes. The packets take longer.
            workspace.sync_block()  # explore: resumed
            for tile in range(tiles):
                vector = start + tile * stride
                if vector < vectors and not failed:
                    boxes = own + box(block, epoch, 0, 0, tile, thread)
                    failed = not receive(guard, boxes, epoch, block, low, high, wanted)
                    if rooted and thread == 0 and not failed:
                        failed = not digests_match(guard, digest, due_from, low, high)
                    if failed:  # explore: give-up
                        break
                    low[0], high[0] = own_low[tile], own_high[tile]
                    shard = target, shard_bytes, vector, count
                    use(rank, shard, taken, low, high, spare)
            if not failed:
                wipe(own, block, epoch, thread)
            start += tiles * stride
            if start - thread < vectors:
                if rooted and thread == 0:  # explore: fence
                    # Orders what thread 0 has received before the synchronization: the
                    # other threads may post to ranks from which they receive nothing.
                    intrinsics.fence_acq_rel_sys()
                failed = between_epochs(failed)
        workspace.keep(own, epochs, block, epoch, failed)

    return one_shot


@functools.cache
def kernel(
    size: int,
    element: Element,
    op: Op,
    ragged: bool,
    transport: str,
    tiles: int,
    kind: exchanges.Exchange,
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged, transport, tiles, kind)
    arguments = (binding.ADDRESS, binding.ADDRESS, *7 * (types.int64,))
    weight = mailboxes.TRANSPORTS[transport].weight
    return binding.make_kernel(make_one_shot, constants, arguments, weight=weight)


def bind(
    transport: str, kind: exchanges.Exchange, end: binding.Endpoint, call: binding.Call
) -> Launch:
    """Return the packed launch."""
    grid, tiles = mailboxes.mailed_grid(
        end, transport, workspace.ONE_SHOT[transport], call.vectors
    )
    element, op, root = call.element, call.op, call.root
    words = f"{kind.output.name} of {call.count} {element.name} by {op!r}, root {root}"
    ragged = partition.is_ragged(call)
    lane = element if kind.output.reduces else partition.moved_as(call, ragged)
    arguments = (
        call.source,
        call.target,
        call.nbytes,
        call.count,
        call.vectors,
        kind.output.taken(end.rank, end.size, root),
        *kind.output.exchanged(end.rank, end.size, root),
        exchanges.digest_word(words),
    )
    of_call = kernel(end.size, lane, op, ragged, transport, tiles, kind)
    return binding.launch(of_call, end, grid, arguments)
