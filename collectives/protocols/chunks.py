"""A chunk of every shard: from a rank's array into slots, and from slots into it.

See ``slots.py`` and ``chunked_all_reduce.py`` for these slots, and for when a block may
use them. A block moves a chunk tile by tile. A thread loads several vectors before it
stores them, so that their latencies overlap.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.collectives.protocols.workspace import (
    CHUNKED,
    LOADS,
    THREADS,
    TILE_BYTES,
)
from numba_symm.device.intrinsics import (
    device_function,
    ld_v2_u64,
    sliced,
    st_v2_u64,
)
from numba_symm.device.lanes import (
    WHOLE,
    Lanes,
    Load,
    Slices,
    Store,
    Vectors,
    before,
    shifted,
)
from numba_symm.device.order import make_mirror


class ChunkAccess(NamedTuple):
    """Device functions that move a chunk of the shards of all other ranks.

    ``low`` and ``high`` are local arrays. ``chunk`` is ``(next_owner, vector, tiles,
    share, count, vectors)``:

    - the shard of the next rank along the ring,
    - the index in each shard of the thread's first vector,
    - the tiles of the chunk, the vectors of a shard,
    - and the elements and vectors of the array.

    Attributes:
        inside: ``(owner, at, share, vectors)`` returns whether vector ``at`` of a shard
            exists.
        in_array: ``(chunk, k)`` returns the indices in the array of the thread's
            vectors of the k-th shard, in the simulator.
        scatter: ``(ring, slot, array, chunk, low, high)`` stores the chunk of each
            shard in the slots of its owner, from the offset ``slot`` in a workspace on.
        collect: ``(slot, array, chunk, low, high)`` stores what arrived in this rank's
            slots, from the address ``slot`` on, in its array; nothing in array 0.
    """

    inside: Callable[[int, int, int, int], bool]
    in_array: Callable[[Any, int], range]
    scatter: Callable[..., None]
    collect: Callable[..., None]


def read_slots(slot: int, number: int) -> Vectors:
    """Return a thread's vectors of so many tiles: the simulator's form of a loop."""
    return WHOLE.read(slot, range(0, number * THREADS, THREADS), 0)


def write_slots(slot: int, words: Vectors) -> None:
    """Store a thread's vectors of several tiles: the simulator's form of a loop."""
    WHOLE.write(slot, range(0, len(words) * THREADS, THREADS), 0, words)


@functools.cache
def make_chunks(
    size: int, load: Load, store: Store, slices: Slices, owners: int, short: bool
) -> ChunkAccess:
    """Return the device functions.

    Args:
        size: number of ranks.
        load: ``Lanes.load``, which many types and operators share.
        store: ``Lanes.store``.
        slices: ``Lanes.slices``.
        owners: how many ranks own a shard; those with the lowest numbers.
        short: whether the last shards may have fewer vectors than ``share``. Where they
            are reduced they do not: there, ``store`` takes care of the array's end.
    """
    room = CHUNKED.tiles(size)
    rank_stride = room * TILE_BYTES
    others = size - 1
    mirror = make_mirror(size)
    batch = min(room, max(1, LOADS // size))

    @device_function
    def inside(owner: int, at: int, share: int, vectors: int) -> bool:
        exists = (owners == size or owner < owners) and at < share
        return exists and (not short or owner * share + at < vectors)

    def in_array(chunk: Any, k: int) -> range:
        next_owner, vector, tiles, share, _, vectors = chunk
        owner = (next_owner + k) % size
        of_thread = range(vector, share, THREADS)[: tiles if owner < owners else 0]
        found = shifted(of_thread, owner * share)
        return before(found, vectors) if short else found

    def scatter_slices(
        ring: Any, slot: int, array: int, chunk: Any, low: Any, high: Any
    ) -> None:
        count = chunk[4]
        for k in range(others):
            at = in_array(chunk, k)
            there = ring[k] + slot + mirror(k) * rank_stride
            write_slots(there, slices.read(array, at, count))

    def collect_slices(slot: int, array: int, chunk: Any, low: Any, high: Any) -> None:
        count = chunk[4]
        for k in range(others if array else 0):
            at = in_array(chunk, k)
            words = read_slots(slot + k * rank_stride, len(at))
            slices.write(array, at, count, words)

    @sliced(scatter_slices)
    def scatter(
        ring: Any,
        slot: int,
        array: int,
        chunk: Any,
        low: Any,
        high: Any,
    ) -> None:
        next_owner, vector, tiles, share, count, vectors = chunk
        for base in range(0, tiles, batch):
            for i in range(batch * others):
                tile, k = base + i // others, i % others
                owner, at = (next_owner + k) % size, vector + tile * THREADS
                if tile < tiles and inside(owner, at, share, vectors):
                    low[i], high[i] = load(array, owner * share + at, count)
            for i in range(batch * others):
                tile, k = base + i // others, i % others
                owner, at = (next_owner + k) % size, vector + tile * THREADS
                if tile < tiles and inside(owner, at, share, vectors):
                    to = ring[k] + slot + mirror(k) * rank_stride
                    st_v2_u64(to + tile * TILE_BYTES, (low[i], high[i]))

    @sliced(collect_slices)
    def collect(
        slot: int,
        array: int,
        chunk: Any,
        low: Any,
        high: Any,
    ) -> None:
        next_owner, vector, tiles, share, count, vectors = chunk
        for base in range(0, tiles, batch):
            for i in range(batch * others):
                tile, k = base + i // others, i % others
                owner, at = (next_owner + k) % size, vector + tile * THREADS
                if tile < tiles and inside(owner, at, share, vectors):
                    here = slot + k * rank_stride + tile * TILE_BYTES
                    low[i], high[i] = ld_v2_u64(here)
            for i in range(batch * others):
                tile, k = base + i // others, i % others
                owner, at = (next_owner + k) % size, vector + tile * THREADS
                exists = tile < tiles and inside(owner, at, share, vectors)
                if exists and array != 0:
                    store(array, owner * share + at, count, low[i], high[i])

    return ChunkAccess(inside, in_array, scatter, collect)


@functools.cache
def make_load_all(size: int, load: Load) -> Callable[..., None]:
    """Return a device function that loads a batch of vectors of all ranks.

    ``(slot, array, chunk, base, low, high, own_low, own_high)`` fills ``low`` and
    ``high`` with the words of each vector, in rank order: the own ones from the array,
    the others from the slots from the address ``slot`` on. ``chunk`` is ``(rank,
    vector, tiles, share, count, first)``: as in ``ChunkAccess``, with this rank's
    number, and the index in the array of its shard's first vector. ``own_low`` and
    ``own_high`` are other local arrays. ``load`` is ``Lanes.load``.
    """
    room = CHUNKED.tiles(size)
    rank_stride = room * TILE_BYTES
    others = size - 1
    batch = min(room, max(1, LOADS // size))

    @device_function
    def load_all(
        slot: int,
        array: int,
        chunk: Any,
        base: int,
        low: Any,
        high: Any,
        own_low: Any,
        own_high: Any,
    ) -> None:
        rank, vector, tiles, share, count, first = chunk
        for i in range(batch):
            at = vector + (base + i) * THREADS
            if base + i < tiles and at < share:
                own_low[i], own_high[i] = load(array, first + at, count)
        for i in range(batch * size):
            tile, r = base + i // size, i % size
            if tile < tiles and vector + tile * THREADS < share:
                k = (r + others - rank) % size
                if k < others:
                    words = ld_v2_u64(slot + k * rank_stride + tile * TILE_BYTES)
                    low[i], high[i] = words
                else:
                    low[i] = own_low[i // size]
                    high[i] = own_high[i // size]

    return load_all


def make_fold_slots(size: int, lanes: Lanes) -> Callable[..., tuple[range, Vectors]]:
    """Return the simulator's form of ``make_load_all`` and of a reduction.

    ``(slot, array, chunk, used)`` returns the indices in the array of a thread's
    vectors of a chunk, and their reduction over the ranks in the slice ``used``. The
    other arguments are those of ``make_load_all``.
    """
    rank_stride = CHUNKED.tiles(size) * TILE_BYTES

    def fold_slots(
        slot: int, array: int, chunk: Any, used: slice
    ) -> tuple[range, Vectors]:
        rank, vector, tiles, share, count, first = chunk
        own = shifted(range(vector, share, THREADS)[:tiles], first)
        rows = []
        for r in range(size)[used]:
            if r == rank:
                rows.append(lanes.slices.read(array, own, count))
            else:
                k = (r - rank - 1) % size
                rows.append(read_slots(slot + k * rank_stride, len(own)))
        return own, lanes.fold(rows, used.start or 0)

    return fold_slots
