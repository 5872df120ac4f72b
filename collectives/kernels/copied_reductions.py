"""All-reduce and reduce with the GPUs' copy engines: for the largest messages.

A rank copies into the other ranks' workspaces, so a call accepts any arrays: in place,
not symmetric, at any address. Each shard is divided into chunks:

    scatter   each rank copies its input's chunk of a shard to the shard's owner
    reduce    the owner reduces what has arrived, by the tree, into its output
    gather    it copies the result to all other ranks
    store     each rank stores the results that have arrived in its output

A reduce of two ranks has one shard, which the root owns, and ends with the reduction.
The kernels of the other rank have nothing to reduce.

A *move* is a scatter or a gather, with the kernel that reads what has arrived. Moves
use two sets of slots alternately, so the copies of one move run beside the kernel of
the previous move:

    scatter 0, scatter 1, gather 0, scatter 2, gather 1, …

Copies are on the side stream, one after another, from the next rank on, because
simultaneous ones share the links badly. Starting a copy takes 3 µs, so chunks are
large. But the last chunks are shorter, because no copy runs beside the last kernel.

Memory order. A barrier (``barrier.py``) precedes each kernel, and another one follows
it. A rank enters the first one after its copies of the move. So the kernel follows the
copies of all ranks. The copies of the next but one move begin after the second barrier.
So they follow all ranks' kernels that read these slots, and the reductions whose
results they gather. A call ends with a barrier, so all slots are free when the next one
begins.

In place, a rank stores shard r after rank r has gathered it, so after rank r received
this rank's own chunk of that shard.

After a failure, the kernels store nothing, but nothing stops copies that have been
enqueued. They overwrite slots only. A rank that is still in such a call may then store
wrong words in its own output, and its next call raises.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, partition, workspace
from numba_symm.collectives.protocols.copies import enqueue
from numba_symm.collectives.protocols.workspace import THREADS, VECTOR
from numba_symm.device import intrinsics
from numba_symm.device.lanes import WHOLE, Lanes, make_lanes, shifted
from numba_symm.device.order import make_total
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.streams import Copy
from numba_symm.launch import failures

LOADS = 8  # vectors that a thread loads before it stores any


def make_reduce_copied(size: int, element: Element, op: Op, ragged: bool) -> Any:
    """Return the kernel that reduces a chunk of this rank's shard."""
    reduce = make_reduce(size, make_lanes(element, op, ragged, size))
    held = max(1, LOADS // size) * size

    def reduce_copied(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        count: int,
        first: int,
        vectors: int,
        slots: int,
        stride: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if workspace.load_failure(own, block) != 0:
            return
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        at = block * THREADS + cuda.threadIdx.x, grid * THREADS, vectors
        arrived = own + slots, stride
        reduce(guard.rank, arrived, source, target, at, first, count, low, high)

    return reduce_copied


def make_reduce(size: int, lanes: Lanes) -> Callable[..., None]:
    """Return a device function that reduces a thread's vectors of a chunk.

    ``(rank, arrived, source, target, at, first, count, low, high)``: ``arrived`` is the
    first slot's address and the distance to the next one. ``at`` is ``(start, across,
    vectors)``: the chunk's vectors at ``start``, ``start + across`` …, before
    ``vectors``. ``first`` is the chunk's first vector in the arrays. The last two are
    local arrays.
    """
    load, store, total = lanes.load, lanes.store, make_total(size, lanes)
    read, write = lanes.slices
    others = size - 1
    batch = max(1, LOADS // size)
    held = batch * size

    def reduce_slices(
        rank: int,
        arrived: Any,
        source: int,
        target: int,
        at: Any,
        first: int,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        (slots, stride), (start, across, vectors) = arrived, at
        mine = range(start, vectors, across)
        here = shifted(mine, first)
        every = [slots + k * stride for k in range(others)]
        of_ranks = [*WHOLE.read_each(every, mine, 0), read(source, here, count)]
        in_order = [of_ranks[(i + others - rank) % size] for i in range(size)]
        write(target, here, count, lanes.fold(in_order))

    @intrinsics.sliced(reduce_slices)
    def reduce(
        rank: int,
        arrived: Any,
        source: int,
        target: int,
        at: Any,
        first: int,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        slots, stride = arrived
        start, across, vectors = at
        while start < vectors:
            for i in range(held):
                vector = start + i // size * across
                if vector < vectors:
                    k = (i % size + others - rank) % size
                    if k < others:
                        slot = slots + k * stride + VECTOR * vector
                        low[i], high[i] = intrinsics.ld_v2_u64(slot)
                    else:
                        low[i], high[i] = load(source, first + vector, count)
            for i in range(batch):
                vector = start + i * across
                if vector < vectors:
                    words = total(low, high, i * size)
                    store(target, first + vector, count, words[0], words[1])
            start += batch * across

    return reduce


def make_store_copied(size: int, element: Element, ragged: bool) -> Any:
    """Return the kernel that stores a chunk of the other shards' results."""
    store = make_store(make_lanes(element, "sum", ragged, size))
    others = size - 1

    def store_copied(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        target: int,
        count: int,
        first: int,
        share: int,
        most: int,
        vectors: int,
        slots: int,
        stride: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if workspace.load_failure(own, block) != 0:
            return
        low = cuda.local.array(LOADS, types.int64)
        high = cuda.local.array(LOADS, types.int64)
        start, across = block * THREADS + cuda.threadIdx.x, grid * THREADS
        for k in range(others):
            into = (guard.rank + 1 + k) % size * share + first
            at = start, across, min(most, vectors - into)
            store(own + slots + k * stride, target, at, into, count, low, high)

    return store_copied


def make_store(lanes: Lanes) -> Callable[..., None]:
    """Return a device function that stores a thread's vectors of a slot in an array.

    ``(slot, target, at, into, count, low, high)``: ``at`` is as for ``make_reduce``,
    ``into`` the slot's first vector in the array. The last two are local arrays.
    """
    store_one, (_, write) = lanes.store, lanes.slices

    def store_slices(
        slot: int, target: int, at: Any, into: int, count: int, low: Any, high: Any
    ) -> None:
        start, across, vectors = at
        mine = range(start, vectors, across)
        write(target, shifted(mine, into), count, WHOLE.read(slot, mine, 0))

    @intrinsics.sliced(store_slices)
    def store(
        slot: int, target: int, at: Any, into: int, count: int, low: Any, high: Any
    ) -> None:
        start, across, vectors = at
        while start < vectors:
            for i in range(LOADS):
                vector = start + i * across
                if vector < vectors:
                    low[i], high[i] = intrinsics.ld_v2_u64(slot + VECTOR * vector)
            for i in range(LOADS):
                vector = start + i * across
                if vector < vectors:
                    store_one(target, into + vector, count, low[i], high[i])
            start += LOADS * across

    return store


reduce_kernel = binding.kernels_of(
    make_reduce_copied, binding.ADDRESS, binding.ADDRESS, *5 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


store_kernel = binding.kernels_of(
    make_store_copied, binding.ADDRESS, *7 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


SETS = 2
"""Sets of slots, and of events of the side stream."""

EVENTS = SETS + 1
"""Events of the side stream: one more for what follows immediately."""


class _Move(NamedTuple):
    """The copies to the other ranks, and the kernel that reads what they sent."""

    copies: list[Copy]
    kernel: binding.Enqueue


_NO_SIDE = SimpleNamespace(
    stream=0,
    joined=nullcontext,
    **dict.fromkeys(("follow", "mark", "lead"), lambda *_: None),
)
"""A substitute for the side stream of a rank without copies.

In a capture, a stream without work of its own gathers dependencies on all that it has
followed, and passes them on to all that it leads.
"""


class Moves:
    """Enqueues all moves of a call.

    Args:
        end: this rank's end.
        barrier: enqueues a barrier.
        moves: at least two.
    """

    def __init__(
        self, end: binding.Endpoint, barrier: binding.Enqueue, moves: list[_Move]
    ):
        self._order = end.order
        self._barrier = barrier
        self._moves = moves

    def __call__(self, stream: int) -> None:
        """Enqueue them; what follows on ``stream`` follows all of them."""
        moves = self._moves
        copying = any(move.copies for move in moves)
        side: Any = self._order.side if copying else _NO_SIDE
        with side.joined(stream):
            side.follow(stream, SETS)  # explore: begin
            for i in range(SETS):
                enqueue(moves[i].copies, side.stream)
                side.mark(i)
            for i, move in enumerate(moves):
                side.lead(stream, i % SETS)  # explore: copied
                self._barrier(stream)  # explore: arrived
                move.kernel(stream)
                self._barrier(stream)  # explore: free
                if i + SETS < len(moves):
                    side.follow(stream, SETS)  # explore: follow
                    enqueue(moves[i + SETS].copies, side.stream)
                    side.mark(i % SETS)


def bind_all_reduce(
    bind_barrier: Callable[[binding.Endpoint, int], binding.Enqueue],
    end: binding.Endpoint,
    call: binding.Call,
) -> binding.Enqueue:
    """Return what enqueues it, for 2 to ``workspace.COPYING`` ranks.

    Args:
        bind_barrier: binds a barrier; takes the number in ``failures.py`` of what the
            ranks wait for.
        end: this rank's end.
        call: the call.
    """
    share = partition.shard(call.vectors, end.size)
    chunks = _chunks(end, call, 0, share, few=(4, 3), many=(2, 2, 1))
    # Each chunk is gathered at least two moves after it is scattered.
    order = [chunks[0].scattered]
    for before, chunk in itertools.pairwise(chunks):
        order += [chunk.scattered, before.gathered]
    order.append(chunks[-1].gathered)
    moves = [move(i % SETS) for i, move in enumerate(order)]
    operation = failures.ALL_REDUCE_COPIES
    return Moves(end, bind_barrier(end, operation), moves)


def bind_reduce(
    bind_barrier: Callable[[binding.Endpoint, int], binding.Enqueue],
    end: binding.Endpoint,
    call: binding.Call,
) -> binding.Enqueue:
    """Return what enqueues a reduce of two ranks; see ``bind_all_reduce``."""
    parts = 4, 2, 1
    chunks = _chunks(end, call, call.root, call.vectors, few=parts, many=parts)
    # explore: sets
    moves = [chunk.scattered(i % SETS) for i, chunk in enumerate(chunks)]
    operation = failures.REDUCE_COPIES
    return Moves(end, bind_barrier(end, operation), moves)


@dataclass(frozen=True)
class _Chunk:
    """A chunk of every shard.

    Attributes:
        end: this rank's end.
        call: the call.
        owner: the rank that owns the first shard; the next rank owns the second one.
        room: how many vectors a slot holds.
        share: vectors of a shard.
        first: the chunk's first vector in a shard.
        vectors: the chunk's vectors.
    """

    end: binding.Endpoint
    call: binding.Call
    owner: int
    room: int
    share: int
    first: int
    vectors: int

    def scattered(self, which: int) -> _Move:
        """Return the scatter into a set of slots, and the reduction."""
        end, call = self.end, self.call
        own = self._shard_of(end.rank)
        kernel = reduce_kernel(end.size, call.element, call.op, self._ragged)
        sizes = call.count, own * self.share + self.first, self._held(own)
        slots = self._slots(which), VECTOR * self.room
        arguments = (call.source, call.target, *sizes, *slots)
        launch = binding.launch(kernel, end, self._grid, arguments)
        return _Move(self._copies(call.source, which, self._shard_of), launch)

    def gathered(self, which: int) -> _Move:
        """Return the gather into a set of slots, and what stores the results."""
        end, call = self.end, self.call
        kernel = store_kernel(
            end.size, partition.moved_as(call, self._ragged), self._ragged
        )
        sizes = call.count, self.first, self.share, self.vectors, call.vectors
        slots = self._slots(which), VECTOR * self.room
        launch = binding.launch(kernel, end, self._grid, (call.target, *sizes, *slots))
        return _Move(self._copies(call.target, which, lambda peer: end.rank), launch)

    @property
    def _ragged(self) -> bool:
        return partition.is_ragged(self.call)

    @property
    def _grid(self) -> int:
        return max(
            1, min(workspace.divide_up(self.vectors, THREADS), self.end.max_blocks)
        )

    def _shard_of(self, rank: int) -> int:
        return (rank - self.owner) % self.end.size

    def _held(self, of: int) -> int:
        """Return how many vectors a shard has of the chunk."""
        left = self.call.vectors - of * self.share - self.first
        return max(0, min(self.vectors, left))

    def _slots(self, which: int) -> int:
        """Return where in a workspace a set of slots begins."""
        size = self.end.size
        return (
            workspace.layout(size).copied.slots
            + which * (size - 1) * VECTOR * self.room
        )

    def _copies(
        self, array: int, which: int, shard_for: Callable[[int], int]
    ) -> list[Copy]:
        """Return the copies from an array; ``shard_for(peer)`` is what a peer gets."""
        end, copies = self.end, []
        for k in range(end.size - 1):
            peer = (end.rank + 1 + k) % end.size
            of = shard_for(peer)
            at = VECTOR * (of * self.share + self.first)
            nbytes = min(VECTOR * self._held(of), self.call.nbytes - at)
            # This rank is neighbour number size - 2 - k of its k-th neighbour.
            slot = self._slots(which) + (end.size - 2 - k) * VECTOR * self.room
            if nbytes > 0:
                copies.append(Copy(end.workspaces[peer] + slot, array + at, nbytes))
        return copies


def _chunks(
    end: binding.Endpoint,
    call: binding.Call,
    owner: int,
    share: int,
    few: tuple[int, ...],
    many: tuple[int, ...],
) -> list[_Chunk]:
    """Return the chunks of shards of ``share`` vectors.

    Args:
        end: this rank's end.
        call: the call.
        owner: the rank that owns the first shard.
        share: vectors of a shard.
        few: the proportion of their lengths, if the longest one fits into a slot.
        many: else this proportion, with as many more of the first as necessary.
    """
    region = workspace.layout(end.size).copied
    slots = SETS * (end.size - 1)
    room = (
        (region.end - region.slots)
        // (slots * VECTOR)
        // partition.LINE
        * partition.LINE
    )

    def lengths_of(parts: tuple[int, ...]) -> list[int]:
        return [partition.shard(share * part, sum(parts)) for part in parts]

    parts = few if max(lengths_of(few)) <= room else many
    while max(lengths_of(parts)) > room:
        parts = (parts[0], *parts)
    chunks, first = [], 0
    for length in (*lengths_of(parts)[:-1], share):  # the last one has what is left
        vectors = min(length, share - first)
        chunks.append(_Chunk(end, call, owner, room, share, first, vectors))
        first += vectors
    return chunks
