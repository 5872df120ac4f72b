"""Buffers of host types over memory of the GPU, such as ``MPI.memory.fromaddress``.

A program makes such a buffer from a pointer, for a library whose arrays have no
interface. The buffer's type does not show whether its memory is on the GPU, so this
module asks the driver. MPI would read the memory as the host's.
"""

import array
import ctypes
from collections.abc import Collection
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import arrays, driver
from numba_symm.environment import SIMULATED
from numba_symm.own_arrays import Memory

if SIMULATED:
    from numba_symm import simulator

_OWNERS = (bytes, bytearray, array.array)
ASKED = (MPI.buffer, memoryview, ctypes.Array, np.ndarray)
"""Buffers that may be over memory of the GPU."""


def there(buffer: Any) -> Any:
    """Return a device array of the bytes of a buffer over memory of the GPU.

    Any other object is returned unchanged. A buffer of 0 bytes has an address only. It
    is treated as extending to the end of the allocation, because a datatype gives its
    size.
    """
    if not isinstance(buffer, ASKED) or arrays.on_device(buffer) or _is_own(buffer):
        return buffer
    try:
        place = MPI.buffer(buffer)
    except (TypeError, ValueError, BufferError):  # mpi4py's call refuses it, too
        return buffer
    if not place.address or not any_on_device([place.address]):
        return buffer
    nbytes = place.nbytes or _end(place.address) - place.address
    return Memory(place.address, nbytes, buffer).array(nbytes, np.dtype(np.uint8))


def on_device(buffer: Any) -> bool:
    """Return whether an object is a device array, or a buffer over such memory."""
    return arrays.on_device(buffer) or there(buffer) is not buffer


def _is_own(buffer: Any) -> bool:
    """Return whether Python or NumPy has allocated the memory of a buffer."""
    while isinstance(buffer, np.ndarray | memoryview):
        if isinstance(buffer, memoryview):
            buffer = buffer.obj
        elif buffer.base is None:
            return bool(buffer.flags.owndata)
        else:
            buffer = buffer.base
    return isinstance(buffer, _OWNERS)


def any_on_device(addresses: Collection[int]) -> bool:
    """Return whether one of several addresses is of the GPU's memory."""
    if SIMULATED:
        return simulator.end_of_array(addresses) is not None
    from cuda.core import Buffer

    return any(not Buffer.from_handle(each, 1).is_host_accessible for each in addresses)


def _end(address: int) -> int:
    """Return the end of an allocation."""
    if SIMULATED:
        found = simulator.end_of_array([address])
        assert found is not None
        return found
    base, nbytes = driver.call("cuMemGetAddressRange", address)
    return int(base) + int(nbytes)
