"""All-gather and all-to-all between the ranks' own arrays, with loads.

Each rank loads its shard of every other rank's input; in an all-gather, it loads the
whole input. It stores the loaded vectors in its own output, a few at a time, and does
not use the workspace. The inputs must be symmetric. ``handshake.py`` describes the
exchange of their addresses, and calls with other inputs. Each rank sends every other
rank the address from which that rank loads.

Memory order: that of ``handshake.py``, which orders the streams' earlier work before
this kernel, and this kernel before what follows on any rank's stream. In an all-gather
in place, no rank stores its own shard, which the other ranks load. An all-to-all in
place is refused, because the other ranks load what it would overwrite.
"""

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import (
    binding,
    exchanges,
    handshake,
    partition,
    workspace,
)
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import intrinsics
from numba_symm.device.lanes import Lanes, make_lanes
from numba_symm.dtypes import Element

LOADS = 6  # vectors that a thread loads before it stores them


def make_copy(size: int, moves: Lanes) -> Callable[..., None]:
    """Return a device function that copies a thread's vectors of all shards.

    ``(rank, inputs, source, target, shard_bytes, at, count, low, high)``; ``inputs`` is
    a local array of their addresses along the ring. ``at`` is ``(start, stride,
    vectors)``: the vectors at ``start``, ``start + stride`` …, before ``vectors``.
    """
    store, read, write = moves.store, moves.slices.read, moves.slices.write
    batch = max(1, LOADS // size)
    held = batch * size
    load_batch = handshake.make_load_batch(size, batch, moves.load)

    def copy_slices(
        rank: int,
        inputs: Any,
        source: int,
        target: int,
        shard_bytes: int,
        at: Any,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        start, stride, vectors = at
        mine = range(start, vectors, stride)
        for k in range(size):
            there = target + (rank + 1 + k) % size * shard_bytes
            if there != source:
                write(there, mine, count, read(int(inputs[k]), mine, count))

    @intrinsics.sliced(copy_slices)
    def copy(
        rank: int,
        inputs: Any,
        source: int,
        target: int,
        shard_bytes: int,
        at: Any,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        start, stride, vectors = at
        while start < vectors:
            load_batch(inputs, start, stride, vectors, count, low, high)
            for i in range(held):
                vector = start + i // size * stride
                there = target + (rank + 1 + i % size) % size * shard_bytes
                if vector < vectors and there != source:
                    store(there, vector, count, low[i], high[i])
            start += batch * stride

    return copy


def make_direct_exchange(size: int, element: Element, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks and a type that is only moved."""
    copy = make_copy(size, make_lanes(element, "sum", ragged, size))
    refused, where = handshake.make_refused(size), handshake.make_where(size)
    others = size - 1
    held = max(1, LOADS // size) * size

    def direct_exchange(
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
    ) -> None:
        workspace.follow_previous_grid(early)
        block = intrinsics.block_index()
        if block >= grid or refused(own):
            return
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        inputs = cuda.local.array(size, types.int64)
        for k in range(others):
            inputs[k], _ = intrinsics.ld_v2_u64(own + where(k))
        inputs[others] = source
        at = block * THREADS + cuda.threadIdx.x, grid * THREADS, vectors
        copy(guard.rank, inputs, source, target, shard_bytes, at, count, low, high)

    return direct_exchange


kernel = binding.kernels_of(
    make_direct_exchange, binding.ADDRESS, binding.ADDRESS, *3 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


def bind(
    exchange: exchanges.Exchange,
    bind_fallback: binding.BindFallback,
    end: binding.Endpoint,
    call: binding.Call,
) -> binding.Enqueue:
    """Return what enqueues it, for two ranks or more.

    Args:
        exchange: that of the all-gather or the all-to-all.
        bind_fallback: binds the exchange through the workspace.
        end: this rank's end.
        call: the call.
    """
    shards = exchange.sends_shards
    kind = "all_to_all" if shards else "all_gather"
    words = f"direct {kind} of {call.count} {call.element.name}"
    mine = call.source + (end.rank * call.nbytes if shards else 0)
    grid = min(
        workspace.divide_up(call.vectors, THREADS), end.max_blocks, handshake.BLOCKS
    )
    ragged = partition.is_ragged(call)
    of_call = kernel(end.size, partition.moved_as(call, ragged), ragged)
    arguments = mine, call.target, call.nbytes, call.count, call.vectors
    move = binding.launch(of_call, end, grid, arguments, handshake.MULTIPROCESSORS)
    if not shards:
        seen = handshake.offered(end, call.source, call.nbytes)
    elif call.source == call.target:
        seen = handshake.refusal(end.size)
    else:
        seen = handshake.offered(end, call.source, end.size * call.nbytes)
        peers = binding.along_ring(end.rank, tuple(range(end.size)))
        seen = tuple(
            address and address + peer * call.nbytes
            for address, peer in zip(seen, peers, strict=True)
        )
    offer = handshake.Offer(exchange.operation, words, seen, seen)
    return handshake.bind(bind_fallback, end, call, offer, move)
