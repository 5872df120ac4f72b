"""Numba's device arrays, of all types that the library reduces.

Numba reads host arrays through Python's buffer protocol, which has no format for
bfloat16 and floats of 8 bits. So it can copy such a type neither from a host array to
the device, nor into a given host array. The arrays of this module copy the bits
instead.
"""

import functools
import math
from typing import Any

import numpy as np


def device_array(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    gpu_data: Any,
) -> Any:
    """Return Numba's array over memory."""
    kind = _kinds()[_lacks_a_format(dtype)]
    return kind(shape, strides, dtype, gpu_data=gpu_data)


@functools.cache
def _lacks_a_format(dtype: np.dtype[Any]) -> bool:
    """Return whether Python's buffers cannot describe the type."""
    try:
        memoryview(np.empty(0, dtype))  # type: ignore[arg-type]
    except ValueError:
        return True
    return False


def dense_strides(
    shape: tuple[int, ...], itemsize: int, order: str = "C"
) -> tuple[int, ...]:
    """Return the strides, in bytes, of a contiguous array of that order."""
    if order == "F":
        return dense_strides(shape[::-1], itemsize)[::-1]
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


@functools.cache
def _kinds() -> tuple[Any, Any]:
    """Return Numba's class, and the class of arrays whose bits are copied."""
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    class BitsNDArray(DeviceNDArray):  # type: ignore[misc]  # Numba is untyped
        """An array that copies host arrays of its type as unsigned integers."""

        def copy_to_device(self, ary: Any, stream: Any = 0) -> None:
            """Copy ``ary`` to this array; see Numba's."""
            if self._can_view(ary):
                bits = self._bits()
                bits.copy_to_device(np.asarray(ary).view(bits.dtype), stream)
            else:  # a device array, or a mistake
                super().copy_to_device(ary, stream)

        def copy_to_host(self, ary: Any = None, stream: Any = 0) -> Any:
            """Copy this array to ``ary`` or a new host array; see Numba's."""
            if not self._can_view(ary):
                return super().copy_to_host(ary, stream)
            bits = self._bits()
            bits.copy_to_host(ary.view(bits.dtype), stream)
            return ary

        def _can_view(self, ary: Any) -> bool:
            return isinstance(ary, np.ndarray | np.generic) and ary.dtype == self.dtype

        def _bits(self) -> Any:
            # Numba's view fails for arrays without axes.
            dtype = f"u{self.dtype.itemsize}"
            shape, strides = self.shape, self.strides
            return DeviceNDArray(shape, strides, dtype, self.stream, self.gpu_data)

    return DeviceNDArray, BitsNDArray
