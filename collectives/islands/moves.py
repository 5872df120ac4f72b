"""Collectives that move data between several islands.

What every rank of an island needs crosses the network once for that island: along a
rail, and from there to the others by the island's own kernels.
"""

from collections.abc import Sequence

from numba_symm.collectives.islands.pipeline import (
    Stages,
    in_shards,
    overlapped,
    several,
)
from numba_symm.collectives.islands.site import (
    Site,
    Stage,
    fitting,
    of_island,
    padded,
    parcels,
)
from numba_symm.collectives.kernels import barrier as barriers
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.collectives.protocols.workspace import VECTOR
from numba_symm.engines import partners
from numba_symm.engines.protocol import Parcel
from numba_symm.environment import SIMULATED

ONE_RAIL = 256 if SIMULATED else 256 << 10
"""Bytes of the largest broadcast that crosses along one rail. An estimate: at 400 Gb/s
they take 5 µs, and another step within the root's island 2 to 3."""


def all_gather(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of an all-gather."""
    nbytes = call.nbytes

    def at(rank: int) -> int:
        return call.target + rank * nbytes

    targets, sources = partners(site.islands)
    exchange = (
        [Parcel(peer, at(site.rank), nbytes) for peer in targets],
        [Parcel(peer, at(peer), nbytes) for peer in sources],
    )

    def spread(site: Site, part: Sequence[int]) -> list[Enqueue]:
        if list(part) == list(range(part[0], part[0] + len(part))):
            return site.spread(at(part[0]), len(part), call.count, call.element)
        return [
            step
            for number, rank in enumerate(part)
            for step in site.spread(at(rank), 1, call.count, call.element, number)
        ]

    own = site.copy(at(site.rank), call.source, nbytes)
    others = [step for j in site.others for step in spread(site, site.parts[j])]
    chunks = [
        Stages([own, others], [exchange]),
        Stages([spread(site.beside, site.mine)], []),  # beside the exchange
    ]
    return overlapped(site, "all_gather", chunks)


def broadcast(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a broadcast.

    A small message crosses along the root's rail. Of a large one, the root's island
    gets the whole, a shard crosses along each rail, and the others gather the shards.
    """
    shards = site.largest
    if shards == 1 or call.nbytes <= ONE_RAIL:
        return overlapped(site, "broadcast", [_on_one_rail(site, call)])
    width = call.element.itemsize
    most = several(call.count, shards, width, call.count + VECTOR * shards)
    chunks = list(in_shards(site, call.count, most, shards))
    if len(chunks) > 1:
        site = site.beside
    stages = [
        _on_all_rails(site, call, call.target + first * width, count // number, number)
        for first, count, number in chunks
    ]
    return overlapped(site, "broadcast", stages)


def _on_one_rail(site: Site, call: Call) -> Stages:
    """Return the stages of a message that crosses along the root's rail."""
    island, number = site.place_of(call.root)
    given = call.target, 1, call.count, call.element, number % len(site.mine)
    inner = site.spread(*given)
    if site.index != island:
        mine = site.rank == site.on_rail(site.index, number)
        receives = [Parcel(call.root, call.target, call.nbytes)] if mine else []
        return Stages([[], inner], [([], receives)])
    peers = [site.on_rail(j, number) for j in site.others]
    sends = [Parcel(peer, call.target, call.nbytes) for peer in peers]
    return Stages([[], inner], [(sends if site.rank == call.root else [], [])])


def _on_all_rails(
    site: Site, call: Call, target: int, count: int, shards: int
) -> Stages:
    """Return the stages of a chunk that crosses in shards.

    Args:
        site: this rank's site.
        call: the call.
        target: address of the chunk.
        count: elements of a shard.
        shards: the number of shards.
    """
    island, root = site.place_of(call.root)
    element, nbytes = call.element, count * call.element.itemsize
    mine = [
        (number, target + number * nbytes)
        for number in range(shards)
        if site.on_rail(site.index, number) == site.rank
    ]
    if site.index != island:
        receives = [
            Parcel(site.on_rail(island, number), at, nbytes) for number, at in mine
        ]
        return Stages(
            [[], site.spread(target, shards, count, element)], [([], receives)]
        )
    sends = [
        Parcel(site.on_rail(j, number), at, nbytes)
        for number, at in mine
        for j in site.others
    ]
    whole = site.spread(target, 1, shards * count, element, root)
    return Stages([whole, []], [(sends, [])])


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
        stage = Stage(site).take(site.size * stride)
        source = call.source + first * width
        steps += _exchanged(site, source, stage, nbytes, call.nbytes, stride)
        for rank in range(site.size):
            at = source + rank * call.nbytes
            steps += site.copy(at, stage + rank * stride, nbytes)
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
    given = parcels(out), parcels(back), site.messages(sent, received)
    return site.between(what or "a message", *given)


def barrier(site: Site) -> list[Enqueue]:
    """Return the steps of a barrier: in each island before and after a message."""
    stage = Stage(site)
    token, into = stage.take(1), stage.take(len(site.parts))
    steps: list[Enqueue] = [barriers.bind(site.end)]
    if site.local == 0:
        peers = {j: site.parts[j][0] for j in site.others}
        steps += site.between(
            "barrier",
            [Parcel(peer, token, 1) for peer in peers.values()],
            [Parcel(peer, into + j, 1) for j, peer in peers.items()],
        )
    return [*steps, barriers.bind(site.end)]
