"""The table of calls in errors: which rank has made which, where they differ."""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from numba_symm.launch.ranks import name_ranks
from numba_symm.record import Entry, Head, Record, Records

_AROUND = 2
"""Calls that are shown before and after the one that the table is about."""

_LINES = 24
"""The most lines of calls, of which the last ones are left out."""

_AFTER = 3
"""The most calls of a rank that are not compared, after each one that is."""

_SENT = 64
"""Calls that a rank sends to other islands, so that MPI sends them without delay."""

_DIFFER = "Calls differ between islands"

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
    found = difference(records, calls)
    last = [max(each, default=0) for each in calls]
    others = [records.others(rank) for rank in range(records.size)]
    if not any(last) and not any(others):
        return ""
    about = found or min(last)
    lines = _lines(records, calls, others, about, marked=found)
    lines += states(records, last, now())
    lines += _first(head.across for head in records.heads).splitlines()
    return "\n".join(["The calls of the ranks:", *lines])


def difference(records: Records, calls: Sequence[dict[int, Entry]]) -> int:
    """Return the first number whose calls differ, of those that are known; 0: none.

    Calls after a rank's first capture are not compared.

    Args:
        records: the records of all ranks.
        calls: by rank, the calls by number.
    """
    last = min(
        (head.captured - 1 for head in records.heads if head.captured), default=math.inf
    )
    for number in sorted(set().union(*calls)):
        found = {each[number].chain for each in calls if number in each}
        if len(found) > 1 and number <= last:
            return number
    return 0


class Cause(NamedTuple):
    """Why a rank was late, as far as the ranks of its island know.

    Attributes:
        differ: whether calls differ; otherwise processes have ended.
        ranks: the ranks that the text names, by their numbers in texts.
        text: what they have done.
    """

    differ: bool
    ranks: Sequence[int]
    text: str


def mismatch(records: Records, here: int, there: int, number: int) -> Cause:
    """Return that the calls of two ranks with a number differ."""
    names = [records.heads[rank].name for rank in (here, there)]
    words = [
        records.words(rank, entry) if entry else "a call that was overwritten"
        for rank in (here, there)
        for entry in [records.call(rank, number)]
    ]
    text = (
        f"rank {names[0]}'s call {number} differs from rank {names[1]}'s: {words[0]}, "
        f"and {words[1]}"
    )
    return Cause(True, names, text)


def cause(records: Records) -> Cause | None:
    """Return how the ranks' calls differ, or None."""
    calls = [
        {entry.number: entry for entry in records.calls(rank)}
        for rank in range(records.size)
    ]
    number = difference(records, calls)
    if number:
        chains = {
            rank: each[number].chain
            for rank, each in enumerate(calls)
            if number in each
        }
        here = min(chains)
        there = next(rank for rank in chains if chains[rank] != chains[here])
        return mismatch(records, here, there, number)
    across = _first(head.across for head in records.heads)
    if not across.startswith(_DIFFER):
        return None
    return Cause(True, (), across.partition("\n")[0].rstrip(":"))


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
    """Return the last call of a rank, and for how long it has made no other one."""
    found = [*records.calls(rank)[-1:], *records.others(rank)[-1:]]
    if not found:
        return "it has made no call"
    entry = max(found, key=lambda each: each.time)
    seconds = max(0, now - entry.time) / 1e9
    number = f"{entry.number}, " if entry in records.calls(rank)[-1:] else ""
    return (
        f"its last call is {number}{records.words(rank, entry)}; it has made no other "
        f"call for {seconds:.0f} s"
    )


def agreed(records: Record, ended: Cause | None = None) -> tuple[Cause | None, str]:
    """Return why a rank was late, and the table: the same on all ranks.

    The first rank that needs them stores them. If several do that simultaneously, they
    take those of the lowest rank. So a rank that ends after the failure is no cause.

    Args:
        records: the records of all ranks.
        ended: that ranks' processes have ended; None: all run.
    """
    kept = _kept(records)
    if not kept:
        made = f"{json.dumps(cause(records) or ended)}\n{table(records)}"
        records.own.table = made.encode(errors="replace")[: Head.table.size - 1]
        time.sleep(_BETWEEN)
        kept = _kept(records)
    found, _, text = kept.partition("\n")
    why = json.loads(found)
    return why and Cause(*why), text


def _kept(records: Records) -> str:
    return _first(head.table for head in records.heads)


def _first(texts: Iterable[bytes]) -> str:
    """Return the first text that is not empty."""
    return next(filter(None, texts), b"").decode(errors="ignore")


class Sent(NamedTuple):
    """The latest calls of a rank, as it sends them to other islands.

    Attributes:
        name: the rank's number in texts.
        compared: the last number that may be compared, because no capture is before.
        calls: by number, the chain of digests and what the call is.
    """

    name: int
    compared: int
    calls: dict[int, tuple[int, str]]


def sent(records: Record) -> Sent:
    """Return what this rank sends to other islands, after a failure."""
    calls = records.calls(records.rank)[-_SENT:]
    words = {each.about: records.words(records.rank, each) for each in calls}
    own = records.own
    compared = int(own.captured) - 1 if own.captured else records.number
    made = {each.number: (each.chain, words[each.about]) for each in calls}
    return Sent(int(own.name), compared, made)


def compare_across(records: Record, other: Sent) -> None:
    """Compare this rank's calls with those of a rank of another island.

    Store the result in the table. Raise nothing if calls differ: the communicator has
    failed before.
    """
    own = records.own
    before = own.across.decode(errors="ignore").splitlines()
    text = "\n".join([*before, *_across(sent(records), other)])
    own.across = text.encode(errors="replace")[: Head.across.size - 1]
    own.heard += 1  # last, because others may wait for it


def _across(mine: Sent, other: Sent) -> list[str]:
    here, there = f"rank {mine.name}", f"rank {other.name}"
    last = min(mine.compared, other.compared)
    common = [n for n in mine.calls if n in other.calls and n <= last]
    differ = [n for n in common if mine.calls[n][0] != other.calls[n][0]]
    if differ:
        first = differ[0]
        known = first > common[0] or first == 1
        lines = [
            f"{_DIFFER}, from call {first} on"
            + (":" if known else ", or from an earlier one:")
        ]
        for number in range(first - _AROUND, first + _AROUND + 1):
            head = f"{'> ' if number == first else '  '}{number}"
            found = [
                (name, each.calls[number][1])
                for name, each in ((here, mine), (there, other))
                if number in each.calls
            ]
            for name, words in found:
                lines.append(f"{head}  {name}: {words}")
                head = " " * len(head)
        return lines
    behind = max(mine.calls, default=0) - max(other.calls, default=0)
    if not behind:
        return []
    late, ahead, calls = (there, here, other) if behind > 0 else (here, there, mine)
    number, (_, words) = max(calls.calls.items(), default=(0, (0, "none")))
    return [
        f"{late} is {abs(behind)} call{'s' * (abs(behind) > 1)} behind {ahead} of "
        f"another island: its last call is {number}, {words}"
    ]
