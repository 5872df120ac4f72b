"""The choice of a backend that works between all ranks, and mappings of all peers."""

import os
from contextlib import ExitStack
from typing import Any, Protocol

from numba_symm import backends, environment
from numba_symm.backends.protocol import Backend, Mapping
from numba_symm.environment import SIMULATED
from numba_symm.errors import BackendError, CollectiveError, SymmError
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.store import StoreExchange

if SIMULATED:
    from numba_symm import simulator


class MappingRanks(Protocol):
    """Ranks that map each other's memory, such as a :class:`numba_symm.island.Island`.

    Attributes:
        exchange: exchanges small values between the ranks.
        channel: sends file descriptors between the ranks.
    """

    exchange: StoreExchange
    channel: IpcChannel


def choose_backend(ranks: MappingRanks, ordinal: int) -> tuple[Backend, dict[str, str]]:
    """Return the best backend that works between every pair of ranks. Collective.

    Args:
        ranks: the ranks.
        ordinal: the ordinal of this rank's GPU.

    Returns:
        The backend, which ``NUMBA_SYMM_BACKEND`` may select, and by name the reasons
        against better ones.
    """
    exchange = ranks.exchange
    with exchange.agreed("reading NUMBA_SYMM_BACKEND"):
        asked = environment.requested_backend()
    exchange.agree_equal(f"NUMBA_SYMM_BACKEND={asked}", "Communicator")
    refused: dict[str, str] = {}
    for name in [asked] if asked else environment.BACKENDS:
        try:
            with exchange.agreed(f"starting backend {name!r}"):
                backend = backends.create(name, ordinal)
            prove(ranks, backend)
        except SymmError as error:
            # Not about the memory: an interrupt, a bug, a rank that is late or left.
            if type(error) is SymmError or isinstance(error, CollectiveError):
                raise
            refused[name] = str(error)
        else:
            return backend, refused
    reasons = "\n".join(f"  {name}: {text}" for name, text in refused.items())
    raise BackendError(f"no kind of memory can be shared by these ranks:\n{reasons}")


def prove(ranks: MappingRanks, backend: Backend) -> None:
    """Write to every peer's memory, and read what the peers wrote. Collective.

    Raises:
        SymmError: on all ranks, if a step failed or a byte is wrong on any.
    """
    exchange, what = ranks.exchange, f"trying memory of kind {backend.name!r}"
    rank, size = exchange.rank, exchange.size
    with ExitStack() as undo:
        with exchange.agreed(what):
            block = backend.allocate(8 * size)

            @undo.push
            def free(kind: Any, error: BaseException | None, trace: Any) -> None:
                if backend.frees_while_mapped or exchange.is_everybodys(error):
                    backend.free(block)

        peers = map_peers(ranks, backend, block, block.nbytes, what)

        @undo.push
        def unmap(kind: Any, error: BaseException | None, trace: Any) -> None:
            peers.close(exchange if exchange.is_everybodys(error) else None)

        with exchange.agreed(f"{what}: writing"):
            for r in range(size):
                slot = peers.addresses[r] + 8 * rank
                backend.write(slot, _pattern(rank, r))
        with exchange.agreed(f"{what}: reading"):
            for r in range(size):
                found = backend.read(block.address + 8 * r, 8)
                if found != _pattern(r, rank):
                    raise BackendError(
                        f"expected {_pattern(r, rank).hex()}, which rank {r} wrote "
                        f"into this rank's memory, got {found.hex()}"
                    )


def _pattern(source: int, target: int) -> bytes:
    return f"{source:03d}>{target:03d}\n".encode()


class Peers:
    """Every rank's copy of an allocation, mapped into this process.

    Attributes:
        addresses: by rank, the address of the rank's copy in this process.
        seen: by rank, the address of this rank's copy in the rank's process.
        mappings: by rank, the mapping of the rank's copy; None for this rank.
        closed: whether they were unmapped.
    """

    def __init__(
        self,
        addresses: tuple[int, ...],
        seen: tuple[int, ...],
        mappings: list[Mapping | None],
        undo: ExitStack,
    ):
        self.addresses = addresses
        self.seen = seen
        self.mappings = mappings
        self.closed = False
        self._undo = undo

    def close(self, exchange: StoreExchange | None = None) -> None:
        """Unmap the peers' memory.

        Args:
            exchange: the ranks. After unmapping, wait until all have unmapped, so that
                memory of every kind may be freed. None: close locally.
        """
        self.closed = True
        self.mappings = [None] * len(self.mappings)
        if exchange is None:
            self._undo.close()
            return
        with exchange.agreed("unmapping"):
            self._undo.close()


def map_peers(
    ranks: MappingRanks, backend: Backend, block: Any, nbytes: int, what: str
) -> Peers:
    """Map every rank's allocation here. Collective. Fails on all ranks or on none.

    Args:
        ranks: the ranks.
        backend: the backend of the allocations, equal on all ranks.
        block: this rank's :class:`Allocation`.
        nbytes: its size, equal on all ranks.
        what: the step's name in errors.
    """
    try:
        return _map_peers(ranks, backend, block, nbytes, what)
    except BaseException as error:
        # If every rank is here, discard descriptors, so that they are not taken for
        # later ones. When all ranks have unmapped, the memory may be freed.
        if ranks.exchange.is_everybodys(error):
            ranks.channel.discard()
            ranks.exchange.barrier(f"{what}: undone")
        raise


def _map_peers(
    ranks: MappingRanks, backend: Backend, block: Any, nbytes: int, what: str
) -> Peers:
    exchange = ranks.exchange
    rank, size = exchange.rank, exchange.size
    with ExitStack() as undo:
        with exchange.agreed(f"{what}: exporting"):
            handle = backend.export(block)
            if backend.exports_fd:
                undo.callback(os.close, handle)
        with ExitStack() as received, ExitStack() as mapped:
            if backend.exports_fd:
                with exchange.agreed(f"{what}: passing descriptors"):
                    handles = ranks.channel.all_gather_fds(handle)
                    for fd in handles:
                        received.callback(os.close, fd)
            else:
                handles = exchange.all_gather(handle, f"{what}: passing handles")
            mappings: list[Mapping | None] = [None] * size
            addresses = [block.address] * size
            with exchange.agreed(f"{what}: mapping peers"):
                for r in range(size):
                    if r != rank:
                        mapping = backend.open(handles[r], nbytes)
                        mapped.callback(backend.close, mapping)
                        mappings[r], addresses[r] = mapping, mapping.address
                        if SIMULATED:
                            simulator.add_peer(mapping.address, mapping.resource)
            everyone = exchange.all_gather(tuple(addresses), f"{what}: where it is")
            seen = tuple(theirs[rank] for theirs in everyone)
            return Peers(tuple(addresses), seen, mappings, mapped.pop_all())
