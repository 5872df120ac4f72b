"""All-reduce and reduce-scatter between the ranks' own arrays: for larger messages.

Each rank owns a shard. It loads its shard of all ranks' inputs, reduces it in rank
order, and stores the result, vector by vector. So no thread waits between the first
vector and the last. In each direction, a link transfers two shards in an all-reduce,
and one in a reduce-scatter.

    all_reduce       stores the result in every rank's output, its own included; the
                     inputs and outputs of all ranks must be symmetric
    reduce_scatter   stores it in its own output, at any address; the inputs of all
                     ranks must be symmetric

``handshake.py`` explains how the ranks exchange the addresses of the arrays, and what
happens if one is not symmetric.

Memory order: that of ``handshake.py``, which orders the streams' earlier work before
this kernel, and this kernel before what follows on any rank's stream. In the kernel, no
thread depends on another one, not even in place:

- In an all-reduce, one thread of one rank loads a vector of all inputs, and then stores
  that vector of all outputs. No other thread accesses this vector, so any ranks may be
  in place.
- In a reduce-scatter in place, a rank's output is its own shard of its input. The other
  ranks load only their own shards of this input.

After a refusal, the third launch may be in place, as any call through the workspace.

Each element is reduced by one rank, by their tree, so all ranks get the same bits.
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
from numba_symm.collectives.protocols.workspace import THREADS, VECTOR
from numba_symm.device import intrinsics, order
from numba_symm.device.lanes import Lanes, make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.kernels import Launch
from numba_symm.launch import failures

LOADS = 8  # vectors that a thread loads before it reduces them

BLOCKS = 64
"""Most blocks of an all-reduce. On 2 GPUs, thread blocks of 8 of them were within 2 %
of smaller ones.
"""


def make_reduce(size: int, lanes: Lanes, everywhere: bool) -> Callable[..., None]:
    """Return a device function that reduces a thread's vectors of this rank's shard.

    ``(own, inputs, outputs, target, offset, at, count, low, high)`` stores the results
    at ``target``, and ``offset`` bytes from what each other rank has sent. ``at`` is
    ``(start, stride, vectors)``: the vectors at ``start``, ``start + stride`` …, before
    ``vectors``. The others are local arrays, ``inputs`` that of
    ``handshake.make_find_inputs``.
    """
    store, total = lanes.store, order.make_total(size, lanes)
    others, batch = size - 1, max(1, LOADS // size)
    where = handshake.make_where(size)
    load_batch = handshake.make_load_batch(size, batch, lanes.load)
    read_each, write = lanes.slices.read_each, lanes.slices.write

    def reduce_slices(
        own: int,
        inputs: Any,
        outputs: Any,
        target: int,
        offset: int,
        at: Any,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        start, stride, vectors = at
        mine = range(start, vectors, stride)
        words = lanes.fold(read_each(inputs, mine, count))
        write(target, mine, count, words)
        for k in range(others if everywhere else 0):
            _, there = intrinsics.ld_v2_u64(own + where(k))
            write(there + offset, mine, count, words)

    @intrinsics.sliced(reduce_slices)
    def reduce(
        own: int,
        inputs: Any,
        outputs: Any,
        target: int,
        offset: int,
        at: Any,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        start, stride, vectors = at
        while start < vectors:
            load_batch(inputs, start, stride, vectors, count, low, high)
            for i in range(batch):
                if start + i * stride < vectors:
                    # What was loaded there is reduced by now.
                    low[i], high[i] = total(low, high, i * size)
            for i in range(batch):
                vector = start + i * stride
                if vector < vectors:
                    store(target, vector, count, low[i], high[i])
            if everywhere:
                for k in range(others):
                    # Loaded again, because the registers cannot hold all addresses
                    # beside a vector of each of eight ranks.
                    _, there = intrinsics.ld_v2_u64(own + where(k))  # explore: into
                    outputs[k] = there + offset  # explore: whose
                # Along the ring, so that the ranks do not all store at the same one.
                for k in range(others):
                    for i in range(batch):
                        vector = start + i * stride
                        if vector < vectors:
                            into = intrinsics.word_of(outputs[k])
                            store(into, vector, count, low[i], high[i])
            start += batch * stride

    return reduce


def make_direct_shards(
    size: int, element: Element, op: Op, ragged: bool, everywhere: bool
) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction.

    Args:
        size: number of ranks.
        element: the element type.
        op: the operator.
        ragged: see ``make_lanes``.
        everywhere: whether all ranks get the result, else this one.
    """
    lanes = make_lanes(element, op, ragged, size)
    refused, find_inputs = (
        handshake.make_refused(size),
        handshake.make_find_inputs(size),
    )
    reduce = make_reduce(size, lanes, everywhere)
    others = size - 1
    held = max(1, LOADS // size) * size

    def direct_shards(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        offset: int,
        count: int,
        vectors: int,
    ) -> None:
        # ``source`` and ``target`` are this rank's shard of its own arrays; of the
        # other ranks' arrays, it begins after ``offset`` bytes.
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if refused(own):  # explore: refused
            return
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        inputs = cuda.local.array(size, types.int64)
        outputs = cuda.local.array(others, types.int64)
        find_inputs(own, guard.rank, source, offset, inputs)  # explore: shard
        at = block * THREADS + cuda.threadIdx.x, grid * THREADS, vectors
        reduce(own, inputs, outputs, target, offset, at, count, low, high)

    return direct_shards


kernel = binding.kernels_of(
    make_direct_shards, binding.ADDRESS, binding.ADDRESS, *3 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


def bind_all_reduce(
    bind_fallback: binding.BindFallback, end: binding.Endpoint, call: binding.Call
) -> binding.Enqueue:
    """Return what enqueues an all-reduce, for two ranks or more.

    Args:
        bind_fallback: binds the all-reduce through the workspace.
        end: this rank's end.
        call: the call.
    """
    inputs = handshake.offered(end, call.source, call.nbytes)
    outputs = handshake.offered(end, call.target, call.nbytes)
    if outputs[0] == 0:  # explore: both
        inputs = outputs
    lanes, share = call.element.lanes, partition.shard(call.vectors, end.size)
    first = end.rank * share
    vectors = max(0, min(share, call.vectors - first))
    offset, count = VECTOR * first, min(share * lanes, call.count - first * lanes)
    arguments = call.source + offset, call.target + offset, offset, count, vectors
    ragged = call.count % lanes != 0
    move = _launch(end, call, share, arguments, everywhere=True, ragged=ragged)
    words = f"direct all_reduce of {_words(call)}"
    offer = handshake.Offer(failures.ALL_REDUCE_DIRECT, words, inputs, outputs)
    return handshake.bind(bind_fallback, end, call, offer, move)


def bind_reduce_scatter(
    bind_fallback: binding.BindFallback, end: binding.Endpoint, call: binding.Call
) -> binding.Enqueue:
    """Return what enqueues a reduce-scatter; see ``bind_all_reduce``."""
    inputs = handshake.offered(end, call.source, end.size * call.nbytes)
    offset = end.rank * call.nbytes
    ragged, share = partition.is_ragged(call), call.vectors
    arguments = call.source + offset, call.target, offset, call.count, share
    move = _launch(end, call, share, arguments, everywhere=False, ragged=ragged)
    words = f"direct reduce_scatter of {_words(call)}"
    offer = handshake.Offer(failures.REDUCE_SCATTER, words, inputs, inputs)
    return handshake.bind(bind_fallback, end, call, offer, move)


def _words(call: binding.Call) -> str:
    return f"{call.count} {call.element.name} by {call.op!r}"


def _launch(
    end: binding.Endpoint,
    call: binding.Call,
    share: int,
    arguments: tuple[int, ...],
    everywhere: bool,
    ragged: bool,
) -> Launch:
    """Pack the second launch; ``share`` are the vectors of the largest shard."""
    most = BLOCKS if everywhere else handshake.BLOCKS
    grid = min(workspace.divide_up(share, THREADS), end.max_blocks, most)
    of_call = kernel(end.size, call.element, call.op, ragged, everywhere)
    return binding.launch(of_call, end, grid, arguments, handshake.MULTIPROCESSORS)
