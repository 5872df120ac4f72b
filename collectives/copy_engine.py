"""All-reduce by the GPUs' copy engines: for the largest messages.

Copy engines fill the links better than kernels do, and leave the multiprocessors free.
The output, which must be symmetric, is the staging room: its shard r takes what rank r
contributes to this rank's shard.

    scatter   each rank copies its shards to their owners' outputs
    reduce    each owner reduces what came, in rank order, into its own shard
    gather    each owner copies its shard to all outputs

Each shard goes in two pieces, so that one is reduced on a side stream while the other
is copied; copies follow one another on the call's stream, from the next rank on, since
copies side by side share the links badly.

Memory order. All ranks agree before the first copy, so nobody's output is written
before that rank's stream has come here; a digest of the call tells whether all mean
the same array. (Where that fails, the copies, already enqueued, follow all the same:
what lay there on any rank is lost then, as the error says.) Barriers follow each
piece's scatter (what came is complete), each piece's reduction (what was staged may be
overwritten by results), and the last gather.

Where the output is not symmetric, or also the input, or does not divide into whole
vectors, the agreement is followed by ``two_shot_signalled.py``.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types

from numba_symm import streams
from numba_symm.collectives import agreement, barrier, two_shot_signalled
from numba_symm.collectives.launches import InTurn
from numba_symm.collectives.workspace import (
    ADDRESS,
    THREADS,
    VECTOR,
    divide_up,
    is_ragged,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.device.signals import AGREEMENT
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch

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
    """Copies ``(target, source, bytes)`` and the reduction of one piece."""

    scatter: list[tuple[int, int, int]]
    reduce: Launch
    gather: list[tuple[int, int, int]]


class Pipeline:
    """The steps of one all-reduce, enqueued as often as one likes."""

    def __init__(self, comm: Any, agree: Launch, pieces: list[_Piece]):
        self._agree = agree
        self._barrier = barrier.bind(comm)
        self._pieces = pieces
        self._order = comm.order

    def __call__(self, stream: int) -> None:
        """Enqueue all steps; ``stream`` has the last one."""
        side, barrier = self._order.side, self._barrier
        self._agree(stream)
        for index, piece in enumerate(self._pieces):
            _copy(piece.scatter, stream)
            side.follow(stream, index)
            # What all ranks have scattered of this piece is there.
            barrier(side.stream)
            piece.reduce(side.stream)
            # All ranks have read what was staged of this piece.
            barrier(side.stream)
            side.mark(len(self._pieces) + index)
        for index, piece in enumerate(self._pieces):
            side.lead(stream, len(self._pieces) + index)
            _copy(piece.gather, stream)
        # What all ranks have gathered is there.
        barrier(stream)


def _copy(copies: list[tuple[int, int, int]], stream: int) -> None:
    for target, source, nbytes in copies:
        streams.copy(target, source, nbytes, stream)


def bind(
    comm: Any, source: int, target: int, count: int, element: Element, op: Op
) -> Any:
    """Return what enqueues it; see ``Bind`` in ``select.py``."""
    vectors = divide_up(count, element.lanes)
    # Equal on all ranks whose outputs lie alike, wherever their inputs lie.
    whole = vectors % comm.size == 0 and not is_ragged(0, target, count, element.lanes)
    found = comm.heap.everywhere(target, count * element.itemsize)
    call = f"{count} {element.name} {op}"
    if source == target or not whole or found is None or comm.size == 1:
        agree = agreement.bind(comm, AGREEMENT, f"{call}, output staged")
        args = (comm, source, target, count, element, op)
        return InTurn(agree, two_shot_signalled.bind(*args))
    number, offset, outputs = found
    agree = agreement.bind(
        comm, AGREEMENT, f"{call}, output in block {number} at {offset}"
    )
    share = vectors // comm.size
    step = divide_up(share, PIECES)
    pieces = []
    for first in range(0, share, step):
        part = min(step, share - first)
        pieces.append(_piece(comm, source, outputs, share, first, part, element, op))
    return Pipeline(comm, agree, pieces)


def _piece(
    comm: Any,
    source: int,
    outputs: tuple[int, ...],
    share: int,
    first: int,
    vectors: int,
    element: Element,
    op: Op,
) -> _Piece:
    """Return the steps for ``vectors`` of every shard, from ``first`` on."""
    rank, size = comm.rank, comm.size
    others = [(rank + 1 + k) % size for k in range(size - 1)]

    def at(array: int, shard: int) -> int:
        return array + VECTOR * (shard * share + first)

    nbytes = VECTOR * vectors
    scatter = [(at(outputs[r], rank), at(source, r), nbytes) for r in others]
    own = at(outputs[rank], rank)
    gather = [(at(outputs[r], rank), own, nbytes) for r in others]
    staged = at(outputs[rank], 0)
    grid = min(divide_up(vectors, THREADS), _BLOCKS)
    args = (rank, at(source, rank), staged, share, vectors)
    ragged = source % VECTOR != 0
    reduce = kernel(size, element, op, ragged).bind(grid, *args)
    return _Piece(scatter, reduce, gather)
