"""The interface of backends: allocate, export, map, unmap, free."""

from dataclasses import dataclass
from typing import Any, Protocol


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


class Backend(Protocol):
    """Allocates memory and maps that of peers. No method is collective.

    Attributes:
        name: as in ``NUMBA_SYMM_BACKEND``.
        exports_fd: whether handles are file descriptors, which are sent over a socket
            and closed after use. Otherwise they are bytes.
        frees_while_mapped: whether an allocation may be freed while peers have it
            mapped.
    """

    name: str
    exports_fd: bool
    frees_while_mapped: bool

    def allocate(self, nbytes: int, ranks: int = 1) -> Allocation:
        """Return at least ``nbytes`` of zeroed memory.

        Args:
            nbytes: the size that this process needs.
            ranks: the number of processes that allocate as much now; for backends in
                which they share one memory.
        """
        ...

    def free(self, allocation: Allocation) -> None:
        """Free the memory."""
        ...

    def export(self, allocation: Allocation) -> Any:
        """Return a handle of the memory. The caller closes a file descriptor."""
        ...

    def open(self, handle: Any, nbytes: int) -> Mapping:
        """Map a peer's memory. The caller keeps the handle."""
        ...

    def close(self, mapping: Mapping) -> None:
        """Unmap a peer's memory."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to an address in this process, also of mapped memory."""
        ...

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from an address in this process."""
        ...

    def fill(self, address: int, nbytes: int, byte: int = 0) -> None:
        """Set every byte, and wait until that is done."""
        ...
