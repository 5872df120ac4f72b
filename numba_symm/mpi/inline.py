"""Small messages, whose data is part of their envelope.

The data passes through host memory. So no kernel and no copy between GPUs has to wait
for the work of another process on a shared GPU, and the receiver maps no memory.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np

from numba_symm import driver
from numba_symm.environment import SIMULATED
from numba_symm.errors import DriverError

MOST = 3 << 10
"""Bytes of such a message, at most.

MPI must send its envelope eagerly: the receiver of a larger message may wait until the
sender calls MPI again. Open MPI's limit in shared memory is 4096 bytes with headers.
"""

_BYTES, _NUMBER = MOST, 128  # of rooms
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context


class HostRoom(NamedTuple):
    """Host memory for the copy of one message to or from the device.

    Attributes:
        address: of its first byte.
        data: the same as an array of bytes.
        pinned: whether the memory is pinned; then it is used again.
    """

    address: int
    data: Any
    pinned: bool


_free: list[HostRoom] = []


@functools.cache
def prepare() -> None:
    """Allocate pinned memory, once in a process. It stays until the process ends.

    No message allocates any, because that may wait for the GPU, where a kernel may wait
    for a rank that waits for this one.
    """
    nbytes = _BYTES * _NUMBER
    if SIMULATED:
        whole = np.empty(nbytes, np.uint8)
    else:
        try:
            first = int(driver.call("cuMemHostAlloc", nbytes, _PORTABLE))
        except DriverError:  # messages then use memory that is not pinned
            return
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(first))
    _free.extend(_room(part, True) for part in whole.reshape(_NUMBER, _BYTES))


def take() -> HostRoom:
    """Return host memory, which the caller gives back after its copy has ended.

    While all pinned memory is in use, it is not pinned. Then CUDA itself copies the
    bytes of a copy to the device before it returns.
    """
    try:
        return _free.pop()
    except IndexError:  # also if another thread took the last one
        return _room(np.empty(_BYTES, np.uint8), False)


def give_back(room: HostRoom) -> None:
    """Let other messages use the memory."""
    if room.pinned:
        _free.append(room)


def _room(data: Any, pinned: bool) -> HostRoom:
    return HostRoom(int(data.ctypes.data), data, pinned)
