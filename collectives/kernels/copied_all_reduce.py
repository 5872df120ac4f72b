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
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.kernels import barrier, chunked_all_reduce
from numba_symm.collectives.protocols import handshake
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.protocols.copies import Copies, Copy, enqueue
from numba_symm.collectives.protocols.handshake import along_ring, refusal
from numba_symm.collectives.protocols.workspace import (
    ADDRESS,
    THREADS,
    VECTOR,
    divide_up,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch
from numba_symm.waits import ALL_REDUCE_COPIES

PIECES = 2  # of a shard; with more, the barriers cost more than they hide
EVENTS = 2 * PIECES
"""What a side stream needs: one when a piece was scattered, one when it is reduced."""

_BLOCKS = 1024  # this kernel waits for nobody, so its grid need not fit


def make_reduce(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel that reduces a piece of this rank's shard."""
    unpack, pack, combine, load, store = make_lanes(element, op, ragged, size)
    lanes = element.lanes

    def reduce(rank: int, mine: int, staged: int, share: int, vectors: int) -> None:
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        first = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        for vector in range(first, vectors, cuda.gridDim.x * THREADS):
            for r in range(size):
                at = mine if r == rank else staged + VECTOR * share * r
                low[r], high[r] = load(at, vector, vectors * lanes)
            total = unpack(low[0], high[0])
            for r in range(1, size):
                total = combine(total, unpack(low[r], high[r]))
            result = pack(total)
            at = staged + VECTOR * share * rank
            store(at, vector, vectors * lanes, result[0], result[1])

    return reduce


@functools.cache
def kernel(size: int, element: Element, op: Op, ragged: bool) -> Kernel:
    """Return the reducing kernel, compiled when first bound."""
    signature = (types.int64, ADDRESS, ADDRESS, types.int64, types.int64)
    return Kernel(make_reduce, (size, element, op, ragged), signature, THREADS)


class _Piece(NamedTuple):
    """The copies and the reduction of one piece of every shard."""

    scatter: list[Copy]
    reduce: Launch
    gather: list[Copy]


class Pipeline:
    """What comes between the meeting and the third launch."""

    def __init__(self, comm: Any, pieces: list[_Piece]):
        self._barrier = barrier.bind(comm, between=True)
        self._pieces = pieces
        self._order = comm.order

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
    comm: Any, source: int, target: int, count: int, element: Element, op: Op
) -> Enqueue:
    """Return what enqueues it; see ``Bind`` in ``select.py``."""
    args = (comm, source, target, count, element, op)
    vectors = divide_up(count, element.lanes)
    if comm.size == 1 or vectors % comm.size != 0 or count % element.lanes != 0:
        return chunked_all_reduce.bind(*args)
    rest = chunked_all_reduce.bind(*args, left_over=ALL_REDUCE_COPIES)
    call = f"all_reduce of {count} {element.name} by {op!r}"
    inputs = comm.heap.place(source, count * element.itemsize)
    outputs = comm.heap.place(target, count * element.itemsize)
    offer = known = refusal(comm.size), refusal(comm.size)
    move: Enqueue = Copies(comm.order, [])
    if inputs and outputs and source != target and target % VECTOR == 0:
        ring = functools.partial(along_ring, comm.rank)
        offer = ring(inputs.seen), ring(outputs.seen)
        known = ring(inputs.addresses), ring(outputs.addresses)
        share = vectors // comm.size
        step = divide_up(share, PIECES)
        addresses = (inputs.addresses, outputs.addresses)
        pieces = [
            _piece(comm, *addresses, share, first, step, element, op)
            for first in range(0, share, step)
        ]
        move = Pipeline(comm, pieces)
    return handshake.bind(comm, ALL_REDUCE_COPIES, call, offer, move, rest, known)


def _piece(
    comm: Any,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    share: int,
    first: int,
    most: int,
    element: Element,
    op: Op,
) -> _Piece:
    """Return the steps for ``most`` vectors of every shard at most, from ``first``."""
    rank, size = comm.rank, comm.size
    others = [(rank + 1 + k) % size for k in range(size - 1)]
    vectors = min(most, share - first)
    nbytes = VECTOR * vectors

    def at(array: int, shard: int) -> int:
        return array + VECTOR * (shard * share + first)

    target = outputs[rank]
    scatter = [Copy(at(target, r), at(inputs[r], rank), nbytes) for r in others]
    gather = [Copy(at(target, r), at(outputs[r], r), nbytes) for r in others]
    most_blocks = _BLOCKS if comm.multiprocessors is None else comm.max_blocks
    grid = min(divide_up(vectors, THREADS), most_blocks)
    source = inputs[rank]
    args = (rank, at(source, rank), at(target, 0), share, vectors)
    ragged = source % VECTOR != 0
    reduce = kernel(size, element, op, ragged).bind(grid, *args)
    return _Piece(scatter, reduce, gather)
