"""Broadcast between the ranks' own arrays: for larger messages, of three ranks or more.

The message is divided into a shard for each rank but the root, its owner. An owner
reads its shard in the root's array and stores it in its own and in the other owners',
vector by vector. So the root sends the message once, each other rank receives it once,
and no thread waits between the first vector and the last. The arrays must be symmetric:
``handshake.py`` explains how the ranks exchange their addresses, and what happens
otherwise.

Memory order: that of ``handshake.py``, which orders the streams' earlier work before
this kernel, and this kernel before what follows on any rank's stream.
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
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import intrinsics, lanes, order
from numba_symm.device.lanes import shifted
from numba_symm.dtypes import Element
from numba_symm.launch import failures

BATCH = 2  # vectors that a thread loads before it stores them


def make_copy(size: int, moves: lanes.Lanes) -> Callable[..., None]:
    """Return a device function that copies a thread's vectors of this rank's shard.

    ``(from_root, array, theirs, to_root, at, count, low, high)`` copies from the
    address ``from_root`` to this rank's array, and to those in ``theirs`` but the
    root's. ``at`` is ``(first, start, stride, mine)``: in the shard that begins at
    ``first``, the vectors at ``start``, ``start + stride`` …, before ``mine``.
    """
    load, store, others = moves.load, moves.store, size - 1
    read, write = moves.slices

    def copy_slices(
        from_root: int,
        array: int,
        theirs: Any,
        to_root: int,
        at: Any,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        first, start, stride, mine = at
        here = shifted(range(start, mine, stride), first)
        words = read(from_root, here, count)
        write(array, here, count, words)
        for k in range(others):
            if k != to_root:
                write(int(theirs[k]), here, count, words)

    @intrinsics.sliced(copy_slices)
    def copy(
        from_root: int,
        array: int,
        theirs: Any,
        to_root: int,
        at: Any,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        first, start, stride, mine = at
        while start < mine:
            for i in range(BATCH):
                vector = start + i * stride
                if vector < mine:
                    low[i], high[i] = load(from_root, first + vector, count)
            for i in range(BATCH):
                vector = start + i * stride
                if vector < mine:
                    store(array, first + vector, count, low[i], high[i])
                    for k in range(others):
                        if k != to_root:
                            into = intrinsics.word_of(theirs[k])
                            store(into, first + vector, count, low[i], high[i])
            start += BATCH * stride

    return copy


def make_direct_broadcast(size: int, element: Element, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks and a type that is only moved."""
    copy = make_copy(size, lanes.make_lanes(element, "sum", ragged, size))
    refused, where = handshake.make_refused(size), handshake.make_where(size)
    others = size - 1
    mirror = order.make_mirror(size)

    def direct_broadcast(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        array: int,
        count: int,
        vectors: int,
        share: int,
        root: int,
    ) -> None:
        workspace.follow_previous_grid(early)
        block = intrinsics.block_index()
        # Owners are numbered from the one after the root on.
        owner = (guard.rank + others - root) % size
        if block >= grid or refused(own) or owner == others:  # explore: refused
            return
        low = cuda.local.array(BATCH, types.int64)
        high = cuda.local.array(BATCH, types.int64)
        theirs = cuda.local.array(others, types.int64)
        first = owner * share
        mine = min(share, vectors - first)
        to_root = mirror(owner)  # its index in the ring
        from_root, _ = intrinsics.ld_v2_u64(own + where(to_root))
        for k in range(others):
            theirs[k], _ = intrinsics.ld_v2_u64(own + where(k))
        start = block * THREADS + cuda.threadIdx.x
        at = first, start, grid * THREADS, mine
        copy(from_root, array, theirs, to_root, at, count, low, high)

    return direct_broadcast


kernel = binding.kernels_of(make_direct_broadcast, binding.ADDRESS, *4 * (types.int64,))
"""Returns a kernel, compiled when first bound."""


def bind(
    bind_fallback: binding.BindFallback, end: binding.Endpoint, call: binding.Call
) -> binding.Enqueue:
    """Return what enqueues it, for three ranks or more.

    Args:
        bind_fallback: binds the broadcast through the workspace.
        end: this rank's end.
        call: the call, whose source and target are one.
    """
    words = f"broadcast of {call.count} {call.element.name} from {call.root}"
    share = partition.shard(call.vectors, end.size - 1)
    grid = min(workspace.divide_up(share, THREADS), end.max_blocks, handshake.BLOCKS)
    ragged = call.count % call.element.lanes != 0
    of_call = kernel(end.size, partition.moved_as(call, ragged), ragged)
    arguments = call.target, call.count, call.vectors, share, call.root
    move = binding.launch(of_call, end, grid, arguments, handshake.MULTIPROCESSORS)
    seen = handshake.offered(end, call.target, call.nbytes)
    offer = handshake.Offer(failures.BROADCAST_DIRECT, words, seen, seen)
    return handshake.bind(bind_fallback, end, call, offer, move)
