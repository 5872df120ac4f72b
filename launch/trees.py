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


@dataclass(frozen=True)
class Gathered:
    """The values of consecutive ranks; equal ones are contained once.

    Attributes:
        values: the different values, pickled.
        runs: the number of a value in ``values``, and how many ranks in a row have it.
    """

    values: tuple[bytes, ...]
    runs: tuple[tuple[int, int], ...]

    def each(self) -> list[Any]:
        """Return the value of each rank."""
        found = [pickle.loads(value) for value in self.values]
        return [found[number] for number, many in self.runs for _ in range(many)]


def gathered(value: Any, many: int = 1) -> Gathered:
    """Return the value that a number of ranks have."""
    return Gathered((pickle.dumps(value),), ((0, many),))


def merged(parts: Iterable[Gathered]) -> Gathered:
    """Return the values of ranks that follow one another."""
    numbers: dict[bytes, int] = {}
    runs: list[tuple[int, int]] = []
    for part in parts:
        for number, many in part.runs:
            value = part.values[number]
            here = numbers.setdefault(value, len(numbers))
            if runs and runs[-1][0] == here:
                many += runs.pop()[1]
            runs.append((here, many))
    return Gathered(tuple(numbers), tuple(runs))


@dataclass(frozen=True)
class Waiting:
    """What a rank sends that waits for others.

    Attributes:
        absent: for which ranks.
    """

    absent: Sequence[int]
