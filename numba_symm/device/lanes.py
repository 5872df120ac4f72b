"""Arithmetic on 8-byte words that hold 1, 2 or 4 elements.

Kernels move data as 8-byte words whatever the dtype. ``unpack`` turns a word into
a tuple of lanes in the accumulation type, ``combine`` reduces two such tuples, and
``pack`` turns one back. ``load_word`` and ``store_word`` handle what is not
aligned to 8 bytes, and the last word of an array, element by element.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numba_symm.device.intrinsics import (
    bf16_of_f32,
    bits_of_f32,
    bits_of_f64,
    device_function,
    f16_of_f32,
    f32_of_bf16,
    f32_of_bits,
    f32_of_f16,
    f64_of_bits,
    ld_u16,
    ld_u32,
    ld_u64,
    st_u16,
    st_u32,
    st_u64,
    word_of,
)
from numba_symm.dtypes import REDUCTIONS, Element
from numba_symm.environment import SIMULATED


class Lanes(NamedTuple):
    """The device functions for words of one element type and reduction."""

    unpack: Callable[[int], Any]
    pack: Callable[[Any], int]
    combine: Callable[[Any, Any], Any]
    load_word: Callable[[int, int, int, bool], int]
    store_word: Callable[[int, int, int, bool, int], None]


@device_function
def _i32_of_bits(bits: int) -> Any:
    return np.int64(np.int32(bits))


@device_function
def _bits_of_i32(value: Any) -> Any:
    return np.uint32(value & 0xFFFFFFFF)


@device_function
def _i64_of_bits(bits: int) -> Any:
    return np.int64(bits)


@device_function
def _bits_of_i64(value: Any) -> Any:
    return np.int64(value)


if SIMULATED:  # NumPy checks ranges where a GPU takes the bits

    def _i32_of_bits(bits: int) -> Any:
        return np.int64((bits & 0xFFFFFFFF ^ 0x80000000) - 0x80000000)

    def _bits_of_i32(value: Any) -> Any:
        return int(value) & 0xFFFFFFFF

    def _bits_of_i64(value: Any) -> Any:
        return int(value)


_CODECS = {
    "float16": (f32_of_f16, f16_of_f32),
    "bfloat16": (f32_of_bf16, bf16_of_f32),
    "float32": (f32_of_bits, bits_of_f32),
    "float64": (f64_of_bits, bits_of_f64),
    "int32": (_i32_of_bits, _bits_of_i32),
    "int64": (_i64_of_bits, _bits_of_i64),
}


def make_lanes(element: Element, op: str) -> Lanes:
    """Return the device functions for ``element`` and the reduction named ``op``."""
    number, bits = _CODECS[element.name]
    reduce = _quiet(device_function(REDUCTIONS[op]))
    unpack, pack, combine = {1: _one, 2: _two, 4: _four}[element.lanes](
        number, bits, reduce
    )
    load_word, store_word = _word_access(element)
    return Lanes(unpack, pack, combine, load_word, store_word)


def _quiet(reduce: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Silence NumPy's warnings: overflow is wrapped or infinite, as on a GPU."""
    if not SIMULATED:
        return reduce

    def quiet(a: Any, b: Any) -> Any:
        with np.errstate(all="ignore"):
            return reduce(a, b)

    return quiet


def _one(number: Any, bits: Any, reduce: Any) -> tuple[Any, Any, Any]:
    @device_function
    def unpack(word: int) -> Any:
        return (number(word),)

    @device_function
    def pack(lanes: Any) -> int:
        return word_of(bits(lanes[0]))

    @device_function
    def combine(a: Any, b: Any) -> Any:
        return (reduce(a[0], b[0]),)

    return unpack, pack, combine


def _two(number: Any, bits: Any, reduce: Any) -> tuple[Any, Any, Any]:
    @device_function
    def unpack(word: int) -> Any:
        return number(word & 0xFFFFFFFF), number(word >> 32 & 0xFFFFFFFF)

    @device_function
    def pack(lanes: Any) -> int:
        return word_of(word_of(bits(lanes[0])) | word_of(bits(lanes[1])) << 32)

    @device_function
    def combine(a: Any, b: Any) -> Any:
        return reduce(a[0], b[0]), reduce(a[1], b[1])

    return unpack, pack, combine


def _four(number: Any, bits: Any, reduce: Any) -> tuple[Any, Any, Any]:
    @device_function
    def unpack(word: int) -> Any:
        return (
            number(word & 0xFFFF),
            number(word >> 16 & 0xFFFF),
            number(word >> 32 & 0xFFFF),
            number(word >> 48 & 0xFFFF),
        )

    @device_function
    def pack(lanes: Any) -> int:
        low = word_of(bits(lanes[0])) | word_of(bits(lanes[1])) << 16
        high = word_of(bits(lanes[2])) | word_of(bits(lanes[3])) << 16
        return word_of(low | high << 32)

    @device_function
    def combine(a: Any, b: Any) -> Any:
        return (
            reduce(a[0], b[0]),
            reduce(a[1], b[1]),
            reduce(a[2], b[2]),
            reduce(a[3], b[3]),
        )

    return unpack, pack, combine


_ACCESS = {2: (ld_u16, st_u16), 4: (ld_u32, st_u32), 8: (ld_u64, st_u64)}


def _word_access(element: Element) -> tuple[Any, Any]:
    """Return ``load_word`` and ``store_word`` for an element's size."""
    size, lanes, width = element.itemsize, element.lanes, 8 * element.itemsize
    load, store = _ACCESS[size]

    @device_function
    def load_word(array: int, word: int, count: int, aligned: bool) -> int:
        """Return word ``word`` of ``count`` elements; what lies past them is 0."""
        first = word * lanes
        if aligned and first + lanes <= count:
            return ld_u64(array + 8 * word)
        value = 0
        for lane in range(lanes):
            if first + lane < count:
                bits = load(array + (first + lane) * size)
                value |= word_of(bits) << (lane * width)
        return word_of(value)

    @device_function
    def store_word(
        array: int, word: int, count: int, aligned: bool, value: int
    ) -> None:
        """Store word ``word`` of ``count`` elements, and nothing past them."""
        first = word * lanes
        if aligned and first + lanes <= count:
            st_u64(array + 8 * word, value)
        else:
            for lane in range(lanes):
                if first + lane < count:
                    store(array + (first + lane) * size, value >> (lane * width))

    return load_word, store_word
