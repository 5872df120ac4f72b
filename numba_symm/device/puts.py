"""Copies between arrays: ``put``, ``get``, and runs of elements.

A copy moves rows of bytes. Its threads store aligned vectors of 16 bytes, whatever the
alignment of target and source. If they differ by the alignment within a vector, each
thread loads two adjacent aligned vectors and shifts the words between them. The next
thread loads the second one, too, so the cache may have it. Without shifts, all accesses
would be as narrow as the common alignment.

The bytes before the first whole vector of a row and after the last one are copied
element by element, and so are short rows and strided elements. A copy accesses no byte
outside of its arrays.

Accesses are weak: signals, barriers and ``syncthreads`` around a copy order it against
other accesses. None of these functions synchronizes.

Runs: a few consecutive elements of several arrays of different types.

A run is a vector of 16 bytes in one of the arrays. In each other array, it has as many
elements, but may have another number of bytes. A thread holds the runs of all arrays as
words of 8 bytes in a local array, whose indices are constants. So they are in
registers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.device.arithmetic import complex128_of
from numba_symm.device.checks import check_copy
from numba_symm.device.intrinsics import (
    bits_from,
    block_size,
    device_function,
    f64_of_bits,
    ld_any_u8,
    ld_any_u16,
    ld_any_u32,
    ld_any_u64,
    ld_any_v2_u64,
    ld_u64,
    ld_v2_u64,
    st_any_u8,
    st_any_u16,
    st_any_u32,
    st_any_u64,
    st_any_v2_u64,
    st_u64,
    st_v2_u64,
    thread_index,
    views_of,
    word_of,
)
from numba_symm.device.lanes import make_access, make_bits, make_lanes, number_of
from numba_symm.dtypes import Element

_VECTOR = 16
_SHORT = 128
"""The bytes of a row from which on its vectors are copied, rather than its elements."""

_WARP = 32


@device_function
def lane_index() -> int:
    """Return the thread's index in its warp."""
    return thread_index() % _WARP


@device_function
def warp_size() -> int:
    """Return the number of threads in this warp; the last one may be partial."""
    return min(_WARP, block_size() - thread_index() + lane_index())


@device_function
def copy_element(target: int, source: int, size: int) -> None:
    """Copy an element of that many bytes."""
    if size == 1:
        st_any_u8(target, ld_any_u8(source))
    elif size == 2:
        st_any_u16(target, ld_any_u16(source))
    elif size == 4:
        st_any_u32(target, ld_any_u32(source))
    else:
        st_any_u64(target, ld_any_u64(source))
        if size == 16:
            st_any_u64(target + 8, ld_any_u64(source + 8))


@device_function
def _load_aligned(address: int, skipped: int) -> Any:
    return ld_any_v2_u64(address)


@device_function
def _load_shifted(address: int, skipped: int) -> Any:
    """Return the 16 bytes that begin ``skipped`` bytes after an aligned address."""
    first, second = ld_any_v2_u64(address)
    third, fourth = ld_any_v2_u64(address + _VECTOR)
    bits = 8 * (skipped & 7)
    if skipped >= 8:
        return bits_from(second, third, bits), bits_from(third, fourth, bits)
    return bits_from(first, second, bits), bits_from(second, third, bits)


def _make_move(load: Callable[[int, int], Any]) -> Callable[..., None]:
    """Return a device function that copies vectors.

    ``(target, source, skipped, vectors, lane, lanes)``: both addresses are aligned, and
    the vectors begin ``skipped`` bytes after ``source``.
    """

    @device_function
    def move(
        target: int, source: int, skipped: int, vectors: int, lane: int, lanes: int
    ) -> None:
        k = lane
        # Four at a time, so that a thread waits once for the loads of four.
        while k + 3 * lanes < vectors:
            a = load(source + _VECTOR * k, skipped)
            b = load(source + _VECTOR * (k + lanes), skipped)
            c = load(source + _VECTOR * (k + 2 * lanes), skipped)
            d = load(source + _VECTOR * (k + 3 * lanes), skipped)
            st_any_v2_u64(target + _VECTOR * k, a)
            st_any_v2_u64(target + _VECTOR * (k + lanes), b)
            st_any_v2_u64(target + _VECTOR * (k + 2 * lanes), c)
            st_any_v2_u64(target + _VECTOR * (k + 3 * lanes), d)
            k += 4 * lanes
        while k < vectors:
            one = load(source + _VECTOR * k, skipped)
            st_any_v2_u64(target + _VECTOR * k, one)
            k += lanes

    return move


_move_aligned = _make_move(_load_aligned)
_move_shifted = _make_move(_load_shifted)


@device_function
def _copy_row(
    target: int, source: int, nbytes: int, size: int, lane: int, lanes: int
) -> None:
    """Copy adjacent elements of ``size`` bytes, at most 8, by ``lanes`` threads."""
    head = -target & 15  # up to the target's first aligned vector
    skipped = (source - target) & 15  # of the source's vector in which that begins
    loaded = _VECTOR
    if skipped > 0:
        loaded = 2 * _VECTOR - skipped
        # The vector in which it begins must not begin before the source.
        head += _VECTOR if head < skipped else 0  # explore: from-the-first
    # The last one that is loaded must not end after it.
    # explore: to-the-last
    vectors = max(0, (nbytes - head - loaded + _VECTOR) // _VECTOR)
    head = head if vectors > 0 else nbytes
    tail = head + _VECTOR * vectors
    if skipped == 0:
        _move_aligned(target + head, source + head, 0, vectors, lane, lanes)
    else:
        first = source + head - skipped
        _move_shifted(target + head, first, skipped, vectors, lane, lanes)
    place = lane * size
    while place < head + nbytes - tail:
        at = place if place < head else place - head + tail
        copy_element(target + at, source + at, size)
        place += lanes * size


@device_function
def place_of(layout: Any, row: int, column: int) -> int:
    """Return the address of an element; ``row`` counts through all planes."""
    address, planes, rows, _, to_plane, to_row, to_column = layout
    plane = row // rows if planes > 1 else 0
    place = address + plane * to_plane + (row - plane * rows) * to_row
    return place + column * to_column  # type: ignore[no-any-return]


@device_function
def _copy_elements(size: int, to: Any, of: Any, lane: int, lanes: int) -> None:
    """Copy the elements of rows one by one; ``to`` and ``of`` are layouts."""
    _, planes, rows, columns, _, _, _ = to
    k = lane
    while k < planes * rows * columns:
        row = k // columns
        column = k - columns * row
        copy_element(place_of(to, row, column), place_of(of, row, column), size)
        k += lanes


@device_function
def _copy(ctx: Any, target: Any, source: Any, lane: int, lanes: int) -> None:
    """Copy an array, by ``lanes`` threads that all call this."""
    found = views_of(target, source)
    check_copy(ctx, target, source)
    size, to = found[0], found[1:8]
    of = found[8:9] + found[2:5] + found[12:]  # of the same lengths
    _, planes, rows, columns, plane_to, row_to, column_to = to
    plane_of, row_of, column_of = found[12:]
    length, whole = size * columns, size * columns * rows
    adjacent = column_to == size and column_of == size
    rows *= planes
    if (
        adjacent
        and (planes == 1 or (plane_to == whole and plane_of == whole))
        and row_to == length
        and row_of == length
    ):
        length *= rows
        rows = 1
    if adjacent and (rows == 1 or length >= _SHORT):
        # One row by all threads, or a row for each warp.
        width = lanes if rows == 1 else min(lanes, _WARP)
        abreast = lanes // width
        row = lane // width
        while row < rows and lane < abreast * width:
            at, its = place_of(to, row, 0), place_of(of, row, 0)
            _copy_row(at, its, length, min(size, 8), lane % width, width)
            row += abreast
    else:
        _copy_elements(size, to, of, lane, lanes)


@device_function
def put(ctx: Any, target: Any, source: Any) -> None:
    """Copy an array into a peer's array with the calling thread alone.

    One thread calls it. The call orders nothing and waits for nothing. Before the call,
    the source must be visible to this thread, and the peer must have read what the call
    overwrites. A later :func:`put_signal` of this thread, or of another thread after
    ``syncthreads``, publishes the copy. The call takes a load and a store for each 16
    bytes of adjacent elements, and another load if the alignments differ. Strided
    elements take a load and a store each.

    Args:
        ctx: the memory's context.
        target: an array of one to three dimensions in a peer's memory, such as a part
            of a :func:`peer_array`. It may be strided.
        source: an array of the same shape and dtype, in memory of any kind, which does
            not overlap the target. GPUs check this only in debug mode. Elements have 1,
            2, 4, 8 or 16 bytes.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     there = symm.peer_array(ctx, 0, (2, 4), np.int64)
        ...     there[0, 3] = 7
        ...     symm.put(ctx, there[1], there[0])
        ...     old[0] = there[1, 3]
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        7
    """
    _copy(ctx, target, source, 0, 1)


@device_function
def put_warp(ctx: Any, target: Any, source: Any) -> None:
    """Copy an array into a peer's array with all threads of a warp.

    Every thread of the warp calls it with the same arguments. Call ``cuda.syncwarp()``
    before the copy if other threads wrote the source, and after the copy before one
    thread signals. Everything else is as for :func:`put`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     there = symm.peer_array(ctx, 0, (4, 4), np.int64)
        ...     there[cuda.threadIdx.x, 0] = 1 + cuda.threadIdx.x
        ...     cuda.syncthreads()
        ...     symm.put_warp(ctx, there[:, 1], there[:, 0])  # columns
        ...     cuda.syncthreads()
        ...     old[0] = there[3, 1]
        >>> kernel[1, 4](ctx, old)
        >>> int(old[0])
        4
    """
    _copy(ctx, target, source, lane_index(), warp_size())


@device_function
def put_block(ctx: Any, target: Any, source: Any) -> None:
    """Copy an array into a peer's array with all threads of a block.

    Every thread of the block calls it with the same arguments. Call ``syncthreads``
    before the copy if other threads wrote the source, and after the copy before one
    thread signals. :func:`barrier` and :func:`put_with_signal` contain this
    ``syncthreads``. Everything else is as for :func:`put`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     there = symm.peer_array(ctx, 0, (4, 4), np.int64)
        ...     there[cuda.threadIdx.x, 0] = 1 + cuda.threadIdx.x
        ...     cuda.syncthreads()
        ...     symm.put_block(ctx, there[:, 2:], there[:, :2])
        ...     symm.barrier(ctx, 3)
        ...     old[0] = there[3, 2]
        >>> kernel[1, 4](ctx, old)
        >>> int(old[0])
        4
    """
    _copy(ctx, target, source, thread_index(), block_size())


@device_function
def get(ctx: Any, target: Any, source: Any) -> None:
    """Copy an array of a peer with the calling thread alone.

    One thread calls it. Before the call, the peer's data must be visible to this
    thread: after its own :func:`wait_signal`, or after ``syncthreads`` if another
    thread has waited. A thread waits for what it loads from a peer, but not for what it
    stores there. So prefer :func:`put` where either is possible.

    Args:
        ctx: the memory's context.
        target: an array of one to three dimensions, in memory of any kind.
        source: an array of the same shape and dtype in a peer's memory. Otherwise, the
            conditions of :func:`put` apply to both arrays.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     there = symm.peer_array(ctx, 0, 4, np.int64)
        ...     there[3] = 7
        ...     symm.get(ctx, old, there[3:])
        >>> kernel[1, 1](ctx, old)
        >>> int(old[0])
        7
    """
    _copy(ctx, target, source, 0, 1)


@device_function
def get_warp(ctx: Any, target: Any, source: Any) -> None:
    """Copy an array of a peer with all threads of a warp.

    Every thread of the warp calls it with the same arguments. Call ``cuda.syncwarp()``
    after the copy, before other threads read it. Everything else is as for :func:`get`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     there = symm.peer_array(ctx, 0, 4, np.int64)
        ...     mine = cuda.shared.array(4, np.int64)
        ...     there[cuda.threadIdx.x] = cuda.threadIdx.x
        ...     cuda.syncthreads()
        ...     symm.get_warp(ctx, mine, there)
        ...     cuda.syncthreads()
        ...     old[0] = mine[3]
        >>> kernel[1, 4](ctx, old)
        >>> int(old[0])
        3
    """
    _copy(ctx, target, source, lane_index(), warp_size())


@device_function
def get_block(ctx: Any, target: Any, source: Any) -> None:
    """Copy an array of a peer with all threads of a block.

    Every thread of the block calls it with the same arguments. Call ``syncthreads``
    after the copy, before other threads read it. Everything else is as for :func:`get`.

    Example:
        >>> @cuda.jit
        ... def kernel(ctx, old):
        ...     there = symm.peer_array(ctx, 0, (4, 2), np.int64)
        ...     mine = cuda.shared.array((4, 1), np.int64)
        ...     there[cuda.threadIdx.x, 1] = cuda.threadIdx.x
        ...     symm.barrier(ctx, 3)
        ...     symm.get_block(ctx, mine, there[:, 1:])
        ...     cuda.syncthreads()
        ...     old[0] = mine[3, 0]
        >>> kernel[1, 4](ctx, old)
        >>> int(old[0])
        3
    """
    _copy(ctx, target, source, thread_index(), block_size())


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
