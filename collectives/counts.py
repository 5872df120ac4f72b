"""Counts and displacements, as MPI has them: in elements of the flattened arrays."""

import itertools
from collections.abc import Sequence

from numba_symm.collectives.checks import is_integer
from numba_symm.collectives.transfers import Transfers
from numba_symm.errors import ArgumentError
from numba_symm.launch.store import StoreExchange

Counts = Sequence[int]

Table = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Counts and displacements, checked; None: one after another."""

Place = tuple[int, int]
"""Where a rank's part begins, and how long it is, in elements."""


_COUNTS = {
    "gather_v": ("x.size", "counts[{}]"),
    "scatter": ("x.size // size", "out.size"),
    "scatter_v": ("counts[{}]", "out.size"),
    "all_to_all_v": ("send_counts[{}]", "recv_counts[{}]"),
}
"""What says how much a rank sends to another, and how much that one expects of it."""

_NAMED = 4  # pairs of ranks, in an error


def agree_on_counts(exchange: StoreExchange, what: str, transfers: Transfers) -> None:
    """Check that every rank expects of every other what that one sends. Collective.

    Raises:
        ArgumentError: on all ranks, with who passed what.
    """
    if what not in _COUNTS:  # the ranks have agreed on all counts
        return
    sends, receives = (
        {message.peer: message.nbytes // transfers.itemsize for message in messages}
        for messages in (transfers.sends, transfers.receives)
    )
    everyone = exchange.all_gather((sends, receives), f"{what}: counts")
    sent_as, expected_as = _COUNTS[what]
    wrong = [
        f"rank {rank} sends {sent} elements ({sent_as.format(peer)}) to rank {peer}, "
        f"which expects {everyone[peer][1][rank]} ({expected_as.format(rank)})"
        for rank, (sends, _) in enumerate(everyone)
        for peer, sent in sends.items()
        if sent != everyone[peer][1][rank]
    ]
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ArgumentError(
            f"{what}: {'; '.join(wrong[:_NAMED])}{more}; pass counts that agree"
        )


def table_of(
    counts: Counts | None, displs: Counts | None, size: int, what: str
) -> Table:
    """Return counts and displacements, which may be anything, as a table, checked."""
    if counts is None:
        raise ArgumentError(f"{what}=None; give a number of elements for each rank")
    lengths = _integers(counts, size, what)
    if displs is None:
        return lengths, None
    return lengths, _integers(displs, size, what.replace("counts", "displs"))


def places_of(table: Table) -> list[Place]:
    """Return every rank's place."""
    lengths, starts = table
    if starts is None:
        starts = (0, *itertools.accumulate(lengths[:-1]))
    return list(zip(starts, lengths, strict=True))


def _integers(given: Counts, size: int, what: str) -> tuple[int, ...]:
    try:
        found = tuple(given)
    except Exception:  # whatever an object's own method raises
        found = ()
    integers = len(found) == size and all(map(is_integer, found))
    if not integers or min(found) < 0:
        raise ArgumentError(
            f"{what}={given!r}; give an integer from 0 for each of {size} ranks"
        )
    return tuple(map(int, found))


def end_of(places: list[Place]) -> int:
    """Return how many elements an array for all places must have."""
    return max(first + count for first, count in places)


def refuse_overlap(places: list[Place], what: str) -> None:
    """Refuse parts of an output that are written twice."""
    taken = sorted(place for place in places if place[1])
    for (first, count), (following, _) in itertools.pairwise(taken):
        if first + count > following:
            raise ArgumentError(f"{what}: the parts of two ranks overlap in out")
