"""Counts and displacements as in MPI: in elements of the flattened arrays."""

import itertools
from collections.abc import Sequence

from numba_symm.arguments import is_integer
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.transfers import Transfers
from numba_symm.errors import ArgumentError
from numba_symm.launch.store import StoreExchange

Counts = Sequence[int]

Table = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Checked counts and displacements; None: the ranges follow one another."""

Lengths = tuple[int, ...]
"""The elements of a rank's messages to, or from, one other rank, in order."""

Range = tuple[int, int]
"""A rank's range: its first element, and its number of elements."""


_COUNTS = {
    "gather_v": ("x.size", "counts[{}]"),
    "scatter": ("x.size // size", "out.size"),
    "scatter_v": ("counts[{}]", "out.size"),
    "all_to_all_v": ("send_counts[{}]", "recv_counts[{}]"),
    "neighbor_all_gather": ("destinations", "sources"),
    "neighbor_all_to_all": ("destinations", "sources"),
}
"""The arguments that state how much a rank sends, and how much its peer expects."""

_NAMED = 4  # pairs of ranks that an error names, at most


def agree_on_counts(exchange: StoreExchange, what: str, transfers: Transfers) -> None:
    """Check that every rank expects from each peer what that peer sends. Collective.

    Raises:
        ArgumentError: on all ranks, with the ranks and counts that differ.
    """
    if what not in _COUNTS:  # the ranks have agreed on all counts
        return
    mine = tuple(
        _by_peer(messages, transfers.itemsize)
        for messages in (transfers.sends, transfers.receives)
    )
    everyone = exchange.all_gather(mine, f"{what}: counts")
    pairs = {(rank, peer) for rank, (sends, _) in enumerate(everyone) for peer in sends}
    pairs |= {
        (peer, rank) for rank, (_, found) in enumerate(everyone) for peer in found
    }
    sent_as, expected_as = _COUNTS[what]
    wrong = [
        f"rank {rank} sends {_in_words(sent, ' elements')} ({sent_as.format(peer)}) to "
        f"rank {peer}, which expects {_in_words(expected)} ({expected_as.format(rank)})"
        for rank, peer in sorted(pairs)
        if (sent := everyone[rank][0].get(peer, ()))
        != (expected := everyone[peer][1].get(rank, ()))
    ]
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ArgumentError(
            f"{what}: {'; '.join(wrong[:_NAMED])}{more}; pass counts that agree"
        )


def _by_peer(messages: Sequence[Message], itemsize: int) -> dict[int, Lengths]:
    """Return the elements of the messages to or from each rank, in order."""
    found: dict[int, Lengths] = {}
    for message in messages:
        length = message.nbytes // itemsize
        found[message.peer] = *found.get(message.peer, ()), length
    return found


def _in_words(lengths: Lengths, unit: str = "") -> str:
    """Return "3 elements", "4 + 4 elements" or "nothing"."""
    return " + ".join(map(str, lengths)) + unit if lengths else "nothing"


def table_of(
    counts: Counts | None, displs: Counts | None, size: int, what: str
) -> Table:
    """Return the table of counts and displacements, or refuse wrong values."""
    lengths = _integers(counts, size, what)
    if displs is None:
        return lengths, None
    return lengths, _integers(displs, size, what.replace("counts", "displs"))


def places_of(table: Table) -> list[Range]:
    """Return every rank's range."""
    lengths, starts = table
    if starts is None:
        starts = (0, *itertools.accumulate(lengths[:-1]))
    return list(zip(starts, lengths, strict=True))


def _integers(given: Counts | None, size: int, what: str) -> tuple[int, ...]:
    try:
        found = () if given is None else tuple(given)
    except Exception:  # an object's own method may raise anything
        found = ()
    integers = len(found) == size and all(map(is_integer, found))
    if not integers or min(found) < 0:
        raise ArgumentError(
            f"{what}: expected {size} integers from 0, one for each rank, got {given!r}"
        )
    return tuple(map(int, found))


def end_of(places: list[Range]) -> int:
    """Return the number of elements that an array with these ranges has at least."""
    return max(first + count for first, count in places)


def refuse_overlap(places: list[Range], what: str) -> None:
    """Refuse ranges of an output that overlap."""
    taken = sorted(place for place in places if place[1])
    for (first, count), (following, _) in itertools.pairwise(taken):
        if first + count > following:
            raise ArgumentError(
                f"{what}: expected ranges of out that do not overlap, got one of "
                f"{count} elements from {first}, and one from {following}"
            )
