"""Collectives that move data between several islands.

What every rank of an island needs crosses the network once for that island: along a
rail, and from there to the others by the island's own kernels.
"""

from collections.abc import Sequence

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
from numba_symm.collectives.operations import ALL_GATHER, BROADCAST
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.engines import partners
from numba_symm.engines.protocol import Parcel


def all_gather(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of an all-gather."""
    nbytes = call.nbytes

    def at(rank: int) -> int:
        return call.target + rank * nbytes

    targets, sources = partners(site.islands)
    steps = site.copy(at(site.rank), call.source, nbytes)
    steps += site.between(
        "all_gather",
        [Parcel(peer, at(site.rank), nbytes) for peer in targets],
        [Parcel(peer, at(peer), nbytes) for peer in sources],
    )
    mine = len(site.mine)
    if mine == 1:
        return steps
    for part in site.parts:
        consecutive = list(part) == list(range(part[0], part[0] + len(part)))
        if consecutive and len(part) == mine:
            given = at(part[site.local]), at(part[0]), call.count, call.element
            steps.append(site.within(ALL_GATHER, *given))
            continue
        for number, rank in enumerate(part):
            given = at(rank), at(rank), call.count, call.element
            steps.append(site.within(BROADCAST, *given, root=number % mine))
    return steps


def broadcast(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a broadcast: along the root's rail, then in each island."""
    island, number = site.place_of(call.root)
    steps: list[Enqueue] = []
    nbytes = call.nbytes
    if site.rank == call.root:
        peers = [site.on_rail(j, number) for j in site.others]
        sends = [Parcel(peer, call.source, nbytes) for peer in peers]
        steps += site.between("broadcast", sends, [])
    elif site.index != island and site.rank == site.on_rail(site.index, number):
        receives = [Parcel(call.root, call.target, nbytes)]
        steps += site.between("broadcast", [], receives)
    if len(site.mine) > 1:
        given = call.source, call.target, call.count, call.element
        root = number % len(site.mine)
        steps.append(site.within(BROADCAST, *given, root=root))
    return steps


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
