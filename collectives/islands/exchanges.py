"""All-to-alls over several islands: from rank to rank, or together along the rails."""

from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.gaps import copied
from numba_symm.collectives.islands.moves import messages
from numba_symm.collectives.islands.pipeline import Stages, overlapped
from numba_symm.collectives.islands.site import ALIGNED, Site, StagingRanges, fitting
from numba_symm.collectives.operations import ALL_TO_ALL
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import VECTOR


def all_to_all(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of an all-to-all.

    Between many islands of equally many ranks, small shards for one rail are exchanged
    within each island first, and cross together, if this takes no more messages.
    Otherwise it is made of messages.
    """
    if site.many and site.largest == site.smallest:
        binary, most = _together(site, call)
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


def _together(site: Site, call: Call) -> tuple[bool, int]:
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
