"""Binomial trees of ranks, and what ranks gather along them.

Rank 0 is the root. The children of a rank are the ranks that are 1, 2, 4 … higher, as
long as this number is below the rank's lowest bit. So a rank has at most ⌈log₂ N⌉
children, and the ranks below it follow it.
"""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numba_symm.errors import CollectiveError


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
        values: the different values, by :func:`_pickled`.
        runs: the number of a value in ``values``, and how many ranks in a row have it.
        data: the message by which they have arrived; empty: by several, or none.
    """

    items: tuple["Gathered", ...]
    values: tuple[bytes, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()
    data: bytes = field(default=b"", compare=False)

    def each(self) -> list[Any]:
        """Return the value of each rank."""
        if self.items:
            return list(zip(*(item.each() for item in self.items), strict=True))
        found = [_unpickled(value) for value in self.values]
        return [found[number] for number, many in self.runs for _ in range(many)]

    def packed(self) -> bytes:
        """Return what a message contains, for :func:`unpacked`."""
        return self.data or MARK + b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        yield _number(len(self.items))
        for item in self.items:
            yield from item._pieces()
        if not self.items:
            yield _number(len(self.values))
            for value in self.values:
                yield _number(len(value))
                yield value
            # 0: each value has one run, in their order, which is usual.
            in_order = len(self.runs) == len(self.values)
            yield _number(0 if in_order else len(self.runs))
            for number, many in self.runs:
                if not in_order:
                    yield _number(number)
                yield _number(many)


MARK = b"g"
"""With what a message of gathered values begins; pickled objects begin otherwise."""


def unpacked(data: bytes) -> Gathered:
    """Return what :meth:`Gathered.packed` has packed."""
    return replace(_Reader(data, len(MARK)).gathered(), data=data)


class _Reader:
    """Reads numbers and values, one after another."""

    def __init__(self, data: bytes, at: int):
        self._data, self._at = data, at

    def gathered(self) -> Gathered:
        length = self._number()
        if length:
            return Gathered(tuple(self.gathered() for _ in range(length)))
        values = tuple(self._taken(self._number()) for _ in range(self._number()))
        many = self._number()
        if many:
            runs = [(self._number(), self._number()) for _ in range(many)]
        else:
            runs = [(number, self._number()) for number in range(len(values))]
        return Gathered((), values, tuple(runs))

    def _taken(self, nbytes: int) -> bytes:
        start, self._at = self._at, self._at + nbytes
        return self._data[start : self._at]

    def _number(self) -> int:
        found = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7


def _number(number: int) -> bytes:
    """Return a number in as few bytes as it needs, of 7 bits each."""
    if number < 128:
        return bytes((number,))
    return bytes((number & 127 | 128,)) + _number(number >> 7)


_PROTOCOL = b"\x80\x05"  # with which pickles of protocol 5 begin
_FRAME = 11  # bytes before what a frame has, which pickle.loads does without


def _pickled(value: Any) -> bytes:
    """Return a value's pickle without what is equal in all, or need not be there."""
    found = pickle.dumps(value, 5)
    begin = len(_PROTOCOL)
    length = int.from_bytes(found[begin + 1 : _FRAME], "little")
    if found[begin : begin + 1] == b"\x95" and _FRAME + length == len(found):
        begin = _FRAME
    return found[begin:]


def _unpickled(value: bytes) -> Any:
    return pickle.loads(_PROTOCOL + value)


def gathered(value: Any, many: int = 1) -> Gathered:
    """Return the value that a number of ranks have."""
    return Gathered((), (_pickled(value),), ((0, many),))


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
    for value in map(_unpickled, values):
        if type(value) is not tuple:
            return 0  # the first one decides, because there may be many
        lengths.add(len(value))
    common = lengths.pop() if len(lengths) == 1 else 0
    return common if common <= MOST else 0


def _items(part: Gathered, length: int) -> Sequence[Gathered]:
    """Return the items of a part's values, whose number is ``length``."""
    if part.items:
        return part.items
    found = [_unpickled(value) for value in part.values]
    return [
        _in_turn((_pickled(found[number][at]), many) for number, many in part.runs)
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


@dataclass(frozen=True)
class Refusal:
    """What a rank sends that does not complete a step.

    Attributes:
        error: what the others raise.
    """

    error: CollectiveError
