"""All-reduce by the GPUs' copy engines: for the largest messages.

``copies.py`` says why a rank copies into its own array only, and how the ranks meet.
The output is the staging room: its shard r takes what rank r contributes to this
rank's shard.

    scatter   each rank copies its shard from all inputs into its output
    reduce    it reduces what it copied, in rank order, into its shard of the output
    gather    it copies the other shards from the other ranks' outputs

Inputs and outputs must be symmetric, and apart. Each shard goes in two pieces: one is
reduced on the side stream while the other is copied.

Memory order. The meeting comes before the first copy, so all inputs are complete. A
barrier follows each piece's reduction: all ranks' results of that piece are complete,
and no rank needs what it staged of it. The third launch follows the last gather.

Where an array is not symmetric, or begins elsewhere in its block on another rank, or
the call is in place, ``chunked_all_reduce.py`` reduces in the third launch; where the
message does not divide into whole vectors for each rank, it does so at once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import handshake
from numba_symm.collectives.protocols.binding import (
    ADDRESS,
    BindRest,
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

PIECES = 2  # of a shard; with more, the barriers cost more than they hide
EVENTS = 2 * PIECES
"""What a side stream needs: one when a piece was scattered, one when it is reduced."""


def make_reduce(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel that reduces a piece of this rank's shard."""
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


class _Piece(NamedTuple):
    """The copies and the reduction of one piece of every shard."""

    scatter: list[Copy]
    reduce: Launch
    gather: list[Copy]


class Pipeline:
    """What comes between the handshake and the launch that ends the call."""

    def __init__(self, end: Endpoint, between: Enqueue, pieces: list[_Piece]):
        self._barrier = between
        self._pieces = pieces
        self._order = end.order

    def __call__(self, stream: int) -> None:
        """Enqueue all steps; ``stream`` has the last one."""
        side = self._order.side
        with side.joined(stream):
            for index, piece in enumerate(self._pieces):
                enqueue(piece.scatter, stream)
                side.follow(stream, index)
                piece.reduce(side.stream)
                # All ranks have reduced this piece, and need what they staged no more.
                self._barrier(side.stream)  # explore: barrier
                side.mark(len(self._pieces) + index)
            for index, piece in enumerate(self._pieces):
                side.lead(stream, len(self._pieces) + index)
                enqueue(piece.gather, stream)


def bind(
    rest: BindRest,
    between: Callable[[Endpoint], Enqueue],
    end: Endpoint,
    call: Call,
) -> Enqueue:
    """Return what enqueues it, for two ranks or more, each with whole vectors.

    Args:
        rest: binds the all-reduce through the workspace.
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
        step = divide_up(share, PIECES)
        pieces = [
            _piece(end, call, inputs.addresses, outputs.addresses, first, step)
            for first in range(0, share, step)
        ]
        move = Pipeline(end, between(end), pieces)
    left = rest(end, call, ALL_REDUCE_COPIES)
    return handshake.bind(end, ALL_REDUCE_COPIES, words, offer, move, left, known)


def _piece(
    end: Endpoint,
    call: Call,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    first: int,
    most: int,
) -> _Piece:
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
    return _Piece(scatter, reduce, gather)
