"""Ranges of addresses: the range at an address, and look-ups that found none."""

import bisect
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST = 1024


class Ranges(Generic[T]):
    """Objects by the address at which each begins.

    The number of objects hardly changes the time of a look-up.
    """

    def __init__(self) -> None:
        self._found: dict[int, T] = {}
        self._starts: list[int] = []

    def put(self, start: int, thing: T) -> None:
        """Add an object. It takes the place of one that begins at the same address."""
        if start not in self._found:
            bisect.insort(self._starts, start)
        self._found[start] = thing

    def at(self, start: int) -> T | None:
        """Return the object that begins at an address, or None."""
        return self._found.get(start)

    def around(self, address: int) -> T | None:
        """Return the object that begins last at or before an address, or None.

        It may end before the address.
        """
        index = bisect.bisect_right(self._starts, address) - 1
        return None if index < 0 else self._found[self._starts[index]]

    def remove(self, start: int, thing: T) -> None:
        """Remove an object, unless another one has taken its place."""
        if self._found.get(start) is thing:
            del self._found[start]
            del self._starts[bisect.bisect_left(self._starts, start)]

    def clear(self) -> None:
        """Remove all objects."""
        self._found.clear()
        self._starts.clear()

    def __len__(self) -> int:
        return len(self._starts)

    def values(self) -> list[T]:
        """Return all objects."""
        return list(self._found.values())


class Misses:
    """Ranges of addresses where a look-up found nothing.

    Only the first ``_MOST`` are kept. If there were more, every range counts as missed.
    """

    def __init__(self) -> None:
        self._ranges: set[tuple[int, int]] = set()

    def add(self, address: int, nbytes: int) -> None:
        """Note that nothing was found at these bytes."""
        if len(self._ranges) <= _MOST:
            self._ranges.add((address, address + nbytes))

    def meet(self, address: int, nbytes: int) -> bool:
        """Return whether a look-up has missed any of these bytes."""
        if len(self._ranges) > _MOST:
            return True
        end = address + nbytes
        return any(start < end and address < stop for start, stop in self._ranges)

    def clear(self) -> None:
        """Forget all look-ups."""
        self._ranges.clear()
