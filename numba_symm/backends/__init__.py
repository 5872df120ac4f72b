"""Backends: allocation of symmetric memory and mappings of peers' memory."""

from numba_symm.backends.host import HostBackend
from numba_symm.backends.ipc import IpcBackend
from numba_symm.backends.protocol import Allocation, Backend, Mapping
from numba_symm.backends.vmm import VmmBackend
from numba_symm.errors import ArgumentError


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
