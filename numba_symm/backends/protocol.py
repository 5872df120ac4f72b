"""What a backend does: allocate, export, import and map, unmap, free."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Allocation:
    """Memory of this process that peers can map.

    Attributes:
        address: where it lies here.
        nbytes: its size, rounded up to what the backend can map.
        resource: what the backend needs to export and free it.
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
    """A kind of memory. No method involves another rank.

    Attributes:
        name: as in ``NUMBA_SYMM_BACKEND``.
        exports_fd: whether handles are file descriptors, which travel over a
            socket and are closed after use, or bytes.
        frees_while_mapped: whether an allocation may be freed while peers still
            have it mapped.
    """

    name: str
    exports_fd: bool
    frees_while_mapped: bool

    def allocate(self, nbytes: int, ranks: int = 1) -> Allocation:
        """Return at least ``nbytes`` of zeroed memory.

        Args:
            nbytes: how much this process needs.
            ranks: how many processes allocate as much now; of interest where their
                memory is one.
        """
        ...

    def free(self, allocation: Allocation) -> None:
        """Give the memory back."""
        ...

    def export(self, allocation: Allocation) -> Any:
        """Return a descriptor (the caller closes it) or bytes naming the memory."""
        ...

    def open(self, handle: Any, nbytes: int) -> Mapping:
        """Map a peer's memory; the handle stays the caller's."""
        ...

    def close(self, mapping: Mapping) -> None:
        """Unmap a peer's memory."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to an address in this process, mapped ones included."""
        ...

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from an address in this process."""
        ...

    def fill(self, address: int, nbytes: int, byte: int = 0) -> None:
        """Set every byte; done when it returns."""
        ...
