"""An array's place in its memory, strided or not, and arrays made from this place."""

import dataclasses
import math
import re
import reprlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from numba_symm import numba_arrays
from numba_symm.arrays import ArrayView, strides_of
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.own_arrays import Memory

_LIMIT = 1 << 63  # of addresses and sizes
_AXES = 64  # NumPy has no more
_PLAIN = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[\d*[a-zA-Z]+\])?")


@dataclass(frozen=True)
class ArrayLayout:
    """An array without its memory.

    Attributes:
        offset: bytes from the memory's beginning to the array's first element.
        shape: elements along each axis.
        strides: bytes from one element to the next, along each axis.
        dtype: the type of the elements.

    Raises:
        ArgumentError: no array can have this layout.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: "np.dtype[Any]"

    def __post_init__(self) -> None:
        if not _is_layout(self.offset, self.shape, self.strides, self.dtype):
            raise ArgumentError(
                f"SharedHandle: an array of offset {shown(self.offset)}, shape "
                f"{shown(self.shape)}, strides {shown(self.strides)} and dtype "
                f"{shown(self.dtype)} cannot be shared"
            )

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte and the end, relative to the first element."""
        if 0 in self.shape:
            return 0, 0
        spans = [
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        ]
        low = sum(span for span in spans if span < 0)
        high = sum(span for span in spans if span > 0)
        return low, high + self.dtype.itemsize

    def at(self, offset: int) -> "ArrayLayout":
        """Return the same layout at another offset."""
        return dataclasses.replace(self, offset=offset)

    def dense(self) -> "ArrayLayout":
        """Return the layout of a C-ordered copy, at the beginning of its memory."""
        strides = numba_arrays.dense_strides(self.shape, self.dtype.itemsize)
        return ArrayLayout(0, self.shape, strides, self.dtype)

    def to_json(self) -> list[Any]:
        """Return it as JSON values."""
        dtype = _dtype_to_json(self.dtype)
        return [self.offset, list(self.shape), list(self.strides), dtype]

    @classmethod
    def from_json(cls, found: list[Any]) -> "ArrayLayout":
        """Return the layout from the values of :meth:`to_json`.

        Raises:
            Exception: of any class, for other values.
        """
        offset, shape, strides, dtype = found
        return cls(offset, tuple(shape), tuple(strides), _dtype_from_json(dtype))


def shown(value: Any) -> str:
    """Return any value as a short text for an error."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an int with more digits than Python prints
        return f"a huge {type(value).__name__}"


def _is_layout(offset: Any, shape: Any, strides: Any, dtype: Any) -> bool:
    numbers = (offset, *shape, *strides) if _are_tuples(shape, strides) else (None,)
    if not all(type(n) is int and -_LIMIT < n < _LIMIT for n in numbers):
        return False
    if len(shape) != len(strides) or len(shape) > _AXES or min(shape, default=0) < 0:
        return False
    if not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.itemsize == 0:
        return False
    if dtype.subdtype is not None:  # NumPy does not have arrays of these
        return False
    return bool(math.prod(filter(None, shape)) * dtype.itemsize < _LIMIT)


def _are_tuples(*found: Any) -> bool:
    return all(type(each) is tuple for each in found)


def _dtype_to_json(dtype: "np.dtype[Any]") -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_dtype_to_json(base), list(shape)]
    if dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        return {
            "names": list(dtype.names),
            "formats": [_dtype_to_json(each[0]) for each in fields],
            "offsets": [each[1] for each in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    # The names of ml_dtypes' types, because their ``str`` is that of void.
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def _dtype_from_json(found: Any) -> "np.dtype[Any]":
    named: Any = None
    if isinstance(found, list):
        base, shape = found
        named = _dtype_from_json(base), tuple(shape)
    elif isinstance(found, dict):
        formats = [_dtype_from_json(each) for each in found["formats"]]
        named = found | {"formats": formats}
    else:
        named = found if _PLAIN.fullmatch(found) else getattr(ml_dtypes, found)
    dtype: np.dtype[Any] = np.dtype(named)
    return dtype


def of(array: Any, view: ArrayView) -> ArrayLayout:
    """Return the layout of an array, with offset 0."""
    shape, itemsize = tuple(map(int, view.shape)), view.dtype.itemsize
    if view.order == "C":
        strides = numba_arrays.dense_strides(shape, itemsize)
    elif view.order == "F":
        strides = numba_arrays.dense_strides(shape, itemsize, "F")
    else:
        strides = strides_of(array)
    return ArrayLayout(0, shape, tuple(map(int, strides)), view.dtype)


def build(memory: Memory, layout: ArrayLayout) -> Any:
    """Return a Numba device array of that layout in ``memory``, which it keeps."""
    shape, dtype = layout.shape, layout.dtype
    if 0 in shape:
        from numba import cuda

        return cuda.device_array(shape, dtype)
    if layout.strides == numba_arrays.dense_strides(shape, dtype.itemsize):
        return memory.array(shape, dtype, layout.offset)
    low, high = layout.extent
    bytes_ = memory.array(high - low, np.uint8, layout.offset + low)
    if SIMULATED:
        host = bytes_._ary  # the simulator's array contains a NumPy array
        strides = layout.strides
        return type(bytes_)(np.ndarray(shape, dtype, host, -low, strides))
    return numba_arrays.device_array(
        shape, layout.strides, dtype, bytes_.gpu_data.view(-low)
    )
