"""Small messages, whose data is part of their envelope.

The data passes through host memory. So no kernel and no copy between GPUs has to wait
for the work of another process on a shared GPU, and the receiver maps no memory.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np

from numba_symm import driver
from numba_symm.environment import SIMULATED

MOST = 1 << 14
"""Bytes of such a message, at most."""

_TOGETHER = 32  # pieces that are allocated together
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context


class PinnedRoom(NamedTuple):
    """Pinned host memory for the copy of one message to or from the device.

    Attributes:
        address: of ``MOST`` bytes.
        data: the same as an array of bytes.
    """

    address: int
    data: Any


_free: list[PinnedRoom] = []


def take() -> PinnedRoom:
    """Return pinned memory, which the caller gives back after its copy has ended."""
    while True:
        try:
            return _free.pop()
        except IndexError:  # also if another thread took the last one
            _free.extend(_made())


def give_back(pinned: PinnedRoom) -> None:
    """Let other messages use the memory."""
    _free.append(pinned)


def _made() -> list[PinnedRoom]:
    """Allocate some. They stay until the process ends."""
    nbytes = MOST * _TOGETHER
    if SIMULATED:
        whole = np.empty(nbytes, np.uint8)
    else:
        first = int(driver.call("cuMemHostAlloc", nbytes, _PORTABLE))
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(first))
    parts = whole.reshape(_TOGETHER, MOST)
    return [PinnedRoom(int(part.ctypes.data), part) for part in parts]
