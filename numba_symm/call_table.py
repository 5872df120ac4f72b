"""The table of calls in errors: which rank has made which, where they differ."""

import time
from collections.abc import Callable, Sequence

from numba_symm.launch.ranks import name_ranks
from numba_symm.record import Entry, Head, Record, Records

_AROUND = 2
"""Calls that are shown before and after the one that the table is about."""

_LINES = 24
"""The most lines of calls, of which the last ones are left out."""

_AFTER = 3
"""The most calls of a rank that are not compared, after each one that is."""

_BETWEEN = 2e-3  # seconds in which ranks that make the table simultaneously store it


def table(records: Records, now: Callable[[], int] = time.monotonic_ns) -> str:
    """Return the table of all ranks' calls: around the first difference, if any.

    Args:
        records: the records of all ranks.
        now: the clock.
    """
    calls = [
        {entry.number: entry for entry in records.calls(rank)}
        for rank in range(records.size)
    ]
    found = difference(calls)
    last = [max(each, default=0) for each in calls]
    others = [records.others(rank) for rank in range(records.size)]
    if not any(last) and not any(others):
        return ""
    about = found or min(last)
    lines = _lines(records, calls, others, about, marked=found)
    lines += states(records, last, now())
    return "\n".join(["The calls of the ranks:", *lines])


def difference(calls: Sequence[dict[int, Entry]]) -> int:
    """Return the first number whose calls differ, of those that are known; 0: none.

    Args:
        calls: by rank, the calls by number.
    """
    for number in sorted(set().union(*calls)):
        found = {each[number].chain for each in calls if number in each}
        if len(found) > 1:
            return number
    return 0


def _lines(
    records: Records,
    calls: Sequence[dict[int, Entry]],
    others: Sequence[list[Entry]],
    about: int,
    marked: int,
) -> list[str]:
    lines: list[tuple[str, str]] = []
    numbers = range(max(0, about - _AROUND), about + _AROUND + 1)
    for number in numbers:
        made: dict[str, list[int]] = {}
        for rank, each in enumerate(calls):
            entry = each.get(number)
            if entry is not None:
                made.setdefault(records.words(rank, entry), []).append(rank)
        if made:
            absent = [rank for rank, each in enumerate(calls) if number not in each]
            late = [rank for rank in absent if max(calls[rank], default=0) < number]
            if late:
                made["not made yet"] = late
            sign = "> " if number == marked else "  "
            lines += _grouped(records, f"{sign}{number}", made)
        between: dict[str, list[int]] = {}
        for rank, ring in enumerate(others):
            for entry in [each for each in ring if each.chain == number][-_AFTER:]:
                between.setdefault(records.words(rank, entry), []).append(rank)
        lines += _grouped(records, f"  after {number}", between)
    width = max((len(head) for head, _ in lines), default=0)
    shown = [f"{head:{width}}  {text}" for head, text in lines[:_LINES]]
    return shown + ["  …"] * (len(lines) > _LINES)


def _grouped(
    records: Records, head: str, found: dict[str, list[int]]
) -> list[tuple[str, str]]:
    lines = []
    for text, ranks in found.items():
        lines.append((head, f"{named(records, ranks)}: {text}"))
        head = ""
    return lines


def named(records: Records, ranks: Sequence[int]) -> str:
    """Return "ranks 0, 1", by their numbers in texts."""
    return name_ranks([records.heads[rank].name for rank in ranks])


def states(records: Records, last: Sequence[int], now: int) -> list[str]:
    """Return a line for each rank that is behind, and for those with captures.

    Args:
        records: the records of all ranks.
        last: by rank, the number of its last call.
        now: the time.
    """
    lines, most = [], max(last)
    for rank, number in enumerate(last):
        tag = records.heads[rank].tag.decode(errors="ignore")
        within = f" within {tag!r}" if tag else ""
        if number < most or tag:
            behind = most - number
            where = (
                f"is {behind} call{'s' * (behind > 1)} behind"
                if behind
                else "is at the last call"
            )
            lines.append(
                f"{named(records, [rank])} {where}{within}: "
                f"{latest(records, rank, now)}"
            )
        captures = records.heads[rank].captures
        if captures:
            lines.append(
                f"{named(records, [rank])} has captured {captures} "
                f"call{'s' * (captures > 1)}, whose replays the record does not show"
            )
    return lines


def latest(records: Records, rank: int, now: int) -> str:
    """Return the last call of a rank, and for how long it has been in Python."""
    found = [*records.calls(rank)[-1:], *records.others(rank)[-1:]]
    if not found:
        return "it has made no call"
    entry = max(found, key=lambda each: each.time)
    seconds = max(0, now - entry.time) / 1e9
    number = f"{entry.number}, " if entry in records.calls(rank)[-1:] else ""
    return (
        f"its last call is {number}{records.words(rank, entry)}; it has been in Python "
        f"for {seconds:.0f} s"
    )


def agreed(records: Record) -> str:
    """Return the table that the ranks show, so that their errors are equal.

    The first rank that needs the table stores it. If several do that simultaneously,
    they take that of the lowest rank.
    """
    kept = _kept(records)
    if not kept:
        made = table(records).encode(errors="replace")
        if not made:
            return ""
        records.own.table = made[: Head.table.size - 1]
        time.sleep(_BETWEEN)
        kept = _kept(records)
    return kept


def _kept(records: Records) -> str:
    found = (head.table.decode(errors="ignore") for head in records.heads)
    return next((text for text in found if text), "")
