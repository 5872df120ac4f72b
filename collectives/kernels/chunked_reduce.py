"""Reduce to one rank in chunks, for larger messages of three ranks or more.

Each rank but the root owns a shard. Every rank sends each owner that owner's shard; the
owners reduce, and send the results to the root. So a link transfers the message at most
once in each direction, where ``chunked_all_reduce.py`` transfers more. Both have the
same slots, flags and epochs. (``operations.py`` has the kernels for two ranks.) A block
moves a chunk of several tiles at a time. In stage t, each rank

    scatters  chunk t to its owners
    waits     for all ranks' flags of stage t-1
    reduces   its shard of chunk t-1, and sends the results to the root
    collects  the results of chunk t-2, on the root
    raises    its flags of stage t, at all others

even if it had nothing to send. So the protocol is the same on every rank, and
consecutive calls may have different roots.

Memory order. ``flags.py`` orders a block's accesses of a stage before its flags, and
the other ranks' accesses of the stage before theirs. No slot receives both a scattered
chunk and results, so chunks use four sets of slots, one after another (``slots.py``).
Chunk t is scattered into the set of chunk t-4 after all ranks' flags of stage t-2.
Owners read what was there in stage t-3, and the root read the results in stage t-2.

Each element is reduced by one rank, by their tree, so the bits are those of an
all-reduce.
"""

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import (
    binding,
    handshake,
    partition,
    slots,
    workspace,
)
from numba_symm.collectives.protocols.chunks import (
    make_chunks,
    make_fold_slots,
    make_load_all,
    write_slots,
)
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.workspace import THREADS, TILE_BYTES, VECTOR
from numba_symm.device import intrinsics, order
from numba_symm.device.lanes import Lanes, make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.kernels import Launch
from numba_symm.launch import failures


def make_reduce(size: int, lanes: Lanes) -> Callable[..., None]:
    """Return a device function that reduces this rank's shard of a chunk.

    It reads what the others scattered, from the address ``here`` on. It stores the
    result in the slots of the root, from the offset ``slot`` on. ``chunk`` is as in
    ``chunks.make_load_all``, and ``of_batch`` are two local arrays.
    """
    load_all, total = make_load_all(size, lanes.load), order.make_total(size, lanes)
    room, others = workspace.CHUNKED.tiles(size), size - 1
    rank_stride, mirror = room * TILE_BYTES, order.make_mirror(size)
    batch = min(room, max(1, workspace.LOADS // size))
    fold_slots = make_fold_slots(size, lanes)

    def reduce_slices(
        ring: Any,
        here: int,
        slot: int,
        source: int,
        root: int,
        chunk: Any,
        low: Any,
        high: Any,
        of_batch: Any,
    ) -> None:
        _, result = fold_slots(here, source, chunk, slice(size))
        write_slots(ring[root] + slot + mirror(root) * rank_stride, result)

    @intrinsics.sliced(reduce_slices)
    def reduce(
        ring: Any,
        here: int,
        slot: int,
        source: int,
        root: int,
        chunk: Any,
        low: Any,
        high: Any,
        of_batch: Any,
    ) -> None:
        _, vector, tiles, share, _, _ = chunk
        own_low, own_high = of_batch
        for base in range(0, tiles, batch):
            load_all(here, source, chunk, base, low, high, own_low, own_high)
            for i in range(batch):
                tile = base + i
                if tile < tiles and vector + tile * THREADS < share:
                    result = total(low, high, i * size)
                    for k in range(others):
                        if k == root:  # explore: to-root
                            to = slot + mirror(k) * rank_stride
                            intrinsics.st_v2_u64(
                                ring[k] + to + tile * TILE_BYTES, result
                            )

    return reduce


def make_chunked_reduce(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    lanes = make_lanes(element, op, ragged, size)
    *_, scatter, collect = make_chunks(
        size, lanes.load, lanes.store, lanes.slices, size - 1, False
    )
    reduce = make_reduce(size, lanes)
    raise_flags, await_flags = make_flags(size)
    operation = failures.CHUNKED_REDUCE
    is_done = handshake.make_is_done(size)
    at = workspace.layout(size).chunked
    epochs, flags = at.epochs, at.flags
    place = slots.make_place(size)
    others = size - 1
    mirror = order.make_mirror(size)
    batch = min(workspace.CHUNKED.tiles(size), max(1, workspace.LOADS // size))
    held = batch * size

    def chunked_reduce(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        count: int,
        share: int,
        number: int,
        tiles: int,
        chunks: int,
        fallback_for: int,
    ) -> None:
        # Ranks are numbered from the one after the root on: number k owns shard k, and
        # the root, which has the last number, none.
        thread = cuda.threadIdx.x
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if is_done(guard, ring, own, block, fallback_for):  # explore: fallback
            return
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        own_low = cuda.local.array(batch, types.int64)
        own_high = cuda.local.array(batch, types.int64)
        rank = guard.rank
        root = mirror(number)  # its index in the ring
        stride = grid * tiles * THREADS
        before, failed = workspace.resume(own, epochs, block)
        first = block * tiles * THREADS + thread
        mine = number * share
        flag = flags + 4 * size * block
        for stage in range(chunks + 2):
            epoch = (before + stage + 1) & 0xFFFFFFFF
            if stage < chunks and not failed:
                slot = place(block, before, stage) + VECTOR * thread
                vector = first + stage * stride
                chunk = number + 1, vector, tiles, share, count, share
                scatter(ring, slot, source, chunk, low, high)
            if stage >= 1:  # explore: wait
                last = (before + stage) & 0xFFFFFFFF
                failed = await_flags(guard, operation, own + flag, block, last, failed)
                if failed:
                    break
            if 1 <= stage <= chunks and number < others:
                here = own + place(block, before, stage - 1) + VECTOR * thread
                slot = place(block, before, stage - 1) + VECTOR * thread
                vector = first + (stage - 1) * stride
                chunk = rank, vector, tiles, share, count, mine
                of_batch = own_low, own_high
                reduce(ring, here, slot, source, root, chunk, low, high, of_batch)
            if stage >= 2 and target != 0:
                slot = own + place(block, before, stage - 2) + VECTOR * thread
                vector = first + (stage - 2) * stride
                # The root's k-th neighbour owns shard k.
                # explore: collect
                chunk = 0, vector, tiles, share, count, share
                collect(slot, target, chunk, low, high)
            if stage <= chunks:  # explore: signal
                failed = raise_flags(ring, flag, rank, epoch, failed)
                if failed:
                    break
        workspace.keep(own, epochs, block, slots.after(before, chunks, 2), failed)

    return chunked_reduce


kernel = binding.kernels_of(
    make_chunked_reduce, binding.ADDRESS, binding.ADDRESS, *6 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


def bind(end: binding.Endpoint, call: binding.Call, fallback_for: int = 0) -> Launch:
    """Return the packed launch, for three ranks or more.

    See ``chunked_all_reduce.bind``.
    """
    owners = end.size - 1
    share = partition.shard(call.vectors, owners)
    grid, tiles, chunks = partition.chunks_of(share, end)
    ragged = partition.is_ragged(call, share, owners)
    own = (end.rank - call.root - 1) % end.size
    sizes = call.count, share, own, tiles, chunks
    arguments = (call.source, call.target, *sizes, fallback_for)
    of_call = kernel(end.size, call.element, call.op, ragged)
    return binding.launch(of_call, end, grid, arguments)
