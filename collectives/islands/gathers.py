"""All-gathers over several islands.

Data that all ranks of an island need crosses the network once for that island, along a
rail. The island's own kernels then distribute it.
"""

import itertools

from numba_symm.collectives.islands import rails
from numba_symm.collectives.islands.gaps import copied
from numba_symm.collectives.islands.pipeline import Parcels, Stages, joined, overlapped
from numba_symm.collectives.islands.site import ALIGNED, Site, StagingRanges
from numba_symm.collectives.operations import ALL_GATHER
from numba_symm.collectives.protocols.binding import Call, Enqueue
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.engines.protocol import Parcel


def all_gather(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of an all-gather."""
    nbytes, m, sizes = call.nbytes, len(site.parts), site.sizes
    if site.many and site.largest == site.smallest:
        staged = (rails.slots(m) + site.size) * nbytes + 2 * ALIGNED
        if staged <= sizes.half:
            return _gathered_along_rails(site, call)
    elif site.many and m * site.largest * nbytes <= sizes.whole:
        return _gathered_by_islands(site, call)

    def at(rank: int) -> int:
        return call.target + rank * nbytes

    index, local, mine = site.index, site.local, len(site.mine)
    count, element = call.count, call.element
    exchanges: list[Parcels] = []
    last: list[list[Enqueue]] = []
    apart = (
        nbytes >= site.sizes.chunk and m > 2
    )  # an exchange with one island after another
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
        exchanges = [joined(exchanges)]
        if together := _together(site, nbytes):
            steps = site.copy(at(site.rank), call.source, nbytes)
            steps += site.between("all_gather", *exchanges[0])
            return steps + _spread_together(site, call, together)
        last = [list(itertools.chain(*last))]
    chunks = [
        Stages([[], work], [each]) for each, work in zip(exchanges, last, strict=True)
    ]
    chunks[0].work[0].extend(site.copy(at(site.rank), call.source, nbytes))
    own = site.beside.spread_all(call.target, site.mine, count, element)
    return overlapped(site, "all_gather", [*chunks, Stages([own], [])])


def _gathered_along_rails(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a small all-gather: along the rails, then in each island."""
    m, mine, nbytes = len(site.parts), len(site.mine), call.nbytes
    staging = StagingRanges(site)
    slots = staging.take(rails.slots(m) * nbytes)
    steps = site.copy(slots + site.index * nbytes, call.source, nbytes)
    steps += rails.gathered(site, "all_gather", slots, nbytes)
    if mine == 1:
        return steps + site.copy(call.target, slots, m * nbytes)
    whole = staging.take(mine * m * nbytes)
    step = Call(slots, whole, m * call.count, call.element, "sum")
    places = [whole + (k * m + i) * nbytes for i, k in _places(site)]
    placed = copied(site, call.target, places, nbytes)
    return [*steps, site.within(ALL_GATHER, step), *placed]


def _gathered_by_islands(site: Site, call: Call) -> list[Enqueue]:
    """Return the steps of a small all-gather between islands of different sizes.

    Each island gathers its own arrays, and then all of them cross along every rail.
    """
    m, nbytes = len(site.parts), call.nbytes
    stride = divide_up(site.largest * nbytes, VECTOR) * VECTOR
    slots = StagingRanges(site).take(rails.slots(m) * stride)
    own = slots + site.index * stride
    inner = Call(call.source, own, call.count, call.element, "sum")
    steps = [site.within(ALL_GATHER, inner)]
    steps += rails.gathered(site, "all_gather", slots, stride)
    places = [slots + i * stride + k * nbytes for i, k in _places(site)]
    return steps + copied(site, call.target, places, nbytes)


def _places(site: Site) -> list[tuple[int, int]]:
    """Return the island of each rank, and the rank's number there."""
    return [site.place_of(rank) for rank in range(site.size)]


_FEWEST = 4
"""Islands whose arrays are distributed together, by three launches, at least."""


def _together(site: Site, nbytes: int) -> int:
    """Return of how many islands the arrays are distributed together; 0: of one."""
    if not (site.many and site.even and len(site.mine) > 1 and nbytes):
        return 0
    number = (site.sizes.half - 2 * ALIGNED) // ((len(site.mine) + 1) * nbytes)
    return min(number, len(site.parts)) if number >= _FEWEST else 0


def _spread_together(site: Site, call: Call, number: int) -> list[Enqueue]:
    """Return the steps by which an island gathers what has crossed along its rails.

    The arrays of several islands are copied next to each other, so that one all-gather
    distributes them. So the number of launches grows with the bytes, not the islands.
    """
    m, mine, nbytes = len(site.parts), len(site.mine), call.nbytes
    steps = list[Enqueue]()
    staging = StagingRanges(site)
    own = staging.take(number * nbytes)
    whole = staging.take(number * mine * nbytes)
    for island in range(0, m, number):
        islands = min(number, m - island)
        target = call.target + island * mine * nbytes
        rail, apart = target + site.local * nbytes, mine * nbytes
        steps += site.packed(own, rail, (islands, nbytes), (apart,))
        inner = Call(own, whole, islands * call.count, call.element, "sum")
        steps.append(site.within(ALL_GATHER, inner))
        # By the ranks of an island, and then by islands.
        shape = mine, islands, nbytes
        steps += site.packed(whole, target, shape, (nbytes, apart), packing=False)
    return steps
