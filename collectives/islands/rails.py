"""Small messages along the rails, in steps whose number grows with log₂ of the islands.

The ranks of equal number in all islands are a rail. If there are more than a
few islands, the start of each message takes longer than its bytes. So a rank does not
exchange with every island, but in each step with one or two:

    crossed     a barrier, by dissemination: in step k with the islands 2^k before and
                after this one
    gathered    what each island has, to all of them, by Bruck's algorithm: in step k
                every rank has received what 2^k islands have, and passes that on
    collected   the same to one island, by a binomial tree
    spread      what one island has, to all of them, by a binomial tree

What is passed on is what each island had at first, never a reduction of that. So every
rank reduces it in the order of the islands, and gets the same bits.

A rank stores what island i has at the i-th slot, or, where the steps need consecutive
slots, at slot m + i of m islands. A copy moves these last ones to their places.
"""

from collections.abc import Iterator

from numba_symm.collectives.islands.site import Site
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.engines.protocol import Parcel


def slots(islands: int) -> int:
    """Return how many slots a rank needs."""
    return 2 * islands - 1


def steps(islands: int) -> int:
    """Return the number of steps along a rail, ⌈log₂ islands⌉."""
    return (islands - 1).bit_length()


def _distances(islands: int) -> Iterator[int]:
    for step in range(steps(islands)):
        yield 1 << step


def crossed(site: Site, token: int, into: int) -> list[Enqueue]:
    """Return the steps of a barrier between the first ranks of all islands.

    Args:
        site: the site of a first rank.
        token: address of a byte that is sent.
        into: address of a byte for each step.
    """
    m, found = len(site.parts), list[Enqueue]()
    for step, distance in enumerate(_distances(m)):
        after = site.parts[(site.index + distance) % m][0]
        before = site.parts[(site.index - distance) % m][0]
        received = Parcel(before, into + step, 1)
        found += site.between("barrier", [Parcel(after, token, 1)], [received])
    return found


def gathered(site: Site, what: str, first: int, stride: int) -> list[Enqueue]:
    """Return the steps after which every rank has what all islands have.

    All ranks of an island have the same, or all islands have equally many ranks.

    Args:
        site: this rank's site.
        what: the operation.
        first: address of slot 0. This island's slot has what this rank has.
        stride: bytes of a slot, and from one to the next.
    """
    m, found = len(site.parts), list[Enqueue]()
    own = first + site.index * stride
    for distance in _distances(m):
        number = min(distance, m - distance)
        there = site.parts[(site.index - distance) % m]
        sends = [
            Parcel(rank, own, number * stride)
            for place, rank in enumerate(there)
            if place % len(site.mine) == site.local
        ]
        sender = site.on_rail((site.index + distance) % m, site.local)
        received = Parcel(sender, own + distance * stride, number * stride)
        found += site.between(what, sends, [received])
    return found + site.copy(first, first + m * stride, site.index * stride)


def collected(
    site: Site, what: str, first: int, stride: int, island: int, number: int
) -> list[Enqueue]:
    """Return the steps after which one rank has what all islands have.

    Args:
        site: this rank's site, on any rail.
        what: the operation.
        first: address of slot 0.
        stride: bytes of a slot, and from one to the next.
        island: the island of the rank that gets them.
        number: the number of its rail. Before, each rank of the rail has what its
            island has at :func:`own_slot`.
    """
    m, found = len(site.parts), list[Enqueue]()
    if site.rank != site.on_rail(site.index, number):
        return []
    place = (site.index - island) % m
    own = first + own_slot(site, island) * stride
    for distance in _distances(m):
        if place & distance:
            peer = site.on_rail((site.index - distance) % m, number)
            size = min(distance, m - place) * stride
            return found + site.between(what, [Parcel(peer, own, size)], [])
        if place + distance < m:
            peer = site.on_rail((site.index + distance) % m, number)
            size = min(distance, m - place - distance) * stride
            received = Parcel(peer, own + distance * stride, size)
            found += site.between(what, [], [received])
    return found + site.copy(first, first + m * stride, island * stride)


def own_slot(site: Site, island: int) -> int:
    """Return this island's slot for :func:`collected` in another one."""
    return island + (site.index - island) % len(site.parts)


def spread(
    site: Site, what: str, at: int, nbytes: int, island: int, number: int
) -> list[Enqueue]:
    """Return the steps after which a rail's ranks have what one of them has.

    Args:
        site: this rank's site, on any rail.
        what: the operation.
        at: address of the bytes.
        nbytes: how many.
        island: the island of the rank that has them.
        number: the number of the rail.
    """
    m, found = len(site.parts), list[Enqueue]()
    if site.rank != site.on_rail(site.index, number):
        return []
    place = (site.index - island) % m
    for distance in reversed([*_distances(m)]):
        sends, receives = list[Parcel](), list[Parcel]()
        if place % (2 * distance) == 0 and place + distance < m:
            peer = site.on_rail((site.index + distance) % m, number)
            sends.append(Parcel(peer, at, nbytes))
        elif place % (2 * distance) == distance:
            peer = site.on_rail((site.index - distance) % m, number)
            receives.append(Parcel(peer, at, nbytes))
        found += site.between(what, sends, receives)
    return found
