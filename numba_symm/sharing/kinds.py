"""Kinds of memory: how a process exports each, and how another one maps it.

``ipc``   ``cudaMalloc``, by a legacy handle of 64 bytes
``vmm``   allocations of this library, by a file descriptor
``pool``  stream-ordered memory of an exportable pool: a descriptor for the pool, 64
          bytes for the allocation
``host``  under Numba's simulator: shared host memory, by a file descriptor
``none``  nothing: the array has no elements
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, BackendError, DriverError
from numba_symm.gpu import driver
from numba_symm.gpu.arrays import Memory
from numba_symm.gpu.events import current_device
from numba_symm.launch import devices
from numba_symm.memory import backends
from numba_symm.memory.allocator import block_around
from numba_symm.memory.backends import HostBackend, Mapping

GOING_WITH_ARRAYS = ("host",)
"""Kinds whose mapping ends with its last array, without an explicit unmap."""

_EXPORT_BYTES = 64  # of CUmemPoolPtrExportData, read by address as it is opaque


@dataclass(frozen=True)
class SharedAllocation:
    """The allocation of an array, in the array's own process.

    Attributes:
        kind: see above.
        base: the address of the allocation.
        nbytes: its size.
        data: its inter-process handle, if that is bytes.
        pool: the handle of its pool, for ``pool``.
        export: returns a new file descriptor, for the kinds that need one. May be
            called in any thread.
    """

    kind: str
    base: int
    nbytes: int
    data: bytes = b""
    pool: int = 0
    export: Callable[[], int] | None = None


def locate(address: int, nbytes: int) -> SharedAllocation | None:
    """Find the allocation around an array of this process.

    Returns:
        The allocation; in the simulator None if the array is in private memory.

    Raises:
        ArgumentError: no other process can map memory of this kind.
    """
    if nbytes == 0:
        return SharedAllocation("none", address, 0)
    block = block_around(address)
    if block is not None and block.backend.exports_fd:
        return SharedAllocation(
            kind=block.backend.name,
            base=block.address,
            nbytes=block.allocation.nbytes,
            export=functools.partial(block.backend.export, block.allocation),
        )
    if SIMULATED:
        return _rooms.around(address)
    _check_on_device(address, nbytes)
    return _locate_in_pool(address) or _locate_in_cuda_malloc(address)


def ordinal_of(address: int, nbytes: int) -> int:
    """Return the ordinal of the GPU of an array of this process."""
    if SIMULATED:
        return 0
    if nbytes == 0:
        return current_ordinal()
    from cuda.core import Buffer

    # cuda-bindings' cuPointerGetAttribute returns 0 for every device: cuda-python#2928
    return int(Buffer.from_handle(address, nbytes).device_id)


def current_ordinal() -> int:
    """Return the ordinal of the current GPU. Make one current if none is."""
    return 0 if SIMULATED else int(current_device().device_id)


@functools.cache
def uuid_of(ordinal: int) -> str:
    """Return a GPU's UUID, which names it in all processes."""
    return devices.visible_gpus()[ordinal].uuid


def _check_on_device(address: int, nbytes: int) -> None:
    from cuda.core import Buffer

    buffer = Buffer.from_handle(address, nbytes)
    if buffer.is_host_accessible:
        raise _refused(address, "managed memory or pinned host memory")


def _locate_in_pool(address: int) -> SharedAllocation | None:
    from cuda.bindings import driver as binding

    attribute = binding.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    try:
        pool = int(driver.call("cuPointerGetAttribute", attribute, address) or 0)
    except DriverError:  # some drivers raise it for memory outside of pools
        return None
    if not pool:
        return None
    try:
        base, nbytes = driver.call("cuMemGetAddressRange", address)
        data = driver.call("cuMemPoolExportPointer", base)
    except DriverError as error:
        raise _refused(
            address,
            "stream-ordered memory (cudaMallocAsync) of a pool that cannot be exported "
            f"({error}; cuda.core.DeviceMemoryResource with ipc_enabled=True makes a "
            "pool that can)",
        ) from None
    return SharedAllocation(
        kind="pool",
        base=int(base),
        nbytes=int(nbytes),
        data=ctypes.string_at(data.getPtr(), _EXPORT_BYTES),
        pool=pool,
        export=functools.partial(_export_pool, pool),
    )


def _export_pool(pool: int) -> int:
    from cuda.bindings import driver as binding

    kind = binding.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = binding.CUmemoryPool(pool)
    return int(driver.call("cuMemPoolExportToShareableHandle", handle, kind, 0))


def _locate_in_cuda_malloc(address: int) -> SharedAllocation:
    try:
        found = backends.allocation_around(address, "share")
    except BackendError:
        raise _refused(
            address,
            "neither from cudaMalloc nor from this library (memory of CUDA's virtual "
            "memory management that another library mapped, such as torch's expandable "
            "segments, or memory that another library imported)",
        ) from None
    return SharedAllocation(
        "ipc", found.address, found.nbytes, backends.IpcBackend().export(found)
    )


def _refused(address: int, kind: str) -> ArgumentError:
    return ArgumentError(
        f"share: the memory at {address:#x} is {kind}, which another process cannot "
        "map; copy the array into memory of cudaMalloc (the default allocators of "
        "Numba, CuPy and torch) or of comm.empty, and share the copy"
    )


# Mapping a producer's allocation


def map_memory(
    kind: str,
    nbytes: int,
    data: bytes,
    pool: tuple[Any, ...],
    fetch: Callable[[], AbstractContextManager[tuple[int, int]]],
    ordinal: int,
    own: bool,
) -> Mapping:
    """Map another process' allocation on a GPU.

    Args:
        kind: as in the producer's :class:`SharedAllocation`.
        nbytes: likewise.
        data: likewise.
        pool: identifies the producer's pool, for ``pool``.
        fetch: requests a descriptor from the producer, and closes it after a block.
        ordinal: the GPU's ordinal in this process.
        own: whether the memory is on that GPU.
    """
    if kind == "pool":
        imported = functools.partial(_import_pool, fetch, ordinal, own)
        address = _pools.open((*pool, ordinal), data, imported)
        return Mapping(address, nbytes, (*pool, ordinal))
    backend = _backend(kind, ordinal)
    if not backend.exports_fd:
        return backend.open(data, nbytes)  # type: ignore[no-any-return]
    with fetch() as (fd, _):
        return backend.open(fd, nbytes)  # type: ignore[no-any-return]


def unmap_memory(kind: str, mapping: Mapping, ordinal: int) -> None:
    """Unmap another process' allocation, when all work that uses it is done."""
    if kind == "pool":
        _pools.close(mapping.resource, mapping.address)
    else:
        _backend(kind, ordinal).close(mapping)


@functools.cache
def _backend(kind: str, ordinal: int) -> Any:
    return backends.create(kind, ordinal)


class _ImportedPools:
    """Other processes' pools, each imported once while an allocation is mapped."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may close one within another
        self._handles: dict[tuple[Any, ...], Any] = {}
        self._users: dict[tuple[Any, ...], int] = {}

    def open(
        self, key: tuple[Any, ...], data: bytes, imported: Callable[[], Any]
    ) -> int:
        from cuda.bindings import driver as binding

        exported = binding.CUmemPoolPtrExportData()
        ctypes.memmove(exported.getPtr(), data, _EXPORT_BYTES)
        with self._lock:
            if key not in self._handles:
                self._handles[key] = imported()
                self._users[key] = 0
            self._users[key] += 1
            try:
                pool = self._handles[key]
                return int(driver.call("cuMemPoolImportPointer", pool, exported))
            except BaseException:
                self._leave(key)
                raise

    def close(self, key: tuple[Any, ...], address: int) -> None:
        driver.call("cuCtxSynchronize")  # because cuMemFree does not wait
        with self._lock:
            try:
                driver.call("cuMemFree", address)
            finally:
                self._leave(key)

    def _leave(self, key: tuple[Any, ...]) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            driver.call("cuMemPoolDestroy", self._handles.pop(key))


def _import_pool(
    fetch: Callable[[], AbstractContextManager[tuple[int, int]]],
    ordinal: int,
    own: bool,
) -> Any:
    from cuda.bindings import driver as binding

    kind = binding.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    with fetch() as (fd, _):
        pool = driver.call("cuMemPoolImportFromShareableHandle", fd, kind, 0)
    if own:
        return pool
    try:
        driver.call("cuMemPoolSetAccess", pool, [backends.access_of(ordinal)], 1)
    except BaseException:
        driver.call("cuMemPoolDestroy", pool)
        raise
    return pool


_pools = _ImportedPools()


# Shared memory for copies of the simulator's private arrays

_CHUNK = 16 << 20
_ALIGNMENT = 64


class _Pool:
    """Shared host memory, assigned from its beginning to its end."""

    def __init__(self, nbytes: int):
        backend = HostBackend()
        self.allocation = backend.allocate(nbytes)
        self.export = functools.partial(backend.export, self.allocation)
        self.end = 0
        self.rooms = 0
        weakref.finalize(self, backend.free, self.allocation).atexit = False

    def leave(self) -> None:
        self.rooms -= 1
        if self.rooms == 0:
            self.end = 0


class _CopyMemory:
    """Memory for copies, of which many small ones share a chunk and a descriptor."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # finalizers take it, too
        self._current: _Pool | None = None
        self._chunks: weakref.WeakSet[_Pool] = weakref.WeakSet()

    def copy(self, array: Any) -> Memory:
        """Return new shared memory that holds an array's elements in C order."""
        host = np.ascontiguousarray(array.copy_to_host())
        room = self._take(host.nbytes)
        ctypes.memmove(room.address, host.ctypes.data, host.nbytes)
        return room

    def around(self, address: int) -> SharedAllocation | None:
        """Return the chunk around an address, or None."""
        with self._lock:
            for chunk in self._chunks:
                found = chunk.allocation
                if 0 <= address - found.address < found.nbytes:
                    return SharedAllocation(
                        "host", found.address, found.nbytes, export=chunk.export
                    )
        return None

    def _take(self, nbytes: int) -> Memory:
        with self._lock:
            chunk = self._current
            if nbytes > _CHUNK // 4:
                chunk = self._new(nbytes)
            elif chunk is None or chunk.end + nbytes > chunk.allocation.nbytes:
                chunk = self._current = self._new(_CHUNK)
            # Before an object is made, because a finalizer may free rooms then.
            start = chunk.end
            chunk.end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            chunk.rooms += 1
            room = Memory(chunk.allocation.address + start, nbytes, chunk)
            weakref.finalize(room, self._leave, chunk).atexit = False
            return room

    def _new(self, nbytes: int) -> _Pool:
        chunk = _Pool(nbytes)
        self._chunks.add(chunk)
        return chunk

    def _leave(self, chunk: _Pool) -> None:
        with self._lock:
            chunk.leave()


_rooms = _CopyMemory()


def private_copy(array: Any) -> Memory:
    """Return shared memory with a copy of a simulator's array, in C order."""
    return _rooms.copy(array)
