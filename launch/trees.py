"""Binomial trees of ranks, and what ranks gather along them.

Rank 0 is the root. The children of a rank are the ranks that are 1, 2, 4 … higher, as
long as this number is below the rank's lowest bit. So a rank has at most ⌈log₂ N⌉
children, and the ranks below it follow it.
"""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def parent(rank: int) -> int | None:
    """Return a rank's parent; None for the root."""
    return rank & (rank - 1) if rank else None


def children(rank: int, size: int) -> list[int]:
    """Return a rank's children, the nearest one first."""
    found, distance = [], 1
    while rank + distance < size and not rank & distance:
        found.append(rank + distance)
        distance *= 2
    return found


def below(rank: int, size: int) -> int:
    """Return how many ranks are in the part of the tree that begins with a rank."""
    return min(rank & -rank or size, size - rank)


MOST = 8
"""The most items of a tuple that are gathered apart."""


@dataclass(frozen=True)
class Gathered:
    """The values of consecutive ranks; equal ones are contained once.

    If values differ, and all are tuples of one length, their items are gathered one by
    one. So only the items in which ranks differ are contained for each rank.

    Attributes:
        items: what was gathered of each item; empty: the values are not divided.
        values: the different values, pickled.
        runs: the number of a value in ``values``, and how many ranks in a row have it.
    """

    items: tuple["Gathered", ...]
    values: tuple[bytes, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:  # without the names of the attributes
        return Gathered, (self.items, self.values, self.runs)

    def each(self) -> list[Any]:
        """Return the value of each rank."""
        if self.items:
            return list(zip(*(item.each() for item in self.items), strict=True))
        found = [pickle.loads(value) for value in self.values]
        return [found[number] for number, many in self.runs for _ in range(many)]


def gathered(value: Any, many: int = 1) -> Gathered:
    """Return the value that a number of ranks have."""
    return Gathered((), (pickle.dumps(value),), ((0, many),))


def merged(parts: Iterable[Gathered]) -> Gathered:
    """Return the values of ranks that follow one another."""
    parts = list(parts)
    length = _common_length(parts)
    if length:
        columns = zip(*(_items(part, length) for part in parts), strict=True)
        return Gathered(tuple(map(merged, columns)))
    if any(part.items for part in parts):  # beside other values, such as None
        parts = [gathered(value) for part in parts for value in part.each()]
    return _in_turn(
        (part.values[number], many) for part in parts for number, many in part.runs
    )


def _common_length(parts: Sequence[Gathered]) -> int:
    """Return how many items all values have; 0: they are equal, or are not divided."""
    lengths = {len(part.items) for part in parts if part.items}
    values = {value for part in parts for value in part.values}
    if not lengths and len(values) == 1:
        return 0
    for value in map(pickle.loads, values):
        if type(value) is not tuple:
            return 0  # the first one decides, because there may be many
        lengths.add(len(value))
    common = lengths.pop() if len(lengths) == 1 else 0
    return common if common <= MOST else 0


def _items(part: Gathered, length: int) -> Sequence[Gathered]:
    """Return the items of a part's values, whose number is ``length``."""
    if part.items:
        return part.items
    found = [pickle.loads(value) for value in part.values]
    return [
        _in_turn((pickle.dumps(found[number][at]), many) for number, many in part.runs)
        for at in range(length)
    ]


def _in_turn(values: Iterable[tuple[bytes, int]]) -> Gathered:
    """Return values, each with the number of ranks in a row that have it."""
    numbers: dict[bytes, int] = {}
    runs: list[tuple[int, int]] = []
    for value, many in values:
        here = numbers.setdefault(value, len(numbers))
        if runs and runs[-1][0] == here:
            many += runs.pop()[1]
        runs.append((here, many))
    return Gathered((), tuple(numbers), tuple(runs))


@dataclass(frozen=True)
class Waiting:
    """What a rank sends that waits for others.

    Attributes:
        absent: for which ranks.
    """

    absent: Sequence[int]
