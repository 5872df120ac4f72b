"""Legacy CUDA IPC: memory of ``cudaMalloc``, with handles of 64 bytes.

The module also finds the allocation of an array that another library has allocated by
``cudaMalloc``.

Source: `CUDA driver API, memory management
<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html>`_ (``cuIpc*``).
"""

import ctypes
from typing import Any

from numba_symm import driver
from numba_symm.backends.device_memory import DeviceMemory
from numba_symm.backends.protocol import Allocation, Mapping
from numba_symm.errors import BackendError, DriverError

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

    def export(self, allocation: Allocation) -> bytes:
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
