"""Symmetric memory: allocate, export, exchange, map, validate, close.

``SymmetricMemoryAllocator`` is this process' part: blocks, found from any pointer
inside them. ``Heap`` is a communicator's: which blocks are mapped on all its ranks,
and when all have dropped one. ``SymmetricMemory`` is what a rendezvous gives.
"""

import bisect
import functools
import math
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import cuda

from numba_symm import arguments, arrays, deferred, forks, pads, streams
from numba_symm.arrays import Memory
from numba_symm.backends.protocol import Allocation, Backend
from numba_symm.device.signals import Context
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, BackendError, ClosedError
from numba_symm.group import Group, Peers, map_peers

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

    def rendezvous(self, ptr: int, comm: "HasHeap") -> "SymmetricMemory":
        """Map the block that contains ``ptr`` on all ranks of ``comm``. Collective.

        Every rank passes a pointer at the same offset of a block of the same size.
        """
        if not isinstance(getattr(comm, "heap", None), Heap):
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


class HasHeap(Protocol):
    """A communicator, as far as memory is concerned."""

    @property
    def heap(self) -> "Heap":
        """The communicator's symmetric memory."""

    def set_up(self, what: str) -> AbstractContextManager[None]:
        """Make a call that all ranks make, once all are here, or raise on all."""

    def _alone(self, what: str) -> AbstractContextManager[None]:
        """Keep other threads' calls out."""


@functools.cache
def allocator_of(name: str, ordinal: int) -> SymmetricMemoryAllocator:
    """Return this process' allocator for a backend on a GPU."""
    from numba_symm import backends

    allocator = SymmetricMemoryAllocator(backends.create(name, ordinal))
    _allocators.append(allocator)
    return allocator


def block_around(ptr: int) -> Block | None:
    """Return the block that contains ``ptr``, of any communicator, or None."""
    found = (allocator.find(ptr) for allocator in _allocators)
    return next((block for block in found if block is not None), None)


@dataclass
class _Entry:
    """A block that is mapped on all ranks of one communicator.

    Attributes:
        number: counts the communicator's blocks, equal on all ranks.
        block: this rank's.
        peers: every rank's, mapped here.
        pad: its signal pad, once it has had a rendezvous.
        owner: what keeps this rank's memory: an array's Memory (weakly, so that
            the array may be dropped), or a registered array.
    """

    number: int
    block: Block
    peers: Peers
    pad: "_Pad | None" = None
    owner: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class _Pad:
    arena: _Entry
    offset: int

    def addresses(self) -> tuple[int, ...]:
        return tuple(base + self.offset for base in self.arena.peers.addresses)


class Place(NamedTuple):
    """Where a part of a symmetric block lies.

    Attributes:
        addresses: by rank, where this rank sees that part of the rank's block.
        seen: by rank, where the rank sees that part of this rank's block.
    """

    addresses: tuple[int, ...]
    seen: tuple[int, ...]


class Heap:
    """The symmetric memory of one communicator.

    All public methods but ``close_locally``, ``everywhere`` and ``seen`` are
    collective: every rank calls them with equal sizes, in the same order.
    """

    def __init__(self, group: Group):
        self.group = group
        self.allocator = allocator_of(group.backend.name, group.gpu.ordinal)
        self._entries: dict[int, _Entry] = {}
        self._count = 0
        self.generation = 0  # changes with what is mapped
        self._arenas: list[_Entry] = []
        self._free_pads: list[_Pad] = []

    def allocate(self, nbytes: int, what: str) -> tuple[Memory, Peers]:
        """Return zeroed memory and its mappings on all ranks.

        It is given back some time after the last reference to the Memory is gone on
        every rank: at the next allocation, or when the communicator closes. If that was
        closed before: at the next allocation, or close, of any communicator.
        """
        self.reclaim()
        entry = self._allocate(nbytes, what)
        memory = Memory(entry.block.address, nbytes, entry.block)
        entry.owner = weakref.ref(memory)
        dropping = weakref.finalize(
            memory, deferred.defer, self.allocator.release, entry.block
        )
        dropping.atexit = False  # the process' end frees it
        return memory, entry.peers

    def _allocate(self, nbytes: int, what: str) -> _Entry:
        exchange = self.group.exchange
        exchange.agree_equal(f"{nbytes} bytes", what)
        with ExitStack() as undo:
            with exchange.agreed(what):
                block = self.allocator.allocate(nbytes, self.group.world.size)

                @undo.push
                def release(kind: Any, error: BaseException | None, trace: Any) -> None:
                    # If this rank alone gives up, peers may have it mapped for good.
                    frees = block.backend.frees_while_mapped
                    if frees or exchange.is_everybodys(error):
                        self.allocator.release(block)

            entry = self._map(block, what)
            undo.pop_all()
        return entry

    def _map(self, block: Block, what: str) -> _Entry:
        nbytes = block.allocation.nbytes
        peers = map_peers(self.group, block.backend, block.allocation, nbytes, what)
        entry = _Entry(self._count, block, peers)
        block.mapped += 1
        self._entries[entry.number] = entry
        self._count += 1
        self.generation += 1
        return entry

    def reclaim(self) -> None:
        """Free the blocks that every rank has dropped."""
        deferred.give_back()
        mine = [entry.number for entry in self._entries.values() if entry.block.dropped]
        dropped = self.group.exchange.all_gather(mine, "dropped memory")
        numbers = sorted(set(mine).intersection(*map(set, dropped)))
        if not numbers:
            return
        self.generation += 1
        entries = [self._entries.pop(number) for number in numbers]
        with self.group.exchange.agreed("unmapping dropped memory"):
            _unmap(entries)
        # Every rank has unmapped them: the memory may go, whatever its kind.
        for entry in entries:
            entry.block.unmapped()
        self._free_pads += [entry.pad for entry in entries if entry.pad is not None]

    def rendezvous(self, address: int, array: Any = None) -> "SymmetricMemory":
        """Return the symmetric memory around ``address``, mapping it if need be.

        Args:
            address: where it begins; at the same offset of its block on all ranks.
            array: what keeps memory that is not this library's; kept until close.
        """
        exchange, what = self.group.exchange, "rendezvous"
        with exchange.agreed(what):
            address = arguments.address(address, what)
            entry = self._entry_around(address)
            block = entry.block if entry else self._block_around(address, what)
        offset = address - block.address
        number = entry.number if entry else "new"
        exchange.agree_equal(
            f"block {number} of {block.nbytes} bytes ({block.backend.name}), "
            f"offset {offset}",
            what,
        )
        if entry is None:
            entry = self._map(block, what)
            if not block.own:
                entry.owner = lambda: array
        if entry.pad is None:
            entry.pad = self._take_pad(what)
        return SymmetricMemory(self.group, entry, offset, entry.pad, array)

    def _entry_around(self, address: int) -> _Entry | None:
        for entry in self._entries.values():
            inside = 0 <= address - entry.block.address < max(entry.block.nbytes, 1)
            if inside and entry.block.dropped:
                raise ArgumentError(f"rendezvous: {address:#x} lies in freed memory")
            if inside:
                return entry
        return None

    def _block_around(self, address: int, what: str) -> Block:
        block = self.allocator.find(address)
        if block is not None:
            return block
        if SIMULATED:
            raise ArgumentError(
                f"{what}: the array at {address:#x} is in this process' private "
                "memory; under the simulator use comm.empty()"
            )
        from numba_symm.backends.ipc import IpcBackend, allocation_around

        found = allocation_around(address, what)
        return Block(found.nbytes, IpcBackend(), found, own=False)

    def place(self, address: int, nbytes: int) -> Place | None:
        """Return where symmetric memory lies, on all ranks if they passed the same.

        Not collective: other ranks' arrays may lie elsewhere. None: the bytes from
        ``address`` on are not in one block that is kept as long as it is mapped.
        """
        for entry in self._entries.values():
            offset = address - entry.block.address
            inside = offset >= 0 and offset + nbytes <= entry.block.nbytes
            if inside and (entry.block.own or entry.owner() is not None):
                return Place(
                    tuple(base + offset for base in entry.peers.addresses),
                    tuple(base + offset for base in entry.peers.seen),
                )
        return None

    def _take_pad(self, what: str) -> _Pad:
        nbytes = pads.pad_nbytes(self.group.world.size)
        if not self._free_pads:
            arena = self._allocate(pads.PADS_PER_ARENA * nbytes, "signal pads")
            self._arenas.append(arena)
            self._free_pads = [
                _Pad(arena, index * nbytes) for index in range(pads.PADS_PER_ARENA)
            ]
        pad = self._free_pads.pop(0)
        with self.group.exchange.agreed(f"{what}: zeroing the signal pad"):
            own = pad.addresses()[self.group.world.rank]
            self.group.backend.fill(own, nbytes)
        return pad

    def close(self) -> None:
        """Unmap all peers; free what no array views any more, the rest later."""
        entries = self._forget()
        with self.group.exchange.agreed("closing: unmapping peers"):
            _unmap(entries)
        # Every rank has unmapped: the memory may go, whatever its kind.
        for entry in entries:
            entry.block.unmapped()

    def close_locally(self) -> None:
        """Unmap all peers without any other rank.

        Memory that must not be freed while a peer has it mapped stays until the
        process ends.
        """
        entries = self._forget()
        try:
            _unmap(entries)
        finally:
            for entry in entries:
                if entry.block.backend.frees_while_mapped:
                    entry.block.unmapped()
                else:
                    _never_freed.append(entry)

    def _forget(self) -> list[_Entry]:
        deferred.give_back()  # the workspace among it
        entries = list(self._entries.values())
        self._entries.clear()
        for arena in self._arenas:  # no array views them: they go once unmapped
            self.allocator.release(arena.block)
        self._arenas.clear()
        self._free_pads.clear()
        return entries


_never_freed: list[_Entry] = []


def _unmap(entries: list[_Entry]) -> None:
    """Unmap the peers of every entry, whatever fails on the way."""
    with ExitStack() as steps:
        for entry in entries:
            steps.callback(entry.peers.close)


class SymmetricMemory:
    """A buffer that every rank has and can reach on every other, with its signal pad.

    Made by ``comm.rendezvous(array)``. Valid until the communicator closes.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        buffer_size: bytes from the rendezvous' address to the block's end.
        signal_pad_size: bytes of a signal pad.
        buffer_ptrs: address of every rank's buffer in this process.
        signal_pad_ptrs: address of every rank's signal pad in this process.

    Source: ``CUDASymmetricMemory`` of PyTorch.
    """

    def __init__(self, group: Group, entry: _Entry, offset: int, pad: _Pad, array: Any):
        block, peers = entry.block, entry.peers
        self.rank = group.world.rank
        self.world_size = group.world.size
        self.buffer_size = block.nbytes - offset
        self.signal_pad_size = pads.pad_nbytes(self.world_size)
        self.buffer_ptrs = [base + offset for base in peers.addresses]
        self.signal_pad_ptrs = list(pad.addresses())
        self._ctx = Context(
            self.rank,
            self.world_size,
            tuple(self.buffer_ptrs),
            tuple(self.signal_pad_ptrs),
            group.guard,
        )
        self._group = group
        self._peers = peers
        # What keeps this rank's memory; contexts and arrays over it keep that, too.
        self._owner = (entry.owner(), array)
        self._ctx.owner = self._owner, tuple(peers.mappings)
        self._ctx.buffer_size = self.buffer_size

    @property
    def ctx(self) -> Context:
        """The form that kernels take, an ordinary argument of any ``@cuda.jit`` kernel.

        It keeps the memory until the communicator closes, as this object does.

        Raises:
            ClosedError: the communicator was closed, or the memory has gone.
        """
        self._check_mapped()
        return self._ctx

    @functools.cached_property
    def _pointer_arrays(self) -> tuple[Any, Any]:
        buffers = np.array(self.buffer_ptrs, np.uint64)
        signal_pads = np.array(self.signal_pad_ptrs, np.uint64)
        return cuda.to_device(buffers), cuda.to_device(signal_pads)

    @property
    def buffer_ptrs_dev(self) -> int:
        """Device address of an array of ``world_size`` uint64: the buffers.

        Raises:
            ClosedError: the communicator was closed, or the memory has gone.
        """
        self._check_mapped()
        return arrays.view(self._pointer_arrays[0], "buffer_ptrs_dev").address

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Device address of an array of ``world_size`` uint64: the signal pads.

        Raises:
            ClosedError: the communicator was closed, or the memory has gone.
        """
        self._check_mapped()
        return arrays.view(self._pointer_arrays[1], "signal_pad_ptrs_dev").address

    def get_buffer(
        self, rank: int, shape: Any, dtype: Any, storage_offset: int = 0
    ) -> Any:
        """Return an array over rank ``rank``'s buffer; not collective.

        Args:
            rank: whose buffer.
            shape: the array's shape, an int or a tuple.
            dtype: the array's dtype.
            storage_offset: elements of ``dtype`` from the buffer's start.

        Returns:
            A Numba device array. A peer's must not be used after the communicator
            has closed; nothing orders its use with the peer's but signals.

        Raises:
            ArgumentError: there is no such rank, or the array does not fit.
        """
        self._check_open()
        dtype = arrays.checked_dtype(dtype, "get_buffer")
        shape, start = self._place(rank, shape, dtype, storage_offset, "get_buffer")
        memory = Memory(
            self.buffer_ptrs[rank],
            self.buffer_size,
            (self._owner, self._peers.mappings[rank]),
        )
        return memory.array(shape, dtype, start)

    def _place(
        self, rank: int, shape: Any, dtype: Any, storage_offset: int, what: str
    ) -> tuple[tuple[int, ...], int]:
        """Return the shape as a tuple and the first byte, if an array fits there."""
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.world_size:
            raise ArgumentError(
                f"{what}: rank {rank!r}; there are ranks 0 to {self.world_size - 1}"
            )
        shape = arrays.checked_shape(shape, dtype, what)
        first = arguments.integer(
            *(storage_offset, what, "storage_offset to be an integer"),
            *(-(1 << 63), 1 << 63, "pass where the array begins, in elements"),
        )
        start = first * dtype.itemsize
        end = start + math.prod(shape) * dtype.itemsize
        if start < 0 or end > self.buffer_size:
            raise ArgumentError(
                f"{what}: shape {shape} of {dtype.name} from element "
                f"{storage_offset} takes bytes {start} to {end} of a buffer of "
                f"{self.buffer_size}"
            )
        return shape, start

    def put(
        self, x: Any, rank: int, storage_offset: int = 0, stream: Any = None
    ) -> None:
        """Enqueue a copy of ``x`` into rank ``rank``'s buffer, by a copy engine.

        Not collective, and may be captured. It arrives where that rank's
        ``get_buffer(rank, x.shape, x.dtype, storage_offset)`` looks. That it has come
        is for a signal to tell: whoever takes one that this stream has put after the
        copy, by :meth:`put_signal` or :meth:`barrier`, sees it. ``x`` must stay as it
        is, and nobody may use its place at ``rank``, until then.

        Args:
            x: a device array of this rank's GPU, in C order, of any dtype.
            rank: whose buffer, this rank's included.
            storage_offset: elements of x's dtype from the buffer's start.
            stream: where to; None is the legacy default stream, whichever ``x`` names.

        Raises:
            ArgumentError: there is no such rank, ``x`` is no such array, does not fit
                or overlaps its place.
            ClosedError: the communicator was closed, or the memory has gone.
            CollectiveError: the communicator has failed.
        """
        self._check_open()
        source = self._contiguous(x, "put")
        _, start = self._place(rank, source.shape, source.dtype, storage_offset, "put")
        target = self.buffer_ptrs[rank] + start
        _copy(target, source.address, source.nbytes, stream, "put")

    def get(
        self,
        rank: int,
        shape: Any,
        dtype: Any,
        storage_offset: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Enqueue a copy from rank ``rank``'s buffer, by a copy engine.

        Not collective, and may be captured. It takes what is there when the stream
        comes to it: let the stream first take a signal that ``rank`` put after writing.

        Args:
            rank: whose buffer, this rank's included.
            shape: the shape of what is there, an int or a tuple.
            dtype: its dtype.
            storage_offset: elements of ``dtype`` from the buffer's start.
            out: where to: a device array of this rank's GPU of that shape and dtype,
                in C order. None: a new array of ordinary device memory.
            stream: where to enqueue; None is the legacy default stream.

        Returns:
            ``out``, or the new array; what is in it is defined once the stream's work
            is done.

        Raises:
            ArgumentError: there is no such rank, nothing of that size, ``out`` is no
                such array or overlaps it, or out=None in a capture.
            ClosedError: the communicator was closed, or the memory has gone.
            CollectiveError: the communicator has failed.
        """
        self._check_open()
        dtype = arrays.checked_dtype(dtype, "get")
        shape, start = self._place(rank, shape, dtype, storage_offset, "get")
        if out is None:
            out = _new_array(shape, dtype, stream)
        target = self._contiguous(out, "get: out")
        if (target.shape, target.dtype) != (shape, dtype) or target.readonly:
            raise ArgumentError(
                f"get: out is{' read-only,' * target.readonly} of shape {target.shape} "
                f"and {target.dtype.name}; pass an array of shape {shape} and "
                f"{dtype.name} that may be written"
            )
        source = self.buffer_ptrs[rank] + start
        _copy(target.address, source, target.nbytes, stream, "get")
        return out

    def _contiguous(self, array: Any, what: str) -> arrays.ArrayView:
        view = arrays.dense(arrays.view(array, what), what)
        if view.order != "C":
            raise ArgumentError(
                f"{what}: the array is in Fortran order; pass its transpose, which is "
                "in C order"
            )
        arrays.check_device(view, self._group.gpu.ordinal, what)
        return view

    def fence(self, stream: Any = None) -> None:
        """Enqueue a kernel whose one thread fences at system scope; not collective.

        What the stream has put before is visible to a peer that takes a signal which
        the stream puts after. :meth:`put_signal` and :meth:`barrier` see to that
        without a fence: their kernels begin once the copies before them are done, and
        release at system scope. So a fence between them adds no order; it says what
        is meant, for one launch. It does not wait for a peer, and orders nothing
        between streams, which events do.
        """
        self._check_open()
        pads.fence_kernel().bind(1)(_handle(stream))

    def barrier(self, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a barrier of all ranks on ``channel``. Every rank calls it.

        What any rank's stream wrote before is visible to all ranks' streams after.
        ``stream=None`` here, and for signals, is the legacy default stream.

        Args:
            channel: 0 to 127; a (pair, channel) has one user at a time.
            stream: where to enqueue.

        Raises:
            ArgumentError: there is no such channel.
            ClosedError: the communicator was closed, or the memory has gone.
            CollectiveError: the communicator has failed.
        """
        pads.check_channel(channel, "barrier")
        self._launch("barrier", pads.barrier_kernel, stream, channel)

    def put_signal(self, dst: int, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a signal to rank ``dst``, once it has taken the one before.

        What this rank's stream wrote before is visible to whoever takes it. Channels,
        streams and errors are those of :meth:`barrier`; ``dst`` is another rank.
        """
        pads.check_channel(channel, "put_signal")
        pads.check_peer(dst, self.rank, self.world_size, "put_signal")
        self._launch("put_signal", pads.put_signal_kernel, stream, dst, channel)

    def wait_signal(self, src: int, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a wait for rank ``src``'s signal, which takes it.

        Channels, streams and errors are those of :meth:`barrier`; ``src`` is another
        rank.
        """
        pads.check_channel(channel, "wait_signal")
        pads.check_peer(src, self.rank, self.world_size, "wait_signal")
        self._launch("wait_signal", pads.wait_signal_kernel, stream, src, channel)

    def _launch(self, what: str, kernel: Any, stream: Any, *args: int) -> None:
        self._check_open()
        handle = _handle(stream)
        try:
            kernel(self.world_size).bind(1, self._ctx, *args)(handle)
        except BaseException as error:
            # The other ranks have enqueued theirs. No graph comes of a capture.
            if not streams.spoil_capture(handle):
                self._group.abandon(error, what)
            raise

    def _check_open(self) -> None:
        self._group.check()
        self._check_mapped()

    def _check_mapped(self) -> None:
        self._group.check_open()
        if self._peers.closed:
            raise ClosedError("this symmetric memory was closed by its communicator")


def _handle(stream: Any) -> int:
    return streams.LEGACY_DEFAULT if stream is None else streams.handle_of(stream)


def _new_array(shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Any:
    if not SIMULATED and streams.is_capturing(_handle(stream)):
        raise ArgumentError(
            "get: pass out= while a stream is being captured into a graph; memory "
            "cannot be allocated then"
        )
    return arrays.empty(shape, dtype, "get")


def _copy(target: int, source: int, nbytes: int, stream: Any, what: str) -> None:
    """Enqueue a copy between arrays that do not overlap."""
    handle = _handle(stream)
    if nbytes == 0:
        return
    if abs(target - source) < nbytes:
        raise ArgumentError(
            f"{what}: the array overlaps its place in the buffer; pass one apart"
        )
    streams.copy(target, source, nbytes, handle)
