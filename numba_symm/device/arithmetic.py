"""Arithmetic on elements in the accumulation type."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numba_symm.device.codecs import complex64_of, complex128_of
from numba_symm.device.intrinsics import device_function, mul_rn_f32, mul_rn_f64
from numba_symm.dtypes import (
    LOGICAL,
    REDUCTIONS,
    Element,
    Op,
    UserOperator,
    converted,
)
from numba_symm.environment import SIMULATED


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
