"""CUDA virtual memory management: physical blocks, exported as file descriptors.

Source: `CUDA driver API, virtual memory management
<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>`_.
"""

from contextlib import ExitStack
from typing import Any

from numba_symm import driver
from numba_symm.backends.device_memory import DeviceMemory
from numba_symm.backends.protocol import Allocation, Mapping


class VmmBackend(DeviceMemory):
    """Physical blocks of ``cuMemCreate``, mapped in this process and in peers."""

    name = "vmm"
    exports_fd = True
    frees_while_mapped = True

    def __init__(self, ordinal: int):
        self._ordinal = ordinal
        self._granularity = int(
            driver.call(
                "cuMemGetAllocationGranularity",
                self._properties(),
                _binding().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
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

    def export(self, allocation: Allocation) -> int:
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
        cuda = _binding()
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
    cuda = _binding()
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _binding() -> Any:
    from cuda.bindings import driver as binding

    return binding


def _posix_fd() -> Any:
    types = _binding().CUmemAllocationHandleType
    return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
