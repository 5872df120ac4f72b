"""Elements: conversions to the accumulation type and back, and arithmetic in it.

Sums of floats that are exact integers, so that their order does not matter.

A term is an element, or the product of two. It is rounded to a multiple of one power of
two, the unit, which follows from the largest exponent of all terms. So every term is an
integer of 96 bits. The integers are added as slices of 32 bits, in words of 64 bits.

Products are exact: those of float32 are float64, and one of float64 is a pair of them
(a product and its error). Pairs are made of significands, and have exponents of their
own. So no product overflows or underflows.
"""

import functools
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
    fma_rn_f64,
    mul_rn_f32,
    mul_rn_f64,
    word_of,
)
from numba_symm.dtypes import (
    LOGICAL,
    OVERFLOWS,
    REDUCTIONS,
    Element,
    Op,
    UserOperator,
    converted,
)
from numba_symm.environment import SIMULATED


@device_function
def _complex(real: Any, imag: Any) -> Any:
    return complex(real, imag)


complex64_of = complex128_of = _complex

if SIMULATED:

    def complex64_of(real: Any, imag: Any) -> Any:
        """Return the complex64 of two float32."""
        return np.array([real, imag], np.float32).view(np.complex64)[0]

    def complex128_of(real: Any, imag: Any) -> Any:
        """Return the complex128 of two float64."""
        return np.array([real, imag], np.float64).view(np.complex128)[0]


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
    return complex64_of(real, f32_of_bits(bits >> 32 & 0xFFFFFFFF))


@device_function
def _bits_of_c64(value: Any) -> Any:
    return word_of(bits_of_f32(value.real)) | word_of(bits_of_f32(value.imag)) << 32


CODECS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
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

    CODECS |= {
        "bool": (np.bool_, int),
        "int8": (_signed(np.int32, 8), _bits(8)),
        "int16": (_signed(np.int32, 16), _bits(16)),
        "int32": (_signed(np.int64, 32), _bits(32)),
        "int64": (_signed(np.int64, 64), _bits(64)),
        "uint32": (np.int64, _bits(32)),
        "uint64": (lambda bits: np.uint64(int(bits) & (1 << 64) - 1), _bits(64)),
    }


class Narrow(NamedTuple):
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


NARROW = {
    "float8_e4m3fn": Narrow(
        *(f32x2_of_e4m3x2, e4m3x2_of_f32x2), *OVERFLOWS["float8_e4m3fn"]
    ),
    "float8_e5m2": Narrow(
        *(f32x2_of_e5m2x2, e5m2x2_of_f32x2), *OVERFLOWS["float8_e5m2"]
    ),
}


class Arithmetic(NamedTuple):
    """The functions of elements in the accumulation type.

    Attributes:
        reduce: reduces two elements.
        finish: converts the reduction of all ranks' elements to the result.
    """

    reduce: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any]


def make_arithmetic(element: Element, op: Op, size: int) -> Arithmetic:
    """Return an operator's functions; see ``lanes.make_lanes``."""
    kind = element.accumulate.type
    if isinstance(op, UserOperator):
        return Arithmetic(_reducing(op.function, kind), _same)
    function = REDUCTIONS[op]
    if op == "prod" and element.complex:
        function = _COMPLEX_PRODUCTS[element.name]
    return Arithmetic(_reducing(function, kind), _finishing(element, op, size))


def _reducing(function: Any, kind: Any) -> Callable[[Any, Any], Any]:
    """Return a device function of two ``kind`` that returns one.

    It converts the result, because Numba promotes to int64 and float64 in expressions
    with literals.
    """
    if SIMULATED:

        def simulated(a: Any, b: Any) -> Any:
            return converted(function(a, b), kind)

        return simulated
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
    return function if SIMULATED else device_function(function)


_MADE = {
    "complex64": (complex64_of, np.float32),
    "complex128": (complex128_of, np.float64),
}


def _complex_product(multiply: Any, made: Any) -> Callable[[Any, Any], Any]:
    def product(a: Any, b: Any) -> Any:
        real = multiply(a.real, b.real) - multiply(a.imag, b.imag)
        imag = multiply(a.real, b.imag) + multiply(a.imag, b.real)
        return made(real, imag)

    return product


_COMPLEX_PRODUCTS = {
    "complex64": _complex_product(mul_rn_f32, complex64_of),
    "complex128": _complex_product(mul_rn_f64, complex128_of),
}


SUM, DOT, NORM = "sum", "dot", "norm"

EXPONENT_BITS = 13
"""Bits of a term's exponent."""

_LOW = 0xFFFFFFFF
_SIGN = -(1 << 63)  # a word's highest bit
_ONE = 1023 << 52  # the bits of 1.0
_FRACTION = (1 << 52) - 1
_INFINITE, _NORMAL, _LARGER = np.inf, 2.0**-1022, 2.0**64
_NOT_FINITE = 0x7FF  # the exponent of infinities and NaN
_OFFSET = 128  # makes the exponents of the smallest products positive
_LEAST, _MOST = 623, 1423  # with such exponents, products and errors are normal

# Added to a number below 2**19, these round it to a multiple of 2**-32, 2**-64 or
# 2**-96. The difference of the bits is this multiple, as an integer.
_FIRST, _SECOND, _THIRD = (1.5 * 2.0**power for power in (20, -12, -44))
_FIRST_BITS, _SECOND_BITS, _THIRD_BITS = (
    int(np.float64(each).view(np.int64)) for each in (_FIRST, _SECOND, _THIRD)
)


class Terms(NamedTuple):
    """The device functions of a term, of two numbers of which a sum uses the first.

    Attributes:
        weigh: ``(found, a, b, state)`` returns the largest exponent so far, whether a
            term counts as a positive infinity, and whether as a negative one; a NaN
            counts as both.
        add: ``(total, a, b, state)`` adds the three slices of the term's integer.
        state: ``(top)`` returns the state, for the largest exponent of all terms.
    """

    weigh: Callable[[Any, Any, Any, Any], Any]
    add: Callable[[Any, Any, Any, Any], Any]
    state: Callable[[int], Any]


def make_terms(name: str, width: int) -> Terms:
    """Return the functions.

    Args:
        name: ``SUM``, ``DOT`` or ``NORM``.
        width: the bits of a number: 32 or 64.
    """
    if name == SUM:
        of_one = _single(_first)
        return of_one if width == 64 else of_one._replace(weigh=_weigh_narrow)
    if width == 32:
        return _single(_product)
    return Terms(_weigh_pair, _add_pair, _scale_of_pairs)


@device_function
def _first(a: Any, b: Any) -> Any:
    return np.float64(a)


@device_function
def _product(a: Any, b: Any) -> Any:
    return mul_rn_f64(np.float64(a), np.float64(b))


@functools.cache
def _single(term: Callable[[Any, Any], Any]) -> Terms:
    """Return the functions of terms that are numbers of float64."""

    @device_function
    def weigh(found: Any, a: Any, b: Any, state: Any) -> Any:
        value, (top, plus, minus) = term(a, b), found
        exponent = _exponent(value)
        if exponent == _NOT_FINITE:
            plus = np.int32(plus | (not value < _INFINITE))
            minus = np.int32(minus | (not value > -_INFINITE))
        return max(top, exponent), plus, minus

    @device_function
    def add(total: Any, a: Any, b: Any, state: Any) -> Any:
        return _added(total, mul_rn_f64(term(a, b), state[1]))

    return Terms(weigh, add, _scale)


@device_function
def _weigh_narrow(found: Any, a: Any, b: Any, state: Any) -> Any:
    """Weigh a float32, because to convert each to float64 takes longer than to load it.

    A number below the normal ones counts as one of these: a unit is fine enough.
    """
    exponent, (top, plus, minus) = bits_of_f32(a) >> 23 & 0xFF, found
    if exponent == 0xFF:
        plus = np.int32(plus | (not a < _INFINITE))
        minus = np.int32(minus | (not a > -_INFINITE))
    return max(top, np.int32(exponent + 1023 - 127)), plus, minus


@device_function
def _exponent(number: Any) -> Any:
    return np.int32(bits_of_f64(number) >> 52 & 0x7FF)


@device_function
def _scale(top: int) -> Any:
    """Return the exponent, and a factor that makes the largest terms less than 1."""
    return top, _power(1022 - min(top, 2047))


@device_function
def _scale_of_pairs(top: int) -> Any:
    """Return the exponent, and the factor of products that are near."""
    return top, _power(min(max(2 * 1023 + _OFFSET - 2 - top, -1022), 1023))


@device_function
def _power(power: int) -> Any:
    """Return two to this power, which may be subnormal."""
    half = power >> 1
    rest = f64_of_bits(_ONE + (power - half << 52))
    return mul_rn_f64(f64_of_bits(_ONE + (half << 52)), rest)


@device_function
def _added(total: Any, value: Any) -> Any:
    """Add the slices of a number below 2**19; the largest terms are below 1."""
    first = value + _FIRST
    rest = value - (first - _FIRST)
    second = rest + _SECOND
    third = rest - (second - _SECOND) + _THIRD
    return (
        total[0] + (bits_of_f64(first) - _FIRST_BITS),
        total[1] + (bits_of_f64(second) - _SECOND_BITS),
        total[2] + (bits_of_f64(third) - _THIRD_BITS),
    )


@device_function
def _significand(number: Any) -> Any:
    """Return a number from 1 to 2 with its sign, or 0.0 for 0; and its exponent."""
    tiny = abs(number) < _NORMAL
    bits = bits_of_f64(number * (_LARGER if tiny else 1.0))
    exponent = (bits >> 52 & 0x7FF) - (64 if tiny else 0)
    found = f64_of_bits(word_of(bits & (_SIGN | _FRACTION) | _ONE))
    return found if number != 0 else 0.0, exponent


@device_function
def _are_near(a: Any, b: Any) -> Any:
    i, j = _exponent(a), _exponent(b)
    return (i >= _LEAST) & (i <= _MOST) & (j >= _LEAST) & (j <= _MOST)


@device_function
def _weigh_pair(found: Any, a: Any, b: Any, state: Any) -> Any:
    if _are_near(a, b):
        exponent = np.int32(_exponent(a) + _exponent(b) + _OFFSET)
        return max(found[0], exponent), found[1], found[2]
    # The product itself may overflow.
    infinite = (abs(a) == _INFINITE) | (abs(b) == _INFINITE)
    undefined = (a != a) | (b != b) | infinite & ((a == 0) | (b == 0))
    negative = (a < 0) != (b < 0)
    exponent = _significand(a)[1] + _significand(b)[1] + _OFFSET
    return (
        max(found[0], np.int32(exponent if (a != 0) & (b != 0) else 0)),
        np.int32(found[1] | undefined | infinite & (not negative)),
        np.int32(found[2] | undefined | infinite & negative),
    )


@device_function
def _add_pair(total: Any, a: Any, b: Any, state: Any) -> Any:
    x, y, scale = a, b, state[1]
    if not _are_near(a, b):
        (x, i), (y, j) = _significand(a), _significand(b)
        down = min(max(state[0] - (i + j + _OFFSET), 0) + 2, 1023)
        scale = f64_of_bits(_ONE - (down << 52))
    high = mul_rn_f64(x, y)
    total = _added(total, mul_rn_f64(high, scale))
    return _added(total, mul_rn_f64(fma_rn_f64(x, y, -high), scale))


@device_function
def carried(a: int, b: int, c: int, d: int) -> Any:
    """Return the digits of a sum of slices: three of 32 bits, after a signed one."""
    c += d >> 32
    b += c >> 32
    a += b >> 32
    return a, b & _LOW, c & _LOW, d & _LOW


@functools.cache
def make_result(name: str, width: int) -> Callable[..., int]:
    """Return a device function that makes the result, as bits.

    ``(top, plus, minus, a, b, c, d)``: the largest exponent, whether there are terms
    that count as infinities, and the four digits of the sum of all integers. The result
    is rounded once, to nearest even. The arguments are those of :func:`make_terms`.
    """
    fraction, ones, bias = (52, 0x7FF, 1023) if width == 64 else (23, 0xFF, 127)
    infinite, undefined = ones << fraction, (2 * ones + 1) << fraction - 1
    sign_bit = _SIGN if width == 64 else 1 << 31
    least = -1118  # 1.0 has the exponent 1023, and a unit of 2**-95
    if name != SUM and width == 64:
        least = -_OFFSET - 2 * 1023 - 94
    rooted = name == NORM

    @device_function
    def result(
        top: int, plus: bool, minus: bool, a: int, b: int, c: int, d: int
    ) -> int:
        if plus and minus:
            return undefined
        if plus or minus:
            return infinite | (sign_bit if minus else 0)
        a, b, c, d = carried(a, b, c, d)
        sign = 0
        if a < 0:
            sign = sign_bit
            a, b, c, d = carried(-a, -b, -c, -d)
        # Five digits of 32 bits, the lowest one in units of two to this power.
        power = top + least
        a, b, c, d, e = a >> 32, a & _LOW, b, c, d
        for _ in range(4):
            if a == 0:
                a, b, c, d, e = b, c, d, e, 0
                power -= 32
        if a == 0:
            return 0
        length = (bits_of_f64(np.float64(a)) >> 52) - 1022
        a, b, c, d, e = _shifted(a, b, c, d, e, 32 - length)
        power -= 32 - length
        head, rest = a << 31 | b >> 1, b & 1 | c | d | e
        power += 97
        if rooted:
            head, rest, power = _root(a, b, c, d, e, power)
        # The head has 63 bits, in units of two to this power.
        exponent = power + 62 + bias
        if exponent >= ones:
            return sign | infinite
        drop = 62 - fraction + max(0, 1 - exponent)
        if drop > 63:
            head, drop = 1, 63
        kept, lost, half = head >> drop, head & (1 << drop) - 1, 1 << drop - 1
        if lost > half or (lost == half and (rest != 0 or kept & 1 != 0)):
            kept += 1
        # A kept hidden bit adds 1 to the exponent, and so does a carry.
        return sign | kept + ((max(exponent, 1) - 1) << fraction)

    return result


@device_function
def _shifted(a: int, b: int, c: int, d: int, e: int, shift: int) -> Any:
    back = 32 - shift
    return (
        (a << shift | b >> back) & _LOW,
        (b << shift | c >> back) & _LOW,
        (c << shift | d >> back) & _LOW,
        (d << shift | e >> back) & _LOW,
        e << shift & _LOW,
    )


@device_function
def _root(a: int, b: int, c: int, d: int, e: int, power: int) -> Any:
    """Return the square root's 63 bits, what it lacks, and the power of its unit.

    The digits begin with a one. The power is that of ``result`` there, after which 97
    lower bits follow.
    """
    odd = power + 1 & 1  # the radicand has an odd number of bits
    root = rest = 0
    for i in range(56):
        taken = 1 if i == 0 and odd == 1 else 2
        rest = rest << taken | a >> 32 - taken
        a, b, c, d, e = _shifted(a, b, c, d, e, taken)
        trial = root << 2 | 1
        root <<= 1
        if rest >= trial:
            rest -= trial
            root |= 1
    power = (power - 49 + odd >> 1) - 7
    return root << 7, rest | a | b | c | d | e, power
