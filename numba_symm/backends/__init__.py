"""Where symmetric memory comes from and how a peer maps it: one file a kind."""

from numba_symm.backends.host import HostBackend
from numba_symm.backends.ipc import IpcBackend
from numba_symm.backends.protocol import Allocation, Backend, Mapping
from numba_symm.backends.vmm import VmmBackend
from numba_symm.errors import ArgumentError


def create(name: str, ordinal: int) -> Backend:
    """Return the backend called ``name`` for the GPU with that ordinal."""
    if name == "vmm":
        return VmmBackend(ordinal)
    if name == "ipc":
        return IpcBackend()
    if name == "host":
        return HostBackend()
    raise ArgumentError(f"there is no backend {name!r}; use vmm, ipc or host")


__all__ = ["Allocation", "Backend", "Mapping", "create"]
