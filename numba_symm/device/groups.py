"""Groups of elements as codes, and digests of memory.

Groups of 128 elements as codes of one byte and a scale.

An element's code is the element divided by its group's scale, and rounded. The scale
maps the group's largest magnitude to the largest code. ``max_of_eight`` finds that
magnitude, so ``LANES`` adjacent threads handle a group together: each has ``PARTS``
vectors of codes, of 16 elements each.

All arithmetic is of float32, each operation rounded by itself, so NumPy computes the
same bits.

Digests of memory: a hash of each 8-byte word and its place, and their sum.

The sum does not depend on the order or on which thread adds which words. So digests of
adjoining ranges add up to the digest of both.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from numba_symm.device import intrinsics
from numba_symm.device.arithmetic import CODECS, NARROW
from numba_symm.device.intrinsics import (
    bits_of_f32,
    device_function,
    f32_of_bits,
    mul_rn_f32,
    word_of,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, element

GROUP = 128
"""Elements of a group. Groups begin at multiples of it."""

IN_VECTOR = 16
"""Elements whose codes are one vector."""

FP8, INT8 = element(ml_dtypes.float8_e4m3fn, "wire"), element(np.int8, "wire")

LARGEST = {FP8: np.float32(448), INT8: np.float32(127)}
"""The largest code of each type."""

LEAST = np.float32(2**-100)
"""The least magnitude that a scale is made for; smaller elements round to its steps."""

ONE = np.float32(1)

_INFINITY, _NAN = 0x7F800000, 0x7FFFFFFF
# Added to a float32 that is small compared with it, it rounds to an integer, whose low
# bits are the low bits of the sum.
_ROUNDING = np.float32(1.5 * 2**23)


@device_function
def sum_of(a: Any, b: Any) -> Any:
    """Return the sum of two float32."""
    return np.float32(a + b)


class Codes(NamedTuple):
    """The device functions of one type of codes.

    ``values`` is a local array of float32, and ``first`` the index of 16 of them.

    Attributes:
        scale: ``(largest)`` returns the scale of a group, of the bits of its largest
            magnitude: NaN if that is infinite or NaN.
        encode: ``(values, first, inverse)`` returns the two words of 16 codes;
            ``inverse`` is 1 divided by the scale.
        decode: ``(low, high, scale, values, first)`` stores what 16 codes stand for.
        decode_word: ``(word, scale, values, first)`` does so for the 8 of a word.
    """

    scale: Callable[[Any], Any]
    encode: Callable[[Any, int, Any], Any]
    decode: Callable[[int, int, Any, Any, int], None]
    decode_word: Callable[[int, Any, Any, int], None]


@functools.cache
def make_codes(codes: Element) -> Codes:
    """Return the device functions for codes of that type."""
    step = np.float32(1) / LARGEST[codes]

    @device_function
    def scale(largest: Any) -> Any:
        if largest >= _INFINITY:
            return f32_of_bits(_NAN)
        magnitude = f32_of_bits(largest)
        return mul_rn_f32(LEAST if magnitude < LEAST else magnitude, step)

    word, values_of = _of_words(codes)

    @device_function
    def encode(values: Any, first: int, inverse: Any) -> Any:
        return word(values, first, inverse), word(values, first + 8, inverse)

    @device_function
    def decode(low: int, high: int, scale: Any, values: Any, first: int) -> None:
        values_of(low, scale, values, first)
        values_of(high, scale, values, first + 8)

    return Codes(scale, encode, decode, values_of)


def _of_words(codes: Element) -> tuple[Any, Any]:
    """Return ``encode`` and ``decode`` for one word of 8 codes."""
    if codes == INT8:
        number, _ = CODECS["int8"]

        @device_function
        def word(values: Any, first: int, inverse: Any) -> int:
            found = 0
            for i in range(8):
                scaled = mul_rn_f32(values[first + i], inverse)
                bits = bits_of_f32(np.float32(scaled + _ROUNDING))
                found |= word_of(bits & 0xFF) << 8 * i
            return word_of(found)

        @device_function
        def values_of(word: int, scale: Any, values: Any, first: int) -> None:
            for i in range(8):
                code = np.float32(number(word >> 8 * i & 0xFF))
                values[first + i] = mul_rn_f32(code, scale)

        return word, values_of
    widen, narrow, *_ = NARROW[codes.name]

    @device_function
    def word_of_pairs(values: Any, first: int, inverse: Any) -> int:
        found = 0
        for i in range(4):
            low = mul_rn_f32(values[first + 2 * i], inverse)
            high = mul_rn_f32(values[first + 2 * i + 1], inverse)
            found |= word_of(narrow(low, high)) << 16 * i
        return word_of(found)

    @device_function
    def values_of_pairs(word: int, scale: Any, values: Any, first: int) -> None:
        for i in range(4):
            pair = widen(word >> 16 * i & 0xFFFF)
            values[first + 2 * i] = mul_rn_f32(pair[0], scale)
            values[first + 2 * i + 1] = mul_rn_f32(pair[1], scale)

    return word_of_pairs, values_of_pairs


class Spread(NamedTuple):
    """The device functions that access 16 elements of an array.

    Attributes:
        load: ``(array, group, part, count, values, first)`` stores elements of a group,
            from 16 * ``part`` on, as float32 in a local array; 0 after the array's end.
        store: the same, in the other direction; each is rounded once.
    """

    load: Callable[[int, int, int, int, Any, int], None]
    store: Callable[[int, int, int, int, Any, int], None]


@functools.cache
def make_spread(kind: Element, load: Any, store: Any) -> Spread:
    """Return the device functions for float32, bfloat16 or float16.

    Args:
        kind: the element type.
        load: ``Lanes.load`` of that type.
        store: ``Lanes.store``.
    """
    number, bits = CODECS[kind.name]
    lanes, width = kind.lanes, 8 * kind.itemsize
    in_word, mask = lanes // 2, (1 << width) - 1
    vectors = IN_VECTOR // lanes

    @device_function
    def load_16(
        array: int, group: int, part: int, count: int, values: Any, first: int
    ) -> None:
        at = (group * (GROUP // IN_VECTOR) + part) * vectors
        for k in range(vectors):
            low, high = 0, 0
            if (at + k) * lanes < count:
                low, high = load(array, at + k, count)
            for i in range(in_word):
                place = first + k * lanes + i
                values[place] = number(low >> width * i & mask)
                values[place + in_word] = number(high >> width * i & mask)

    @device_function
    def store_16(
        array: int, group: int, part: int, count: int, values: Any, first: int
    ) -> None:
        at = (group * (GROUP // IN_VECTOR) + part) * vectors
        for k in range(vectors):
            low, high = 0, 0
            for i in range(in_word):
                place = first + k * lanes + i
                low |= word_of(bits(values[place])) << width * i
                high |= word_of(bits(values[place + in_word])) << width * i
            if (at + k) * lanes < count:
                store(array, at + k, count, word_of(low), word_of(high))

    return Spread(load_16, store_16)


@functools.cache
def make_largest(number: int) -> Callable[[Any], Any]:
    """Return a device function that all threads of a group call together.

    ``(values)`` returns the bits of the largest magnitude of the ``number`` values of
    each of these threads. NaN counts as larger than infinity.
    """

    @device_function
    def largest(values: Any) -> Any:
        found = word_of(0)
        for i in range(number):
            magnitude = word_of(bits_of_f32(values[i]) & _NAN)
            found = max(found, magnitude)
        return word_of(intrinsics.max_of_eight(found))

    return largest


VECTOR = 16
"""Bytes that a thread reads at a time."""

_PLACE = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, as a signed word
_FIRST = -0x00AE502812AA7333  # factors of MurmurHash3's finalizer
_SECOND = -0x3B314601E57A13AD
_LOW = 0x7FFFFFFF  # of a word shifted by 33 bits, which repeats the sign

_load = make_lanes(element("uint8", "digest"), "sum", True, 1).load


@device_function
def hashed(word: int, place: int) -> int:
    """Return the hash of a word of 8 bytes at a place."""
    mixed = word ^ word_of((place + 1) * _PLACE)
    mixed = word_of((mixed ^ mixed >> 33 & _LOW) * _FIRST)
    mixed = word_of((mixed ^ mixed >> 33 & _LOW) * _SECOND)
    return mixed ^ mixed >> 33 & _LOW


@device_function
def sum_of_hashes(address: int, nbytes: int, first: int, end: int, step: int) -> int:
    """Return the sum, modulo 2**64, of the hashes of some vectors of 16 bytes.

    Args:
        address: of the memory, of any alignment.
        nbytes: its size. Bytes of the last vector beyond it count as zeros.
        first: the number of the first vector.
        end: the number of the vector at which the range ends.
        step: the distance between two of these vectors.
    """
    total = 0
    vector = first
    while vector < end:
        low, high = _load(address, vector, nbytes)
        total += hashed(low, 2 * vector) + hashed(high, 2 * vector + 1)
        vector += step
    return word_of(total)
