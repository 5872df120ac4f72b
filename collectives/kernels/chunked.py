"""All operations in chunks through slots with flags: for larger messages of any type.

A block moves a chunk of several tiles at a time, and signals it with one flag a rank.
So neither marks nor packets cross the links. There are two ways:

- An *exchange* has one phase. Each rank sends its vectors, or a shard to each rank, and
  every rank stores or reduces what it receives. In a reduction to one of two ranks, the
  other rank sends and the root reads.
- *Through owners*, a message has two phases. It is divided into a shard for each owner.
  Every rank sends each owner its shard. (In a broadcast, only the root does.) An owner
  reduces its shard, or takes the root's, and passes it on: to the root in a reduce, to
  the others in a broadcast, and to all in an all-reduce. So a link transfers a
  broadcast or a reduce at most once in each direction. There, the root owns no shard,
  and ranks are *numbered* from the one after the root on. Otherwise, a rank's number is
  its rank.

In stage t, each block

    sends     chunk t to all others, or to the owners
    waits     for all ranks' flags of stage t-1
    uses      what the others sent of chunk t-1: reduces, passes on or stores it
    collects  what the owners passed on of chunk t-2
    raises    its flags of stage t, at all others

even if it has nothing to send. So the protocol is the same on every rank, and calls of
all kinds may follow one another, with any roots. A block's next chunk is in transit
while it waits for one and reads it. An all-reduce sends after it has waited.

Memory order. ``flags.py`` orders a block's accesses of a stage before its flags, and
the other ranks' accesses of the stage before theirs. Chunks use four sets of slots, one
after another (``slots.py``). A rank stores chunk t where chunk t-4 was. It does so
after all ranks' flags of stage t-2, which they raised after they had read chunk t-4.

What owners pass on of a chunk arrives in the same set, where no slot receives both:
the root receives it, or the root has sent. In an all-reduce, each slot receives both,
so chunk t-1 is passed on, in stage t, into the set of chunk t-2. Owners read that chunk
in stage t-1, and the flags of stage t-1 show it. The results are collected in stage
t+1. Chunk t+2, which has that set next, is sent after the flags of stage t+1 for that
reason. All accesses of a stage are in different sets, so their order does not matter.

Each element is reduced by one rank, by their tree, so all ranks get the same bits. A
rank without an output, in a reduction to one rank, stores nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
from numba_symm.collectives.protocols.exchanges import Exchange, Output
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.slots import read_slots, write_slots
from numba_symm.collectives.protocols.workspace import THREADS, TILE_BYTES, VECTOR
from numba_symm.device import intrinsics, order
from numba_symm.device.lanes import (
    Lanes,
    Load,
    Slices,
    Store,
    make_lanes,
    repeated,
)
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.kernels import Launch


def owners_of(size: int, output: Output, through: bool) -> int:
    """Return how many ranks own a shard, those with the lowest numbers; 0: exchange."""
    return size - output.rooted if through else 0


def batch_of(size: int, loaded: int) -> int:
    """Return of how many tiles a thread loads its vectors before it stores them.

    So their latencies overlap. ``loaded`` are the vectors of a tile.
    """
    return min(workspace.CHUNKED.tiles(size), max(1, workspace.LOADS // loaded))


class Division(NamedTuple):
    """Functions that find the shards of a message.

    ``chunk`` is the same for all chunks of a call: this rank, its number, the tiles of
    a chunk, the vectors of a shard and of the array, the array's elements, and the
    bytes of a shard. In an exchange, the array is one shard. ``vector`` is the index in
    each shard of a thread's first vector of a chunk.

    Attributes:
        whose: ``(number, k)`` returns the number of the k-th neighbour.
        tiles_of: ``(r, vector, chunk)`` returns in how many tiles of a chunk the
            thread has a vector of shard ``r``.
        start: ``(array, r, sharded, vector, chunk)`` returns where the first one is: an
            array's address, and the index in it. In an exchange, the array has a shard
            for each rank if it is ``sharded``, else one for all.
        within: the same for the simulator; returns the indices of all in the chunk.
    """

    whose: Callable[[int, int], int]
    tiles_of: Callable[[int, int, Any], int]
    start: Callable[[int, int, bool, int, Any], Any]
    within: Callable[[int, int, bool, int, Any], tuple[int, range]]


@functools.cache
def make_division(size: int, owners: int) -> Division:
    """Return the functions for ``size`` ranks, of which the first ones are owners."""

    @intrinsics.device_function
    def whose(number: int, k: int) -> int:
        return (number + 1 + k) % size  # explore: whose

    @intrinsics.device_function
    def tiles_of(r: int, vector: int, chunk: Any) -> int:
        _, _, tiles, share, vectors, _, _ = chunk
        left = min(share, vectors - r * share) if owners > 0 else share
        if 0 < owners <= r:
            left = 0
        last = (left - vector + THREADS - 1) // THREADS
        return min(tiles, last)  # type: ignore[no-any-return]

    @intrinsics.device_function
    def start(array: int, r: int, sharded: bool, vector: int, chunk: Any) -> Any:
        _, _, _, share, _, _, shard_bytes = chunk
        if owners > 0:
            return array, r * share + vector
        return array + (r * shard_bytes if sharded else 0), vector

    def within(
        array: int, r: int, sharded: bool, vector: int, chunk: Any
    ) -> tuple[int, range]:
        array, first = start(array, r, sharded, vector, chunk)
        number = max(0, tiles_of(r, vector, chunk))
        return array, range(first, first + number * THREADS, THREADS)

    return Division(whose, tiles_of, start, within)


def sent_of(size: int, sends_shards: bool, keeps: bool, owners: int) -> int:
    """Return how many vectors a thread loads of one tile before it stores them.

    Those of the other ranks' shards, or one for all; and its own vector, which is the
    last, if it ``keeps`` that.
    """
    each = sends_shards or owners > 0
    return max(1, (size - 1) * each + (keeps or not each))


@functools.cache
def make_send(
    size: int,
    access: tuple[Load, Store, Slices],
    sends_shards: bool,
    keeps: bool,
    owners: int,
) -> Callable[..., None]:
    """Return a device function that stores a chunk in the slots of all others.

    ``(ring, slot, source, target, vector, chunk, low, high)`` stores it from the offset
    ``slot`` in a workspace on, and this rank's own shard in ``target`` if it ``keeps``
    that. ``low`` and ``high`` are local arrays; see ``Division`` for the rest.
    ``access`` are functions of ``Lanes``, which many types and operators share.
    """
    load, store, (read, write) = access
    each = sends_shards or owners > 0
    whose, tiles_of, start, within = make_division(size, owners)
    others, mirror = size - 1, order.make_mirror(size)
    rank_stride = workspace.CHUNKED.tiles(size) * TILE_BYTES
    sent = sent_of(size, sends_shards, keeps, owners)
    batch = batch_of(size, sent)

    def send_slices(
        ring: Any,
        slot: int,
        source: int,
        target: int,
        vector: int,
        chunk: Any,
        low: Any,
        high: Any,
    ) -> None:
        number, count = chunk[1], chunk[5]
        for k in range(others + keeps):
            r = whose(number, k)
            array, at = within(source, r, sends_shards, vector, chunk)
            words = read(array, at, count)
            if k < others:
                write_slots(ring[k] + slot + mirror(k) * rank_stride, words)
            else:
                array, at = within(target, r, True, vector, chunk)
                write(array, at, count, words)

    @intrinsics.sliced(send_slices)
    def send(
        ring: Any,
        slot: int,
        source: int,
        target: int,
        vector: int,
        chunk: Any,
        low: Any,
        high: Any,
    ) -> None:
        _, number, tiles, _, _, count, _ = chunk
        for base in range(0, tiles, batch):
            for i in range(batch * sent):
                tile, r = base + i // sent, whose(number, i % sent)
                if tile < tiles_of(r, vector, chunk):
                    array, at = start(source, r, sends_shards, vector, chunk)
                    low[i], high[i] = load(array, at + tile * THREADS, count)
            for i in range(batch):
                tile = base + i
                for k in range(others):
                    j = i * sent + (k if each else 0)
                    if tile < tiles_of(whose(number, k), vector, chunk):
                        to = ring[k] + slot + mirror(k) * rank_stride
                        intrinsics.st_v2_u64(to + tile * TILE_BYTES, (low[j], high[j]))
                if keeps and tile < tiles_of(number, vector, chunk):
                    j = i * sent + sent - 1
                    array, at = start(target, number, True, vector, chunk)
                    store(array, at + tile * THREADS, count, low[j], high[j])

    return send


@functools.cache
def make_use(
    size: int, element: Element, op: Op, lanes: Lanes, kind: Exchange, owners: int
) -> Callable[..., None]:
    """Return a device function that reduces what arrived of a chunk, or passes it on.

    ``(ring, places, vector, chunk, held)``; ``places`` are ``(here, there, source,
    target, taken, root)``. It reads the slots from the address ``here`` on, and this
    rank's shard of the input. It stores the result in its own output, unless ``target``
    is 0. Owners pass it on into slots from the offset ``there`` on. ``root`` is the
    root's index in the ring, ``taken`` is ``Output.taken``, and ``held`` are five local
    arrays.
    """
    output, sends_shards = kind.output, kind.sends_shards
    reduces, passes = output.reduces, owners > 0
    everyone, to_root = output is Output.REDUCED, output is Output.AT_ROOT
    reduced = exchanges.make_reduced(size, lanes, output)
    none_stored, none_low, none_high = exchanges.of_none(element, op, output)
    load, store, (read, write) = lanes.load, lanes.store, lanes.slices
    _, tiles_of, start, within = make_division(size, owners)
    others, mirror = size - 1, order.make_mirror(size)
    rank_stride = workspace.CHUNKED.tiles(size) * TILE_BYTES
    loaded = size if reduces else 1
    batch = batch_of(size, loaded)
    last_ranks = output is Output.FROM_THIS

    def use_slices(ring: Any, places: Any, vector: int, chunk: Any, held: Any) -> None:
        here, there, source, target, taken, root = places
        rank, number, count = chunk[0], chunk[1], chunk[5]
        array, at = within(source, number, sends_shards, vector, chunk)
        if taken == 0:
            result = repeated(none_low, none_high, len(at))
        elif reduces:
            rows = []
            used = range(size - taken, size) if last_ranks else range(taken)
            for r in used:
                slot = here + (r - rank - 1) % size * rank_stride
                own = r == rank
                rows.append(
                    read(array, at, count) if own else read_slots(slot, len(at))
                )
            result = lanes.fold(rows, used.start)
        else:
            result = read_slots(here + root * rank_stride, len(at))
        for k in range(others if passes else 0):
            if everyone or (k == root) == to_root:
                write_slots(ring[k] + there + mirror(k) * rank_stride, result)
        if target != 0:
            array, at = within(target, number, False, vector, chunk)
            write(array, at, count, result)

    @intrinsics.sliced(use_slices)
    def use(ring: Any, places: Any, vector: int, chunk: Any, held: Any) -> None:
        here, there, source, target, taken, root = places
        rank, number, _, _, _, count, _ = chunk
        low, high, own_low, own_high, spare = held
        array, at = start(source, number, sends_shards, vector, chunk)
        into, to_at = start(target, number, False, vector, chunk)
        last = tiles_of(number, vector, chunk)
        for base in range(0, last, batch):
            # In the ring's order, because a branch on a rank would make loads wait.
            for i in range(batch * loaded):
                tile, j = base + i // loaded, i % loaded
                if tile < last and reduces and j == 0:
                    low[i], high[i] = load(array, at + tile * THREADS, count)
                elif tile < last:
                    slot = here + (j - 1 if reduces else root) * rank_stride
                    low[i], high[i] = intrinsics.ld_v2_u64(slot + tile * TILE_BYTES)
            for i in range(batch):
                tile = base + i
                if tile < last:
                    words = low[i], high[i]
                    if reduces:
                        for j in range(size):
                            own_low[j] = low[i * size + j]
                            own_high[j] = high[i * size + j]
                        words = reduced(rank, taken, own_low, own_high, spare)
                    if none_stored and taken == 0:
                        words = none_low, none_high
                    for k in range(others if passes else 0):
                        if everyone or (k == root) == to_root:  # explore: to-root
                            to = ring[k] + there + mirror(k) * rank_stride
                            intrinsics.st_v2_u64(to + tile * TILE_BYTES, words)
                    if target != 0:
                        store(into, to_at + tile * THREADS, count, words[0], words[1])

    return use


@functools.cache
def make_collect(
    size: int, store: Store, slices: Slices, owners: int
) -> Callable[..., None]:
    """Return a device function that stores what arrived of all other shards.

    ``(slot, target, vector, chunk, low, high)`` reads the slots from the address
    ``slot`` on.
    """
    write = slices.write
    whose, tiles_of, start, within = make_division(size, owners)
    others, rank_stride = size - 1, workspace.CHUNKED.tiles(size) * TILE_BYTES
    batch = batch_of(size, max(1, others))

    def collect_slices(
        slot: int, target: int, vector: int, chunk: Any, low: Any, high: Any
    ) -> None:
        for k in range(others):
            array, at = within(target, whose(chunk[1], k), True, vector, chunk)
            write(array, at, chunk[5], read_slots(slot + k * rank_stride, len(at)))

    @intrinsics.sliced(collect_slices)
    def collect(
        slot: int, target: int, vector: int, chunk: Any, low: Any, high: Any
    ) -> None:
        _, number, tiles, _, _, count, _ = chunk
        for base in range(0, tiles, batch):
            for i in range(batch * others):
                tile, k = base + i // others, i % others
                if tile < tiles_of(whose(number, k), vector, chunk):
                    here = slot + k * rank_stride + tile * TILE_BYTES
                    low[i], high[i] = intrinsics.ld_v2_u64(here)
            for i in range(batch * others):
                tile, r = base + i // others, whose(number, i % others)
                if tile < tiles_of(r, vector, chunk):
                    array, at = start(target, r, True, vector, chunk)
                    store(array, at + tile * THREADS, count, low[i], high[i])

    return collect


def make_chunked(
    size: int, element: Element, op: Op, ragged: bool, kind: Exchange, through: bool
) -> Any:
    """Return the kernel for an exchange, or ``through`` owners."""
    lanes, output = make_lanes(element, op, ragged, size), kind.output
    owners = owners_of(size, output, through)
    uses = output is not Output.SHARDS
    sent = kind.sends_shards, not uses, owners
    send = make_send(size, (lanes.load, lanes.store, lanes.slices), *sent)
    use = make_use(size, element, op, lanes, kind, owners)
    collect = make_collect(size, lanes.store, lanes.slices, owners)
    raise_flags, await_flags = make_flags(size)
    is_done = handshake.make_is_done(size)
    operation, place = kind.operation, slots.make_place(size)
    at = workspace.layout(size).chunked
    epochs, flags = at.epochs, at.flags
    mirror = order.make_mirror(size)
    none_stored, _, _ = exchanges.of_none(element, op, output)
    lag = 2 if owners > 1 else 1  # how many stages after it was sent a chunk is read
    collects = lag == 2 or not uses
    waits_first = owners == size
    passed = 3 if waits_first else 0  # in which set, from the chunk's own one on
    to_one = output.rooted and (output is Output.OF_ROOT or not through)
    loaded = sent_of(size, *sent), size if output.reduces else 1, size - 1
    held = max(each * batch_of(size, max(1, each)) for each in loaded)

    def chunked(
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
        share: int,
        number: int,
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
        own_low = cuda.local.array(size, types.int64)
        own_high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        rank = guard.rank
        root = mirror(number)  # its index in the ring
        stride = grid * tiles * THREADS
        before, failed = workspace.resume(own, epochs, block)
        first = block * tiles * THREADS + thread
        flag = flags + 4 * size * block
        chunk = rank, number, tiles, share, vectors, count, shard_bytes
        sends = not to_one or taken == 0
        for stage in range(chunks + lag):
            epoch = (before + stage + 1) & 0xFFFFFFFF
            slot = place(block, before, stage) + VECTOR * thread
            vector = first + stage * stride
            if sends and stage < chunks and not waits_first and not failed:
                send(ring, slot, source, target, vector, chunk, low, high)
            if stage >= 1:  # explore: wait
                last = (before + stage) & 0xFFFFFFFF
                failed = await_flags(guard, operation, own + flag, block, last, failed)
                if failed:
                    break
            if stage < chunks and waits_first and not failed:  # explore: send
                send(ring, slot, source, target, vector, chunk, low, high)
            if 1 <= stage <= chunks and uses and (none_stored or taken > 0):
                here = own + place(block, before, stage - 1) + VECTOR * thread
                # explore: set
                slot = place(block, before, stage - 1 + passed) + VECTOR * thread
                vector = first + (stage - 1) * stride
                places = here, slot, source, target, taken, root
                held_by = low, high, own_low, own_high, spare
                use(ring, places, vector, chunk, held_by)
            if stage >= lag and collects and target != 0:
                # explore: collected
                slot = (
                    own + place(block, before, stage - lag + passed) + VECTOR * thread
                )
                vector = first + (stage - lag) * stride
                collect(slot, target, vector, chunk, low, high)
            if stage < chunks + lag - 1:  # explore: signal
                failed = raise_flags(ring, flag, rank, epoch, failed)
                if failed:
                    break
        before = slots.after(before, chunks + lag - 1, chunks - 1 + passed)
        workspace.keep(own, epochs, block, before, failed)

    return chunked


kernel = binding.kernels_of(
    make_chunked, binding.ADDRESS, binding.ADDRESS, *9 * (types.int64,)
)
"""Returns a kernel, compiled when first bound."""


def bind(
    kind: Exchange,
    through: bool,
    end: binding.Endpoint,
    call: binding.Call,
    fallback_for: int = 0,
) -> Launch:
    """Return the packed launch.

    A reduction to a root is for two ranks at most, or through owners for more.

    Args:
        kind: what is exchanged. Its operation is what the ranks wait for.
        through: whether through owners.
        end: this rank's end.
        call: the call. A broadcast's source and target are one.
        fallback_for: what ``handshake.make_is_done`` takes; 0: there was no handshake.
    """
    rank, size, output, root = end.rank, end.size, kind.output, call.root
    owners = owners_of(size, output, through)
    number, share, target = rank, call.vectors, call.target
    taken = output.taken(rank, size, root)
    if through:
        share = partition.shard(call.vectors, owners)
        number = (rank - root - 1) % size if output.rooted else rank
        taken = size if number < owners else 0
    if output is Output.OF_ROOT and taken == 0:
        target = 0  # the root only sends
    grid, tiles, chunks = partition.chunks_of(share, end)
    ragged = partition.is_ragged(call)
    element = call.element if output.reduces else partition.moved_as(call, ragged)
    sizes = call.nbytes, call.count, call.vectors, share
    arguments = (call.source, target, *sizes, number, taken, tiles, chunks)
    of_call = kernel(size, element, call.op, ragged, kind, through)
    follows = fallback_for == handshake.MOVED
    return binding.launch(of_call, end, grid, (*arguments, fallback_for), follows)
