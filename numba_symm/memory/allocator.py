"""This process' allocations of symmetric memory, found by any pointer into them."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from numba_symm import arguments, backends, deferred, forks, reserve
from numba_symm.backends.protocol import Allocation, Backend
from numba_symm.errors import ArgumentError, BackendError
from numba_symm.memory.symmetric import SymmetricMemory
from numba_symm.own_arrays import Memory
from numba_symm.ranges import Ranges

_on_failure: list[Callable[[], None]] = []
_allocators: list["SymmetricMemoryAllocator"] = []


def on_allocation_failure(callback: Callable[[], None]) -> None:
    """Call ``callback`` when an allocation fails, before the second attempt."""
    _on_failure.append(callback)


class Mapped(Protocol):
    """A block that a communicator has mapped on all its ranks."""

    def note_dropped(self) -> None:
        """Note that the block's owner has dropped it. In any thread."""


class Block:
    """An allocation of this process that can be mapped by peers.

    Attributes:
        address: the address of its first byte.
        nbytes: the size that was requested.
        backend: its backend.
        allocation: the backend's allocation.
        mapped: for each communicator that has it mapped, that mapping.
        dropped: whether its owner has dropped it.
        own: whether this library has to free it, and has not done so.
    """

    def __init__(
        self, nbytes: int, backend: Backend, allocation: Allocation, own: bool
    ):
        self.address = allocation.address
        self.nbytes = nbytes
        self.backend = backend
        self.allocation = allocation
        self.mapped: set[Mapped] = set()
        self.dropped = False
        self.own = own

    def drop(self) -> None:
        """Free the memory as soon as no communicator has it mapped."""
        self.dropped = True
        for mapped in list(self.mapped):
            mapped.note_dropped()
        self._free_if_unused()

    def add_mapped(self, mapped: Mapped) -> None:
        """Note that a communicator has mapped it."""
        self.mapped.add(mapped)
        if self.dropped:  # by another thread
            mapped.note_dropped()

    def remove_mapped(self, mapped: Mapped) -> None:
        """Note that a communicator has unmapped it."""
        self.mapped.remove(mapped)
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self.dropped and not self.mapped and self.own:
            self.own = False
            self.backend.free(self.allocation)


class SymmetricMemoryAllocator:
    """Allocates memory that peers can map, and finds allocations by their addresses.

    Only :meth:`rendezvous` is collective. ``comm.allocator`` is the allocator of a
    communicator. Communicators with the same GPU and backend share their allocator.

    Source: ``SymmetricMemoryAllocator`` of PyTorch's symmetric memory.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._blocks: Ranges[Block] = Ranges()
        # For threads. An RLock would admit finalizers between the steps of their own
        # thread, so finalizers defer their releases.
        self._lock = threading.RLock()
        forks.watch(self)

    def disown(self) -> None:
        """Free nothing that a forked child has inherited, because its parent does."""
        self._lock = threading.RLock()
        for block in self._blocks.values():
            block.own = False

    def alloc(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of zeroed memory.

        Raises:
            ArgumentError: ``nbytes`` is negative, or a stream is being captured.
            BackendError: there is not enough memory.
        """
        return self.allocate(nbytes).address

    def allocate(self, nbytes: int, ranks: int = 1) -> Block:
        """Return a new allocation; ``ranks`` processes of the node allocate as much."""
        what = "a number of bytes from 0 to 2**63 - 1"
        nbytes = arguments.integer(
            nbytes, "alloc", what, 0, 2**63 - 1, "pass how many are needed"
        )
        deferred.give_back()
        try:
            allocation = self._backend.allocate(nbytes, ranks)
        except BackendError:
            if not reserve.release() and not _on_failure:
                raise
            for callback in _on_failure:
                callback()
            allocation = self._backend.allocate(nbytes, ranks)
        block = Block(nbytes, self._backend, allocation, own=True)
        with self._lock:
            self._blocks.put(block.address, block)
        return block

    def memory_of(self, block: Block) -> Memory:
        """Return the memory of a new allocation; it may be freed after you drop it.

        It is freed when the library next allocates memory, or closes a communicator.
        """
        memory = Memory(block.address, block.nbytes, block)
        dropping = weakref.finalize(memory, deferred.defer, self.release, block)
        dropping.atexit = False  # the process' end frees it
        return memory

    def free(self, ptr: int) -> None:
        """Free the allocation that begins at ``ptr``.

        Peers keep their mappings. The memory is freed when no communicator has the
        allocation mapped.
        """
        ptr = arguments.address(ptr, "free")
        block = self._blocks.at(ptr)
        if block is None:
            raise ArgumentError(
                f"free: expected an address that alloc returned, got {ptr:#x}"
            )
        self.release(block)

    def release(self, block: Block) -> None:
        """Free an allocation. Idempotent."""
        with self._lock:
            if block.dropped:
                return
            self._blocks.remove(block.address, block)
            block.dropped = True
        block.drop()

    def find(self, ptr: int) -> Block | None:
        """Return the allocation that contains ``ptr``, or None."""
        ptr = arguments.address(ptr, "find")
        with self._lock:
            block = self._blocks.around(ptr)
        if block is None or ptr - block.address >= max(block.nbytes, 1):
            return None
        return block

    def get_alloc_size(self, ptr: int) -> int:
        """Return the requested size of the allocation that contains ``ptr``."""
        ptr = arguments.address(ptr, "get_alloc_size")
        block = self.find(ptr)
        if block is None:
            raise ArgumentError(
                "get_alloc_size: expected an address within an allocation, "
                f"got {ptr:#x}"
            )
        return block.nbytes

    def rendezvous(self, ptr: int, comm: "Mapper") -> SymmetricMemory:
        """Map the allocation of ``ptr`` on all ranks of ``comm``. Collective.

        Every rank passes a pointer at the same offset of an allocation of equal size.
        """
        if isinstance(comm, type) or not isinstance(comm, Mapper):
            raise ArgumentError(
                f"rendezvous: expected a Communicator, got {comm!r}; pass the one "
                "whose ranks are to map the block"
            )
        return comm._rendezvous(ptr)

    def is_rendezvous_completed(self, ptr: int) -> bool:
        """Return whether the allocation of ``ptr`` is mapped on all ranks."""
        block = self.find(arguments.address(ptr, "is_rendezvous_completed"))
        return block is not None and bool(block.mapped)


@runtime_checkable
class Mapper(Protocol):
    """A communicator, as far as memory is concerned."""

    def _rendezvous(self, ptr: int) -> SymmetricMemory:
        """Return the symmetric memory around ``ptr``. Collective."""


@functools.cache
def allocator_of(name: str, ordinal: int) -> SymmetricMemoryAllocator:
    """Return this process' allocator for a backend on a GPU."""
    allocator = SymmetricMemoryAllocator(backends.create(name, ordinal))
    _allocators.append(allocator)
    return allocator


def block_around(ptr: int) -> Block | None:
    """Return the allocation that contains ``ptr``, of any communicator, or None."""
    found = (allocator.find(ptr) for allocator in _allocators)
    return next((block for block in found if block is not None), None)
