"""Messages along the rails, chunks that overlap, and copies of many ranges.

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

The overlap of chunks: some cross between islands while kernels work on others.

While the engine moves the bytes of a chunk, the kernels of the chunk before it and of
the chunk after it run on another stream, one after another. So they need one workspace,
and chunks need two halves of the staging memory, which they use in turn:

    exchange           0        1        2
    beside it      1       0, 2     1        2      (work of these chunks)
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from numba_symm.collectives.islands.site import Site
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.engines.protocol import Parcel

CHUNKS = 8
"""The number of chunks of a large message, if they fit into the staging memory."""

ChunkStep = tuple[int, int]
"""A chunk, and the number of one of its exchanges or of a part of its work."""

Parcels = tuple[list[Parcel], list[Parcel]]
"""What an exchange sends, and what it receives."""


class Stages(NamedTuple):
    """The stages of a chunk.

    Attributes:
        work: the steps before the first exchange, between two, and after the last one.
        exchanges: one fewer.
    """

    work: Sequence[list[Enqueue]]
    exchanges: Sequence[Parcels]


def overlapped(
    site: Site, what: str, chunks: Sequence[Stages], last: int = 1
) -> list[Enqueue]:
    """Return the steps of chunks, in which exchanges and work overlap.

    Args:
        site: this rank's site.
        what: the operation.
        chunks: the stages of each; all ranks have as many.
        last: the number of the last work of a chunk that uses the staging memory. The
            exchanges before it do, too.
    """
    steps: list[Enqueue] = []
    for exchanges, work in ticks([len(chunk.exchanges) for chunk in chunks], last):
        sends, receives = joined([chunks[c].exchanges[n] for c, n in exchanges])
        beside = [step for c, n in work for step in chunks[c].work[n]]
        steps += site.between(what, sends, receives, beside)
    return steps


def ticks(
    exchanges: Sequence[int], last: int = 1
) -> list[tuple[list[ChunkStep], list[ChunkStep]]]:
    """Return the stages at each tick: what is one exchange, and the work beside it.

    A chunk has an exchange at every second tick. The work between two is at the tick
    between them, beside the exchange of another chunk. The first exchange of chunk c
    is at tick c, if only the first exchange and the work after it use the staging
    memory. Otherwise, a pair of chunks begins when both of the pair before have ended
    their use, in the order of the chunks.

    Args:
        exchanges: of each chunk, how many it has.
        last: the number of the last work that uses the staging memory.
    """
    found = []
    period = 2 * last  # ticks from a pair to the next
    starts = [c // 2 * period + c % 2 for c in range(len(exchanges))]
    longest = 2 * max(exchanges)
    ended = max(at + 2 * n for at, n in zip(starts, exchanges, strict=True))
    for tick in range(-1, ended):
        exchanged: list[ChunkStep] = []
        work: list[ChunkStep] = []
        # There may be many chunks. The first may free what the last uses.
        first = max(0, 2 * ((tick - longest) // period) - 1)
        for c in range(first, min(len(exchanges), 2 * ((tick + 1) // period) + 2)):
            most = exchanges[c]
            number, odd = divmod(tick + 1 - starts[c], 2)
            if not odd and 0 <= number <= most:
                work.append((c, number))
            elif odd and 0 <= number < most:
                exchanged.append((c, number))
        found.append((exchanged, work))
    return found


def joined(pairs: Sequence[Parcels]) -> Parcels:
    """Return one exchange in place of several."""
    sends = [parcel for sent, _ in pairs for parcel in sent]
    return sends, [parcel for _, received in pairs for parcel in received]


def several(count: int, shards: int, width: int, most: int, least: int) -> int:
    """Return how many elements a chunk has, so that several chunks overlap.

    Args:
        count: the elements of the message.
        shards: the number of shards of a chunk.
        width: bytes of an element.
        most: the elements of a chunk that fits, a multiple of vectors.
        least: the bytes of a chunk's shard.
    """
    each = max(least, divide_up(count * width, shards * CHUNKS)) // width
    return min(most, divide_up(each, VECTOR) * VECTOR * shards)


def in_shards(
    site: Site, count: int, most: int, shards: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the first element, the number of elements and the shards of each chunk.

    A last chunk has the few elements that do not divide into shards.
    """
    even = count // shards * shards
    for first, number in site.chunks(even, most):
        yield first, number, shards
    if even < count:
        yield even, count - even, 1


def copied(
    site: Site, whole: int, places: Sequence[int], nbytes: int, packing: bool = True
) -> list[Enqueue]:
    """Return the copies of equally long ranges to contiguous memory, or from there.

    Ranges at equal distances are one copy, and so are equally many of such ranges.

    Args:
        site: this rank's site.
        whole: the address of that memory.
        places: the addresses of the ranges.
        nbytes: of each.
        packing: whether to copy to that memory; else from there.
    """
    steps, at = list[Enqueue](), whole
    for place, outer, inner in strided(places):
        number = outer[0] * inner[0]
        if number == 1 or (outer[0] == 1 and inner[1] == nbytes):
            ends = (at, place) if packing else (place, at)
            steps += site.copy(*ends, number * nbytes)
        else:
            shape, apart = (outer[0], inner[0], nbytes), (outer[1], inner[1])
            steps += site.packed(at, place, shape, apart, packing)
        at += number * nbytes
    return steps


Axis = tuple[int, int]
"""A number of places, and what lies between two of them."""


def strided(places: Sequence[int]) -> list[tuple[int, Axis, Axis]]:
    """Return the first of places, in their order, that two axes give together."""
    runs, start = list[tuple[int, Axis]](), 0
    while start < len(places):
        end = start + 1
        apart = places[end] - places[start] if end < len(places) else 0
        while end < len(places) and places[end] - places[end - 1] == apart:
            end += 1
        runs.append((places[start], (end - start, apart if end - start > 1 else 0)))
        start = end
    found = list[tuple[int, Axis, Axis]]()
    for place, run in runs:
        if found and found[-1][2] == run:
            first, (number, apart), _ = found[-1]
            if number == 1 or place == first + number * apart:
                found[-1] = first, (number + 1, (place - first) // number), run
                continue
        found.append((place, (1, 0), run))
    return found


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
