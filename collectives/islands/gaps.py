"""Copies of many ranges of equal length; ranges at equal distances are one copy."""

from collections.abc import Sequence

from numba_symm.collectives.islands.site import Site
from numba_symm.collectives.protocols.binding import Enqueue


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
