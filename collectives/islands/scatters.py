"""Reduce-scatters over several islands: within each in rank order, then in theirs."""

from numba_symm.collectives.islands.pipeline import (
    CHUNK,
    Parcels,
    Stages,
    joined,
    overlapped,
    several,
)
from numba_symm.collectives.islands.site import (
    STAGING,
    Carried,
    Site,
    StagingRanges,
    fitting,
    padded,
)
from numba_symm.collectives.operations import REDUCE, REDUCE_SCATTER
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.collectives.protocols.workspace import divide_up
from numba_symm.engines.protocol import Parcel


def reduce_scatter(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a reduce-scatter.

    Each island reduces the shard of every rank to the rank on that one's rail.
    """
    carried, m = Carried(call), len(site.parts)
    width, itemsize = carried.width, call.element.itemsize
    ranges = 2 * m - 1 + (carried.element != call.element) * len(site.mine)
    if site.even and ranges * padded(call.count * width) <= STAGING:
        return _scatter_by_islands(site, carried)
    if site.even:
        return _scatter_packed(site, carried)
    # The staging memory has the shards for a rail's ranks, those from all islands, and
    # a widened one.
    most = divide_up(site.largest, site.smallest)
    fits = several(call.count, 1, width, fitting(site, m * most + m + 1, width))
    if fits < call.count:
        site = site.beside
    chunks: list[Stages] = []
    for first, count in site.chunks(call.count, fits):
        staging, steps = StagingRanges(site, len(chunks)), list[Enqueue]()
        stride = padded(count * width)
        wide, slots = staging.take(stride), staging.take(m * stride)
        own = slots + site.index * stride
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
                partial = staging.take(stride)
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
    inner = site if nbytes < CHUNK else site.beside

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
    if nbytes < CHUNK:
        steps = [step for each in work for step in each]
        chunks = [Stages([steps + mine, last], [joined(exchanges)])]
    else:
        pairs = zip(work, exchanges, strict=True)
        chunks = [Stages([each, []], [exchange]) for each, exchange in pairs]
        chunks.append(Stages([mine, last], [([], [])]))
    return overlapped(site, "reduce_scatter", chunks)


def _scatter_packed(site: Site, carried: Carried) -> list[Enqueue]:
    """Return the steps of a reduce-scatter in chunks, which are parts of all shards.

    The parts of an island's shards are copied next to each other, so that its
    reduce-scatter reduces them all.
    """
    call, m, mine = carried.call, len(site.parts), len(site.mine)
    width = carried.width
    most = fitting(site, 2 * m - 1 + mine, width)
    fits = several(call.count, 1, width, most)
    site = site.beside
    chunks: list[Stages] = []
    for first, count in site.chunks(call.count, fits):
        staging, steps = StagingRanges(site, len(chunks)), list[Enqueue]()
        nbytes = count * width
        packed, stride = staging.take(mine * nbytes), padded(nbytes)
        slots, partials = staging.take(m * stride), staging.take((m - 1) * stride)
        own = slots + site.index * stride
        exchange: Parcels = ([], [])
        for number in range(m):
            island = (site.index + 1 + number) % m  # this one is the last
            starts = [rank * call.count + first for rank in site.parts[island]]
            packing, source = _packed(site, carried, starts, packed, count)
            target = own if island == site.index else partials + number * stride
            steps += packing
            step = carried.step(source, target, count)
            steps.append(site.within(REDUCE_SCATTER, step))
            if island != site.index:
                peer = site.on_rail(island, site.local)
                exchange[0].append(Parcel(peer, target, nbytes))
                exchange[1].append(Parcel(peer, slots + island * stride, nbytes))
        last = site.combined(carried, slots, stride, site.index, m)
        result = call.target + first * call.element.itemsize
        last += site.finished(carried, own, result, count)
        chunks.append(Stages([steps, last], [exchange]))
    return overlapped(site, "reduce_scatter", chunks)


def _packed(
    site: Site, carried: Carried, starts: list[int], target: int, count: int
) -> tuple[list[Enqueue], int]:
    """Return the steps that store ranges of the input next to each other.

    Args:
        site: this rank's site.
        carried: the call, as whose carried elements they are stored.
        starts: the first element of each range.
        target: the address of the first one, if they are stored.
        count: the number of elements of each.

    Returns:
        The steps, and the address of the first range.
    """
    element = carried.call.element
    steps: list[Enqueue] = []
    for number, start in enumerate(starts):
        source = carried.call.source + start * element.itemsize
        at = target + number * count * carried.width
        widened, found = site.widened(carried, source, at, count)
        if len(starts) == 1:
            return widened, found
        steps += widened or site.copy(at, found, count * carried.width)
    return steps, target
