"""Collectives that move data between several islands.

What every rank of an island needs crosses the network once for that island, along a
rail. The island's own kernels send it on to the other ranks.
"""

import itertools
from collections.abc import Sequence

from numba_symm import waits
from numba_symm.collectives.islands.pipeline import (
    CHUNK,
    Parcels,
    Stages,
    in_shards,
    joined,
    overlapped,
    several,
)
from numba_symm.collectives.islands.site import (
    Site,
    StagingRanges,
    fitting,
    of_island,
    padded,
    parcels,
)
from numba_symm.collectives.kernels import barrier as barriers
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.collectives.protocols.workspace import VECTOR
from numba_symm.engines.protocol import Parcel
from numba_symm.environment import SIMULATED

ONE_RAIL = 256 if SIMULATED else 256 << 10
"""The most bytes of a broadcast that the root sends to all other islands. An estimate:
at 400 Gb/s they take 5 µs, and another step within the root's island 2 to 3."""


def all_gather(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of an all-gather."""
    nbytes = call.nbytes

    def at(rank: int) -> int:
        return call.target + rank * nbytes

    m, index, local, mine = len(site.parts), site.index, site.local, len(site.mine)
    count, element = call.count, call.element
    exchanges: list[Parcels] = []
    last: list[list[Enqueue]] = []
    apart = nbytes >= CHUNK and m > 2  # an exchange with one island after another
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


def broadcast(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a broadcast.

    A small message crosses along the root's rail. A large one is first distributed
    within the root's island. Then one shard of it crosses along each rail, and the
    other islands gather the shards. If there are many chunks, each island sends them to
    the next one, and no rank sends a byte twice.
    """
    shards = site.largest
    if shards == 1 or call.nbytes * (len(site.parts) - 1) <= ONE_RAIL:
        return overlapped(site, "broadcast", [_on_one_rail(site, call)])
    width, m = call.element.itemsize, len(site.parts)
    most = several(call.count, shards, width, call.count + VECTOR * shards, 2 * m)
    chunks = list(in_shards(site, call.count, most, shards))
    if len(chunks) > 1:
        site = site.beside
    chain = chained(len(chunks), m)
    stages = [
        _on_all_rails(site, call, call.target + first * width, count // n, n, chain)
        for first, count, n in chunks
    ]
    return overlapped(site, "broadcast", stages)


def chained(chunks: int, islands: int) -> bool:
    """Return whether chunks take less time from island to island than from one to all.

    A tick is the time of one chunk on a link. In a chain, the last chunk needs two more
    ticks for each island after the root's. From one to all, each chunk needs as many
    ticks as there are other islands.
    """
    others = islands - 1
    return chunks + 2 * others < chunks * others


def _on_one_rail(site: Site, call: Call) -> Stages:
    """Return the stages of a message that crosses along the root's rail."""
    island, number = site.place_of(call.root)
    owner = number % len(site.mine)
    inner = site.spread(call.target, 1, call.count, call.element, owner)
    if site.index != island:
        mine = site.rank == site.on_rail(site.index, number)
        receives = [Parcel(call.root, call.target, call.nbytes)] if mine else []
        return Stages([[], inner], [([], receives)])
    peers = [site.on_rail(j, number) for j in site.others]
    sends = [Parcel(peer, call.target, call.nbytes) for peer in peers]
    return Stages([[], inner], [(sends if site.rank == call.root else [], [])])


def _on_all_rails(
    site: Site, call: Call, target: int, count: int, shards: int, chain: bool
) -> Stages:
    """Return the stages of a chunk that crosses in shards.

    Args:
        site: this rank's site.
        call: the call.
        target: address of the chunk.
        count: elements of a shard.
        shards: the number of shards.
        chain: whether each island sends to the next one; else the root's to all.
    """
    island, root = site.place_of(call.root)
    element, nbytes = call.element, count * call.element.itemsize
    mine = [
        (number, target + number * nbytes)
        for number in range(shards)
        if site.on_rail(site.index, number) == site.rank
    ]
    m, exchanged = len(site.parts), len(site.parts) - 1 if chain else 1
    work: list[list[Enqueue]] = [[] for _ in range(exchanged + 1)]
    exchanges: list[Parcels] = [([], []) for _ in range(exchanged)]
    # The number of exchanges before this island's own.
    before = min((site.index - island) % m, exchanged)
    if before == 0 or site.listing:  # other roots use the other branch
        work[0] += site.spread(target, 1, shards * count, element, root)
    if before > 0 or site.listing:
        work[max(before, 1)] += site.spread(target, shards, count, element)
    if before > 0:
        sender = (site.index - 1) % m if chain else island
        exchanges[before - 1][1].extend(
            Parcel(site.on_rail(sender, number), at, nbytes) for number, at in mine
        )
    if before < exchanged:
        exchanges[before][0].extend(
            Parcel(site.on_rail(after, number), at, nbytes)
            for number, at in mine
            for after in ([(site.index + 1) % m] if chain else site.others)
        )
    return Stages(work, exchanges)


def all_to_all(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of an all-to-all, which is made of messages."""
    if call.source != call.target:
        return _exchanged(site, call.source, call.target, call.nbytes, call.nbytes)
    # In place: what arrives waits in the staging memory, in chunks of every shard.
    steps: list[Enqueue] = []
    width = call.element.itemsize
    fits = fitting(site, site.size, width)
    for first, count in site.chunks(call.count, fits):
        nbytes = count * width
        stride = padded(nbytes)
        staging = StagingRanges(site).take(site.size * stride)
        source = call.source + first * width
        steps += _exchanged(site, source, staging, nbytes, call.nbytes, stride)
        for rank in range(site.size):
            at = source + rank * call.nbytes
            steps += site.copy(at, staging + rank * stride, nbytes)
    return steps


def _exchanged(
    site: Site,
    source: int,
    target: int,
    nbytes: int,
    apart: int,
    into: int | None = None,
) -> list[Enqueue]:
    """Return the steps that send bytes of each shard, and receive such of every rank.

    Args:
        site: this rank's site.
        source: address of what is sent to rank 0.
        target: address for what rank 0 sends.
        nbytes: of each.
        apart: bytes from one rank's to the next one's, in the source.
        into: the same in the target; None: the same.
    """
    into = apart if into is None else into
    own = site.rank
    others = [rank for rank in range(site.size) if rank != own]
    sends = [Message(rank, source + rank * apart, nbytes) for rank in others]
    receives = [Message(rank, target + rank * into, nbytes) for rank in others]
    steps = site.copy(target + own * into, source + own * apart, nbytes)
    return steps + messages(site, sends, receives, "all_to_all")


def messages(
    site: Site, sends: Sequence[Message], receives: Sequence[Message], what: str = ""
) -> list[Enqueue]:
    """Return the step of messages between any ranks, which progress side by side."""
    sent, out = of_island(site, sends)
    received, back = of_island(site, receives)
    inner = site.messages(sent, received)
    return site.between(what or waits.MESSAGE, parcels(out), parcels(back), inner)


def barrier(site: Site) -> list[Enqueue]:
    """Return the steps of a barrier: in each island before and after a message."""
    staging = StagingRanges(site)
    token, into = staging.take(1), staging.take(len(site.parts))
    steps: list[Enqueue] = [barriers.bind(site.end)]
    if site.local == 0:
        peers = {j: site.parts[j][0] for j in site.others}
        steps += site.between(
            "barrier",
            [Parcel(peer, token, 1) for peer in peers.values()],
            [Parcel(peer, into + j, 1) for j, peer in peers.items()],
        )
    return [*steps, barriers.bind(site.end)]
