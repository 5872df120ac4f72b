"""Messages along the rails, in steps whose number grows with the islands' logarithm.

The ranks of equal number in all islands are a rail. If there are more than a
few islands, the start of each message takes longer than its bytes. So a rank does not
exchange with every island, but in each step with one or two:

    crossed     a barrier, by dissemination: in step k with the islands 2^k before and
                after this one
    gathered    what each island has, to all of them, by Bruck's algorithm: in step k
                every rank has received what 2^k islands have, and passes that on
    collected   the same to one island, by a binomial tree
    spread      what one island has, to all of them, by a binomial tree
    exchanged   what each island has for every other one, by Bruck's algorithm in a
                base: in step k with the islands that are 1, 2 … times base^k after this
                one. In base 2, a rank has ⌈log₂ islands⌉ messages, and passes most
                parts on several times. If the base is the number of islands, each part
                is sent once.

Ranks pass on only the islands' original data, never a reduction of it. So every rank
reduces the data in the order of the islands, and gets the same bits.

A rank stores the data of island i at slot i. If the steps need consecutive slots, it
stores some data at slot m + i, where m is the number of islands, and copies it
afterwards.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from numba_symm.collectives.islands.gaps import copied
from numba_symm.collectives.islands.pipeline import Parcels, Stages
from numba_symm.collectives.islands.site import Site
from numba_symm.collectives.islands.sizes import log2
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.engines.protocol import Parcel


def slots(islands: int) -> int:
    """Return how many slots a rank needs."""
    return 2 * islands - 1


def steps(islands: int) -> int:
    """Return the number of steps along a rail, ⌈log₂ islands⌉."""
    return log2(islands)


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
    there = [site.on_rail(island, site.local) for island in range(m)]
    for distance, (_, receives) in zip(
        _distances(m), gathering(site.index, there, first, stride), strict=True
    ):
        number = min(distance, m - distance)
        sends = [
            Parcel(rank, first + site.index * stride, number * stride)
            for place, rank in enumerate(site.parts[(site.index - distance) % m])
            if place % len(site.mine) == site.local
        ]
        found += site.between(what, sends, receives)
    return found + in_order(site, first, stride, site.index)


def gathering(
    index: int, peers: Sequence[int], first: int, stride: int
) -> list[Parcels]:
    """Return the exchanges of an all-gather between one rank of each island.

    Args:
        index: the number of this rank's island.
        peers: by island, its rank.
        first: address of slot 0. This island's slot has what this rank has.
        stride: bytes of a slot, and from one to the next.
    """
    m, found = len(peers), list[Parcels]()
    own = first + index * stride
    for distance in _distances(m):
        nbytes = min(distance, m - distance) * stride
        to, source = peers[(index - distance) % m], peers[(index + distance) % m]
        sends = [Parcel(to, own, nbytes)]
        found.append((sends, [Parcel(source, own + distance * stride, nbytes)]))
    return found


def in_order(site: Site, first: int, stride: int, slot: int) -> list[Enqueue]:
    """Return the copy after which island i's slot is the i-th one.

    Args:
        site: this rank's site.
        first: address of slot 0.
        stride: bytes of a slot, and from one to the next.
        slot: the first slot in use; those of all islands follow it.
    """
    return site.copy(first, first + len(site.parts) * stride, slot * stride)


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
    if site.rank != site.on_rail(site.index, number):
        return []
    peers = [site.on_rail(each, number) for each in range(len(site.parts))]
    found = list[Enqueue]()
    for parcels in collecting(site.index, peers, first, stride, island):
        found += site.between(what, *parcels)
    if site.index == island:
        found += in_order(site, first, stride, island)
    return found


def collecting(
    index: int, peers: Sequence[int], first: int, stride: int, island: int
) -> list[Parcels]:
    """Return the exchanges after which one rank has what those of all islands have.

    Args:
        index: the number of this rank's island.
        peers: by island, its rank.
        first: address of slot 0.
        stride: bytes of a slot, and from one to the next.
        island: the island of the rank that gets them.
    """
    m, found = len(peers), list[Parcels]()
    place = (index - island) % m
    own = first + (island + place) * stride
    for distance in _distances(m):
        sends, receives = list[Parcel](), list[Parcel]()
        if place % (2 * distance) == distance:
            size = min(distance, m - place) * stride
            sends.append(Parcel(peers[(index - distance) % m], own, size))
        elif place % (2 * distance) == 0 and place + distance < m:
            size = min(distance, m - place - distance) * stride
            peer = peers[(index + distance) % m]
            receives.append(Parcel(peer, own + distance * stride, size))
        found.append((sends, receives))
    return found


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


class Slots(NamedTuple):
    """Parts at equal distances, one for each island or from each.

    Attributes:
        at: the address of the first one.
        apart: bytes from one to the next.
    """

    at: int
    apart: int

    def of(self, island: int) -> int:
        """Return the address of an island's part."""
        return self.at + island * self.apart


def rooms(islands: int, base: int) -> int:
    """Return for how many parts :func:`exchanged` needs memory, besides its result."""
    if base >= islands:
        return 0
    most, weight = islands, base
    while weight < islands:
        most = max(most, -(-islands // weight) * weight)
        weight *= base
    return 3 * most


def exchanged(
    site: Site,
    peers: Sequence[int],
    parts: Slots,
    nbytes: int,
    base: int,
    room: int,
    result: Slots,
) -> Stages:
    """Return the stages after which a rank has what each island has for its own.

    Slot d of a rank has its part for the island that is d after its own. In the step of
    a digit, the rank sends the slots whose number has that digit v to the island that
    is v · weight after its own, for each v but 0. It receives as many, from the island
    that is as far before, into the same slots. In the end, slot d has the part from the
    island that is d before.

    Who writes what: kernels of this rank copy between its three rooms, and to the
    result; the engine stores into the second room and reads the first one, or the
    slots. Each stage follows the one before, so none is read and written at a time.

    Args:
        site: this rank's site.
        peers: by island, its rank on this rail.
        parts: this rank's parts, by the island that they are for. They may be in the
            first room.
        nbytes: of a part.
        base: the base, the same on all ranks; at least the number of islands if each
            rank sends each part once. Then the parts must be contiguous within.
        room: address of memory for :func:`rooms` parts.
        result: where the parts are stored, by the island that they are from. It may be
            in the first two rooms; if each part is sent once, it is apart from
            ``parts``.
    """
    m, index = len(peers), site.index
    if base >= m:
        others = [j for j in range(m) if j != index]
        sends = [Parcel(peers[j], parts.of(j), nbytes) for j in others]
        receives = [Parcel(peers[j], result.of(j), nbytes) for j in others]
        own = site.copy(result.of(index), parts.of(index), nbytes)
        return Stages([own, []], [(sends, receives)])
    each = rooms(m, base) // 3 * nbytes
    packed, received, slots = room, room + each, room + 2 * each
    order = [*range(index, m), *range(index)]
    steps = copied(site, slots, [parts.of(j) for j in order], nbytes)
    work, exchanges, weight = [steps], list[Parcels](), 1
    while weight < m:
        run, groups = weight * nbytes, -(-m // (weight * base))
        whole, rest = divmod(m, weight * base)
        sends, receives = list[Parcel](), list[Parcel]()
        top = weight * base >= m
        start = slots + run if top else packed
        for digit in range(1, min(base, -(-m // weight))):
            number = whole * weight + min(max(0, rest - digit * weight), weight)
            at = (digit - 1) * groups * run
            to = peers[(index + digit * weight) % m]
            source = peers[(index - digit * weight) % m]
            sends.append(Parcel(to, start + at, number * nbytes))
            receives.append(Parcel(source, received + at, number * nbytes))
        exchanges.append((sends, receives))
        if top:  # these slots follow one another
            arrived = site.copy(slots + run, received, (m - weight) * nbytes)
        else:
            shape, apart = (base - 1, groups, run), (run, base * run)
            work[-1].extend(site.packed(packed, slots + run, shape, apart))
            arrived = site.packed(received, slots + run, shape, apart, packing=False)
        work.append(arrived)
        weight *= base
    # Slot d has the part from the island that is d before.
    into = [result.of((index - d) % m) for d in range(m)]
    work[-1].extend(copied(site, slots, into, nbytes, packing=False))
    return Stages(work, exchanges)
