"""Reduce-scatters over several islands: each by its tree, then the islands."""

import dataclasses

from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.pipeline import (
    Parcels,
    Stages,
    joined,
    overlapped,
    several,
)
from numba_symm.collectives.islands.reductions import reduce
from numba_symm.collectives.islands.site import (
    ALIGNED,
    Site,
    StagingRanges,
    fitting,
    padded,
)
from numba_symm.collectives.operations import ALL_REDUCE, REDUCE, REDUCE_SCATTER
from numba_symm.collectives.protocols.binding import Call, Carried, Enqueue
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.engines.protocol import Parcel


def reduce_scatter(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a reduce-scatter.

    Each island reduces the shard of every rank to the rank on that one's rail.
    """
    carried, m = Carried(call), len(site.parts)
    if _small(site, carried):
        return _scatter_along_rails(site, carried)
    if not site.even:
        return _scatter_one_by_one(site, carried)
    wide = (carried.element != call.element) * len(site.mine)
    nbytes = (2 * m - 1 + wide) * padded(call.count * carried.width)
    several = not site.many or call.count * carried.width >= site.sizes.chunk
    if several and nbytes <= site.sizes.staging:
        return _scatter_by_islands(site, carried)
    return _scatter_packed(site, carried)


def _by_rail(site: Site) -> bool:
    """Return whether a rank's island reduces for the ranks of its rail only."""
    return site.even and len(site.mine) > 1


def _small(site: Site, carried: Carried) -> bool:
    """Return whether many islands exchange all their results along the rails."""
    m, nbytes = len(site.parts), carried.call.count * carried.width
    slot = padded(nbytes * (m if _by_rail(site) else site.size))
    memory = (rails.slots(m) + 2 * site.largest + 1) * slot
    few_bytes = m * slot <= site.sizes.kept
    return site.many and few_bytes and memory <= site.sizes.half


def _scatter_along_rails(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the steps of a small reduce-scatter.

    The ranks of a rail exchange all that their islands have for ranks of the rail, or
    for all ranks, if islands differ. Each combines that, and keeps its own shard.
    """
    call, m = carried.call, len(site.parts)
    nbytes, staging = call.count * carried.width, StagingRanges(site)
    number, place = (m, site.index) if _by_rail(site) else (site.size, site.rank)
    stride = padded(number * nbytes)
    slots = staging.take(rails.slots(m) * stride)
    own, room = slots + site.index * stride, site.size * nbytes
    if _by_rail(site):
        rooms = [staging.take(room) for _ in range(2)]
        steps = _reduced(site, carried, 0, call.count, range(m), rooms, own)
    else:
        wide = staging.take(room)
        count = site.size * call.count
        steps, source = site.widened(carried, call.source, wide, count)
        steps.append(site.within(ALL_REDUCE, carried.step(source, own, count)))
    steps += rails.gathered(site, "reduce_scatter", slots, stride)
    steps += site.combined(carried, slots, stride, site.index, m)
    shard = own + place * nbytes
    if carried.op != call.op and shard % VECTOR:  # an average is divided by vectors
        shard = staging.take(nbytes)
        steps += site.copy(shard, own + place * nbytes, nbytes)
    return steps + site.finished(carried, shard, call.target, call.count)


def _scatter_one_by_one(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the steps of a reduce-scatter that reduces one rank's shard at a time."""
    call, m = carried.call, len(site.parts)
    width, itemsize = carried.width, call.element.itemsize
    # The staging memory has the shards for a rail's ranks, those from all islands, and
    # a widened one.
    most = m * (divide_up(site.largest, site.smallest) + 1) + 1
    fits = fitting(site, most, width, 2 * ALIGNED + VECTOR * most)
    if not fits:
        at = call.source
        return [
            step
            for rank in range(site.size)
            for step in reduce(
                site,
                dataclasses.replace(call, source=at + rank * call.nbytes, root=rank),
            )
        ]
    fits = several(call.count, 1, width, fits, site.sizes.chunk)
    if fits < call.count:
        site = site.beside
    chunks: list[Stages] = []
    for first, count in site.chunks(call.count, fits):
        staging, steps = StagingRanges(site, len(chunks)), list[Enqueue]()
        stride = divide_up(count * width, VECTOR) * VECTOR
        wide, slots = staging.take(stride), staging.take((most - 1) * stride)
        own, free = slots + site.index * stride, slots + m * stride
        sends: list[Parcel] = []
        for rank in range(site.size):
            island, number = site.place_of(rank)
            owner = number % len(site.mine)
            at = call.source + (rank * call.count + first) * itemsize
            widened, source = site.widened(carried, at, wide, count)
            partial = 0
            if rank == site.rank:
                partial = own
            elif owner == site.local and island != site.index:
                partial, free = free, free + stride
                sends.append(Parcel(rank, partial, count * width))
            step = carried.step(source, partial, count, owner)
            steps += [*widened, site.within(REDUCE, step)]
        receives = [
            Parcel(site.on_rail(j, site.local), slots + j * stride, count * width)
            for j in site.others
        ]
        last = site.combined(carried, slots, stride, site.index, m)
        target = call.target + first * itemsize
        last += site.finished(carried, own, target, count)
        chunks.append(Stages([steps, last], [(sends, receives)]))
    return overlapped(site, "reduce_scatter", chunks)


def _scatter_by_islands(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the steps of a reduce-scatter in which shards of an island are together.

    Each island reduces the shards of one island after another, by a reduce-scatter.
    """
    call, m, index = carried.call, len(site.parts), site.index
    nbytes, staging = call.count * carried.width, StagingRanges(site, None)
    stride = padded(nbytes)
    slots = staging.take(m * stride)
    partials = staging.take((m - 1) * stride)
    own, wide = slots + index * stride, 0
    if carried.element != call.element:
        wide = staging.take(len(site.mine) * stride)
    inner = site if nbytes < site.sizes.chunk else site.beside

    def reduced(island: int, target: int) -> list[Enqueue]:
        first = site.parts[island][0] * call.count * call.element.itemsize
        at, count = call.source + first, len(site.mine) * call.count
        steps, source = inner.widened(carried, at, wide, count)
        step = carried.step(source, target, call.count)
        return [*steps, inner.within(REDUCE_SCATTER, step)]

    work: list[list[Enqueue]] = []
    exchanges: list[Parcels] = []
    for d in range(1, m):
        to, source = (index + d) % m, (index - d) % m
        at = partials + (d - 1) * stride
        sends = [Parcel(site.on_rail(to, site.local), at, nbytes)]
        into = slots + source * stride
        receives = [Parcel(site.on_rail(source, site.local), into, nbytes)]
        work.append(reduced(to, at))
        exchanges.append((sends, receives))
    last = site.combined(carried, slots, stride, index, m)
    last += site.finished(carried, own, call.target, call.count)
    mine = reduced(index, own)
    if nbytes < site.sizes.chunk:
        steps = [step for each in work for step in each]
        chunks = [Stages([steps + mine, last], [joined(exchanges)])]
    else:
        pairs = zip(work, exchanges, strict=True)
        chunks = [Stages([each, []], [exchange]) for each, exchange in pairs]
        chunks.append(Stages([mine, last], [([], [])]))
    return overlapped(site, "reduce_scatter", chunks)


def _scatter_packed(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the steps of a reduce-scatter in chunks, which are parts of all shards.

    The parts of the shards of several islands are copied next to each other, so that
    one reduce-scatter within the island reduces them. The number of launches grows
    with the bytes, not with the islands.
    """
    call, m, mine = carried.call, len(site.parts), len(site.mine)
    width, itemsize = carried.width, call.element.itemsize
    converted = carried.element != call.element
    # An eighth of a half has the parts that are reduced together, twice if their type
    # differs; the rest has a chunk's partial results, and those of all islands.
    together = site.sizes.half // 8 // (1 + converted)

    def most(pieces: int) -> int:
        lost = site.sizes.half // 8 + VECTOR * m + 8 * ALIGNED
        fits = fitting(site, pieces, width, lost)
        return min(fits, together // (mine * width) // VECTOR * VECTOR)

    rooms, fits = m, several(call.count, 1, width, most(2 * m), site.sizes.chunk)
    binary = site.many and min(call.count, fits) * width < site.sizes.part
    if binary:
        rooms, fits = rails.rooms(m), most(rails.rooms(m))
    site = site.beside
    peers = [site.on_rail(island, site.local) for island in range(m)]
    found: list[Stages] = []
    for first, count in site.chunks(call.count, fits):
        staging, steps = StagingRanges(site, len(found)), list[Enqueue]()
        nbytes, stride = count * width, divide_up(count * width, VECTOR) * VECTOR
        room = staging.take(rooms * nbytes)
        # The results of all islands, in two rooms that are free then, or beside them.
        beside = not binary or nbytes < VECTOR
        slots = staging.take(m * stride) if beside else room
        parts = rails.Slots(room, nbytes)
        if mine > 1 or converted:
            number = max(1, together // (mine * nbytes))  # of islands together
            taken = [staging.take(number * mine * nbytes) for _ in range(1 + converted)]
            for island in range(0, m, number):
                islands = range(island, min(m, island + number))
                at = parts.of(island)
                steps += _reduced(site, carried, first, count, islands, taken, at)
        else:  # the input is this island's result
            parts = rails.Slots(call.source + first * itemsize, call.nbytes)
        into = rails.Slots(slots, stride)
        if binary:
            stages = rails.exchanged(site, peers, parts, nbytes, room, into)
        else:
            stages = rails.directly(site, peers, parts, nbytes, into)
        stages.work[0][:0] = steps
        last = site.combined(carried, slots, stride, site.index, m)
        own, result = into.of(site.index), call.target + first * itemsize
        stages.work[-1].extend(last + site.finished(carried, own, result, count))
        found.append(stages)
    return overlapped(site, "reduce_scatter", found, len(found[0].exchanges))


def _reduced(
    site: Site,
    carried: Carried,
    first: int,
    count: int,
    islands: range,
    room: list[int],
    target: int,
) -> list[Enqueue]:
    """Return the steps that reduce, within the island, parts of some islands' shards.

    Args:
        site: this rank's site.
        carried: the call.
        first: the first element of each part.
        count: the number of elements of each.
        islands: the islands.
        room: addresses for all these parts; a second one if their type differs.
        target: the address of the results for the rank on this one's rail, one after
            another.
    """
    call, mine, number = carried.call, len(site.mine), len(islands)
    itemsize, shard = call.element.itemsize, call.nbytes
    source = call.source + islands.start * mine * shard + first * itemsize
    # By the ranks of an island, and then by islands.
    steps = site.packed(
        room[0], source, (mine, number, count * itemsize), (shard, mine * shard)
    )
    widened, at = site.widened(carried, room[0], room[-1], mine * number * count)
    step = carried.step(at, target, number * count)
    return [*steps, *widened, site.within(REDUCE_SCATTER, step)]
