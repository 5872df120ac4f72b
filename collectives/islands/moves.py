"""Calls over several islands that reduce nothing.

Broadcasts, messages and barriers between several islands.

Data that all ranks of an island need crosses the network once for that island, along a
rail. The island's own kernels then distribute it.

All-gathers over several islands.

Data that all ranks of an island need crosses the network once for that island, along a
rail. The island's own kernels then distribute it.
"""

import itertools
from collections.abc import Sequence

from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.rails import (
    Parcels,
    Stages,
    copied,
    in_shards,
    joined,
    overlapped,
    several,
)
from numba_symm.collectives.islands.site import (
    ALIGNED,
    Site,
    StagingRanges,
    fitting,
    of_island,
    parcels,
)
from numba_symm.collectives.operations import ALL_GATHER, ALL_TO_ALL
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.engines.protocol import Parcel
from numba_symm.launch import failures


def broadcast(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a broadcast.

    A small message crosses along the root's rail. A large one is first distributed
    within the root's island. Then one shard of it crosses along each rail, and the
    other islands gather the shards.
    """
    sizes, shards, count = site.sizes, site.largest, call.count
    small = sizes.small if site.many else sizes.one_rail // (len(site.parts) - 1)
    if shards == 1 or call.nbytes <= small:
        return _on_one_rail(site, call)
    most = count + VECTOR * shards
    fits = several(count, shards, call.element.itemsize, most, sizes.chunk)
    beside = site.beside
    chunks = [
        _in_shards(beside, call, *each) for each in in_shards(site, count, fits, shards)
    ]
    return overlapped(beside, "broadcast", chunks)


def _on_one_rail(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a message that crosses along the root's rail."""
    island, number = site.place_of(call.root)
    at, nbytes = call.target, call.nbytes
    owner = number % len(site.mine)
    inner = site.spread(at, 1, call.count, call.element, owner)
    return [*rails.spread(site, "broadcast", at, nbytes, island, number), *inner]


def _in_shards(site: Site, call: Call, first: int, count: int, shards: int) -> Stages:
    """Return the stages of a chunk of a broadcast: its first element, its length."""
    island, root = site.place_of(call.root)
    element, m = call.element, len(site.parts)
    each, at = count // shards, call.target + first * element.itemsize
    nbytes = each * element.itemsize
    owned = [
        rails.spreading(site, at + number * nbytes, nbytes, island, number)
        for number in range(shards)
        if site.on_rail(site.index, number) == site.rank
    ]
    # As many on ranks that own no shard.
    steps = range(rails.steps(m) if site.many else 1)
    exchanges = [joined([one[n] for one in owned]) for n in steps]
    work: list[list[Enqueue]] = [[] for _ in range(len(exchanges) + 1)]
    if site.index == island or site.listing:
        work[0] += site.spread(at, 1, count, element, root)
    if site.index != island or site.listing:
        work[-1] += site.spread(at, shards, each, element)
    return Stages(work, exchanges)


def messages(
    site: Site, sends: Sequence[Message], receives: Sequence[Message], what: str = ""
) -> list[Enqueue]:
    """Return the step of messages between any ranks, which progress side by side."""
    sent, out = of_island(site, sends)
    received, back = of_island(site, receives)
    inner = site.messages(sent, received)
    return site.between(what or failures.MESSAGE, parcels(out), parcels(back), inner)


def barrier(site: Site) -> list[Enqueue]:
    """Return the steps of a barrier: in each island before and after messages."""
    m, staging = len(site.parts), StagingRanges(site)
    token, into = staging.take(1), staging.take(m)
    steps = site.met()
    if site.local == 0:
        steps += rails.crossed(site, token, into)
    return steps + site.met()


def all_to_all(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of an all-to-all.

    Between many islands of equally many ranks, small shards for one rail are exchanged
    within each island first, and cross together, if this takes no more messages.
    Otherwise it is made of messages.
    """
    if site.many and site.largest == site.smallest:
        binary, most = _crossed_together(site, call)
        # Each chunk is a message to every other island, unless it crosses in base 2.
        fewer = binary or call.count <= most * len(site.mine)
        if most and fewer and 0 < call.nbytes < site.sizes.apart:
            return _exchanged_together(site, call, binary, most)
    if call.source != call.target:
        return _exchanged(site, call)
    # In place: what arrives waits in the staging memory. Each batch has pairs of ranks
    # whose numbers have certain sums, so that both send what the other one replaces.
    steps: list[Enqueue] = []
    size, width, half = site.size, call.element.itemsize, site.sizes.half
    most = min(call.count, half // width)
    number = max(1, min(size, half // (most * width))) if most else 1
    for first, count in site.chunks(call.count, most):
        for batch in range(0, size, number):
            sums = range(batch, min(size, batch + number))
            steps += _replaced(site, call, first, count, sums)
    return steps


def _crossed_together(site: Site, call: Call) -> tuple[bool, int]:
    """Return whether parts cross in base 2, and the most elements of a chunk."""
    m, mine, width = len(site.parts), len(site.mine), call.element.itemsize

    def most(rooms: int) -> int:
        found = fitting(site, rooms * mine, width, 4 * ALIGNED, 1)
        return min(call.count, found // VECTOR * VECTOR or found)

    fits = most(3 * m)
    binary = mine * fits * width < site.sizes.part
    return binary, most(rails.rooms(m)) if binary else fits


def _exchanged_together(
    site: Site, call: Call, binary: bool, most: int
) -> list[Enqueue]:
    """Return the steps in which shards cross together, along the rails.

    Args:
        site: this rank's site.
        call: the call.
        binary: whether parts cross in base 2; see :func:`rails.exchanged`.
        most: the elements of a chunk, which has as many of every shard.
    """
    m, mine, itemsize = len(site.parts), len(site.mine), call.element.itemsize
    peers = [site.on_rail(island, site.local) for island in range(m)]
    by_rail = [(i, k) for k in range(mine) for i in range(m)]
    bounds = site.chunks(call.count, most)
    if len(bounds) > 1:
        site = site.beside
    found = list[Stages]()
    for first, count in bounds:
        nbytes = count * itemsize
        source, target = (at + first * itemsize for at in (call.source, call.target))
        each = (rails.rooms(m) // 3 if binary else m) * mine * nbytes
        room = StagingRanges(site, len(found)).take(3 * each)
        others, third = room + each, room + 2 * each
        steps, parts, result = list[Enqueue](), rails.Slots(source, call.nbytes), room
        if mine > 1:
            places = [source + site.parts[i][k] * call.nbytes for i, k in by_rail]
            steps += copied(site, others, places, nbytes)
            inner = Call(others, third, m * count, call.element, "sum")
            steps.append(site.within(ALL_TO_ALL, inner))
            # By the island that they are for, and then by the ranks of this one.
            shape, apart = (m, mine, nbytes), (nbytes, m * nbytes)
            steps += site.packed(room, third, shape, apart)
            parts = rails.Slots(room, mine * nbytes)
            result = room if binary else others
        into = rails.Slots(result, mine * nbytes)
        if binary:
            stages = rails.exchanged(site, peers, parts, mine * nbytes, room, into)
        else:
            stages = rails.directly(site, peers, parts, mine * nbytes, into)
        stages.work[0][:0] = steps
        places = [target + rank * call.nbytes for part in site.parts for rank in part]
        stages.work[-1].extend(copied(site, result, places, nbytes, packing=False))
        found.append(stages)
    last = len(found[0].exchanges)
    return overlapped(site, "all_to_all", found, last)


def _replaced(
    site: Site, call: Call, first: int, count: int, sums: range
) -> list[Enqueue]:
    """Return the steps that exchange parts of shards in place.

    Args:
        site: this rank's site.
        call: the call.
        first: the first element of each part.
        count: the number of elements of each.
        sums: the sums of the two ranks' numbers, modulo the number of ranks.
    """
    size, nbytes = site.size, count * call.element.itemsize
    start = call.source + first * call.element.itemsize
    sends, receives, last = list[Message](), list[Message](), list[Enqueue]()
    for number, each in enumerate(sums):
        peer, at = (each - site.rank) % size, site.staging + number * nbytes
        if peer != site.rank:
            place = start + peer * call.nbytes
            sends.append(Message(peer, place, nbytes))
            receives.append(Message(peer, at, nbytes))
            last += site.copy(place, at, nbytes)
    return [*messages(site, sends, receives, "all_to_all"), *last]


def _exchanged(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps that send each rank its shard, and receive that of each."""
    nbytes, own = call.nbytes, site.rank * call.nbytes
    others = [rank for rank in range(site.size) if rank != site.rank]
    sends = [Message(rank, call.source + rank * nbytes, nbytes) for rank in others]
    receives = [Message(rank, call.target + rank * nbytes, nbytes) for rank in others]
    steps = site.copy(call.target + own, call.source + own, nbytes)
    return steps + messages(site, sends, receives, "all_to_all")


def all_gather(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of an all-gather."""
    nbytes, m, sizes = call.nbytes, len(site.parts), site.sizes
    if site.many and site.largest == site.smallest:
        staged = (rails.slots(m) + site.size) * nbytes + 2 * ALIGNED
        if staged <= sizes.half:
            return _gathered_along_rails(site, call)
    elif site.many and m * site.largest * nbytes <= sizes.whole:
        return _gathered_by_islands(site, call)

    def at(rank: int) -> int:
        return call.target + rank * nbytes

    index, local, mine = site.index, site.local, len(site.mine)
    count, element = call.count, call.element
    exchanges: list[Parcels] = []
    last: list[list[Enqueue]] = []
    apart = (
        nbytes >= site.sizes.chunk and m > 2
    )  # an exchange with one island after another
    inner = site.beside if apart else site
    for d in range(1, m):
        to, source = site.parts[(index + d) % m], site.parts[(index - d) % m]
        sends = [Parcel(to[local % len(to)], at(site.rank), nbytes)]
        receives = [
            Parcel(rank, at(rank), nbytes)
            for number, rank in enumerate(source)
            if number % mine == local
        ]
        exchanges.append((sends, receives))
        last.append(inner.spread_all(call.target, source, count, element))
    if not apart:
        exchanges, last = [joined(exchanges)], [list(itertools.chain(*last))]
    chunks = [
        Stages([[], work], [each]) for each, work in zip(exchanges, last, strict=True)
    ]
    chunks[0].work[0].extend(site.copy(at(site.rank), call.source, nbytes))
    own = site.beside.spread_all(call.target, site.mine, count, element)
    return overlapped(site, "all_gather", [*chunks, Stages([own], [])])


def _gathered_along_rails(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a small all-gather: along the rails, then in each island."""
    m, mine, nbytes = len(site.parts), len(site.mine), call.nbytes
    staging = StagingRanges(site)
    slots = staging.take(rails.slots(m) * nbytes)
    steps = site.copy(slots + site.index * nbytes, call.source, nbytes)
    steps += rails.gathered(site, "all_gather", slots, nbytes)
    if mine == 1:
        return steps + site.copy(call.target, slots, m * nbytes)
    whole = staging.take(mine * m * nbytes)
    step = Call(slots, whole, m * call.count, call.element, "sum")
    places = [whole + (k * m + i) * nbytes for i, k in _places(site)]
    placed = copied(site, call.target, places, nbytes)
    return [*steps, site.within(ALL_GATHER, step), *placed]


def _gathered_by_islands(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a small all-gather between islands of different sizes.

    Each island gathers its own arrays, and then all of them cross along every rail.
    """
    m, nbytes = len(site.parts), call.nbytes
    stride = divide_up(site.largest * nbytes, VECTOR) * VECTOR
    slots = StagingRanges(site).take(rails.slots(m) * stride)
    own = slots + site.index * stride
    inner = Call(call.source, own, call.count, call.element, "sum")
    steps = [site.within(ALL_GATHER, inner)]
    steps += rails.gathered(site, "all_gather", slots, stride)
    places = [slots + i * stride + k * nbytes for i, k in _places(site)]
    return steps + copied(site, call.target, places, nbytes)


def _places(site: Site) -> list[tuple[int, int]]:
    """Return the island of each rank, and the rank's number there."""
    return [site.place_of(rank) for rank in range(site.size)]
