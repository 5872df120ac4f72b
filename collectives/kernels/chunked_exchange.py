"""All-gather, all-to-all and partial reductions in chunks, for larger messages.

The exchange is that of ``one_shot.py``, but a block moves a chunk of several tiles at a
time through the workspace, and signals each with one flag for every rank. In stage t,
each rank

    sends     chunk t to all others
    waits     for all ranks' flags of stage t-1
    reads     what the others sent of chunk t-1
    raises    its flags of stage t, at all others

so a block's next chunk is in transit while it waits for one and reads it. In a
reduction to one of two ranks, the other rank sends and the root reads.

Memory order. ``flags.py`` orders a block's accesses of a stage before its flags, and
the other ranks' accesses of the stage before theirs. Chunks use four sets of slots, one
after another (``slots.py``). A rank stores chunk t where chunk t-4 was. It does so
after all ranks' flags of stage t-2, which they raised after they had read chunk t-4.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import (
    binding,
    exchanges,
    handshake,
    partition,
    slots,
    workspace,
)
from numba_symm.collectives.protocols.chunks import (
    make_fold_slots,
    make_load_all,
    read_slots,
    write_slots,
)
from numba_symm.collectives.protocols.exchanges import Output
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.workspace import THREADS, TILE_BYTES, VECTOR
from numba_symm.device import intrinsics, order
from numba_symm.device.lanes import Lanes, make_lanes, repeated
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.kernels import Launch


def received_of(size: int, output: Output) -> int:
    """Return how many vectors a thread receives of one tile, its own included."""
    return max(1, size - 1 if output is Output.SHARDS else size)


@functools.cache
def make_use(
    size: int, element: Element, op: Op, lanes: Lanes, output: Output
) -> Callable[..., None]:
    """Return a device function that reduces or stores what arrived of a chunk.

    ``(slot, here, target, shard_bytes, taken, chunk, low, high, mine)`` reads the slots
    from the address ``slot`` on, and this rank's input at ``here``. ``chunk`` is as in
    ``chunks.make_load_all``, and ``mine`` are two local arrays.
    """
    store = lanes.store
    total = exchanges.make_total_for(size, lanes, output)
    none_stored, none_low, none_high = exchanges.of_none(element, op, output)
    load_all = make_load_all(size, lanes.load)
    stores_shards = output is Output.SHARDS
    room, others = workspace.CHUNKED.tiles(size), size - 1
    rank_stride = room * TILE_BYTES
    received = received_of(size, output)
    batch = min(room, max(1, workspace.LOADS // received))
    fold_slots, write = make_fold_slots(size, lanes), lanes.slices.write
    from_this = output is Output.FROM_THIS

    def use_slices(
        slot: int,
        here: int,
        target: int,
        shard_bytes: int,
        taken: int,
        chunk: Any,
        low: Any,
        high: Any,
        mine: Any,
    ) -> None:
        rank, vector, tiles, vectors, count, _ = chunk
        at = range(vector, vectors, THREADS)[:tiles]
        if stores_shards:
            for k in range(others):
                to = target + (rank + 1 + k) % size * shard_bytes
                write(to, at, count, read_slots(slot + k * rank_stride, len(at)))
        elif taken > 0:
            used = slice(size - taken, size) if from_this else slice(taken)
            write(target, at, count, fold_slots(slot, here, chunk, used)[1])
        elif none_stored:
            write(target, at, count, repeated(none_low, none_high, len(at)))

    @intrinsics.sliced(use_slices)
    def use(
        slot: int,
        here: int,
        target: int,
        shard_bytes: int,
        taken: int,
        chunk: Any,
        low: Any,
        high: Any,
        mine: Any,
    ) -> None:
        rank, vector, tiles, vectors, count, _ = chunk
        for base in range(0, tiles, batch):
            if stores_shards:
                for i in range(batch * others):
                    tile, k = base + i // others, i % others
                    at = vector + tile * THREADS
                    if tile < tiles and at < vectors:
                        low[i], high[i] = intrinsics.ld_v2_u64(
                            slot + k * rank_stride + tile * TILE_BYTES
                        )
            else:
                load_all(slot, here, chunk, base, low, high, mine[0], mine[1])
            for i in range(batch):
                at = vector + (base + i) * THREADS
                if base + i < tiles and at < vectors:
                    j = i * received
                    if stores_shards:
                        for k in range(others):
                            to = target + (rank + 1 + k) % size * shard_bytes
                            store(to, at, count, low[j + k], high[j + k])
                    elif taken > 0:
                        words = total(taken, low, high, j)
                        store(target, at, count, words[0], words[1])
                    elif none_stored:
                        store(target, at, count, none_low, none_high)

    return use


def sent_of(size: int, kind: exchanges.Exchange) -> int:
    """Return how many vectors a thread loads of one tile before it stores them.

    Those of the other ranks' shards, or one for all; and its own vector, which is the
    last.
    """
    stores_shards, sends_shards = kind.output is Output.SHARDS, kind.sends_shards
    return max(1, (size - 1) * sends_shards + (stores_shards or not sends_shards))


@functools.cache
def make_send(size: int, lanes: Lanes, kind: exchanges.Exchange) -> Callable[..., None]:
    """Return a device function that stores a chunk in the slots of all others.

    ``(ring, slot, source, there, shard_bytes, chunk, low, high)`` stores it from the
    offset ``slot`` in a workspace on, and this rank's own shard at ``there``. ``chunk``
    is as in ``chunks.make_load_all``.
    """
    load, store = lanes.load, lanes.store
    read, write = lanes.slices
    sends_shards, stores_shards = kind.sends_shards, kind.output is Output.SHARDS
    room, others = workspace.CHUNKED.tiles(size), size - 1
    rank_stride, mirror = room * TILE_BYTES, order.make_mirror(size)
    sent = sent_of(size, kind)
    batch = min(room, max(1, workspace.LOADS // sent))

    def send_slices(
        ring: Any,
        slot: int,
        source: int,
        there: int,
        shard_bytes: int,
        chunk: Any,
        low: Any,
        high: Any,
    ) -> None:
        rank, vector, tiles, vectors, count, _ = chunk
        at = range(vector, vectors, THREADS)[:tiles]
        for k in range(others):
            r = (rank + 1 + k) % size
            array = source + r * shard_bytes if sends_shards else source
            to = ring[k] + slot + mirror(k) * rank_stride
            write_slots(to, read(array, at, count))
        if stores_shards:
            array = source + rank * shard_bytes if sends_shards else source
            write(there, at, count, read(array, at, count))

    @intrinsics.sliced(send_slices)
    def send(
        ring: Any,
        slot: int,
        source: int,
        there: int,
        shard_bytes: int,
        chunk: Any,
        low: Any,
        high: Any,
    ) -> None:
        rank, vector, tiles, vectors, count, _ = chunk
        for base in range(0, tiles, batch):
            for i in range(batch * sent):
                tile, k = base + i // sent, i % sent
                at = vector + tile * THREADS
                if tile < tiles and at < vectors:
                    r = (rank + 1 + k) % size
                    array = source + r * shard_bytes if sends_shards else source
                    low[i], high[i] = load(array, at, count)
            for i in range(batch):
                tile = base + i
                at = vector + tile * THREADS
                if tile < tiles and at < vectors:
                    for k in range(others):
                        j = i * sent + (k if sends_shards else 0)
                        to = ring[k] + slot + mirror(k) * rank_stride
                        to += tile * TILE_BYTES
                        intrinsics.st_v2_u64(to, (low[j], high[j]))
                    if stores_shards:
                        j = i * sent + sent - 1
                        store(there, at, count, low[j], high[j])

    return send


def make_chunked_exchange(
    size: int, element: Element, op: Op, ragged: bool, kind: exchanges.Exchange
) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    is_done = handshake.make_is_done(size)
    lanes = make_lanes(element, op, ragged, size)
    raise_flags, await_flags = make_flags(size)
    sends_shards, output, operation = kind
    stores_shards, at_root = output is Output.SHARDS, output is Output.AT_ROOT
    at = workspace.layout(size).chunked
    epochs, flags = at.epochs, at.flags
    place = slots.make_place(size)
    room, sent = workspace.CHUNKED.tiles(size), sent_of(size, kind)
    send, use = make_send(size, lanes, kind), make_use(size, element, op, lanes, output)
    batch_out = min(room, max(1, workspace.LOADS // sent))
    batch_in = min(room, max(1, workspace.LOADS // received_of(size, output)))
    held = max(batch_out * sent, batch_in * received_of(size, output))

    def chunked_exchange(
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
        own_low = cuda.local.array(batch_in, types.int64)
        own_high = cuda.local.array(batch_in, types.int64)
        mine = own_low, own_high
        rank = guard.rank
        stride = grid * tiles * THREADS
        before, failed = workspace.resume(own, epochs, block)
        first = block * tiles * THREADS + thread
        here = source + rank * shard_bytes if sends_shards else source
        there = target + rank * shard_bytes if stores_shards else target
        flag = flags + 4 * size * block
        for stage in range(chunks + 1):
            epoch = (before + stage + 1) & 0xFFFFFFFF
            if stage < chunks and not failed and not (at_root and taken > 0):
                slot = place(block, before, stage) + VECTOR * thread
                vector = first + stage * stride
                chunk = rank, vector, tiles, vectors, count, 0
                send(ring, slot, source, there, shard_bytes, chunk, low, high)
            if stage >= 1:  # explore: wait
                last = (before + stage) & 0xFFFFFFFF
                failed = await_flags(guard, operation, own + flag, block, last, failed)
                if failed:
                    break
            if stage >= 1 and not (at_root and taken == 0):
                slot = own + place(block, before, stage - 1) + VECTOR * thread
                vector = first + (stage - 1) * stride
                chunk = rank, vector, tiles, vectors, count, 0
                use(slot, here, target, shard_bytes, taken, chunk, low, high, mine)
            if stage < chunks:  # explore: signal
                failed = raise_flags(ring, flag, rank, epoch, failed)
                if failed:
                    break
        workspace.keep(own, epochs, block, slots.after(before, chunks, 1), failed)

    return chunked_exchange


kernel = binding.kernels_of(
    make_chunked_exchange, binding.ADDRESS, binding.ADDRESS, *7 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


def bind(
    kind: exchanges.Exchange,
    end: binding.Endpoint,
    call: binding.Call,
    fallback_for: int = 0,
) -> Launch:
    """Return the packed launch; see ``chunked_all_reduce.bind``.

    A reduction to a root is for two ranks at most.
    """
    grid, tiles, chunks = partition.chunks_of(call.vectors, end)
    ragged = partition.is_ragged(call)
    element = call.element if kind.output.reduces else partition.moved_as(call, ragged)
    sizes = call.nbytes, call.count, call.vectors
    taken = kind.output.taken(end.rank, end.size, call.root)
    arguments = (call.source, call.target, *sizes, taken, tiles, chunks, fallback_for)
    of_call = kernel(end.size, element, call.op, ragged, kind)
    return binding.launch(of_call, end, grid, arguments)
