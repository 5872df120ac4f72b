"""Reduce between the ranks' own arrays: for larger messages.

Each rank but the root owns a shard; of two ranks, the root owns everything. An owner
reads its shard in all ranks' inputs, reduces it by their tree, and stores the result in
the root's output, vector by vector. So a link transfers the message at most once in
each direction, and no thread waits between the first vector and the last. The inputs
and the root's output must be symmetric: ``handshake.py`` explains how the ranks
exchange their addresses, and what happens otherwise.

Memory order: as ``direct_broadcast.py``. In place, the thread that reads a vector of
the root's input stores that vector of its output afterwards, and no other thread
accesses it.

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
    workspace,
)
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import intrinsics, order
from numba_symm.device.lanes import Lanes, make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.launch import failures

LOADS = 8  # vectors that a thread loads before it reduces them


def make_reduce(size: int, lanes: Lanes) -> Callable[..., None]:
    """Return a device function that reduces a thread's vectors of this rank's shard.

    ``(inputs, into, at, count, low, high)`` stores the results at ``into``. ``at`` is
    ``(start, stride, end)``: the vectors at ``start``, ``start + stride`` …, before
    ``end``. The others are local arrays, ``inputs`` that of
    ``handshake.make_find_inputs``.
    """
    store, total = lanes.store, order.make_total(size, lanes)
    batch = max(1, LOADS // size)
    load_batch = handshake.make_load_batch(size, batch, lanes.load)
    read_each, write = lanes.slices.read_each, lanes.slices.write

    def reduce_slices(
        inputs: Any, into: int, at: Any, count: int, low: Any, high: Any
    ) -> None:
        start, stride, end = at
        mine = range(start, end, stride)
        write(into, mine, count, lanes.fold(read_each(inputs, mine, count)))

    @intrinsics.sliced(reduce_slices)
    def reduce(
        inputs: Any, into: int, at: Any, count: int, low: Any, high: Any
    ) -> None:
        start, stride, end = at
        while start < end:
            load_batch(inputs, start, stride, end, count, low, high)
            for i in range(batch):
                vector = start + i * stride
                if vector < end:
                    words = total(low, high, i * size)
                    store(into, vector, count, words[0], words[1])
            start += batch * stride

    return reduce


def make_direct_reduce(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    reduce = make_reduce(size, make_lanes(element, op, ragged, size))
    refused, where = handshake.make_refused(size), handshake.make_where(size)
    find_inputs = handshake.make_find_inputs(size)
    others = size - 1
    mirror = order.make_mirror(size)
    after_owner = others if size > 2 else size
    held = max(1, LOADS // size) * size

    def direct_reduce(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        count: int,
        vectors: int,
        share: int,
        root: int,
    ) -> None:
        workspace.follow_previous_grid(early)
        block = intrinsics.block_index()
        # Owners are numbered from the one after the root on, or from the root.
        owner = (guard.rank + after_owner - root) % size
        if block >= grid or refused(own) or owner == others:  # explore: refused
            return
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        inputs = cuda.local.array(size, types.int64)
        first = owner * share
        end = min(first + share, vectors)
        into = target
        if size > 2:
            _, into = intrinsics.ld_v2_u64(own + where(mirror(owner)))  # explore: into
        find_inputs(own, guard.rank, source, 0, inputs)
        at = first + block * THREADS + cuda.threadIdx.x, grid * THREADS, end
        reduce(inputs, into, at, count, low, high)

    return direct_reduce


kernel = binding.kernels_of(
    make_direct_reduce, binding.ADDRESS, binding.ADDRESS, *4 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


def bind(
    bind_fallback: binding.BindFallback, end: binding.Endpoint, call: binding.Call
) -> binding.Enqueue:
    """Return what enqueues it, for two ranks or more.

    Args:
        bind_fallback: binds the reduction through the workspace.
        end: this rank's end.
        call: the call.
    """
    element, op = call.element, call.op
    inputs = outputs = handshake.offered(end, call.source, call.nbytes)
    if end.rank == call.root:
        outputs = handshake.offered(end, call.target, call.nbytes)
        if outputs[0] == 0:
            inputs = outputs
    words = f"reduce of {call.count} {element.name} by {op!r} to {call.root}"
    share = partition.shard(call.vectors, end.size - 1)
    grid = min(workspace.divide_up(share, THREADS), end.max_blocks, handshake.BLOCKS)
    of_call = kernel(end.size, element, op, call.count % element.lanes != 0)
    sizes = call.count, call.vectors, share
    arguments = (call.source, call.target, *sizes, call.root)
    move = binding.launch(of_call, end, grid, arguments, handshake.MULTIPROCESSORS)
    offer = handshake.Offer(failures.REDUCE_DIRECT, words, inputs, outputs)
    return handshake.bind(bind_fallback, end, call, offer, move)
