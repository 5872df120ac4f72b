"""Shared host memory, for Numba's CUDA simulator: a memfd, mapped by every rank."""

import ctypes
import mmap
import os
from contextlib import ExitStack
from typing import Any

from numba_symm.backends.protocol import Allocation, Mapping
from numba_symm.errors import BackendError


class HostBackend:
    """Anonymous files that peers map by descriptor."""

    name = "host"
    exports_fd = True
    frees_while_mapped = True

    def allocate(self, nbytes: int) -> Allocation:
        """Return at least ``nbytes`` of zeroed memory."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with ExitStack() as undo:
                fd = os.memfd_create("numba_symm", os.MFD_CLOEXEC)
                undo.callback(os.close, fd)
                os.ftruncate(fd, size)
                memory = mmap.mmap(fd, size)
                undo.pop_all()
        except (OSError, OverflowError) as error:
            raise BackendError(f"cannot allocate {size} bytes: {error}") from error
        return Allocation(address_of(memory), size, (fd, memory))

    def free(self, allocation: Allocation) -> None:
        """Give the memory back; it goes with the last array that views it."""
        os.close(allocation.resource[0])

    def export(self, allocation: Allocation) -> int:
        """Return a new descriptor of the file."""
        return os.dup(allocation.resource[0])

    def open(self, handle: Any, nbytes: int) -> Mapping:
        """Map the file behind a peer's descriptor."""
        found = os.fstat(handle).st_size
        if found < nbytes:
            raise BackendError(f"a peer's memory has {found} bytes, not {nbytes}")
        memory = mmap.mmap(handle, nbytes)
        return Mapping(address_of(memory), nbytes, memory)

    def close(self, mapping: Mapping) -> None:
        """Do nothing: the map goes with the last array that views it."""

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to an address."""
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from an address."""
        return ctypes.string_at(address, nbytes)

    def fill(self, address: int, nbytes: int, byte: int = 0) -> None:
        """Set every byte."""
        ctypes.memset(address, byte, nbytes)


def address_of(memory: mmap.mmap) -> int:
    """Return where a writable map lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
