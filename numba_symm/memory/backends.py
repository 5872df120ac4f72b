"""Backends of symmetric memory: CUDA virtual memory, CUDA IPC, and host memory.

Legacy CUDA IPC: memory of ``cudaMalloc``, with handles of 64 bytes.

The module also finds the allocation of an array that another library has allocated by
``cudaMalloc``.

Source: `CUDA driver API, memory management
<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html>`_ (``cuIpc*``).

CUDA virtual memory management: physical blocks, exported as file descriptors.

Source: `CUDA driver API, virtual memory management
<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>`_.

The memory that this node has left for Numba's simulator.

Linux allocates more shared memory than there is, and kills a process that writes to too
much of it. So the simulator checks before it allocates.
"""

import ctypes
import faulthandler
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba_symm.errors import ArgumentError, BackendError, DriverError
from numba_symm.gpu import driver
from numba_symm.launch.store import StoreExchange


@dataclass(frozen=True)
class Allocation:
    """Memory of this process that peers can map.

    Attributes:
        address: its address in this process.
        nbytes: its size, rounded up to a size that the backend can map.
        resource: the backend's object for it.
    """

    address: int
    nbytes: int
    resource: Any


@dataclass(frozen=True)
class Mapping:
    """A peer's memory, mapped into this process at ``address``."""

    address: int
    nbytes: int
    resource: Any


class DeviceMemory:
    """Synchronous accesses of the host to any address that a GPU can access."""

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to a device address, a peer's mapped memory included."""
        driver.call("cuMemcpyHtoD", address, data, len(data))
        driver.call("cuCtxSynchronize")

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from a device address."""
        data = ctypes.create_string_buffer(nbytes)
        driver.call("cuMemcpyDtoH", ctypes.addressof(data), address, nbytes)
        return data.raw

    def fill(self, address: int, nbytes: int, byte: int = 0) -> None:
        """Set every byte, and wait until that is done.

        Raises:
            DriverError: it failed; nothing will be written, so the caller may unmap.
        """
        # In a capture, the wait fails. Then nothing may have been enqueued before.
        driver.call("cuCtxSynchronize")
        driver.call("cuMemsetD8", address, byte, nbytes)
        driver.call("cuCtxSynchronize")


_HANDLE_BYTES = 64  # read by address, because handles are opaque in cuda-bindings 13.4
_GRANULARITY = 2 << 20  # whole pages, because a handle exports a whole page


class IpcBackend(DeviceMemory):
    """``cuMemAlloc`` memory that peers open by handle."""

    name = "ipc"
    exports_fd = False
    frees_while_mapped = False  # CUDA leaves that undefined

    def allocate(self, nbytes: int, ranks: int = 1) -> Allocation:
        """Return at least ``nbytes`` of zeroed memory on the current GPU."""
        size = -(-max(nbytes, 1) // _GRANULARITY) * _GRANULARITY
        address = int(driver.call("cuMemAlloc", size))
        try:
            self.fill(address, size)
        except BaseException:
            driver.call("cuMemFree", address)
            raise
        return Allocation(address, size, None)

    def free(self, allocation: Allocation) -> None:
        """Free the memory, which all peers must have unmapped."""
        driver.call("cuMemFree", allocation.address)

    def export(self, allocation: Allocation) -> Any:
        """Return the handle of the allocation."""
        handle = driver.call("cuIpcGetMemHandle", allocation.address)
        return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def open(self, handle: Any, nbytes: int) -> Mapping:
        """Map the allocation of a peer's handle."""
        from cuda.bindings import driver as binding

        ipc = binding.CUipcMemHandle()
        ctypes.memmove(ipc.getPtr(), bytes(handle), _HANDLE_BYTES)
        flag = binding.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(driver.call("cuIpcOpenMemHandle", ipc, flag))
        return Mapping(address, nbytes, None)

    def close(self, mapping: Mapping) -> None:
        """Wait for the GPU, and unmap a peer's allocation.

        Raises:
            DriverError: the wait failed; the allocation stays mapped.
        """
        driver.call("cuCtxSynchronize")
        driver.call("cuIpcCloseMemHandle", mapping.address)


def allocation_around(address: int, what: str) -> Allocation:
    """Return the ``cudaMalloc`` allocation that contains ``address``.

    Raises:
        BackendError: the memory is of another kind, which has no legacy handle.
    """
    try:
        base, nbytes = driver.call("cuMemGetAddressRange", address)
        driver.call("cuIpcGetMemHandle", base)
    except DriverError as error:
        raise BackendError(
            f"{what}: memory at {address:#x} cannot be shared between processes "
            f"({error}): expected memory of cudaMalloc, not of a pool, and not managed "
            "memory; copy the array into one of comm.empty()"
        ) from None
    return Allocation(int(base), int(nbytes), None)


class VmmBackend(DeviceMemory):
    """Physical blocks of ``cuMemCreate``, mapped in this process and in peers."""

    name = "vmm"
    exports_fd = True
    frees_while_mapped = True

    def __init__(self, ordinal: int):
        from cuda.bindings import driver as cuda

        self._ordinal = ordinal
        kinds = cuda.CUmemAllocationGranularity_flags
        recommended = kinds.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._granularity = int(
            driver.call(
                "cuMemGetAllocationGranularity", self._properties(), recommended
            )
        )

    def allocate(self, nbytes: int, ranks: int = 1) -> Allocation:
        """Return at least ``nbytes`` of zeroed memory on this GPU."""
        size = -(-max(nbytes, 1) // self._granularity) * self._granularity
        with ExitStack() as undo:
            handle = driver.call("cuMemCreate", size, self._properties(), 0)
            undo.callback(driver.call, "cuMemRelease", handle)
            address, unmap = map_block(handle, size, self._ordinal)
            undo.push(unmap)
            self.fill(address, size)
            return Allocation(address, size, (handle, undo.pop_all()))

    def free(self, allocation: Allocation) -> None:
        """Unmap the block and release it. Peers' mappings keep the memory.

        Raises:
            DriverError: the wait for the GPU failed; the block stays mapped.
        """
        driver.call("cuCtxSynchronize")
        allocation.resource[1].close()

    def export(self, allocation: Allocation) -> Any:
        """Return a new file descriptor of the block."""
        return int(
            driver.call(
                "cuMemExportToShareableHandle", allocation.resource[0], _posix_fd(), 0
            )
        )

    def open(self, handle: Any, nbytes: int) -> Mapping:
        """Import the block of a descriptor, and map it on this GPU."""
        with ExitStack() as undo:
            block = driver.call(
                "cuMemImportFromShareableHandle", int(handle), _posix_fd()
            )
            undo.callback(driver.call, "cuMemRelease", block)
            address, unmap = map_block(block, nbytes, self._ordinal)
            undo.push(unmap)
            return Mapping(address, nbytes, undo.pop_all())

    def close(self, mapping: Mapping) -> None:
        """Unmap a peer's block and drop this process' reference to it.

        Raises:
            DriverError: the wait for the GPU failed; the block stays mapped.
        """
        driver.call("cuCtxSynchronize")
        mapping.resource.close()

    def _properties(self) -> Any:
        from cuda.bindings import driver as cuda

        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        location = cuda.CUmemLocation()
        location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._ordinal
        properties.location = location
        properties.requestedHandleTypes = _posix_fd()
        return properties


def map_block(handle: Any, nbytes: int, ordinal: int) -> tuple[int, ExitStack]:
    """Map a physical block for reading and writing by one GPU.

    Args:
        handle: a ``CUmemGenericAllocationHandle``, of this process or imported.
        nbytes: its size, a multiple of the allocation granularity.
        ordinal: the GPU that gets access.

    Returns:
        The address, and a stack that unmaps the block when it is closed. It does not
        wait for kernels, so their work on the block must be done before.
    """
    with ExitStack() as undo:
        address = driver.call("cuMemAddressReserve", nbytes, 0, 0, 0)
        undo.callback(driver.call, "cuMemAddressFree", address, nbytes)
        driver.call("cuMemMap", address, nbytes, 0, handle, 0)
        undo.callback(driver.call, "cuMemUnmap", address, nbytes)
        driver.call("cuMemSetAccess", address, nbytes, [access_of(ordinal)], 1)
        return int(address), undo.pop_all()


def access_of(ordinal: int) -> Any:
    """Return the driver's description of a GPU's access: it reads and writes."""
    from cuda.bindings import driver as cuda

    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _posix_fd() -> Any:
    from cuda.bindings import driver as cuda

    types = cuda.CUmemAllocationHandleType
    return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def available() -> int:
    """Return the bytes that this process can still use, on the node and in its groups.

    Memory that caches files counts as free. Swap space does not count.
    """
    return min([_of_node(), *_of_groups()])


def _of_node() -> int:
    for line in (_PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/meminfo has no MemAvailable")


def _of_groups() -> Iterator[int]:
    """Yield the bytes that are left in each control group that has a limit.

    If a container hides the groups above its own, its own is the root of the mount.
    """
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, limit, used, prefix = _GROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit = _GROUPS / "memory", "memory.limit_in_bytes"
            used, prefix = "memory.usage_in_bytes", "total_"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                most = (folder / limit).read_text().strip()
                if most != "max":
                    taken = int((folder / used).read_text())
                    yield int(most) - taken + _caching(folder, prefix)
            except OSError:  # not visible here, or without a limit
                pass
            if folder == root:
                break


def _caching(folder: Path, prefix: str) -> int:
    """Return the bytes of files that a group caches, which can be freed."""
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = dict(line.split(" ", 1) for line in lines)
    kinds = (f"{prefix}inactive_file", f"{prefix}active_file")
    return sum(int(stat.get(kind, 0)) for kind in kinds)


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

    def export(self, allocation: Allocation) -> Any:
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


@contextmanager
def file_of_all(
    exchange: StoreExchange, channel: Any, name: str, nbytes: int
) -> Iterator[int]:
    """Yield a descriptor of new memory that all ranks map in the block. Collective.

    Args:
        exchange: the ranks.
        channel: an ``IpcChannel`` of these.
        name: what it is.
        nbytes: its size.
    """
    with ExitStack() as files:
        with exchange.agreed(f"making the {name}"):
            if channel.rank == 0:
                fd = memory_file(f"numba_symm {name}", nbytes)
                files.callback(os.close, fd)
                for other in range(1, channel.size):
                    channel.send_fd(other, fd)
        with exchange.agreed(f"sending the {name}"):
            if channel.rank != 0:
                fd = channel.recv_fd(0)
                files.callback(os.close, fd)
        yield fd


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
    left = available()
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


Backend = VmmBackend | IpcBackend | HostBackend
"""What allocates memory and maps that of peers. No method is collective.

Attributes:
    name: as in ``NUMBA_SYMM_BACKEND``.
    exports_fd: whether handles are file descriptors, which are sent over a socket and
        closed after use. Otherwise they are bytes.
    frees_while_mapped: whether an allocation may be freed while peers have it mapped.
"""


def create(name: str, ordinal: int) -> Backend:
    """Return the backend ``name`` for the GPU ``ordinal``."""
    if name == "vmm":
        return VmmBackend(ordinal)
    if name == "ipc":
        return IpcBackend()
    if name == "host":
        return HostBackend()
    raise ArgumentError(f"expected backend vmm, ipc or host, got {name!r}")


__all__ = ["Allocation", "Backend", "Mapping", "create"]
