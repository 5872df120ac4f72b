"""The symmetric memory of a communicator: allocations that all ranks have mapped."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba_symm import arguments, arrays, deferred, dtypes, libraries, pads
from numba_symm.backends import ipc
from numba_symm.backends.peers import Peers, map_peers
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.members import Members
from numba_symm.memory.allocator import Block, allocator_of
from numba_symm.memory.symmetric import SymmetricMemory
from numba_symm.own_arrays import Memory
from numba_symm.ranges import Misses, Ranges


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
                library = libraries.named(like, what)
                libraries.check_type(library, dtype, what)
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
            self._count = first + _MOST

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
        deferred.give_back()
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

    def rendezvous(self, address: int, array: Any = None) -> SymmetricMemory:
        """Return the symmetric memory at ``address``. Map its allocation if needed.

        Args:
            address: the address of its first byte, at the same offset of its allocation
                on all ranks.
            array: the object that keeps memory of another library; kept until close.
        """
        exchange, what = self._members.exchange, "rendezvous"
        with exchange.agreed(what):
            address = arguments.address(address, what)
            entry = self._entry_around(address)
            block = entry.block if entry else self._block_around(address, what)
        offset = address - block.address
        number = entry.number if entry else "new"
        exchange.agree_equal(
            f"allocation {number} of {block.nbytes} bytes ({block.backend.name}), "
            f"offset {offset}",
            what,
        )
        with self._of_islands(what):
            if entry is None:
                entry = self._map(block, what)
                if not block.own:
                    entry.owner = lambda: array
            if entry.pad is None:
                entry.pad = self._take_pad(what)
        owner = entry.owner(), array
        pad = entry.pad.addresses()
        return SymmetricMemory(
            self.island,
            entry.peers,
            block.nbytes,
            offset,
            pad,
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
        found = ipc.allocation_around(address, what)
        return Block(found.nbytes, ipc.IpcBackend(), found, own=False)

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

    def _take_pad(self, what: str) -> _Pad:
        nbytes = pads.pad_nbytes(self.island.world.size)
        if not self._free_pads:
            arena = self._allocate(pads.PADS_PER_ARENA * nbytes, "signal pads")
            self._arenas.append(arena)
            self._free_pads = [
                _Pad(arena, index * nbytes) for index in range(pads.PADS_PER_ARENA)
            ]
        pad = self._free_pads.pop(0)
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
        deferred.give_back()  # includes the workspace
        entries = list(self._entries.values())
        self._entries.clear()
        self._found.clear()
        for arena in self._arenas:  # no array views them: freed when unmapped
            self.allocator.release(arena.block)
        self._arenas.clear()
        self._free_pads.clear()
        return entries


_MOST = 2  # allocations that a call maps: of an array and of signal pads
_never_freed: list[_Entry] = []


def _unmap(entries: list[_Entry]) -> None:
    """Unmap the peers of every entry, even if one of them fails."""
    with ExitStack() as steps:
        for entry in entries:
            steps.callback(entry.peers.close)
