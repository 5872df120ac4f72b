"""All-reduce by the GPUs' copy engines: for the largest messages.

``copies.py`` explains why a rank copies into its own array only, and describes the
handshake. The output also stages inputs: its shard r first receives rank r's input for
this rank's shard.

    scatter   each rank copies its shard from all inputs into its output
    reduce    it reduces what it copied, in rank order, into its shard of the output
    gather    it copies the other shards from the other ranks' outputs

Inputs and outputs must be symmetric, and distinct. Each shard is divided into two
chunks: one is reduced on the side stream while the other is copied.

Memory order. The handshake ends before the first copy, so all inputs are complete. A
barrier follows each chunk's reduction: then all ranks' results of that chunk are
complete, and no rank needs what it staged of it. The third launch follows the last
gather.

Where an array is not symmetric, or begins elsewhere in its allocation on another rank,
or the call is in place, ``chunked_all_reduce.py`` reduces in the third launch. Where
the message does not divide into whole vectors for each rank, it reduces without a
handshake.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import handshake
from numba_symm.collectives.protocols.binding import (
    ADDRESS,
    BindFallback,
    Call,
    Endpoint,
    Enqueue,
    along_ring,
)
from numba_symm.collectives.protocols.copies import Copies, Copy, enqueue
from numba_symm.collectives.protocols.handshake import refusal
from numba_symm.collectives.protocols.order import make_total
from numba_symm.collectives.protocols.workspace import (
    HELD,
    THREADS,
    VECTOR,
    divide_up,
)
from numba_symm.device.intrinsics import row_index
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch
from numba_symm.waits import ALL_REDUCE_COPIES

CHUNKS = 2  # of a shard; with more, barriers would take longer than they save
EVENTS = 2 * CHUNKS
"""Events of the side stream: for each chunk, after its scatter and its reduction."""


def make_reduce(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel that reduces a chunk of this rank's shard."""
    vector_lanes = make_lanes(element, op, ragged, size)
    load, store = vector_lanes.load, vector_lanes.store
    total = make_total(size, vector_lanes)
    lanes = element.lanes

    def reduce(
        grid: int, rank: int, mine: int, staged: int, share: int, vectors: int
    ) -> None:
        block = row_index()
        if block >= grid:
            return
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        vector = block * THREADS + cuda.threadIdx.x
        while vector < vectors:
            for r in range(size):
                at = mine if r == rank else staged + VECTOR * share * r
                low[r], high[r] = load(at, vector, vectors * lanes)
            result = total(low, high, 0)
            at = staged + VECTOR * share * rank
            store(at, vector, vectors * lanes, result[0], result[1])
            vector += grid * THREADS

    return reduce


@functools.cache
def kernel(size: int, element: Element, op: Op, ragged: bool) -> Kernel:
    """Return the reducing kernel, compiled when first bound."""
    signature = (*2 * (types.int64,), ADDRESS, ADDRESS, *2 * (types.int64,))
    return Kernel(make_reduce, (size, element, op, ragged), signature, THREADS, HELD)


class _Chunk(NamedTuple):
    """The copies and the reduction of one chunk of every shard."""

    scatter: list[Copy]
    reduce: Launch
    gather: list[Copy]


class Pipeline:
    """The work between the handshake and the third launch."""

    def __init__(self, end: Endpoint, between: Enqueue, chunks: list[_Chunk]):
        self._barrier = between
        self._chunks = chunks
        self._order = end.order

    def __call__(self, stream: int) -> None:
        """Enqueue all steps, the last one on ``stream``."""
        side = self._order.side
        with side.joined(stream):
            for index, chunk in enumerate(self._chunks):
                enqueue(chunk.scatter, stream)
                side.follow(stream, index)
                chunk.reduce(side.stream)
                # Then all ranks have reduced this chunk, and need no longer what they
                # staged.
                self._barrier(side.stream)  # explore: barrier
                side.mark(len(self._chunks) + index)
            for index, chunk in enumerate(self._chunks):
                side.lead(stream, len(self._chunks) + index)
                enqueue(chunk.gather, stream)


def bind(
    bind_fallback: BindFallback,
    between: Callable[[Endpoint], Enqueue],
    end: Endpoint,
    call: Call,
) -> Enqueue:
    """Return what enqueues it, for two ranks or more, each with whole vectors.

    Args:
        bind_fallback: binds the all-reduce through the workspace.
        between: binds a barrier that a refusal skips.
        end: this rank's end.
        call: the call.
    """
    words = f"all_reduce of {call.count} {call.element.name} by {call.op!r}"
    inputs = end.place(call.source, call.nbytes)
    outputs = end.place(call.target, call.nbytes)
    apart = call.source != call.target
    offer = known = refusal(end.size), refusal(end.size)
    move: Enqueue = Copies(end.order, [])
    if inputs and outputs and apart and call.target % VECTOR == 0:
        ring = functools.partial(along_ring, end.rank)
        offer = ring(inputs.seen), ring(outputs.seen)
        known = ring(inputs.addresses), ring(outputs.addresses)
        share = call.vectors // end.size
        step = divide_up(share, CHUNKS)
        chunks = [
            _chunk(end, call, inputs.addresses, outputs.addresses, first, step)
            for first in range(0, share, step)
        ]
        move = Pipeline(end, between(end), chunks)
    fallback = bind_fallback(end, call, ALL_REDUCE_COPIES)
    return handshake.bind(end, ALL_REDUCE_COPIES, words, offer, move, fallback, known)


def _chunk(
    end: Endpoint,
    call: Call,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    first: int,
    most: int,
) -> _Chunk:
    """Return the steps for ``most`` vectors of every shard at most, from ``first``."""
    rank, size = end.rank, end.size
    others = [(rank + 1 + k) % size for k in range(size - 1)]
    share = call.vectors // size
    vectors = min(most, share - first)
    nbytes = VECTOR * vectors

    def at(array: int, shard: int) -> int:
        return array + VECTOR * (shard * share + first)

    target = outputs[rank]
    scatter = [Copy(at(target, r), at(inputs[r], rank), nbytes) for r in others]
    gather = [Copy(at(target, r), at(outputs[r], r), nbytes) for r in others]
    grid = min(divide_up(vectors, THREADS), end.max_blocks)
    source = inputs[rank]
    args = (grid, rank, at(source, rank), at(target, 0), share, vectors)
    ragged = source % VECTOR != 0
    held = divide_up(grid, end.multiprocessors)
    reduce = kernel(size, call.element, call.op, ragged).bind(grid, *args, held=held)
    return _Chunk(scatter, reduce, gather)
