"""Arithmetic on vectors of 16 bytes with 1 to 16 elements.

Kernels move data of every dtype as vectors of two 8-byte words:

- ``unpack`` converts a vector to elements in the accumulation type.
- ``combine`` reduces the elements of two vectors.
- ``pack`` finishes the reduction and converts the elements back.
- ``load`` and ``store`` access a vector of an array. Their ragged forms access the last
  vector of an array, and arrays off 16-byte boundaries, element by element.

Elements are nested pairs: a vector is a pair of words, a word of four elements is a
pair of pairs. So all elements are in registers, and one source serves every width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numba_symm.device.intrinsics import (
    bf16_of_f32,
    bits_of_f32,
    bits_of_f64,
    device_function,
    e4m3x2_of_f32x2,
    e5m2x2_of_f32x2,
    f16_of_f32,
    f32_of_bf16,
    f32_of_bits,
    f32_of_f16,
    f32x2_of_e4m3x2,
    f32x2_of_e5m2x2,
    f64_of_bits,
    ld_u8,
    ld_u16,
    ld_u32,
    ld_u64,
    ld_v2_u64,
    mul_rn_f32,
    mul_rn_f64,
    st_u8,
    st_u16,
    st_u32,
    st_u64,
    st_v2_u64,
    word_of,
)
from numba_symm.dtypes import (
    LOGICAL,
    REDUCTIONS,
    Element,
    Op,
    UserOperator,
    bitwise,
)
from numba_symm.environment import SIMULATED


class Lanes(NamedTuple):
    """The device functions for vectors of one element type and operator.

    Attributes:
        unpack: ``(low, high)`` returns the elements of a vector's two words.
        pack: ``(elements)`` returns two words of the result. It does what is done once,
            after the last rank, such as an average's division.
        combine: ``(a, b)`` reduces the elements of two vectors.
        load: ``(array, vector, count)`` returns a vector of an array of ``count``
            elements, with 0 after its end.
        store: ``(array, vector, count, low, high)`` stores a vector, and nothing after
            the array's end.
    """

    unpack: Callable[[int, int], Any]
    pack: Callable[[Any], Any]
    combine: Callable[[Any, Any], Any]
    load: Callable[[int, int, int], Any]
    store: Callable[[int, int, int, int, int], None]


def make_lanes(element: Element, op: Op, ragged: bool, size: int) -> Lanes:
    """Return the device functions for ``element`` and the operator ``op``.

    Args:
        element: the element type.
        op: an operator of ``dtypes.reduction`` that ``dtypes.check`` has accepted.
        ragged: whether arrays may be off 16-byte boundaries, or end within a vector.
        size: the number of ranks, by which an average divides.
    """
    whole_words = bitwise(op, element)
    if whole_words is not None:
        parts = _words(whole_words)
    else:
        parts = _elements(element, _arithmetic(element, op, size))
    load, store = _ragged_access(element) if ragged else (_load_whole, _store_whole)
    return Lanes(*parts, load, store)


_Parts = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
"""``unpack``, ``pack`` and ``combine`` of a vector or of some bits of a word.

For some bits of a word, ``unpack`` takes a word with these bits lowest and ignores the
higher ones. ``pack`` returns a word whose higher bits are 0.
"""


def _words(op: str) -> _Parts:
    """Return the functions of a bitwise operator, which works on whole words."""
    reduce = device_function(REDUCTIONS[op])

    @device_function
    def unpack(low: int, high: int) -> Any:
        return low, high

    @device_function
    def pack(words: Any) -> Any:
        return words

    @device_function
    def combine(a: Any, b: Any) -> Any:
        return reduce(a[0], b[0]), reduce(a[1], b[1])

    return unpack, pack, combine


class _Arithmetic(NamedTuple):
    """The functions of elements in the accumulation type.

    Attributes:
        reduce: reduces two elements.
        finish: converts the reduction of all ranks' elements to the result.
    """

    reduce: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any]


def _arithmetic(element: Element, op: Op, size: int) -> _Arithmetic:
    kind = element.accumulate.type
    if isinstance(op, UserOperator):
        return _Arithmetic(_reducing(op.function, kind), _same)
    function = REDUCTIONS[op]
    if op == "prod" and element.complex:
        function = _COMPLEX_PRODUCTS[element.name]
    return _Arithmetic(_reducing(function, kind), _finishing(element, op, size))


def _reducing(function: Any, kind: Any) -> Callable[[Any, Any], Any]:
    """Return a device function of two ``kind`` that returns one.

    It converts the result, because Numba promotes to int64 and float64 in expressions
    with literals.
    """
    if SIMULATED:
        # An array's astype accepts values out of range, such as a user's Python ints.
        return _quiet(lambda a, b: np.asarray(function(a, b)).astype(kind)[()])
    inlined = device_function(function)

    @device_function
    def reduce(a: Any, b: Any) -> Any:
        return kind(inlined(a, b))

    return reduce


def _finishing(element: Element, op: str, size: int) -> Callable[[Any], Any]:
    if op == "avg":
        return _divided(element, size)
    if op in LOGICAL:
        return _truth(element.accumulate.type)
    return _same


@device_function
def _same(value: Any) -> Any:
    return value


def _truth(kind: Any) -> Callable[[Any], Any]:
    """Return a function from an element to 0 or 1; needed for one rank, too."""

    @device_function
    def truth(value: Any) -> Any:
        return kind(value != 0)

    return truth


def _divided(element: Element, size: int) -> Callable[[Any], Any]:
    """Return a function that divides by the number of ranks; integers towards 0."""
    if element.complex:
        return _divided_complex(*_MADE[element.name], size)
    if element.floating:
        return _divided_real(element.accumulate.type, size)
    return _divided_integer(element.accumulate.type, size)


def _divided_real(kind: Any, size: int) -> Callable[[Any], Any]:
    ranks = kind(size)
    return _finisher(lambda value: kind(value / ranks))


def _divided_complex(made: Any, part: Any, size: int) -> Callable[[Any], Any]:
    ranks = part(size)
    return _finisher(
        lambda value: made(part(value.real / ranks), part(value.imag / ranks))
    )


def _divided_integer(kind: Any, size: int) -> Callable[[Any], Any]:
    unsigned = {np.int32: np.uint32}.get(kind, np.uint64)
    ranks = unsigned(size)

    # ``//`` would round down, and take more instructions for signed integers.
    def divided(value: Any) -> Any:
        negative = value < 0
        quotient = kind(unsigned(-value if negative else value) // ranks)
        return kind(-quotient if negative else quotient)

    return _finisher(divided)


def _finisher(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return _quiet(function) if SIMULATED else device_function(function)


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disable NumPy's warnings: overflow wraps or is infinite, as on a GPU."""

    def quiet(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return quiet


@device_function
def _complex(real: Any, imag: Any) -> Any:
    return complex(real, imag)


_complex64 = _complex128 = _complex

if SIMULATED:

    def _complex64(real: Any, imag: Any) -> Any:
        return np.array([real, imag], np.float32).view(np.complex64)[0]

    def _complex128(real: Any, imag: Any) -> Any:
        return np.array([real, imag], np.float64).view(np.complex128)[0]


_MADE = {"complex64": (_complex64, np.float32), "complex128": (_complex128, np.float64)}


def _complex_product(multiply: Any, made: Any) -> Callable[[Any, Any], Any]:
    def product(a: Any, b: Any) -> Any:
        real = multiply(a.real, b.real) - multiply(a.imag, b.imag)
        imag = multiply(a.real, b.imag) + multiply(a.imag, b.real)
        return made(real, imag)

    return product


_COMPLEX_PRODUCTS = {
    "complex64": _complex_product(mul_rn_f32, _complex64),
    "complex128": _complex_product(mul_rn_f64, _complex128),
}


def _elements(element: Element, arithmetic: _Arithmetic) -> _Parts:
    """Return a vector's functions, built from those of one or two elements."""
    if element.itemsize == 16:
        return _complex128_vector(arithmetic)
    if element.narrow:
        width, part = 16, _two_narrow(element, arithmetic)
    else:
        width, part = 8 * element.itemsize, _single(element, arithmetic)
    while width < 64:
        part = _double(part, width)
        width *= 2
    unpack_word, pack_word, combine_words = part

    @device_function
    def unpack(low: int, high: int) -> Any:
        return unpack_word(low), unpack_word(high)

    @device_function
    def pack(elements: Any) -> Any:
        return pack_word(elements[0]), pack_word(elements[1])

    @device_function
    def combine(a: Any, b: Any) -> Any:
        return combine_words(a[0], b[0]), combine_words(a[1], b[1])

    return unpack, pack, combine


def _double(half: _Parts, width: int) -> _Parts:
    """Return the functions of two adjacent halves of ``width`` bits each."""
    unpack_half, pack_half, combine_halves = half

    @device_function
    def unpack(word: int) -> Any:
        return unpack_half(word), unpack_half(word >> width)

    @device_function
    def pack(elements: Any) -> int:
        return word_of(pack_half(elements[0]) | pack_half(elements[1]) << width)

    @device_function
    def combine(a: Any, b: Any) -> Any:
        return combine_halves(a[0], b[0]), combine_halves(a[1], b[1])

    return unpack, pack, combine


def _single(element: Element, arithmetic: _Arithmetic) -> _Parts:
    """Return the functions of one element of at most 8 bytes."""
    number, bits = _CODECS[element.name]
    reduce, finish = arithmetic
    mask = (1 << 8 * element.itemsize) - 1 if element.itemsize < 8 else -1

    @device_function
    def unpack(word: int) -> Any:
        return number(word & mask)

    @device_function
    def pack(value: Any) -> int:
        return word_of(bits(finish(value)))

    return unpack, pack, reduce


def _complex128_vector(arithmetic: _Arithmetic) -> _Parts:
    reduce, finish = arithmetic

    @device_function
    def unpack(low: int, high: int) -> Any:
        return _complex128(f64_of_bits(low), f64_of_bits(high))

    @device_function
    def pack(value: Any) -> Any:
        result = finish(value)
        return word_of(bits_of_f64(result.real)), word_of(bits_of_f64(result.imag))

    return unpack, pack, reduce


class _Narrow(NamedTuple):
    """The conversion of two 8-bit floats.

    Attributes:
        widen: ``(bits)`` returns two float32.
        narrow: converts two float32; it saturates.
        limit: the least float32 that overflows.
        beyond: the bits of the result of an overflow, as in ml_dtypes.
    """

    widen: Callable[[int], Any]
    narrow: Callable[[Any, Any], int]
    limit: Any
    beyond: int


_NARROW = {
    "float8_e4m3fn": _Narrow(  # has no infinity, but NaN
        *(f32x2_of_e4m3x2, e4m3x2_of_f32x2),
        *(np.nextafter(np.float32(464), np.float32(465)), 0x7F),
    ),
    "float8_e5m2": _Narrow(
        *(f32x2_of_e5m2x2, e5m2x2_of_f32x2, np.float32(61440), 0x7C)
    ),
}


def _two_narrow(element: Element, arithmetic: _Arithmetic) -> _Parts:
    """Return the functions of two 8-bit floats, which are converted together."""
    widen, narrow, limit, beyond = _NARROW[element.name]
    reduce, finish = arithmetic

    @device_function
    def unpack(word: int) -> Any:
        return widen(word & 0xFFFF)

    @device_function
    def overflown(bits: int, value: Any) -> int:
        if value >= limit:
            return beyond
        if value <= -limit:
            return beyond | 0x80
        return bits

    @device_function
    def pack(elements: Any) -> int:
        low, high = finish(elements[0]), finish(elements[1])
        bits = word_of(narrow(low, high))
        above = overflown(bits >> 8 & 0xFF, high)
        return overflown(bits & 0xFF, low) | above << 8

    @device_function
    def combine(a: Any, b: Any) -> Any:
        return reduce(a[0], b[0]), reduce(a[1], b[1])

    return unpack, pack, combine


@device_function
def _i8_of_bits(bits: int) -> Any:
    return np.int32(np.int8(bits))


@device_function
def _i16_of_bits(bits: int) -> Any:
    return np.int32(np.int16(bits))


@device_function
def _i32_of_bits(bits: int) -> Any:
    return np.int64(np.int32(bits))


@device_function
def _i64_of_bits(bits: int) -> Any:
    return np.int64(bits)


@device_function
def _narrow_u_of_bits(bits: int) -> Any:
    return np.int32(bits)


@device_function
def _u64_of_bits(bits: int) -> Any:
    return np.uint64(bits)


@device_function
def _bool_of_bits(bits: int) -> Any:
    return bits != 0


@device_function
def _bits_of_8(value: Any) -> Any:
    return value & 0xFF


@device_function
def _bits_of_16(value: Any) -> Any:
    return value & 0xFFFF


@device_function
def _bits_of_32(value: Any) -> Any:
    return np.uint32(value & 0xFFFFFFFF)


@device_function
def _bits_of_64(value: Any) -> Any:
    return np.int64(value)


@device_function
def _c64_of_bits(bits: int) -> Any:
    real = f32_of_bits(bits & 0xFFFFFFFF)
    return _complex64(real, f32_of_bits(bits >> 32 & 0xFFFFFFFF))


@device_function
def _bits_of_c64(value: Any) -> Any:
    return word_of(bits_of_f32(value.real)) | word_of(bits_of_f32(value.imag)) << 32


_CODECS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "float16": (f32_of_f16, f16_of_f32),
    "bfloat16": (f32_of_bf16, bf16_of_f32),
    "float32": (f32_of_bits, bits_of_f32),
    "float64": (f64_of_bits, bits_of_f64),
    "complex64": (_c64_of_bits, _bits_of_c64),
    "bool": (_bool_of_bits, _bits_of_64),
    "int8": (_i8_of_bits, _bits_of_8),
    "int16": (_i16_of_bits, _bits_of_16),
    "int32": (_i32_of_bits, _bits_of_32),
    "int64": (_i64_of_bits, _bits_of_64),
    "uint8": (_narrow_u_of_bits, _bits_of_8),
    "uint16": (_narrow_u_of_bits, _bits_of_16),
    "uint32": (_i64_of_bits, _bits_of_32),
    "uint64": (_u64_of_bits, _bits_of_64),
}
"""Conversions of an element's bits to the accumulation type, and back."""

if SIMULATED:  # NumPy checks ranges, a GPU does not

    def _signed(kind: Any, width: int) -> Callable[[int], Any]:
        sign = 1 << width - 1
        return lambda bits: kind((int(bits) & 2 * sign - 1 ^ sign) - sign)

    def _bits(width: int) -> Callable[[Any], int]:
        return lambda value: int(value) & (1 << width) - 1

    _CODECS |= {
        "bool": (np.bool_, int),
        "int8": (_signed(np.int32, 8), _bits(8)),
        "int16": (_signed(np.int32, 16), _bits(16)),
        "int32": (_signed(np.int64, 32), _bits(32)),
        "int64": (_signed(np.int64, 64), _bits(64)),
        "uint32": (np.int64, _bits(32)),
        "uint64": (lambda bits: np.uint64(int(bits) & (1 << 64) - 1), _bits(64)),
    }


@device_function
def _load_whole(array: int, vector: int, count: int) -> Any:
    return ld_v2_u64(array + 16 * vector)


@device_function
def _store_whole(array: int, vector: int, count: int, low: int, high: int) -> None:
    st_v2_u64(array + 16 * vector, (low, high))


_ACCESS = {
    1: (ld_u8, st_u8),
    2: (ld_u16, st_u16),
    4: (ld_u32, st_u32),
    8: (ld_u64, st_u64),
}


def _ragged_access(element: Element) -> tuple[Any, Any]:
    """Return ``load`` and ``store`` for arrays of any alignment and length."""
    size = min(8, element.itemsize)  # an element of 16 bytes is two of 8
    pieces = element.itemsize // size
    lanes, width = 8 // size, 8 * size
    load_element, store_element = _ACCESS[size]

    @device_function
    def load_word(array: int, first: int, end: int) -> int:
        value = 0
        for lane in range(lanes):
            if first + lane < end:
                bits = load_element(array + (first + lane) * size)
                value |= word_of(bits) << (lane * width)
        return word_of(value)

    @device_function
    def store_word(array: int, first: int, end: int, value: int) -> None:
        for lane in range(lanes):
            if first + lane < end:
                store_element(array + (first + lane) * size, value >> (lane * width))

    @device_function
    def load(array: int, vector: int, count: int) -> Any:
        first, end = 2 * lanes * vector, pieces * count
        if array & 15 == 0 and first + 2 * lanes <= end:
            return ld_v2_u64(array + 16 * vector)
        low = load_word(array, first, end)
        return low, load_word(array, first + lanes, end)

    @device_function
    def store(array: int, vector: int, count: int, low: int, high: int) -> None:
        first, end = 2 * lanes * vector, pieces * count
        if array & 15 == 0 and first + 2 * lanes <= end:
            st_v2_u64(array + 16 * vector, (low, high))
        else:
            store_word(array, first, end, low)
            store_word(array, first + lanes, end, high)

    return load, store
