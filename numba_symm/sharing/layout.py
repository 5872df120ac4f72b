"""Where in its memory an array lies, strided or not, and making it again from that."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_symm.arrays import ArrayView, Memory
from numba_symm.environment import SIMULATED


@dataclass(frozen=True)
class Layout:
    """An array, but for the memory.

    Attributes:
        offset: bytes from the memory's beginning to the array's first element.
        shape: elements along each axis.
        strides: bytes from one element to the next, along each axis.
        dtype: of the elements.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: "np.dtype[Any]"

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes it spans, from and to, counted from its first element."""
        if 0 in self.shape:
            return 0, 0
        spans = [
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        ]
        low = sum(span for span in spans if span < 0)
        high = sum(span for span in spans if span > 0)
        return low, high + self.dtype.itemsize

    def at(self, offset: int) -> "Layout":
        """Return the same at another offset."""
        return dataclasses.replace(self, offset=offset)

    def dense(self) -> "Layout":
        """Return the same without gaps, in C order, at the memory's beginning."""
        strides = _c_strides(self.shape, self.dtype.itemsize)
        return Layout(0, self.shape, strides, self.dtype)


def of(array: Any, view: ArrayView) -> Layout:
    """Return the layout of an array, its offset 0."""
    shape, itemsize = tuple(view.shape), view.dtype.itemsize
    if view.order == "C":
        strides = _c_strides(shape, itemsize)
    elif view.order == "F":
        strides = _c_strides(shape[::-1], itemsize)[::-1]
    else:
        strides = _strides(array, itemsize)
    return Layout(0, shape, strides, view.dtype)


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


def _strides(array: Any, itemsize: int) -> tuple[int, ...]:
    if hasattr(array, "__cuda_ndarray__"):  # Numba's, its simulator's too
        return tuple(array.strides)
    from cuda.core.utils import StridedMemoryView

    found = StridedMemoryView.from_any_interface(array, stream_ptr=-1)
    return tuple(stride * itemsize for stride in found.strides)


def build(memory: Memory, layout: Layout) -> Any:
    """Return a Numba device array of that layout in ``memory``, which it keeps."""
    shape, dtype = layout.shape, layout.dtype
    if 0 in shape:
        from numba import cuda

        return cuda.device_array(shape, dtype)
    if layout.strides == _c_strides(shape, dtype.itemsize):
        return memory.array(shape, dtype, layout.offset)
    low, high = layout.extent
    bytes_ = memory.array(high - low, np.uint8, layout.offset + low)
    if SIMULATED:
        host = bytes_._ary  # the simulator's array is a wrapper of NumPy's
        strides = layout.strides
        return type(bytes_)(np.ndarray(shape, dtype, host, -low, strides))
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    return DeviceNDArray(
        shape, layout.strides, dtype, gpu_data=bytes_.gpu_data.view(-low)
    )
