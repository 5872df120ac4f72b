"""This process' part of symmetric memory: blocks, found from any pointer inside."""

import bisect
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from numba_symm import arguments, backends, deferred, forks
from numba_symm.backends.protocol import Allocation, Backend
from numba_symm.errors import ArgumentError, BackendError
from numba_symm.memory.symmetric import SymmetricMemory

_on_failure: list[Callable[[], None]] = []
_allocators: list["SymmetricMemoryAllocator"] = []


def on_allocation_failure(callback: Callable[[], None]) -> None:
    """Have ``callback`` run when an allocation fails, before it is tried again."""
    _on_failure.append(callback)


class Block:
    """An allocation of this process that can be mapped by peers.

    Attributes:
        address: where it begins.
        nbytes: as asked for.
        backend: its kind of memory.
        allocation: the backend's.
        mapped: how many communicators have it mapped.
        dropped: whether its owner is done with it.
        own: whether it is this library's to free, and not freed yet.
    """

    def __init__(
        self, nbytes: int, backend: Backend, allocation: Allocation, own: bool
    ):
        self.address = allocation.address
        self.nbytes = nbytes
        self.backend = backend
        self.allocation = allocation
        self.mapped = 0
        self.dropped = False
        self.own = own

    def drop(self) -> None:
        """Free the memory as soon as no communicator has it mapped."""
        self.dropped = True
        self._free_if_unused()

    def unmapped(self) -> None:
        """Note that one communicator has it mapped no more."""
        self.mapped -= 1
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self.dropped and self.mapped == 0 and self.own:
            self.own = False
            self.backend.free(self.allocation)


class SymmetricMemoryAllocator:
    """Allocates memory that peers can map, and finds it again from a pointer.

    Allocating and freeing involve no other rank. ``comm.allocator`` is the one of a
    communicator's memory; communicators of one GPU and backend share it.

    Source: ``SymmetricMemoryAllocator`` of PyTorch's symmetric memory.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        # Threads allocate, free and look up. Finalizers, which an RLock would let in
        # between the steps of their own thread, defer what they have to free.
        self._lock = threading.RLock()
        forks.watch(self)

    def disown(self) -> None:
        """Free nothing that a forked child has inherited: its parent does."""
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
        """Return a new block, as ``ranks`` processes do; see :meth:`alloc`."""
        what = "a number of bytes from 0 to 2**63 - 1"
        nbytes = arguments.integer(
            nbytes, "alloc", what, 0, 2**63 - 1, "pass how many are needed"
        )
        deferred.give_back()
        try:
            allocation = self._backend.allocate(nbytes, ranks)
        except BackendError:
            if not _on_failure:
                raise
            for callback in _on_failure:
                callback()
            allocation = self._backend.allocate(nbytes, ranks)
        block = Block(nbytes, self._backend, allocation, own=True)
        with self._lock:
            bisect.insort(self._starts, block.address)
            self._blocks[block.address] = block
        return block

    def free(self, ptr: int) -> None:
        """Free the block that begins at ``ptr``.

        Peers keep what they have mapped; the memory goes when no communicator has
        the block mapped any more.
        """
        ptr = arguments.address(ptr, "free")
        block = self._blocks.get(ptr)
        if block is None:
            raise ArgumentError(f"free: no block of this allocator begins at {ptr:#x}")
        self.release(block)

    def release(self, block: Block) -> None:
        """Free a block, unless that was done already."""
        with self._lock:
            if block.dropped:
                return
            del self._blocks[block.address]
            self._starts.remove(block.address)
            block.dropped = True
        block.drop()

    def find(self, ptr: int) -> Block | None:
        """Return the block that contains ``ptr``, or None."""
        ptr = arguments.address(ptr, "find")
        with self._lock:
            index = bisect.bisect_right(self._starts, ptr) - 1
            if index < 0:
                return None
            block = self._blocks[self._starts[index]]
        inside = ptr - block.address < max(block.nbytes, 1)
        return block if inside else None

    def get_alloc_size(self, ptr: int) -> int:
        """Return the bytes asked for of the block that contains ``ptr``."""
        ptr = arguments.address(ptr, "get_alloc_size")
        block = self.find(ptr)
        if block is None:
            raise ArgumentError(f"get_alloc_size: {ptr:#x} is in no block of this one")
        return block.nbytes

    def rendezvous(self, ptr: int, comm: "HasHeap") -> SymmetricMemory:
        """Map the block that contains ``ptr`` on all ranks of ``comm``. Collective.

        Every rank passes a pointer at the same offset of a block of the same size.
        """
        if not isinstance(getattr(comm, "heap", None), Mapper):
            raise ArgumentError(
                f"rendezvous: expected a Communicator, got {comm!r}; pass the one "
                "whose ranks are to map the block"
            )
        with comm._alone("rendezvous"), comm.set_up("rendezvous"):
            return comm.heap.rendezvous(ptr)

    def is_rendezvous_completed(self, ptr: int) -> bool:
        """Return whether the block that contains ``ptr`` is mapped on all ranks."""
        block = self.find(arguments.address(ptr, "is_rendezvous_completed"))
        return block is not None and block.mapped > 0


class Mapper(ABC):
    """What maps blocks on all ranks: the heap of a communicator."""

    @abstractmethod
    def rendezvous(self, address: int) -> SymmetricMemory:
        """Return the symmetric memory around ``address``. Collective."""


class HasHeap(Protocol):
    """A communicator, as far as memory is concerned."""

    @property
    def heap(self) -> Mapper:
        """The communicator's symmetric memory."""

    def set_up(self, what: str) -> AbstractContextManager[None]:
        """Make a call that all ranks make, once all are here, or raise on all."""

    def _alone(self, what: str) -> AbstractContextManager[None]:
        """Keep other threads' calls out."""


@functools.cache
def allocator_of(name: str, ordinal: int) -> SymmetricMemoryAllocator:
    """Return this process' allocator for a backend on a GPU."""
    allocator = SymmetricMemoryAllocator(backends.create(name, ordinal))
    _allocators.append(allocator)
    return allocator


def block_around(ptr: int) -> Block | None:
    """Return the block that contains ``ptr``, of any communicator, or None."""
    found = (allocator.find(ptr) for allocator in _allocators)
    return next((block for block in found if block is not None), None)
