"""Makes Numba's device arrays: over given memory, and new ones.

In the simulator, arrays are those of Numba's simulator, over host memory.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import cuda

from numba_symm import numba_arrays, reserve
from numba_symm.arrays import checked_shape
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, BackendError


class Memory:
    """Memory that arrays view; each of them holds a reference to it.

    Attributes:
        owner: the object that keeps the memory mapped.
    """

    def __init__(self, address: int, nbytes: int, owner: Any):
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def array(self, shape: Any, dtype: Any, offset: int = 0) -> Any:
        """Return a C-contiguous Numba device array at ``offset`` bytes."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if SIMULATED:
            view = SimpleNamespace(  # to which NumPy's array holds a reference
                memory=self, __array_interface__=self.__cuda_array_interface__
            )
            flat = np.asarray(view)[offset : offset + nbytes]
            return _simulator_array(flat.view(dtype).reshape(shape))
        return _device_array(self, shape, dtype, offset)


def _simulator_array(array: Any) -> Any:
    """Return the simulator's array over host memory, without a copy."""
    kind = type(cuda.device_array(0, np.uint8))
    return kind(array)


def _device_array(
    memory: Memory, shape: Any, dtype: Any, offset: int, order: str = "C"
) -> Any:
    """Return Numba's array, made directly because bfloat16 has no typestr."""
    from cuda.bindings import driver

    pointer = cuda.MemoryPointer(
        cuda.current_context(),
        driver.CUdeviceptr(memory.address + offset),
        max(math.prod(shape) * dtype.itemsize, 1),
        owner=memory,
    )
    strides = numba_arrays.dense_strides(shape, dtype.itemsize, order)
    return numba_arrays.device_array(shape, strides, dtype, pointer)


def empty(
    shape: tuple[int, ...], dtype: np.dtype[Any], what: str, order: str = "C"
) -> Any:
    """Return a new Numba array in ordinary device memory.

    Raises:
        ArgumentError: no memory can hold it, or a stream is being captured.
        BackendError: there is not enough memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= 1 << 63:
        checked_shape(shape, dtype, what)
    try:
        if SIMULATED or nbytes == 0:
            return cuda.device_array(shape, dtype, order=order)
        kept = reserve.current()
        memory = _NewOutput(*kept.take(nbytes), kept)
        return _device_array(memory, shape, dtype, 0, order)
    except ArgumentError as error:
        raise ArgumentError(f"{what}: {error}") from error
    except Exception as error:  # Numba's and NumPy's have no common class
        raise BackendError(
            f"{what}: expected room for a new output of {nbytes} bytes, got {error}; "
            "pass out=, or free memory"
        ) from error


class _NewOutput(Memory):
    """The memory of a new output, which the reserve gets back."""

    def __del__(self) -> None:
        self.owner.drop((self.address, self.nbytes))
