"""Arrays over host memory, and what device functions need of arrays: in the simulator.

``device/ptx.py`` has the same names.
"""

import ctypes
from typing import Any

import numpy as np

from numba_symm.arguments import refuse_misaligned
from numba_symm.device.instructions import LOAD_ORDERS
from numba_symm.device.sim import (
    ld_acquire_sys_u32,
    ld_acquire_sys_u64,
    ld_relaxed_sys_u32,
    ld_relaxed_sys_u64,
    ld_u8,
    ld_u16,
    ld_u32,
    ld_u64,
    st_u8,
    st_u16,
    st_u32,
    st_u64,
)
from numba_symm.errors import ArgumentError


def array_at(address: int, shape: Any, dtype: Any) -> Any:
    """Return a C-contiguous array of ``shape`` and ``dtype`` at ``address``."""
    if not isinstance(shape, int | np.integer | tuple):
        raise ArgumentError(
            f"expected shape to be an int or a tuple of ints, got {shape!r}"
        )
    scalar = isinstance(dtype, type) and issubclass(dtype, np.generic)
    if not scalar and not isinstance(dtype, np.dtype):
        raise ArgumentError(
            "expected dtype to be a NumPy scalar type such as np.float32, got "
            f"{dtype!r}"
        )
    dtype = np.dtype(dtype)
    if address % dtype.alignment:
        refuse_misaligned(address, dtype.alignment)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


def element_address(array: Any, index: Any, name: str) -> int:
    """Return the address of an array's element."""
    places = index if isinstance(index, tuple) else (index,)
    if len(places) != len(array.shape):
        raise ArgumentError(
            f"{name}: expected {len(array.shape)} integers as the index, got {index!r}"
        )
    address = array.ctypes.data
    for place, length, stride in zip(places, array.shape, array.strides, strict=True):
        if not isinstance(place, int | np.integer) or not -length <= place < length:
            raise ArgumentError(
                f"{name}: expected an index within the shape {tuple(array.shape)}, got "
                f"{index!r}; a GPU does not check this"
            )
        address += (place + length * (place < 0)) * stride
    if address % array.itemsize:
        refuse_misaligned(address, array.itemsize)
    return int(address)


_WORDS = {
    np.dtype(np.int64): 0,
    np.dtype(np.uint64): 0,
    np.dtype(np.int32): 1,
    np.dtype(np.uint32): 2,
}
"""The kinds of words in ``device/signals.py``."""


def word_address(array: Any, index: Any) -> int:
    """Return the address of an element of 32 or 64 bits."""
    dtype: Any = getattr(array, "dtype", None)
    if dtype not in _WORDS:
        raise ArgumentError(
            f"wait_until_at: expected an array of {', '.join(map(str, _WORDS))}, got "
            f"{type(array).__name__ if dtype is None else dtype}"
        )
    return element_address(array, index, "wait_until_at")


def word_kind(array: Any) -> int:
    """Return which kind of word its elements are."""
    return _WORDS[array.dtype]


_NUMBERS = *_WORDS, np.dtype(np.float32), np.dtype(np.float64)


def atomic_load(array: Any, index: Any, order: str = "relaxed") -> Any:
    dtype: Any = getattr(array, "dtype", None)
    if dtype not in _NUMBERS:
        raise ArgumentError(
            f"atomic_load: expected an array of {', '.join(map(str, _NUMBERS))}, got "
            f"{type(array).__name__ if dtype is None else dtype}"
        )
    if order not in LOAD_ORDERS:
        orders = ", ".join(map(repr, LOAD_ORDERS))
        raise ArgumentError(
            f"atomic_load: expected order to be {orders}, got {order!r}"
        )
    if dtype.itemsize == 8:
        load = ld_acquire_sys_u64 if order == "acquire" else ld_relaxed_sys_u64
    else:
        load = ld_acquire_sys_u32 if order == "acquire" else ld_relaxed_sys_u32
    word = load(element_address(array, index, "atomic_load"))
    bits = int(word) & (1 << 8 * dtype.itemsize) - 1
    return np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype)[0]


_SIZES = (1, 2, 4, 8, 16)


def _kind(array: Any) -> Any:
    """Return the dtype of what a copy takes; None: it does not take it."""
    dtype = getattr(array, "dtype", None)
    taken = (
        dtype is not None and np.ndim(array) in (1, 2, 3) and dtype.itemsize in _SIZES
    )
    return dtype if taken else None


def _words(array: Any) -> str:
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    return type(array).__name__ if dtype is None else f"{shape} of {dtype}"


def views_of(target: Any, source: Any) -> tuple[int, ...]:
    """Return an element's bytes, and the layouts of a copy's target and source."""
    if _kind(target) is None or _kind(target) != _kind(source):
        raise ArgumentError(
            "a copy: expected two arrays of one to three dimensions and of the same "
            f"dtype, got {_words(target)} and {_words(source)}"
        )
    found = [int(source.dtype.itemsize)]
    for each in target, source:
        more = 3 - len(each.shape)
        lengths, strides = (1,) * more + each.shape, (0,) * more + each.strides
        found += [int(each.ctypes.data), *lengths, *strides]
    return tuple(found)


def mailbox_of(mailbox: Any) -> int:
    """Return the address of a mailbox of packets."""
    dtype = getattr(mailbox, "dtype", None)
    if dtype != np.uint64 or len(mailbox.shape) != 1 or mailbox.strides[0] != 8:
        raise ArgumentError(
            "a copy with packets: expected a contiguous array of one dimension of "
            f"uint64 as the mailbox, got {_words(mailbox)}"
        )
    return int(mailbox.ctypes.data)


_UNITS = {
    1: (ld_u8, st_u8),
    2: (ld_u16, st_u16),
    4: (ld_u32, st_u32),
    8: (ld_u64, st_u64),
}


def load_bits(array: Any, index: int) -> int:
    """Return a contiguous array's element as bits; one of 16 bytes is two elements."""
    unit = min(8, array.itemsize)
    return _UNITS[unit][0](array.ctypes.data + unit * int(index))


def store_bits(array: Any, index: int, bits: int) -> None:
    """Store an element that is given as bits."""
    unit = min(8, array.itemsize)
    _UNITS[unit][1](array.ctypes.data + unit * int(index), bits)
