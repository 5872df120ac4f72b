"""Filling buffers and checking their contents.

The contents repeat a random pattern, so that a gigabyte is cheap to make. The period is
prime, so it is not a multiple of any block or chunk of an algorithm, and misplaced data
is always wrong. Arrays are bytes in Numba's or NumPy's arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

PERIOD = 65_521
"""Elements of a pattern: a prime."""

CHUNK = 64 * PERIOD
"""Elements read back at a time, a multiple of the period."""

POISON = 0xFF
"""The byte that fills outputs before a call: a float is then NaN, an integer -1."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Tiled:
    """A pattern of PERIOD elements, repeated.

    Attributes:
        pattern: the elements.
        start: index in the pattern of the first element.
        count: total number of elements.
    """

    pattern: np.ndarray[Any, Any]
    start: int
    count: int

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return int(self.pattern.dtype.itemsize)

    def first(self, count: int) -> np.ndarray[Any, Any]:
        """Return the first ``count`` elements, or all if there are fewer."""
        rolled = np.roll(self.pattern, -self.start % PERIOD)
        return np.resize(rolled, min(count, self.count))


def fill(array: Any, contents: Tiled) -> None:
    """Fill an array of ``contents.count * contents.itemsize`` bytes."""
    head = contents.first(PERIOD).view(np.uint8)
    _write(array[: head.size], head)
    done, size = head.size, array.size
    while done < size:  # copy what is filled: whole periods, so the pattern continues
        more = min(done, size - done)
        _write(array[done : done + more], array[:more])
        done += more


def poison(array: Any) -> None:
    """Fill an array with bytes that are never a result."""
    fill(array, Tiled(np.full(PERIOD, POISON, np.uint8), 0, array.size))


def arrived() -> None:
    """Wait until filled arrays are complete for every stream."""
    cuda.synchronize()


def count_wrong(array: Any, expected: Sequence[Tiled]) -> int:
    """Return the number of elements of an array that differ in any bit.

    Args:
        array: bytes.
        expected: the expected contents, concatenated, of one dtype; empty where a
            rank has no output.
    """
    if not expected:
        return 0
    unsigned = _UNSIGNED[expected[0].itemsize]
    itemsize = expected[0].itemsize
    most = min(CHUNK, max(part.count for part in expected))
    staging = np.empty(most, unsigned)
    wrong, offset = 0, 0
    for part in expected:
        wanted = part.first(CHUNK).view(unsigned)
        for first in range(0, part.count, CHUNK):
            count = min(CHUNK, part.count - first)
            begin = offset + first * itemsize
            found = staging[:count]
            _read(array[begin : begin + count * itemsize], found.view(np.uint8))
            wrong += int(np.count_nonzero(found != wanted[:count]))
        offset += part.count * itemsize
    return wrong


def _write(target: Any, source: Any) -> None:
    if isinstance(target, np.ndarray):
        target[:] = source
    else:
        target.copy_to_device(source)


def _read(source: Any, target: np.ndarray[Any, Any]) -> None:
    if isinstance(source, np.ndarray):
        target[:] = source
    else:
        source.copy_to_host(target)
