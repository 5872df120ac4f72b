"""Broadcasts, messages and barriers between several islands.

Data that all ranks of an island need crosses the network once for that island, along a
rail. The island's own kernels then distribute it.
"""

from collections.abc import Sequence
from typing import Any

from numba_symm import waits
from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.pipeline import (
    Parcels,
    Stages,
    in_shards,
    overlapped,
    several,
)
from numba_symm.collectives.islands.site import (
    Site,
    StagingRanges,
    of_island,
    parcels,
)
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.engines.protocol import Parcel


def broadcast(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a broadcast.

    A small message crosses along the root's rail. A large one is first distributed
    within the root's island. Then one shard of it crosses along each rail, and the
    other islands gather the shards. If there are many chunks, each island sends them to
    the next one, and no rank sends a byte twice. Between more than ``few`` islands,
    each shard crosses along a binomial tree, or is scattered over the islands and then
    gathered, if that takes less time.
    """
    shards, m, sizes = site.largest, len(site.parts), site.sizes
    small = call.nbytes * (m - 1) <= sizes.one_rail
    if small or (site.by_rails and call.nbytes <= sizes.small):
        return _on_one_rail(site, call)
    width = call.element.itemsize
    most = call.count + VECTOR * shards
    fits = several(call.count, shards, width, most, sizes.chunk, 2 * m)
    bounds = list(in_shards(site, call.count, fits, shards))
    chain, way = chained(len(bounds), m), ""
    if site.by_rails:
        each = divide_up(call.nbytes, shards * len(bounds))
        way = sizes.crossing(m, len(bounds), each)
        chain = way == "chain"
        bounds = bounds if chain else [*in_shards(site, call.count, most, shards)]
    elif shards == 1 and not chain:
        return _on_one_rail(site, call)
    if len(bounds) > 1:
        site = site.beside
    crossing = [
        _Crossing(site, call, call.target + first * width, count // n, n)
        for first, count, n in bounds
    ]
    if site.listing:  # other roots have other steps
        return [step for each in crossing for step in each.first() + each.last()]
    if chain:
        return _along_a_chain(site, crossing)
    if site.by_rails:
        return (_along_trees if way == "tree" else _in_parts)(site, crossing)
    stages = [
        Stages([each.first(), each.last()], [each.from_one_to_all()])
        for each in crossing
    ]
    return overlapped(site, "broadcast", stages)


def chained(chunks: int, islands: int) -> bool:
    """Return whether chunks take less time from island to island than from one to all.

    A tick is the time of one chunk on a link. In a chain, the last chunk needs one more
    tick for each island after the root's. From one to all, each chunk needs as many
    ticks as there are other islands.
    """
    others = islands - 1
    return chunks + others < chunks * others


def _on_one_rail(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a message that crosses along the root's rail."""
    island, number = site.place_of(call.root)
    at, nbytes = call.target, call.nbytes
    owner = number % len(site.mine)
    inner = site.spread(at, 1, call.count, call.element, owner)
    if site.by_rails:
        crossing = rails.spread(site, "broadcast", at, nbytes, island, number)
        return [*crossing, *inner]
    sends, receives = list[Parcel](), list[Parcel]()
    if site.rank == call.root:
        peers = [site.on_rail(j, number) for j in site.others]
        sends = [Parcel(peer, at, nbytes) for peer in peers]
    elif site.index != island and site.rank == site.on_rail(site.index, number):
        receives = [Parcel(call.root, at, nbytes)]
    return [*site.between("broadcast", sends, receives), *inner]


class _Crossing:
    """A chunk of a broadcast, of which a shard crosses along each rail.

    Args:
        site: this rank's site.
        call: the call.
        target: address of the chunk.
        count: elements of a shard.
        shards: the number of shards.

    Attributes:
        island: the number of the root's island.
        nbytes: of a shard.
        mine: the number of each shard that this rank owns, and its address.
    """

    def __init__(self, site: Site, call: Call, target: int, count: int, shards: int):
        self.island, self._root = site.place_of(call.root)
        self.nbytes = count * call.element.itemsize
        self.mine = [
            (number, target + number * self.nbytes)
            for number in range(shards)
            if site.on_rail(site.index, number) == site.rank
        ]
        self._site, self._element = site, call.element
        self._target, self._count, self._shards = target, count, shards

    def first(self) -> list[Enqueue]:
        """Return the steps that distribute the chunk within the root's island."""
        site, count = self._site, self._shards * self._count
        if site.index != self.island and not site.listing:
            return []
        return site.spread(self._target, 1, count, self._element, self._root)

    def last(self) -> list[Enqueue]:
        """Return the steps by which another island gathers the shards."""
        site = self._site
        if site.index == self.island and not site.listing:
            return []
        return site.spread(self._target, self._shards, self._count, self._element)

    def with_island(self, island: int) -> list[Parcel]:
        """Return a parcel for each shard that this rank owns, to or from an island."""
        return [
            Parcel(self._site.on_rail(island, number), at, self.nbytes)
            for number, at in self.mine
        ]

    def from_one_to_all(self) -> Parcels:
        """Return the exchange in which the root's island sends to all others."""
        site = self._site
        if site.index != self.island:
            return [], self.with_island(self.island)
        return [each for j in site.others for each in self.with_island(j)], []


def _along_a_chain(site: Site, chunks: "Sequence[_Crossing]") -> list[Enqueue]:
    """Return the steps in which each island sends chunks to the next one."""
    m, number = len(site.parts), len(chunks)
    place = (site.index - chunks[0].island) % m
    before, after = (site.index - 1) % m, (site.index + 1) % m
    steps: list[Enqueue] = []
    for tick in range(-1, number + 1):  # chunk t arrives at tick t, and is sent on next
        sends, receives, work = list[Parcel](), list[Parcel](), list[Enqueue]()
        if place == 0:
            if 0 <= tick < number:
                sends = chunks[tick].with_island(after)
            if tick + 1 < number:
                work = chunks[tick + 1].first()
        else:
            if 0 <= tick < number:
                receives = chunks[tick].with_island(before)
            if tick - 1 >= 0:
                work = chunks[tick - 1].last()
                sends = chunks[tick - 1].with_island(after) if place < m - 1 else []
        steps += site.between("broadcast", sends, receives, work)
    return steps


def _along_trees(site: Site, chunks: "Sequence[_Crossing]") -> list[Enqueue]:
    """Return the steps in which each rail's shard crosses along a binomial tree.

    Ranks that own several shards pass them on in the same order, by their numbers.
    """
    steps = [step for chunk in chunks for step in chunk.first()]
    for chunk in chunks:
        for number, at in chunk.mine:
            tree = site, "broadcast", at, chunk.nbytes, chunk.island, number
            steps += rails.spread(*tree)
    return steps + [step for chunk in chunks for step in chunk.last()]


def _in_parts(site: Site, chunks: "Sequence[_Crossing]") -> list[Enqueue]:
    """Return the steps in which each rail scatters parts of a shard, and gathers them.

    There is a part for each island. The root's island sends all parts along a binomial
    tree, so a rank gets its own, and those that it passes on. Then all exchange them.
    """
    m = len(site.parts)
    island = chunks[0].island
    place = (site.index - island) % m

    def parcel(chunk: _Crossing, mine: tuple[int, int], peer: int, parts: range) -> Any:
        number, at = mine
        part = divide_up(divide_up(chunk.nbytes, m), VECTOR) * VECTOR
        first = min(parts.start * part, chunk.nbytes)
        nbytes = min(parts.stop * part, chunk.nbytes) - first
        rank = site.on_rail((island + peer) % m, number)
        return [Parcel(rank, at + first, nbytes)] * (nbytes > 0)

    def parcels_of(peer: int, parts: range) -> list[Parcel]:
        return [
            found
            for chunk in chunks
            for mine in chunk.mine
            for found in parcel(chunk, mine, peer, parts)
        ]

    def held(place: int) -> range:
        """Return the parts that a rank gets in the scatter."""
        return range(place, min(place + (place & -place or m), m))

    steps = [step for chunk in chunks for step in chunk.first()]
    for step in reversed(range(rails.steps(m))):
        sends, receives = list[Parcel](), list[Parcel]()
        peer = place ^ 1 << step
        if place % (2 << step) == 0 and peer < m:
            sends = parcels_of(peer, held(peer))
        elif place % (2 << step) == 1 << step:
            receives = parcels_of(peer, held(place))
        steps += site.between("broadcast", sends, receives)
    others = [peer for peer in range(1, m) if peer != place]
    sends, receives = list[Parcel](), list[Parcel]()
    for peer in others if place else ():
        if place not in held(peer):
            sends += parcels_of(peer, range(place, place + 1))
        if peer not in held(place):
            receives += parcels_of(peer, range(peer, peer + 1))
    if place:
        receives += parcels_of(0, range(1))
    else:
        sends = [each for peer in others for each in parcels_of(peer, range(1))]
    steps += site.between("broadcast", sends, receives)
    return steps + [step for chunk in chunks for step in chunk.last()]


def messages(
    site: Site, sends: Sequence[Message], receives: Sequence[Message], what: str = ""
) -> list[Enqueue]:
    """Return the step of messages between any ranks, which progress side by side."""
    sent, out = of_island(site, sends)
    received, back = of_island(site, receives)
    inner = site.messages(sent, received)
    return site.between(what or waits.MESSAGE, parcels(out), parcels(back), inner)


def barrier(site: Site) -> list[Enqueue]:
    """Return the steps of a barrier: in each island before and after messages."""
    m, staging = len(site.parts), StagingRanges(site)
    token, into = staging.take(1), staging.take(m)
    steps = site.met()
    if site.local == 0 and site.by_rails:
        steps += rails.crossed(site, token, into)
    elif site.local == 0:
        peers = {j: site.parts[j][0] for j in site.others}
        steps += site.between(
            "barrier",
            [Parcel(peer, token, 1) for peer in peers.values()],
            [Parcel(peer, into + j, 1) for j, peer in peers.items()],
        )
    return steps + site.met()
