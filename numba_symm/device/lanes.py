"""Operations on vectors of 16 bytes, and the slices that the simulator takes for them.

Operations on vectors of 16 bytes with 1 to 16 elements.

Kernels move data of every dtype as vectors of two 8-byte words:

- ``unpack`` converts a vector to elements in the accumulation type.
- ``combine`` reduces the elements of two vectors.
- ``pack`` finishes the reduction and converts the elements back.
- ``load`` and ``store`` access a vector of an array. Their ragged forms access the last
  vector of an array, and arrays off 16-byte boundaries, element by element.

Elements are nested pairs: a vector is a pair of words, a word of four elements is a
pair of pairs. So all elements are in registers, and one source serves every width.

NumPy slices, which the simulator uses instead of a thread's loops over vectors.

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
from numba_symm.device.arithmetic import (
    CODECS,
    NARROW,
    Arithmetic,
    complex128_of,
    make_arithmetic,
)
from numba_symm.device.intrinsics import (
    bits_of_f64,
    device_function,
    f64_of_bits,
    ld_u8,
    ld_u16,
    ld_u32,
    ld_u64,
    ld_v2_u64,
    st_u8,
    st_u16,
    st_u32,
    st_u64,
    st_v2_u64,
    word_of,
)
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


Load = Callable[[int, int, int], Any]
Store = Callable[[int, int, int, int, int], None]


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
        slices: ``load`` and ``store`` of many vectors, in the simulator.
        fold: reduces many vectors of several ranks, by their tree, in the simulator;
            with the number of the first of these ranks.
        half: ``unpack``, ``pack`` and ``combine`` of 32 bits of a word; None: an
            element has more, or the operator works on whole words.
    """

    unpack: Callable[[int, int], Any]
    pack: Callable[[Any], Any]
    combine: Callable[[Any, Any], Any]
    load: Load
    store: Store
    slices: Slices
    fold: Callable[..., Vectors]
    half: "_Parts | None"


@functools.cache
def make_lanes(element: Element, op: Op, ragged: bool, size: int) -> Lanes:
    """Return the device functions for ``element`` and the operator ``op``.

    Args:
        element: the element type.
        op: an operator of ``dtypes.reduction`` that ``dtypes.check`` has accepted.
        ragged: whether arrays may be off 16-byte boundaries, or end within a vector.
        size: the number of ranks, by which an average divides.
    """
    whole_words, half = bitwise(op, element), None
    if whole_words is not None:
        parts = _words(whole_words)
    else:
        parts, half = _elements(element, make_arithmetic(element, op, size))
    load, store = _ragged_access(element) if ragged else (load_whole, store_whole)
    slices = make_ragged(element.itemsize) if ragged else WHOLE
    in_order = functools.partial(fold, element, op, size)
    return Lanes(*parts, load, store, slices, in_order, half)


_Parts = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
"""``unpack``, ``pack`` and ``combine`` of a vector or of some bits of a word.

For some bits of a word, ``unpack`` takes a word with these bits lowest and ignores the
higher ones. ``pack`` returns a word whose higher bits are 0.
"""


def make_conversion(
    source: Element, target: Element, op: Op, size: int
) -> Callable[[int], Any]:
    """Return a device function from an element's bits to those of another type.

    It finishes a reduction, as ``pack`` does. One of the types is the accumulation type
    of the other, or the element in which that is carried.

    Args:
        source: the type of the argument, of at most 8 bytes.
        target: the type of the result, of at most 8 bytes.
        op: the operator that is finished; "sum" only converts.
        size: the number of ranks, by which an average divides.
    """
    number, bits_of = number_of(source), make_bits(target, op, size)

    @device_function
    def convert(bits: int) -> Any:
        return bits_of(number(bits))

    return convert


def make_bits(target: Element, op: Op, size: int) -> Callable[[Any], Any]:
    """Return a device function from a number to an element's bits.

    The arguments are those of :func:`make_conversion`.
    """
    arithmetic = make_arithmetic(target, op, size)
    if not target.narrow:
        _, pack, _ = _single(target, arithmetic)
        return pack

    _, pack_two, _ = _two_narrow(target, arithmetic)

    @device_function
    def bits_of_narrow(value: Any) -> Any:
        return pack_two((value, value)) & 0xFF

    return bits_of_narrow


def number_of(element: Element) -> Callable[[int], Any]:
    """Return a device function from an element's bits to its number.

    The number is of the accumulation type. The element has at most 8 bytes.
    """
    if not element.narrow:
        return CODECS[element.name][0]
    widen = NARROW[element.name].widen

    @device_function
    def number(bits: int) -> Any:
        return widen(bits)[0]

    return number


def make_access(nbytes: int) -> tuple[Any, Any]:
    """Return the instructions that load and store 1, 2, 4 or 8 bytes."""
    return _ACCESS[nbytes]


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


def _elements(element: Element, arithmetic: Arithmetic) -> tuple[_Parts, _Parts | None]:
    """Return a vector's functions, built from those of one or two elements.

    And those of half a word.
    """
    if element.itemsize == 16:
        return _complex128_vector(arithmetic), None
    if element.narrow:
        width, part = 16, _two_narrow(element, arithmetic)
    else:
        width, part = 8 * element.itemsize, _single(element, arithmetic)
    while width < 32:
        part = _double(part, width)
        width *= 2
    half = part if width == 32 else None
    unpack_word, pack_word, combine_words = _double(part, 32) if half else part

    @device_function
    def unpack(low: int, high: int) -> Any:
        return unpack_word(low), unpack_word(high)

    @device_function
    def pack(elements: Any) -> Any:
        return pack_word(elements[0]), pack_word(elements[1])

    @device_function
    def combine(a: Any, b: Any) -> Any:
        return combine_words(a[0], b[0]), combine_words(a[1], b[1])

    return (unpack, pack, combine), half


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


def _single(element: Element, arithmetic: Arithmetic) -> _Parts:
    """Return the functions of one element of at most 8 bytes."""
    number, bits = CODECS[element.name]
    reduce, finish = arithmetic
    mask = (1 << 8 * element.itemsize) - 1 if element.itemsize < 8 else -1

    @device_function
    def unpack(word: int) -> Any:
        return number(word & mask)

    @device_function
    def pack(value: Any) -> int:
        return word_of(bits(finish(value)))

    return unpack, pack, reduce


def _complex128_vector(arithmetic: Arithmetic) -> _Parts:
    reduce, finish = arithmetic

    @device_function
    def unpack(low: int, high: int) -> Any:
        return complex128_of(f64_of_bits(low), f64_of_bits(high))

    @device_function
    def pack(value: Any) -> Any:
        result = finish(value)
        return word_of(bits_of_f64(result.real)), word_of(bits_of_f64(result.imag))

    return unpack, pack, reduce


def _two_narrow(element: Element, arithmetic: Arithmetic) -> _Parts:
    """Return the functions of two 8-bit floats, which are converted together."""
    widen, narrow, limit, beyond = NARROW[element.name]
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
def load_whole(array: int, vector: int, count: int) -> Any:
    return ld_v2_u64(array + 16 * vector)


@device_function
def store_whole(array: int, vector: int, count: int, low: int, high: int) -> None:
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
