"""Broadcasts, messages and barriers between several islands.

Data that all ranks of an island need crosses the network once for that island, along a
rail. The island's own kernels then distribute it.
"""

from collections.abc import Sequence

from numba_symm import waits
from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.pipeline import in_shards, joined, several
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
    the next one, and no rank sends a byte twice.
    """
    shards, m, sizes = site.largest, len(site.parts), site.sizes
    small = sizes.small if site.many else sizes.one_rail // (m - 1)
    if call.nbytes <= small:
        return _on_one_rail(site, call)
    width = call.element.itemsize
    most = call.count + VECTOR * shards
    fits = several(call.count, shards, width, most, sizes.chunk, 2 * m)
    chain = _chained(site, divide_up(call.count, fits))
    if shards == 1 and not chain:
        return _on_one_rail(site, call)
    bounds = in_shards(site, call.count, fits if chain else most, shards)
    if chain:
        site = site.beside
    crossing = [
        _Crossing(site, call, call.target + first * width, count // n, n)
        for first, count, n in bounds
    ]
    if site.listing:  # other roots have other steps
        return [step for each in crossing for step in each.first() + each.last()]
    return _along_a_chain(site, crossing) if chain else _at_once(site, crossing)


def _chained(site: Site, chunks: int) -> bool:
    """Return whether chunks take less time from island to island than at once.

    A tick is the time of one chunk on a link. In a chain, the last chunk needs one more
    tick for each island after the first two. At once, the root's island sends each
    chunk to every other one, or as often as a binomial tree has steps. Chunks also gain
    time if each island distributes one while the next one crosses.
    """
    m = len(site.parts)
    ticks = chunks * (rails.steps(m) if site.many else m - 1)
    return chunks > 1 and chunks + m - 2 < ticks + (site.largest > 1)


def _on_one_rail(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a message that crosses along the root's rail."""
    island, number = site.place_of(call.root)
    at, nbytes = call.target, call.nbytes
    owner = number % len(site.mine)
    inner = site.spread(at, 1, call.count, call.element, owner)
    return [*rails.spread(site, "broadcast", at, nbytes, island, number), *inner]


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


def _at_once(site: Site, chunks: "Sequence[_Crossing]") -> list[Enqueue]:
    """Return the steps in which the shards of all chunks cross at a time."""
    each = [
        rails.spreading(site, at, chunk.nbytes, chunk.island, number)
        for chunk in chunks
        for number, at in chunk.mine
    ]
    steps = [step for chunk in chunks for step in chunk.first()]
    for exchanges in zip(*each, strict=True):
        steps += site.between("broadcast", *joined(exchanges))
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
    if site.local == 0:
        steps += rails.crossed(site, token, into)
    return steps + site.met()
