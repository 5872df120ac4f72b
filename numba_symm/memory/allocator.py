"""Allocations of symmetric memory: of the process, and of each communicator."""

import bisect
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from numba_symm import arguments, dtypes, process
from numba_symm.device import block_exchange
from numba_symm.device.block_exchange import (
    MOST_DEPTH,
    VECTOR,
    WARP,
    CheckedWorkspaceContext,
    TeamGuard,
    WorkspaceContext,
)
from numba_symm.device.signals import CHANNELS
from numba_symm.device.teams import Team
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, BackendError
from numba_symm.gpu import arrays, loads, streams
from numba_symm.gpu.arrays import Memory
from numba_symm.launch.members import Members, Peers, map_peers
from numba_symm.memory import backends, pads
from numba_symm.memory.backends import Allocation, Backend
from numba_symm.memory.symmetric import SymmetricMemory

T = TypeVar("T")

_MOST_RANGES = 1024


class Ranges(Generic[T]):
    """Objects by the address at which each begins.

    The number of objects hardly changes the time of a look-up.
    """

    def __init__(self) -> None:
        self._found: dict[int, T] = {}
        self._starts: list[int] = []

    def put(self, start: int, thing: T) -> None:
        """Add an object. It takes the place of one that begins at the same address."""
        if start not in self._found:
            bisect.insort(self._starts, start)
        self._found[start] = thing

    def at(self, start: int) -> T | None:
        """Return the object that begins at an address, or None."""
        return self._found.get(start)

    def around(self, address: int) -> T | None:
        """Return the object that begins last at or before an address, or None.

        It may end before the address.
        """
        index = bisect.bisect_right(self._starts, address) - 1
        return None if index < 0 else self._found[self._starts[index]]

    def remove(self, start: int, thing: T) -> None:
        """Remove an object, unless another one has taken its place."""
        if self._found.get(start) is thing:
            del self._found[start]
            del self._starts[bisect.bisect_left(self._starts, start)]

    def clear(self) -> None:
        """Remove all objects."""
        self._found.clear()
        self._starts.clear()

    def values(self) -> list[T]:
        """Return all objects."""
        return list(self._found.values())


class Misses:
    """Ranges of addresses where a look-up found nothing.

    Only the first ``_MOST`` are kept. If there were more, every range counts as missed.
    """

    def __init__(self) -> None:
        self._ranges: set[tuple[int, int]] = set()

    def add(self, address: int, nbytes: int) -> None:
        """Note that nothing was found at these bytes."""
        if len(self._ranges) <= _MOST_RANGES:
            self._ranges.add((address, address + nbytes))

    def meet(self, address: int, nbytes: int) -> bool:
        """Return whether a look-up has missed any of these bytes."""
        if len(self._ranges) > _MOST_RANGES:
            return True
        end = address + nbytes
        return any(start < end and address < stop for start, stop in self._ranges)

    def clear(self) -> None:
        """Forget all look-ups."""
        self._ranges.clear()


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
        process.watch(self)

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
        streams.give_back()
        try:
            allocation = self._backend.allocate(nbytes, ranks)
        except BackendError:
            if not loads.release() and not _on_failure:
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
        dropping = weakref.finalize(memory, streams.defer, self.release, block)
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


@dataclass(eq=False)
class _Entry:
    """An allocation that is mapped on all ranks of one communicator.

    Attributes:
        number: its number among the communicator's allocations, equal on all ranks.
        block: this rank's allocation.
        peers: every rank's allocation, mapped here.
        pad: its signal pad, after a rendezvous.
        owner: returns the object that keeps this rank's memory: an array's Memory (by a
            weak reference, so that the array may be dropped), or a registered array.
        dropped: gets its number when the block's owner drops it.
    """

    number: int
    block: Block
    peers: Peers
    dropped: set[int]
    pad: "_Pad | None" = None
    owner: Callable[[], Any] = lambda: None

    def note_dropped(self) -> None:
        self.dropped.add(self.number)


@dataclass(frozen=True)
class _Pad:
    arena: _Entry
    offset: int
    channels: int

    def addresses(self) -> tuple[int, ...]:
        return tuple(base + self.offset for base in self.arena.peers.addresses)


class MappedPlace(NamedTuple):
    """The addresses of a part of a symmetric allocation.

    Attributes:
        addresses: by rank, the address here of that part of the rank's allocation.
        seen: by rank, the address there of that part of this rank's allocation.
    """

    addresses: tuple[int, ...]
    seen: tuple[int, ...]


class Heap:
    """The symmetric memory of one communicator.

    Args:
        island: the ranks that map each other's memory.
        whole: all ranks of the communicator, if it has several islands.

    All public methods but ``close_locally``, ``everywhere`` and ``seen`` are
    collective: every rank calls them with equal sizes, in the same order.

    Attributes:
        changed: is called whenever :meth:`place` may return another result for the same
            memory than before. Packed calls have addresses that it returned.
    """

    def __init__(self, members: Members):
        self._members = members
        self.island = island = members.island
        self.allocator = allocator_of(island.backend.name, island.gpu.ordinal)
        self.debug = False  # whether kernels of the program check their arguments
        self._entries: dict[int, _Entry] = {}
        self._found: Ranges[_Entry] = Ranges()
        self._dropped: set[int] = set()
        self._misses = Misses()
        self._count = 0
        self.changed: Callable[[], None] = lambda: None
        self._arenas: list[_Entry] = []
        self._free_pads: list[_Pad] = []

    def array(self, shape: Any, dtype: Any, what: str, like: Any = None) -> Any:
        """Return a new symmetric array of zeros, as ``like`` is. Collective."""
        exchange = self._members.exchange
        with self._members.set_up(what):
            with exchange.agreed(what):
                dtype = dtypes.checked(dtype, what)
                shape = arrays.checked_shape(shape, dtype, what)
                library = arrays.named(like, what)
                arrays.check_type(library, dtype, what)
            exchange.agree_equal(f"shape {shape} of {dtype.name}", what)
            with self._of_islands(what):
                memory, _ = self.allocate(math.prod(shape) * dtype.itemsize, what)
            if library is None:
                return memory.array(shape, dtype)
            nbytes = math.prod(shape) * dtype.itemsize
            return library.over(Memory(memory.address, nbytes, memory), shape, dtype)

    @contextmanager
    def _of_islands(self, what: str) -> Iterator[None]:
        """Do work within islands, which fails on all or on none.

        A failure removes what was mapped. Allocations have equal numbers on all
        islands, of which only some may need more signal pads.
        """
        if self._members is self.island:
            yield
            return
        first = self._count
        try:
            with self._members.within(what):
                yield
        except BaseException as error:
            if self._members.exchange.is_everybodys(error):
                undoing = f"{what}: unmapping what another island could not map"
                with self._members.within(undoing):
                    arenas = {arena.number for arena in self._arenas}
                    new = [n for n in self._entries if n >= first and n not in arenas]
                    self._remove(new, undoing)
            raise
        finally:
            self._count = first + _MAPPED

    def allocate(self, nbytes: int, what: str) -> tuple[Memory, Peers]:
        """Return zeroed memory and its mappings on all ranks.

        When every rank has dropped its last reference to the Memory, the memory is
        freed at the next allocation, or when the communicator is closed. If references
        are dropped after that, it is freed at the next allocation, or close, of any
        communicator.
        """
        self.reclaim()
        entry = self._allocate(nbytes, what)
        memory = self.allocator.memory_of(entry.block)
        entry.owner = weakref.ref(memory)
        return memory, entry.peers

    def _allocate(self, nbytes: int, what: str) -> _Entry:
        exchange = self.island.exchange
        exchange.agree_equal(f"{nbytes} bytes", what)
        with ExitStack() as undo:
            with exchange.agreed(what):
                block = self.allocator.allocate(nbytes, self.island.world.size)

                @undo.push
                def release(kind: Any, error: BaseException | None, trace: Any) -> None:
                    # If only this rank gives up, peers may keep it mapped.
                    frees = block.backend.frees_while_mapped
                    if frees or exchange.is_everybodys(error):
                        self.allocator.release(block)

            entry = self._map(block, what)
            undo.pop_all()
        return entry

    def _map(self, block: Block, what: str) -> _Entry:
        nbytes = block.allocation.nbytes
        peers = map_peers(self.island, block.backend, block.allocation, nbytes, what)
        entry = _Entry(self._count, block, peers, self._dropped)
        self._entries[entry.number] = entry
        self._found.put(block.address, entry)
        block.add_mapped(entry)
        self._count += 1
        # Memory that was ordinary when a call was packed: of another library, or freed
        # since, so that its addresses are this block's now.
        if self._misses.meet(block.address, block.allocation.nbytes):
            self._forget_places()
        return entry

    def _forget_places(self) -> None:
        self.changed()
        self._misses.clear()

    def reclaim(self) -> None:
        """Free the allocations that every rank has dropped."""
        streams.give_back()
        mine = list(self._dropped)  # a copy: other threads may drop more
        dropped = self.island.exchange.all_gather(mine, "dropped memory")
        numbers = sorted(set(mine).intersection(*map(set, dropped)))
        self._remove(numbers, "unmapping dropped memory")

    def _remove(self, numbers: Sequence[int], what: str) -> None:
        """Unmap allocations. Collective within the island."""
        if not numbers:
            return
        self._forget_places()  # other memory may be mapped there next
        entries = [self._entries.pop(number) for number in numbers]
        for entry in entries:
            self._found.remove(entry.block.address, entry)
            self._dropped.discard(entry.number)
        with self.island.exchange.agreed(what):
            _unmap(entries)
        # Every rank has unmapped them, so memory of every kind may be freed.
        for entry in entries:
            entry.block.remove_mapped(entry)
        self._free_pads += [entry.pad for entry in entries if entry.pad is not None]

    def rendezvous(
        self, address: int, array: Any = None, channels: Any = None
    ) -> SymmetricMemory:
        """Return the symmetric memory at ``address``. Map its allocation if needed.

        Args:
            address: the address of its first byte, at the same offset of its allocation
                on all ranks.
            array: the object that keeps memory of another library; kept until close.
            channels: as for ``Communicator.rendezvous``.
        """
        exchange, what = self._members.exchange, "rendezvous"
        with exchange.agreed(what):
            address = arguments.address(address, what)
            entry = self._entry_around(address)
            block = entry.block if entry else self._block_around(address, what)
            channels = _channels(channels, entry)
        offset = address - block.address
        number = entry.number if entry else "new"
        exchange.agree_equal(
            f"allocation {number} of {block.nbytes} bytes ({block.backend.name}), "
            f"offset {offset}, {channels} channels",
            what,
        )
        with self._of_islands(what):
            if entry is None:
                entry = self._map(block, what)
                if not block.own:
                    entry.owner = lambda: array
            if entry.pad is None:
                entry.pad = self._take_pad(what, channels)
        owner = entry.owner(), array
        pad = entry.pad.addresses()
        return SymmetricMemory(
            self.island,
            entry.peers,
            block.nbytes,
            offset,
            pad,
            entry.pad.channels,
            owner,
            self.debug,
        )

    def _entry_around(self, address: int) -> _Entry | None:
        entry = self._found.around(address)
        if entry is None:
            return None
        if address - entry.block.address >= max(entry.block.nbytes, 1):
            return None
        if entry.block.dropped:
            raise ArgumentError(
                f"rendezvous: expected an array, got {address:#x} in freed memory"
            )
        return entry

    def _block_around(self, address: int, what: str) -> Block:
        block = self.allocator.find(address)
        if block is not None:
            return block
        if SIMULATED:
            raise ArgumentError(
                f"{what}: the array at {address:#x} is in this process' private "
                "memory; under the simulator use comm.empty()"
            )
        found = backends.allocation_around(address, what)
        return Block(found.nbytes, backends.IpcBackend(), found, own=False)

    def place(self, address: int, nbytes: int) -> MappedPlace | None:
        """Return the addresses of symmetric memory on all ranks.

        Not collective: they are those of the same part of the other ranks' allocations.
        Other ranks may have passed another part. None: the bytes from ``address`` on
        are not in one allocation that is kept as long as it is mapped.
        """
        entry = self._found.around(address)
        if entry is not None:
            offset = address - entry.block.address
            inside = offset + nbytes <= entry.block.nbytes
            if inside and (entry.block.own or entry.owner() is not None):
                return MappedPlace(
                    tuple(base + offset for base in entry.peers.addresses),
                    tuple(base + offset for base in entry.peers.seen),
                )
        self._misses.add(address, nbytes)
        return None

    def _take_pad(self, what: str, channels: int) -> _Pad:
        nbytes = pads.pad_nbytes(self.island.world.size, channels)
        free = [pad for pad in self._free_pads if pad.channels == channels]
        if not free:
            number = max(1, pads.CHANNELS_PER_ARENA // channels)
            arena = self._allocate(number * nbytes, "signal pads")
            self._arenas.append(arena)
            free = [_Pad(arena, index * nbytes, channels) for index in range(number)]
            self._free_pads += free
        pad = free[0]
        self._free_pads.remove(pad)
        with self.island.exchange.agreed(f"{what}: zeroing the signal pad"):
            own = pad.addresses()[self.island.world.rank]
            self.island.backend.fill(own, nbytes)
        return pad

    def close(self) -> None:
        """Unmap all peers. Free what no array views; free the rest later."""
        entries = self._forget()
        with self.island.exchange.agreed("closing: unmapping peers"):
            _unmap(entries)
        # Every rank has unmapped, so memory of every kind may be freed.
        for entry in entries:
            entry.block.remove_mapped(entry)

    def close_locally(self) -> None:
        """Unmap all peers, without other ranks.

        Memory that must not be freed while a peer has it mapped stays until the
        process ends.
        """
        entries = self._forget()
        try:
            _unmap(entries)
        finally:
            for entry in entries:
                if entry.block.backend.frees_while_mapped:
                    entry.block.remove_mapped(entry)
                else:
                    _never_freed.append(entry)

    def _forget(self) -> list[_Entry]:
        streams.give_back()  # includes the workspace
        entries = list(self._entries.values())
        self._entries.clear()
        self._found.clear()
        for arena in self._arenas:  # no array views them: freed when unmapped
            self.allocator.release(arena.block)
        self._arenas.clear()
        self._free_pads.clear()
        return entries


def _channels(channels: Any, entry: _Entry | None) -> int:
    """Return the channels of an allocation's pad, or refuse more than it has."""
    pad = entry.pad if entry else None
    if channels is None:
        return pad.channels if pad else CHANNELS
    most = pad.channels if pad else pads.MOST_CHANNELS
    return arguments.integer(
        channels,
        "rendezvous",
        f"channels to be an integer from 1 to {most}",
        least=1,
        most=most,
        do="pass the most that a kernel needs in the allocation's first rendezvous",
    )


_MAPPED = 2  # allocations that a call maps: of an array and of signal pads
_never_freed: list[_Entry] = []


def _unmap(entries: list[_Entry]) -> None:
    """Unmap the peers of every entry, even if one of them fails."""
    with ExitStack() as steps:
        for entry in entries:
            steps.callback(entry.peers.close)


MOST_BLOCKS, MOST_THREADS, MOST_BYTES = 1 << 16, 1024, 1 << 30


class DeviceWorkspace:
    """The memory for collectives within kernels.

    ``comm.device_workspace(…)`` returns it. It is valid until the communicator is
    closed.

    Attributes:
        blocks: the maximum number of blocks of a kernel.
        threads: the maximum number of threads of a block.
        bytes: the maximum number of bytes that a block sends to each rank in a call.
        depth: the maximum number of collectives that are started and not awaited.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        sizes: tuple[int, int, int, int],
        team: Team,
        users: SymmetricMemory | None,
    ):
        self.blocks, self.threads, self.bytes, self.depth = sizes
        blocks, threads, bytes, depth = sizes
        self._memory = memory
        own, ctx = memory.ctx, (users or memory).ctx
        ranks = ring_of(team)
        fields = (
            *(ctx.rank, ctx.size, ctx.buffers, ctx.pads),
            *(TeamGuard(*ctx.guard, ranks), team),
            tuple(own.buffers[rank] for rank in ranks),
            *(blocks, warps(threads), vectors(threads, bytes), depth),
        )
        size = ctx.buffer_size if users else 0
        self._ctx = WorkspaceContext(*fields)
        if ctx.checked:
            self._ctx = CheckedWorkspaceContext(*fields, size, ctx.channels)
        self._ctx.owner, self._ctx.starts = (own.owner, ctx.owner), {}
        self._ctx.buffer_size, self._ctx.channels = size, ctx.channels
        self._ctx.check_mapped = ctx.check_mapped

    def __repr__(self) -> str:
        return (
            f"<DeviceWorkspace of {self.blocks} blocks of {self.threads} threads, "
            f"{self.bytes} bytes each, rank {self._memory.rank} of "
            f"{self._memory.world_size}>"
        )

    @property
    def ctx(self) -> WorkspaceContext:
        """The context to pass to ``@cuda.jit`` kernels, as an ordinary argument.

        Like this object, the context keeps the memory alive until the communicator is
        closed.

        Raises:
            ClosedError: the communicator was closed.
        """
        _ = self._memory.ctx  # raises if it was closed
        return self._ctx

    @property
    def _numba_type_(self) -> Any:
        """Refuse to be an argument of a kernel, whose type Numba asks for here."""
        raise ArgumentError(
            "a kernel's argument: expected a context, got DeviceWorkspace; pass its "
            "attribute ctx"
        )


def new(
    heap: Heap,
    members: Members,
    blocks: int,
    threads: int,
    bytes: int,
    depth: int,
    team: Any,
    memory: Any,
) -> DeviceWorkspace:
    """Return a new workspace; see ``Communicator.device_workspace``. Collective."""
    what = "device_workspace"
    with members.set_up(what):
        with members.exchange.agreed(what) as outcomes:
            sizes = checked(blocks, threads, bytes, depth)
            team = checked_team(heap.island.world, team)
            check_memory(memory, heap.island)
            outcomes.mine = team.ranks
        blocks, threads, bytes, depth = sizes
        fact = f"{blocks} blocks of {threads} threads, {bytes} bytes, depth {depth}"
        members.exchange.agree_equal(f"{fact}{', memory' * bool(memory)}", what)
        for part in members.parts:
            check_teams([outcomes.all[rank] for rank in part])
        # Of the largest island, because all ranks allocate the same.
        nbytes = block_exchange.nbytes(
            max(map(len, members.parts)),
            blocks,
            warps(threads),
            vectors(threads, bytes) + (heap.debug or SIMULATED),
            depth,
        )
        array = heap.array(nbytes, np.uint8, what)  # zeros: no packet, no epoch
        own = heap.rendezvous(arrays.view(array, what).address, array)
    return DeviceWorkspace(own, sizes, team, memory)


def checked_team(world: Any, team: Any, made: Any = Team) -> Team:
    """Return a team of this rank, or of all ranks for None; or refuse it.

    Args:
        world: has this rank and the number of ranks.
        team: the team.
        made: the class of teams.
    """
    if team is None:
        return made.of(world, range(world.size))  # type: ignore[no-any-return]
    if (
        not isinstance(team, made)
        or team != made.of(world, team.ranks)
        or team.place < 0
    ):
        raise ArgumentError(
            f"device_workspace: expected a team of this rank, {world.rank}, or None, "
            f"got {team!r}; pass each rank the team to which it belongs"
        )
    return team  # type: ignore[no-any-return]


def ring_of(team: Team) -> tuple[int, ...]:
    """Return the ranks of a team along the ring: the others, and then this one."""
    first = team.place + 1
    return team.ranks[first:] + team.ranks[:first]


def check_teams(teams: Sequence[tuple[int, ...]]) -> None:
    """Refuse teams, by rank, of which one contains a rank of another one."""
    for rank, team in enumerate(teams):
        for other in team:
            if teams[other] != team:
                raise ArgumentError(
                    f"device_workspace: rank {rank} has the team {team}, and rank "
                    f"{other} {teams[other]}; all ranks of a team must pass the same"
                )


def check_memory(memory: Any, island: Members) -> None:
    """Refuse what is not symmetric memory of the communicator."""
    if memory is not None:
        if not isinstance(memory, SymmetricMemory) or not memory.is_of(island):
            raise ArgumentError(
                "device_workspace: expected memory to be the result of this "
                f"communicator's rendezvous, or None, got {memory!r}"
            )
        _ = memory.ctx  # raises if it was closed


def checked(
    blocks: Any, threads: Any, bytes: Any, depth: Any
) -> tuple[int, int, int, int]:
    """Return the sizes of a workspace as Python's ints, or refuse one of them."""
    found = _checked(depth, "depth", MOST_DEPTH)
    if found & (found - 1):
        raise ArgumentError(
            f"device_workspace: expected depth to be a power of two, got {found}; pass "
            f"{1 << found.bit_length()}"
        )
    return (
        _checked(blocks, "blocks", MOST_BLOCKS),
        _checked(threads, "threads", MOST_THREADS),
        _checked(bytes, "bytes", MOST_BYTES),
        found,
    )


def _checked(value: Any, name: str, most: int) -> int:
    return arguments.integer(
        value,
        "device_workspace",
        f"{name} to be an integer from 1 to {most}",
        least=1,
        most=most,
        do="pass the most that a kernel needs",
    )


def warps(threads: int) -> int:
    """Return a number of threads, rounded up to whole warps."""
    return -(-threads // WARP) * WARP


def vectors(threads: int, bytes: int) -> int:
    """Return how many vectors a thread of a block sends, of so many bytes in all."""
    return -(-bytes // (VECTOR * threads))
