"""Shared host memory for Numba's CUDA simulator: memory files that every rank maps."""

import ctypes
import faulthandler
import fcntl
import mmap
import os
import threading
from contextlib import ExitStack
from typing import Any

from numba_symm.backends import host_memory
from numba_symm.backends.protocol import Allocation, Mapping
from numba_symm.errors import BackendError


class HostBackend:
    """Anonymous files, which peers map by their descriptors."""

    name = "host"
    exports_fd = True
    frees_while_mapped = True

    def __init__(self) -> None:
        # A kernel's access outside of any memory ends the process. Print its location.
        if not faulthandler.is_enabled():
            faulthandler.enable(2)

    def allocate(self, nbytes: int, ranks: int = 1) -> Allocation:
        """Return at least ``nbytes`` of zeroed memory."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with _lock:
                _refuse_too_much(size, ranks)
            with ExitStack() as undo:
                fd = memory_file("numba_symm", size)
                undo.callback(os.close, fd)
                memory = mapped(fd, size)
                undo.pop_all()
        except (OSError, OverflowError) as error:
            raise BackendError(f"cannot allocate {size} bytes: {error}") from error
        _allocated[fd] = size
        return Allocation(address_of(memory), size, (fd, memory))

    def free(self, allocation: Allocation) -> None:
        """Free the memory, which lives until no array views it."""
        fd = allocation.resource[0]
        with _lock:
            del _allocated[fd]
            os.close(fd)

    def export(self, allocation: Allocation) -> int:
        """Return a new descriptor of the file."""
        return os.dup(allocation.resource[0])

    def open(self, handle: Any, nbytes: int) -> Mapping:
        """Map the file of a peer's descriptor."""
        found = os.fstat(handle).st_size
        if found < nbytes:
            raise BackendError(
                f"expected a peer's memory of {nbytes} bytes, got {found}"
            )
        try:
            memory = mapped(handle, nbytes)
        except OSError as error:
            raise BackendError(f"cannot map {nbytes} bytes: {error}") from error
        return Mapping(address_of(memory), nbytes, memory)

    def close(self, mapping: Mapping) -> None:
        """Do nothing: the mapping ends with the last array that views it."""

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to an address."""
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from an address."""
        return ctypes.string_at(address, nbytes)

    def fill(self, address: int, nbytes: int, byte: int = 0) -> None:
        """Set every byte."""
        ctypes.memset(address, byte, nbytes)


def memory_file(name: str, nbytes: int) -> int:
    """Return the descriptor of a new memory file, whose size cannot be changed.

    If a file were truncated, every process that accesses its mapping would end.

    Args:
        name: the file's name in ``/proc``.
        nbytes: its size.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def mapped(fd: int, nbytes: int) -> mmap.mmap:
    """Return a mapping of a file that needs no descriptor, unlike Python's own.

    Python duplicates the descriptor. So it maps no file here, and the file replaces
    that memory before anything uses it.
    """
    memory = mmap.mmap(-1, nbytes)
    address, how = address_of(memory), mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap(address, nbytes, how, mmap.MAP_SHARED | _FIXED, fd, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return memory


_FIXED = 0x10  # MAP_FIXED: at exactly this address
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_size_t
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


# By the descriptor of an allocation's file: an upper limit of its bytes without memory.
_allocated: dict[int, int] = {}
_lock = threading.RLock()  # other threads close none while one looks at them all


def _refuse_too_much(nbytes: int, ranks: int) -> None:
    """Raise BackendError unless all ranks' arrays fit into the node's memory.

    Memory that was allocated but not written is not used yet. All ranks have as much of
    it, because their allocations are symmetric.
    """
    left = host_memory.available()
    # Look at the files only if their sum does not fit, because there may be thousands.
    if ranks * (nbytes + sum(_allocated.values())) <= left:
        return
    for fd in list(_allocated):
        _look_at(fd)
    unwritten = sum(_allocated.values())
    if ranks * (nbytes + unwritten) > left:
        raise BackendError(
            f"expected {nbytes} bytes on each of {ranks} ranks to fit into the memory "
            f"of this node, got {left} bytes left for all, of which earlier arrays "
            f"will take {ranks * unwritten}; allocate less, or start fewer ranks"
        )


def _look_at(fd: int) -> None:
    """Note how many bytes of a file use no memory yet; their number never grows."""
    try:
        found = os.fstat(fd)
    except OSError:  # a finalizer of this thread has freed it meanwhile
        return
    unwritten = found.st_size - _BLOCK * found.st_blocks
    if fd in _allocated:
        _allocated[fd] = unwritten


_BLOCK = 512  # bytes, what st_blocks counts


def address_of(memory: mmap.mmap) -> int:
    """Return the address of a writable mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
