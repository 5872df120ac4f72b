"""Runs: a few consecutive elements of several arrays of different types.

A run is a vector of 16 bytes in one of the arrays. In each other array, it has as many
elements, but may have another number of bytes. A thread holds the runs of all arrays as
words of 8 bytes in a local array, whose indices are constants. So they are in
registers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.device.codecs import complex128_of
from numba_symm.device.intrinsics import (
    device_function,
    f64_of_bits,
    ld_u64,
    ld_v2_u64,
    st_u64,
    st_v2_u64,
    word_of,
)
from numba_symm.device.lanes import make_access, make_bits, make_lanes, number_of
from numba_symm.dtypes import Element

EACH, ROWS, COLUMNS, ONE, NUMBER = "each", "rows", "columns", "one", "number"
"""What an operand has: an element for each of the result, for each row, for each
column, for all together, or it is a number and not an array."""

PLACES = {EACH: 0, ROWS: 1, COLUMNS: 2, ONE: 3, NUMBER: 3}
"""By what an operand has, which of a run's indices is that of its element."""


class Operand(NamedTuple):
    """An argument of an epilogue.

    Attributes:
        element: its type.
        along: ``EACH``, ``ROWS``, ``COLUMNS``, ``ONE`` or ``NUMBER``.
    """

    element: Element
    along: str

    @property
    def has_runs(self) -> bool:
        """Whether it has another element for each of a run."""
        return self.along in (EACH, COLUMNS)

    def nbytes(self, lanes: int) -> int:
        """Return the bytes that it has in a run of so many elements."""
        return self.element.itemsize * (lanes if self.has_runs else 1)

    def words(self, lanes: int) -> int:
        """Return the words that hold them."""
        return -(-self.nbytes(lanes) // 8)


Fill = Callable[[Any, int, int, int], None]
Fetch = Callable[[Any, int], Any]


@functools.cache
def make_fill(operand: Operand, lanes: int, ragged: bool, first: int) -> Fill:
    """Return a device function that loads an operand's part of a run.

    ``(held, address, index, here)`` stores words in the local array from the index
    ``first`` on, of the elements from ``index`` on. ``address`` may be a number's bits.

    Args:
        operand: the operand.
        lanes: elements of a run.
        ragged: whether a run may be off a multiple of its bytes, or have only its first
            ``here`` elements.
        first: where the words are in the local array.
    """
    size, nbytes = operand.element.itemsize, operand.nbytes(lanes)
    words = operand.words(lanes)

    @device_function
    def keep(held: Any, number: int, index: int, here: int) -> None:
        held[first] = number

    if operand.along == NUMBER:
        return keep
    if nbytes % 16 == 0 and not (ragged and operand.has_runs) and size < 16:

        @device_function
        def fill_vectors(held: Any, address: int, index: int, here: int) -> None:
            for k in range(words // 2):
                low, high = ld_v2_u64(address + index * size + 16 * k)
                held[first + 2 * k], held[first + 2 * k + 1] = low, high

        return fill_vectors
    if size == 16:  # arrays of such elements are aligned to 8 bytes only

        @device_function
        def fill_pairs(held: Any, address: int, index: int, here: int) -> None:
            for k in range(words // 2):
                if k < here:
                    at = address + (index + k) * size
                    held[first + 2 * k] = ld_u64(at)
                    held[first + 2 * k + 1] = ld_u64(at + 8)

        return fill_pairs
    if not (ragged and operand.has_runs):
        load, _ = make_access(nbytes)

        @device_function
        def fill_word(held: Any, address: int, index: int, here: int) -> None:
            held[first] = word_of(load(address + index * size))

        return fill_word
    load_one, _ = make_access(size)
    in_word = min(8 // size, lanes)

    @device_function
    def fill_elements(held: Any, address: int, index: int, here: int) -> None:
        for k in range(words):
            value = 0
            for i in range(in_word):
                if k * in_word + i < here:
                    bits = load_one(address + (index + k * in_word + i) * size)
                    value |= word_of(bits) << 8 * size * i
            held[first + k] = word_of(value)

    return fill_elements


@functools.cache
def make_fetch(operand: Operand, first: int) -> Fetch:
    """Return a device function that returns one element's number.

    ``(held, i)``: of the element ``i`` of a run, in the accumulation type.
    """
    size, several = operand.element.itemsize, operand.has_runs
    if size == 16:

        @device_function
        def fetch_pair(held: Any, i: int) -> Any:
            at = first + (2 * i if several else 0)
            return complex128_of(f64_of_bits(held[at]), f64_of_bits(held[at + 1]))

        return fetch_pair
    number = number_of(operand.element)
    in_word, width = 8 // size, 8 * size
    mask = (1 << width) - 1 if size < 8 else -1

    @device_function
    def fetch(held: Any, i: int) -> Any:
        if several:
            word = held[first + i // in_word]
            return number(word >> width * (i % in_word) & mask)
        return number(held[first] & mask)

    return fetch


class Result(NamedTuple):
    """The device functions of a run of results.

    Attributes:
        put: ``(held, number, i)`` packs the element ``i`` of a run into a local array,
            after those before it.
        store: ``(held, address, index, here)`` stores the run from there.
    """

    put: Callable[[Any, Any, int], None]
    store: Fill


@functools.cache
def make_result(element: Element, lanes: int, ragged: bool, first: int) -> Result:
    """Return the functions; the arguments are those of :func:`make_fill`."""
    operand = Operand(element, EACH)
    size, nbytes = element.itemsize, lanes * element.itemsize
    words = operand.words(lanes)
    if size == 16:
        pack_pair = make_lanes(element, "sum", False, 1).pack

        @device_function
        def put_pair(held: Any, number: Any, i: int) -> None:
            held[first + 2 * i], held[first + 2 * i + 1] = pack_pair(number)

        @device_function
        def store_pairs(held: Any, address: int, index: int, here: int) -> None:
            for k in range(lanes):
                if k < here:
                    at = address + (index + k) * size
                    st_u64(at, held[first + 2 * k])
                    st_u64(at + 8, held[first + 2 * k + 1])

        return Result(put_pair, store_pairs)
    bits, in_word = make_bits(element, "sum", 1), min(8 // size, lanes)

    @device_function
    def put(held: Any, number: Any, i: int) -> None:
        word = held[first + i // in_word] if i % in_word > 0 else 0
        part = word_of(word_of(bits(number)) << 8 * size * (i % in_word))
        held[first + i // in_word] = word | part

    if ragged:
        _, store_one = make_access(size)

        @device_function
        def store_elements(held: Any, address: int, index: int, here: int) -> None:
            for k in range(words):
                for i in range(in_word):
                    if k * in_word + i < here:
                        at = address + (index + k * in_word + i) * size
                        store_one(at, held[first + k] >> 8 * size * i)

        return Result(put, store_elements)
    if nbytes % 16 == 0:

        @device_function
        def store_vectors(held: Any, address: int, index: int, here: int) -> None:
            for k in range(words // 2):
                both = held[first + 2 * k], held[first + 2 * k + 1]
                st_v2_u64(address + index * size + 16 * k, both)

        return Result(put, store_vectors)
    _, store = make_access(nbytes)

    @device_function
    def store_word(held: Any, address: int, index: int, here: int) -> None:
        store(address + index * size, held[first])

    return Result(put, store_word)
