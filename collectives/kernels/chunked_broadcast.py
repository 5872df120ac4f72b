"""Broadcast in chunks, for larger messages: every link transfers the message once.

The message is divided into a shard for each rank but the root, its owner. In chunks:

    scatter   the root stores each owner's shard in the owner's workspace
    relay     the owner stores it in its array, and in the other owners' workspaces
    collect   each owner copies the others' shards from its workspace into its array

so the root sends the message once, and each other rank receives it once. This is the
reverse of ``chunked_reduce.py``, with the same memory order: stages, slots, flags and
epochs are the same. Two ranks have one owner, which relays nothing: a call ends a stage
earlier.
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
    ChunkAccess,
    make_chunks,
    read_slots,
    write_slots,
)
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.workspace import THREADS, TILE_BYTES, VECTOR
from numba_symm.device import intrinsics, lanes, order
from numba_symm.dtypes import Element
from numba_symm.gpu.kernels import Launch
from numba_symm.launch import failures


def make_relay(
    size: int, moves: lanes.Lanes, access: ChunkAccess
) -> Callable[..., None]:
    """Return a device function that passes on a chunk of this rank's shard.

    ``(ring, here, slot, array, to_root, chunk, low, high)`` reads the chunk from the
    address ``here`` on. It stores it in the array, and in the slots of all but the
    root, from the offset ``slot`` on. ``chunk`` begins with the shard's number, but is
    ``chunks.py``'s otherwise.
    """
    inside, store, others = access.inside, moves.store, size - 1
    room, mirror = workspace.CHUNKED.tiles(size), order.make_mirror(size)
    rank_stride, batch = room * TILE_BYTES, min(room, workspace.LOADS)

    def relay_slices(
        ring: Any,
        here: int,
        slot: int,
        array: int,
        to_root: int,
        chunk: Any,
        low: Any,
        high: Any,
    ) -> None:
        count = chunk[4]
        at = access.in_array(chunk, 0)
        words = read_slots(here, len(at))
        for k in range(others):
            if k != to_root:
                write_slots(ring[k] + slot + mirror(k) * rank_stride, words)
        moves.slices.write(array, at, count, words)

    @intrinsics.sliced(relay_slices)
    def relay(
        ring: Any,
        here: int,
        slot: int,
        array: int,
        to_root: int,
        chunk: Any,
        low: Any,
        high: Any,
    ) -> None:
        mine, vector, tiles, share, count, vectors = chunk
        for base in range(0, tiles, batch):
            for i in range(batch):
                at = vector + (base + i) * THREADS
                if base + i < tiles and inside(mine, at, share, vectors):
                    there = here + (base + i) * TILE_BYTES
                    low[i], high[i] = intrinsics.ld_v2_u64(there)
            for i in range(batch):
                at = vector + (base + i) * THREADS
                if base + i < tiles and inside(mine, at, share, vectors):
                    words = low[i], high[i]
                    for k in range(others):
                        to = ring[k] + slot + mirror(k) * rank_stride
                        if k != to_root:  # explore: to-root
                            to += (base + i) * TILE_BYTES
                            intrinsics.st_v2_u64(to, words)
                    there = mine * share + at
                    store(array, there, count, words[0], words[1])

    return relay


def make_chunked_broadcast(size: int, element: Element, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks and a type that is only moved."""
    moves = lanes.make_lanes(element, "sum", ragged, size)
    chunk_access = make_chunks(
        size, moves.load, moves.store, moves.slices, size - 1, True
    )
    scatter, collect = chunk_access.scatter, chunk_access.collect
    relay = make_relay(size, moves, chunk_access)
    at = workspace.layout(size).chunked
    epochs, flags = at.epochs, at.flags
    place = slots.make_place(size)
    room = workspace.CHUNKED.tiles(size)
    rank_stride = room * TILE_BYTES
    held = max(min(room, max(1, workspace.LOADS // size)) * (size - 1), workspace.LOADS)
    lag = 2 if size > 2 else 1
    raise_flags, await_flags = make_flags(size)
    operation = failures.CHUNKED_BROADCAST
    is_done = handshake.make_is_done(size)

    def chunked_broadcast(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        root: int,
        array: int,
        count: int,
        vectors: int,
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
        rank = guard.rank
        is_root = rank == root
        # Along the ring from the root on, whose own number is the last.
        mine = (rank + size - root - 1) % size
        to_root = (root + size - rank - 1) % size
        stride = grid * tiles * THREADS
        before, failed = workspace.resume(own, epochs, block)
        first = block * tiles * THREADS + thread
        flag = flags + 4 * size * block
        for stage in range(chunks + lag):
            epoch = (before + stage + 1) & 0xFFFFFFFF
            if stage < chunks and is_root and not failed:
                slot = place(block, before, stage) + VECTOR * thread
                vector = first + stage * stride
                # The root's k-th neighbour owns shard k.
                chunk = 0, vector, tiles, share, count, vectors
                scatter(ring, slot, array, chunk, low, high)
            if stage >= 1:  # explore: wait
                last = (before + stage) & 0xFFFFFFFF
                failed = await_flags(guard, operation, own + flag, block, last, failed)
                if failed:
                    break
            if 1 <= stage <= chunks and not is_root:
                here = own + place(block, before, stage - 1) + VECTOR * thread
                here += to_root * rank_stride
                slot = place(block, before, stage - 1) + VECTOR * thread
                vector = first + (stage - 1) * stride
                chunk = mine, vector, tiles, share, count, vectors
                relay(ring, here, slot, array, to_root, chunk, low, high)
            if stage >= lag and not is_root:
                slot = own + place(block, before, stage - 2) + VECTOR * thread
                vector = first + (stage - 2) * stride
                # explore: collect
                chunk = mine + 1, vector, tiles, share, count, vectors
                collect(slot, array, chunk, low, high)
            if stage < chunks + lag - 1:  # explore: signal
                failed = raise_flags(ring, flag, rank, epoch, failed)
                if failed:
                    break
        workspace.keep(own, epochs, block, slots.after(before, chunks, lag), failed)

    return chunked_broadcast


kernel = binding.kernels_of(
    make_chunked_broadcast, types.int64, binding.ADDRESS, *6 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


def bind(end: binding.Endpoint, call: binding.Call, fallback_for: int = 0) -> Launch:
    """Return the packed launch; see ``chunked_all_reduce.bind``.

    The call's source and target are one.
    """
    share = partition.shard(call.vectors, end.size - 1)
    grid, tiles, chunks = partition.chunks_of(share, end)
    ragged = partition.is_ragged(call)
    sizes = call.count, call.vectors, share, tiles, chunks
    arguments = (call.root, call.target, *sizes, fallback_for)
    of_call = kernel(end.size, partition.moved_as(call, ragged), ragged)
    return binding.launch(of_call, end, grid, arguments)
