"""Copies to and from device memory, shared by the backends on GPUs."""

import ctypes

from numba_symm import driver


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
