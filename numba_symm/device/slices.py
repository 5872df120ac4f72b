"""NumPy slices, which the simulator uses instead of a thread's loops over vectors.

In the loops of kernels that move bulk data, a thread accesses vectors at equal
distances: its own of each tile, or of each block's share. On a GPU, such a loop is a
device function. Instead, the simulator calls another function, made of the functions of
this module. That function accesses the same vectors of the same arrays, each as one
slice. The order of waits stays the same, because it replaces no code that waits,
signals or synchronizes. Tests compare both forms.

``vectors`` is a ``range``: the indices of the vectors in an array.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from numba_symm.arguments import refuse_misaligned
from numba_symm.device.arithmetic import make_arithmetic
from numba_symm.dtypes import (
    OVERFLOWS,
    REDUCTIONS,
    Element,
    Op,
    UserOperator,
    bitwise,
    in_tree,
)

Vectors = np.ndarray[Any, np.dtype[Any]]
"""Contiguous vectors, each of the dtype ``VECTOR``."""

VECTOR = np.dtype("V16")


class Slices(NamedTuple):
    """Functions that access many vectors of an array.

    Attributes:
        read: ``(array, vectors, count)`` returns vectors of an array of ``count``
            elements, with 0 after its end.
        write: ``(array, vectors, count, words)`` stores vectors, and nothing after the
            array's end.
    """

    read: Callable[[int, range, int], Vectors]
    write: Callable[[int, range, int, Vectors], None]

    def read_each(self, arrays: Any, vectors: range, count: int) -> list[Vectors]:
        """Return the same vectors of several arrays, by their addresses."""
        return [self.read(int(array), vectors, count) for array in arrays]


def before(vectors: range, end: int) -> range:
    """Return those before ``end``."""
    return range(vectors.start, min(vectors.stop, end), vectors.step)


def shifted(vectors: range, first: int) -> range:
    """Return the indices in an array of vectors of a shard that begins at ``first``."""
    return range(vectors.start + first, vectors.stop + first, vectors.step)


def repeated(low: int, high: int, number: int) -> Vectors:
    """Return so many vectors of these two words."""
    return np.array([low, high], np.int64).view(VECTOR).repeat(number)


def _at(array: int, vectors: range) -> Vectors:
    """Return a view of at least one vector of memory."""
    stride = 16 * vectors.step
    nbytes = stride * (len(vectors) - 1) + 16
    memory: Any = (ctypes.c_char * nbytes).from_address(array + 16 * vectors.start)
    return np.ndarray(len(vectors), VECTOR, memory, strides=(stride,))


def _read_whole(array: int, vectors: range, count: int) -> Vectors:
    if array % 16:
        refuse_misaligned(array, 16)
    return _at(array, vectors).copy() if vectors else np.empty(0, VECTOR)


def _write_whole(array: int, vectors: range, count: int, words: Vectors) -> None:
    if array % 16:
        refuse_misaligned(array, 16)
    if vectors:
        _at(array, vectors)[...] = words


WHOLE = Slices(_read_whole, _write_whole)
"""For whole vectors on 16-byte boundaries; ``count`` is not used."""


@functools.cache
def make_ragged(itemsize: int) -> Slices:
    """Return functions for arrays of any alignment and length, by an element's size."""

    def bounds(array: int, vectors: range, count: int) -> tuple[range, int, int]:
        """Return the whole vectors, and the bytes of the last one and its address."""
        if array % min(8, itemsize):
            refuse_misaligned(array, min(8, itemsize))
        last, rest = divmod(count * itemsize, 16)
        return before(vectors, last), rest * (last in vectors), array + 16 * last

    def read(array: int, vectors: range, count: int) -> Vectors:
        whole, rest, at = bounds(array, vectors, count)
        words = np.zeros(len(vectors), VECTOR)
        if whole:
            words[: len(whole)] = _at(array, whole)
        if rest:
            ctypes.memmove(words.ctypes.data + 16 * len(whole), at, rest)
        return words

    def write(array: int, vectors: range, count: int, words: Vectors) -> None:
        whole, rest, at = bounds(array, vectors, count)
        if whole:
            _at(array, whole)[...] = words[: len(whole)]
        if rest:
            ctypes.memmove(at, words[len(whole)].tobytes(), rest)

    return Slices(read, write)


def fold(
    element: Element, op: Op, size: int, rows: Sequence[Vectors], first: int = 0
) -> Vectors:
    """Reduce vectors of several ranks, by their tree; see ``lanes.make_lanes``.

    The result has the bits that ``order.make_total`` computes, except those of NaNs.
    ``first`` is the first of these ranks; those before it are left out.
    """
    return _make_fold(element, op, size)(rows, first)


@functools.cache
def _make_fold(element: Element, op: Op, size: int) -> Callable[..., Vectors]:
    whole_words = bitwise(op, element)
    if whole_words is not None:
        combine = REDUCTIONS[whole_words]

        def fold_words(rows: Sequence[Vectors], first: int) -> Vectors:
            words = (row.view(np.int64) for row in rows)
            return functools.reduce(combine, words).view(VECTOR)

        return fold_words
    reduce, finish = _arithmetic(element, op, size)
    widen, narrow = _CODECS.get(element.name, (_same, None))
    kind, wide = element.dtype, element.accumulate

    def fold_elements(rows: Sequence[Vectors], first: int) -> Vectors:
        values = [widen(row.view(kind)).astype(wide, copy=False) for row in rows]
        total = finish(in_tree(reduce, values, first))
        found = total.astype(kind) if narrow is None else narrow(total)
        return found.view(VECTOR)  # type: ignore[no-any-return]

    return fold_elements


def _arithmetic(element: Element, op: Op, size: int) -> tuple[Any, Any]:
    """Return an operator's functions of arrays in the accumulation type.

    Those of elements are functions of arrays, too, unless they branch or make a complex
    number, or are a user's.
    """
    reduce, finish = make_arithmetic(element, op, size)
    wide = element.accumulate
    if isinstance(op, UserOperator):

        def one_by_one(a: Any, b: Any) -> Any:
            return np.fromiter(map(reduce, a, b), wide, len(a))

        return one_by_one, finish
    if op in _REDUCTIONS:
        return _REDUCTIONS[op], finish
    if element.complex:
        reduce = _complex_product if op == "prod" else reduce
        return reduce, _divided_complex(size) if op == "avg" else finish
    if op == "avg" and not element.floating:
        finish = _divided_integers(np.dtype(f"u{wide.itemsize}").type(size))
    return reduce, finish


def _divided_complex(size: int) -> Any:
    def divided(total: Any) -> Any:
        ranks = total.real.dtype.type(size)
        return _complex(total.real / ranks, total.imag / ranks)

    return divided


def _divided_integers(ranks: Any) -> Any:
    def divided(total: Any) -> Any:
        negative = total < 0
        magnitude = np.where(negative, -total, total).astype(ranks.dtype)
        quotient = (magnitude // ranks).astype(total.dtype)
        return np.where(negative, -quotient, quotient)

    return divided


def _same(values: Any) -> Any:
    return values


# NaN if either is NaN, as in ``dtypes.REDUCTIONS``.
_REDUCTIONS = {
    "min": lambda a, b: np.where((a < b) | (a != a), a, b),
    "max": lambda a, b: np.where((a > b) | (a != a), a, b),
}


def _complex(real: Any, imag: Any) -> Any:
    found = np.empty(len(real), np.result_type(real, np.complex64))
    found.real, found.imag = real, imag
    return found


def _complex_product(a: Any, b: Any) -> Any:
    real = a.real * b.real - a.imag * b.imag
    return _complex(real, a.real * b.imag + a.imag * b.real)


def _widen_bf16(values: Any) -> Any:
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrow_bf16(values: Any) -> Any:
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def _narrowing(kind: Any) -> Callable[[Any], Any]:
    limits: Any = ml_dtypes.finfo
    largest = np.float32(limits(kind).max)
    limit, beyond = OVERFLOWS[np.dtype(kind).name]

    def narrow(values: Any) -> Any:
        bits = np.clip(values, -largest, largest).astype(kind).view(np.uint8)
        bits = np.where(np.isnan(values), 0x7F, bits)
        bits = np.where(values >= limit, beyond, bits)
        return np.where(values <= -limit, beyond | 0x80, bits).astype(np.uint8)

    return narrow


_CODECS: dict[str, tuple[Any, Any]] = {
    "bfloat16": (_widen_bf16, _narrow_bf16),
    "float8_e4m3fn": (_same, _narrowing(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": (_same, _narrowing(ml_dtypes.float8_e5m2)),
}
"""Conversions of arrays that differ from NumPy's ``astype``: a GPU's are canonical."""
