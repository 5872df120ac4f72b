"""Where symmetric memory comes from and how a peer maps it: one file a kind."""

from numba_symm.backends.protocol import Allocation, Backend, Mapping
from numba_symm.errors import ArgumentError


def create(name: str, ordinal: int) -> Backend:
    """Return the backend called ``name`` for the GPU with that ordinal."""
    if name == "vmm":
        from numba_symm.backends.vmm import VmmBackend

        return VmmBackend(ordinal)
    if name == "ipc":
        from numba_symm.backends.ipc import IpcBackend

        return IpcBackend()
    if name == "host":
        from numba_symm.backends.host import HostBackend

        return HostBackend()
    raise ArgumentError(f"there is no backend {name!r}; use vmm, ipc or host")


__all__ = ["Allocation", "Backend", "Mapping", "create"]
