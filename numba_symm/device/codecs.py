"""Conversions of elements: from their bits to the accumulation type, and back."""

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
    word_of,
)
from numba_symm.dtypes import OVERFLOWS
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
