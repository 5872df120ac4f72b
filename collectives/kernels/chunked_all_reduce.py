"""All-reduce in two phases through slots with flags: for large messages of any type.

The phases are those of ``two_shot.py``, but a block moves a chunk of several tiles at a
time, and signals it with one flag a rank. So neither marks nor packets cross the links.
A block's stages overlap: while it reduces a chunk, the next one is in transit, as are
the results of the one before.

Memory order. ``sync_block_or`` and a fence put the whole block's stores before its
flags. Each flag is acquired by one thread, and ``sync_block_or`` extends that to the
whole block. Chunks alternate between two halves. A rank scatters chunk k+2 into the
half of chunk k after it has received the results of chunk k from every rank. Each of
these had read its shard of chunk k before it sent them. A rank sends results of chunk
k+2 into the half of chunk k after it has received its shard of chunk k+2 from every
rank. Each of these sends it after it has read the results of chunk k.

This kernel shares its slots, flags and epochs with ``chunked_broadcast.py``,
``chunked_reduce.py`` and ``chunked_exchange.py``. A call's first chunk is stored in the
half that follows from the call's first epoch. Every rank has read everything in that
half by then. A rank stores anything else after all ranks' flags of this call, which
they raised after they had left the previous call. Here a call ends before a rank knows
that the others have read the last chunk's results, so the next one begins in the other
half. The flags of results have epochs of their own. The other kernels raise none of
them, and a flag 2**31 epochs old would seem to be ahead.

Each element is reduced by one rank, by their tree, so all ranks get the same bits. A
rank without an output, in a reduction to one rank, stores nothing.
"""

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import (
    binding,
    handshake,
    partition,
    workspace,
)
from numba_symm.collectives.protocols.chunks import (
    make_chunks,
    make_fold_slots,
    write_slots,
)
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.workspace import THREADS, TILE_BYTES, VECTOR
from numba_symm.device import intrinsics, order
from numba_symm.device.lanes import Lanes, make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.kernels import Launch
from numba_symm.launch import failures

SCATTERED, REDUCED = 0, 1  # what a set of slots holds, and a set of flags signals


def make_places(size: int) -> tuple[Callable[..., int], Callable[..., int]]:
    """Return device functions for the offsets of slots and flags in a workspace.

    ``(block, epoch, which)`` returns where a set of a block's slots begins, and
    ``(block, which)`` a set of its flags; ``which`` is ``SCATTERED`` or ``REDUCED``.
    """
    at = workspace.layout(size).chunked
    flags, slots = at.flags, at.slots
    set_stride = (size - 1) * workspace.CHUNKED.tiles(size) * TILE_BYTES
    half_stride = 2 * set_stride
    flag_set = 4 * size * workspace.MAX_BLOCKS

    @intrinsics.device_function
    def place(block: int, epoch: int, which: int) -> int:
        half = slots + (2 * block + (epoch & 1)) * half_stride  # explore: half
        return half + which * set_stride  # explore: set

    @intrinsics.device_function
    def flag_place(block: int, which: int) -> int:
        return flags + which * flag_set + 4 * size * block  # explore: flags

    return place, flag_place


def make_reduce(size: int, lanes: Lanes) -> Callable[..., None]:
    """Return a device function that reduces this rank's shard of a chunk.

    It reads what the others scattered, from the address ``here`` on. It stores the
    result in its array, and in the slots of all others, from the offset ``slot`` on.
    ``chunk`` begins with the rank's number, but is ``chunks.py``'s otherwise.
    ``of_vector`` are three local arrays of ``size`` words.
    """
    load, store, total = lanes.load, lanes.store, order.make_total(size, lanes)
    room = workspace.CHUNKED.tiles(size)
    rank_stride = room * TILE_BYTES
    others = size - 1
    mirror = order.make_mirror(size)
    batch = min(room, max(1, workspace.LOADS // size))
    in_rank_order = order.make_in_rank_order(size)
    fold_slots, write = make_fold_slots(size, lanes), lanes.slices.write

    def reduce_slices(
        ring: Any,
        here: int,
        slot: int,
        source: int,
        target: int,
        chunk: Any,
        low: Any,
        high: Any,
        of_vector: Any,
    ) -> None:
        rank, vector, tiles, share, count, _ = chunk
        chunk = rank, vector, tiles, share, count, rank * share
        at, result = fold_slots(here, source, chunk, slice(size))
        for k in range(others):
            write_slots(ring[k] + slot + mirror(k) * rank_stride, result)
        if target != 0:
            write(target, at, count, result)

    @intrinsics.sliced(reduce_slices)
    def reduce(
        ring: Any,
        here: int,
        slot: int,
        source: int,
        target: int,
        chunk: Any,
        low: Any,
        high: Any,
        of_vector: Any,
    ) -> None:
        rank, vector, tiles, share, count, _ = chunk
        own_low, own_high, spare = of_vector
        mine = rank * share
        for base in range(0, tiles, batch):
            for i in range(batch * size):
                tile, j = base + i // size, i % size
                at = vector + tile * THREADS
                if tile < tiles and at < share:
                    if j == 0:
                        low[i], high[i] = load(source, mine + at, count)
                    else:
                        from_k = here + (j - 1) * rank_stride
                        low[i], high[i] = intrinsics.ld_v2_u64(
                            from_k + tile * TILE_BYTES
                        )
            for i in range(batch):
                at = vector + (base + i) * THREADS
                if base + i < tiles and at < share:
                    for j in range(size):
                        own_low[j] = low[i * size + j]
                        own_high[j] = high[i * size + j]
                    in_rank_order(rank, own_low, own_high, spare)
                    result = total(own_low, own_high, 0)
                    for k in range(others):
                        there = slot + mirror(k) * rank_stride
                        intrinsics.st_v2_u64(
                            ring[k] + there + (base + i) * TILE_BYTES, result
                        )
                    if target != 0:
                        at += mine
                        store(target, at, count, result[0], result[1])

    return reduce


def make_chunked_all_reduce(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    lanes = make_lanes(element, op, ragged, size)
    epochs = workspace.layout(size).chunked.epochs
    place, flag_place = make_places(size)
    *_, scatter, collect = make_chunks(
        size, lanes.load, lanes.store, lanes.slices, size, False
    )
    reduce = make_reduce(size, lanes)
    held = size * min(workspace.CHUNKED.tiles(size), max(1, workspace.LOADS // size))

    raise_flags, await_flags = make_flags(size)
    operation = failures.CHUNKED
    is_done = handshake.make_is_done(size)

    def chunked_all_reduce(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        count: int,
        share: int,
        tiles: int,
        chunks: int,
        fallback_for: int,
    ) -> None:
        thread = cuda.threadIdx.x
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if is_done(guard, ring, own, block, fallback_for):  # explore: fallback
            return
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        own_low = cuda.local.array(size, types.int64)
        own_high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        stride = grid * tiles * THREADS
        before, failed = workspace.resume(own, epochs, block)
        results_at = own + epochs + 4 * (workspace.MOST_BLOCKS + block)
        results_before = intrinsics.ld_u32(results_at)  # explore: results
        first = block * tiles * THREADS + thread
        # In each stage: gather the results of the chunk before last, scatter the next
        # chunk, and reduce the last one. The halves rely on this order.
        for stage in range(chunks + 2):
            if stage >= 2:  # explore: gather
                epoch = (results_before + stage - 1) & 0xFFFFFFFF
                flag = own + flag_place(block, REDUCED)
                failed = await_flags(guard, operation, flag, block, epoch, failed)
                if failed:
                    break
                epoch = (before + stage - 1) & 0xFFFFFFFF
                slot = own + place(block, epoch, REDUCED) + VECTOR * thread
                vector = first + (stage - 2) * stride
                chunk = guard.rank + 1, vector, tiles, share, count, share
                collect(slot, target, chunk, low, high)
            if stage == 1:  # explore: wait
                # After it, all ranks have left the previous call.
                epoch = (before + stage) & 0xFFFFFFFF
                flag = own + flag_place(block, SCATTERED)
                failed = await_flags(guard, operation, flag, block, epoch, failed)
                if failed:
                    break
            epoch = (before + stage + 1) & 0xFFFFFFFF
            if stage < chunks and not failed:  # explore: scatter
                slot = place(block, epoch, SCATTERED) + VECTOR * thread
                vector = first + stage * stride
                chunk = guard.rank + 1, vector, tiles, share, count, share
                scatter(ring, slot, source, chunk, low, high)
            if stage < chunks:
                flag = flag_place(block, SCATTERED)
                failed = raise_flags(ring, flag, guard.rank, epoch, failed)
                if failed:
                    break
            if 1 <= stage <= chunks:  # explore: reduce
                epoch = (before + stage) & 0xFFFFFFFF
                flag = own + flag_place(block, SCATTERED)
                failed = await_flags(guard, operation, flag, block, epoch, failed)
                if failed:
                    break
                here = own + place(block, epoch, SCATTERED) + VECTOR * thread
                slot = place(block, epoch, REDUCED) + VECTOR * thread
                vector = first + (stage - 1) * stride
                chunk = guard.rank, vector, tiles, share, count, share
                of_vector = own_low, own_high, spare
                reduce(ring, here, slot, source, target, chunk, low, high, of_vector)
                epoch = (results_before + stage) & 0xFFFFFFFF
                flag = flag_place(block, REDUCED)
                raise_flags(ring, flag, guard.rank, epoch, failed)
        workspace.keep(own, epochs, block, (before + chunks) & 0xFFFFFFFF, failed)
        if thread == 0:
            intrinsics.st_u32(results_at, (results_before + chunks) & 0xFFFFFFFF)

    return chunked_all_reduce


kernel = binding.kernels_of(
    make_chunked_all_reduce, binding.ADDRESS, binding.ADDRESS, *5 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


def bind(end: binding.Endpoint, call: binding.Call, fallback_for: int = 0) -> Launch:
    """Return the packed launch.

    Args:
        end: this rank's end.
        call: the call.
        fallback_for: after a handshake, the number in ``failures.py`` of what the ranks
            wait for there; 0: there was none.
    """
    share = partition.shard(call.vectors, end.size)
    grid, tiles, chunks = partition.chunks_of(share, end)
    ragged = partition.is_ragged(call, share, end.size)
    sizes = call.count, share, tiles, chunks
    arguments = (call.source, call.target, *sizes, fallback_for)
    of_call = kernel(end.size, call.element, call.op, ragged)
    return binding.launch(of_call, end, grid, arguments)
