"""Messages along the rails: all at a time between few islands, else in few steps.

The ranks of equal number in all islands are a rail. Between a few islands, each of them
exchanges with every other one at a time. If there are more, the start of each message
takes longer than its bytes. So a rank exchanges with one other in each step, and the
number of steps grows with the islands' logarithm:

    crossed     a barrier, by dissemination: in step k with the islands 2^k before and
                after this one
    gathered    what each island has, to all of them, by Bruck's algorithm: in step k
                every rank has received what 2^k islands have, and passes that on
    collected   the same to one island, by a binomial tree
    spreading   what one island has, to all of them, by a binomial tree
    exchanged   what each island has for every other one, by Bruck's algorithm in base
                2: in step k with the islands 2^k before and after this one. A rank has
                ⌈log₂ islands⌉ messages, and passes most parts on several times.

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
        into: address of a byte for each island.
    """
    m, found = len(site.parts), list[Enqueue]()
    if not site.many:
        firsts = [(j, site.parts[j][0]) for j in site.others]
        sends = [Parcel(rank, token, 1) for _, rank in firsts]
        receives = [Parcel(rank, into + j, 1) for j, rank in firsts]
        return site.between("barrier", sends, receives)
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
    m, mine, found = len(site.parts), len(site.mine), list[Enqueue]()
    there = [site.on_rail(island, site.local) for island in range(m)]
    own = first + site.index * stride

    def to(island: int, nbytes: int) -> list[Parcel]:
        ranks = site.parts[island][site.local :: mine]
        return [Parcel(rank, own, nbytes) for rank in ranks]

    if not site.many:
        sends = [parcel for j in site.others for parcel in to(j, stride)]
        receives = [Parcel(there[j], first + j * stride, stride) for j in site.others]
        return site.between(what, sends, receives)
    for distance, (_, receives) in zip(
        _distances(m), gathering(site.index, there, first, stride), strict=True
    ):
        number = min(distance, m - distance)
        sends = to((site.index - distance) % m, number * stride)
        found += site.between(what, sends, receives)
    return found + in_order(site, first, stride, site.index)


def gathering(
    index: int, peers: Sequence[int], first: int, stride: int
) -> list[Parcels]:
    """Return the exchanges of an all-gather between one rank of each of many islands.

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
    found, at_root = list[Enqueue](), site.index == island
    if not site.many:
        sends = [Parcel(peers[island], first + site.index * stride, stride)]
        receives = [Parcel(peers[j], first + j * stride, stride) for j in site.others]
        return site.between(what, *(([], receives) if at_root else (sends, [])))
    for parcels in collecting(site.index, peers, first, stride, island):
        found += site.between(what, *parcels)
    return found + in_order(site, first, stride, island) if at_root else found


def collecting(
    index: int, peers: Sequence[int], first: int, stride: int, island: int
) -> list[Parcels]:
    """Return the exchanges after which one rank has what those of many islands have.

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
    if not site.many:
        return site.index
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
    found = list[Enqueue]()
    if site.rank == site.on_rail(site.index, number):
        for parcels in spreading(site, at, nbytes, island, number):
            found += site.between(what, *parcels)
    return found


def spreading(
    site: Site, at: int, nbytes: int, island: int, number: int
) -> list[Parcels]:
    """Return the exchanges of :func:`spread` on a rank of the rail."""
    m, found = len(site.parts), list[Parcels]()
    place = (site.index - island) % m

    def parcel(peer: int) -> Parcel:
        return Parcel(site.on_rail((island + peer) % m, number), at, nbytes)

    if not site.many:
        return [([], [parcel(0)]) if place else ([*map(parcel, range(1, m))], [])]
    for distance in reversed([*_distances(m)]):
        sends, receives = list[Parcel](), list[Parcel]()
        if place % (2 * distance) == 0 and place + distance < m:
            sends = [parcel(place + distance)]
        elif place % (2 * distance) == distance:
            receives = [parcel(place - distance)]
        found.append((sends, receives))
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


def rooms(islands: int) -> int:
    """Return for how many parts :func:`exchanged` needs memory, besides its result."""
    return 3 << steps(islands)


def directly(
    site: Site, peers: Sequence[int], parts: Slots, nbytes: int, result: Slots
) -> Stages:
    """Return the stages of :func:`exchanged` in which a rank sends each part once.

    The parts must be contiguous within. The result is apart from them.
    """
    others, index = site.others, site.index
    sends = [Parcel(peers[j], parts.of(j), nbytes) for j in others]
    receives = [Parcel(peers[j], result.of(j), nbytes) for j in others]
    own = site.copy(result.of(index), parts.of(index), nbytes)
    return Stages([own, []], [(sends, receives)])


def exchanged(
    site: Site,
    peers: Sequence[int],
    parts: Slots,
    nbytes: int,
    room: int,
    result: Slots,
) -> Stages:
    """Return the stages after which a rank has what each island has for its own.

    Slot d of a rank has its part for the island that is d after its own. In the step of
    a binary digit, the rank sends the slots whose number has that digit to the island
    that is as far after its own as the digit's weight. It receives as many, from the
    island that is as far before, into the same slots. In the end, slot d has the part
    from the island that is d before.

    Who writes what: kernels of this rank copy between its three rooms, and to the
    result; the engine stores into the second room and reads the first one, or the
    slots. Each stage follows the one before, so none is read and written at a time.

    Args:
        site: this rank's site.
        peers: by island, its rank on this rail.
        parts: this rank's parts, by the island that they are for. They may be in the
            first room.
        nbytes: of a part.
        room: address of memory for :func:`rooms` parts.
        result: where the parts are stored, by the island that they are from. It may be
            in the first two rooms.
    """
    m, index = len(peers), site.index
    each = rooms(m) // 3 * nbytes
    packed, received, slots = room, room + each, room + 2 * each
    order = [*range(index, m), *range(index)]
    steps = copied(site, slots, [parts.of(j) for j in order], nbytes)
    work, exchanges = [steps], list[Parcels]()
    for distance in _distances(m):
        run, groups = distance * nbytes, -(-m // (2 * distance))
        whole, rest = divmod(m, 2 * distance)
        sent = (whole * distance + max(0, rest - distance)) * nbytes
        top = 2 * distance >= m
        start = slots + run if top else packed
        to, source = peers[(index + distance) % m], peers[(index - distance) % m]
        exchanges.append(([Parcel(to, start, sent)], [Parcel(source, received, sent)]))
        if top:  # these slots follow one another
            arrived = site.copy(slots + run, received, sent)
        else:
            shape, apart = (groups, run), (2 * run,)
            work[-1].extend(site.packed(packed, slots + run, shape, apart))
            arrived = site.packed(received, slots + run, shape, apart, packing=False)
        work.append(arrived)
    # Slot d has the part from the island that is d before.
    into = [result.of((index - d) % m) for d in range(m)]
    work[-1].extend(copied(site, slots, into, nbytes, packing=False))
    return Stages(work, exchanges)
