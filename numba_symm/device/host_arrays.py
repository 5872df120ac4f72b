"""Arrays over host memory, which the simulator's device functions return."""

import ctypes
from typing import Any

import numpy as np

from numba_symm.arguments import refuse_misaligned
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
