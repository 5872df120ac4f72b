"""Reductions of pairs of a value and an index, which find the place of an extreme.

A pair of 8 bytes is reduced as one integer, and one of 16 bytes as two words, so all
algorithms apply to them. The operator takes the pairs apart.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import numpy as np

from numba_symm.arrays import ArrayView
from numba_symm.device.codecs import CODECS
from numba_symm.device.intrinsics import bits_of_f64, device_function, word_of
from numba_symm.dtypes import Element, UserOperator
from numba_symm.errors import ArgumentError

_VALUES = (
    "float32",
    "float64",
    *(f"{kind}{n}" for kind in ("int", "uint") for n in (16, 32, 64)),
)


class _Words(Element):
    """Two words, which may have any bits."""

    @property
    def floating(self) -> bool:
        """Whether all ones may stand for an empty mailbox; not of an index."""
        return False


_ELEMENTS = {
    8: Element(np.dtype(np.int64), np.dtype(np.int64)),
    16: _Words(np.dtype(np.complex128), np.dtype(np.complex128)),
}


def reduced(x: ArrayView, op: str, what: str) -> tuple[Element, UserOperator, int]:
    """Return the type and the operator for pairs, and the number of pairs.

    Args:
        x: an array of pairs, or whose last axis has a value and an index.
        op: ``"minloc"`` or ``"maxloc"``.
        what: the call.

    Raises:
        ArgumentError: its elements are not pairs.
    """
    fields = x.dtype.fields
    size, count = x.dtype.itemsize, x.size
    kinds: list[np.dtype[Any]] = []
    if fields is None and x.shape and x.shape[-1] == 2 and x.order == "C":
        kinds, size, count = [x.dtype] * 2, 2 * size, count // 2
    elif fields is not None and len(fields) == 2 and size in _ELEMENTS:
        places = [fields[name][1] for name in x.dtype.names or ()]
        if places == [0, size // 2]:
            kinds = [fields[name][0] for name in x.dtype.names or ()]
    if size not in _ELEMENTS or not kinds or any(k.name not in _VALUES for k in kinds):
        raise ArgumentError(
            f"{what}: expected pairs of a value and an index for op={op!r}, got "
            f"{x.dtype} of shape {x.shape}; pass 8 or 16 bytes a pair, such as "
            "np.dtype([('value', 'f4'), ('index', 'i4')]), or two columns of a type "
            "of 4 or 8 bytes"
        )
    value, index = (kind.name for kind in kinds)
    return _ELEMENTS[size], _operator(op, value, index, size), count


@functools.cache
def _operator(op: str, value: str, index: str, size: int) -> UserOperator:
    """Return the operator for pairs of ``size`` bytes of these types."""
    replaces = _replacing(op == "minloc")
    value_of, index_of = _reader(value), _reader(index)

    def of_word(a: Any, b: Any) -> Any:
        first, second = value_of(a), value_of(b)
        later = replaces(first, index_of(a >> 32), second, index_of(b >> 32))
        return b if later else a

    def of_words(a: Any, b: Any) -> Any:
        first, second = value_of(bits_of_f64(a.real)), value_of(bits_of_f64(b.real))
        here, there = index_of(bits_of_f64(a.imag)), index_of(bits_of_f64(b.imag))
        return b if replaces(first, here, second, there) else a

    function = cast(FunctionType, of_word if size == 8 else of_words)
    # The ranks compare it; the digest of the body has only the types of what it calls.
    function.__qualname__ = f"{op} of {value} and {index}"
    return UserOperator(function, commutative=True)


def _reader(kind: str) -> Callable[[int], Any]:
    """Return a device function that returns the number in a word's lowest bits."""
    number, _ = CODECS[kind]
    width = 8 * np.dtype(kind).itemsize
    mask = (1 << width) - 1 if width < 64 else -1

    @device_function
    def read(word: int) -> Any:
        return number(word_of(word) & mask)

    return read


def _replacing(lowest: bool) -> Callable[..., bool]:
    """Return a device function that checks whether the second pair wins.

    NaN is less, and greater, than all numbers, as in NumPy's argmin and argmax. Of
    equal values, the one with the lower index remains.
    """

    @device_function
    def replaces(value: Any, index: Any, other: Any, place: Any) -> bool:
        beats = other < value if lowest else other > value
        if value != value or other != other:
            beats = value == value  # only the other one is NaN
        equal = other == value or (other != other and value != value)
        return bool(beats or (equal and place < index))

    return replaces
