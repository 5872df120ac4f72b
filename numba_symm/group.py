"""Ranks bound to GPUs: what symmetric memory and kernels need of a communicator."""

import math
import os
from contextlib import ExitStack
from typing import Any

from numba_symm import backends, environment
from numba_symm.backends.protocol import Backend, Mapping
from numba_symm.board import Board, Failure
from numba_symm.device.signals import Guard
from numba_symm.errors import (
    BackendError,
    ClosedError,
    CollectiveError,
    CollectiveTimeout,
    SymmError,
)
from numba_symm.launch import devices, ranks
from numba_symm.launch.exchange import StoreExchange
from numba_symm.launch.fds import IpcChannel

_MARGIN = 1.0  # seconds


class Group:
    """Ranks that know their GPUs, their memory's kind and each other.

    Collective: every rank makes it at once, with equal ``timeout``.

    Args:
        comm: mpi4py's communicator, or any object with rank, size, allgather and
            barrier.
        device: ordinal of this rank's GPU, or None to have it assigned.
        timeout: seconds a kernel waits for a peer; 0 waits for ever; None:
            ``NUMBA_SYMM_TIMEOUT``, else 300.

    Attributes:
        timeout: the seconds, checked.
        comm: what the ranks talk through: of an mpi4py communicator, a duplicate.
        world: this rank's place.
        exchange: the ranks' store.
        channel: sends descriptors between them.
        gpu: this rank's GPU.
        peer_access: which GPU reaches which, by rank; None where not known.
        backend: where memory comes from.
        refused: why better backends were not taken, by name.
        board: where kernels report that they gave up.
        guard: what kernels need to give up.
        told: the failure that a call of this rank has last raised.
        closed: whether it was closed.
    """

    def __init__(self, comm: ranks.Comm, device: int | None, timeout: float | None):
        self.closed = False
        self.told: Failure | None = None
        with ExitStack() as undo_comm, ExitStack() as undo:
            self.comm = ranks.duplicate(ranks.checked(comm))
            # Collective, so for errors here, which every rank meets, and not later.
            undo_comm.callback(ranks.release, self.comm)
            self.world = ranks.discover(self.comm)
            self.exchange = StoreExchange(self.comm, "communicator")
            with self.exchange.agreed("Communicator"):
                self.timeout = environment.chosen_timeout(timeout)
            self.exchange.agree_equal(f"timeout={self.timeout:g}", "Communicator")
            self.gpu = devices.bind(self.exchange, self.world, device)
            ranks.refuse_too_many(self.world.size)
            self.peer_access = devices.check_peer_access(self.exchange, self.gpu)
            self.channel = undo.enter_context(IpcChannel(self.exchange))
            self.backend, self.refused = choose_backend(self)
            self.board = Board(self.exchange, self.channel)
            undo.callback(self.board.close)
            self.guard = Guard(
                self.board.address,
                self.world.rank,
                self.world.size,
                math.ceil(self.timeout * 1e9),
            )
            undo_comm.pop_all()
            self._undo = undo.pop_all()

    def check(self) -> None:
        """Raise if the communicator was closed or a kernel has given up.

        Raises:
            CollectiveError: it has failed; says why.
            ClosedError: it was closed.
        """
        self.check_open()
        failure = self.board.failure()
        if failure is not None:
            raise self._error(failure)

    @property
    def failed(self) -> bool:
        """Whether it has failed or was closed; asking costs nothing."""
        return self.closed or self.board.failure() is not None

    def check_open(self) -> None:
        """Raise ClosedError if the communicator was closed."""
        if self.closed:
            raise ClosedError("the communicator was closed; make a new one")

    def enter(self) -> None:
        """Wait for every rank to come here. Collective; raises on all ranks or none.

        Raises:
            CollectiveError: it has failed.
            ClosedError: it was closed.
        """
        self.check()
        failure = self.board.gate()
        if failure is not None:
            raise self._error(failure)

    def failure_after_meeting(self) -> CollectiveError | None:
        """Wait for every rank to come to its end; return why one has failed.

        Collective, with no kernel of this rank running; all ranks return the same.
        Does not wait for the others once one has failed, or for the timeout.
        """
        # A little longer than kernels wait: theirs is the better reason.
        failure = self.board.gate(self.timeout and self.timeout + _MARGIN)
        return None if failure is None else self._error(failure)

    def _error(self, failure: Failure) -> CollectiveError:
        """Return what is to be raised, and remember that it was."""
        self.told = failure
        late = failure.error is CollectiveTimeout
        timeout = f" (timeout: {self.timeout:g} s)" if late else ""
        hint = f". {failure.hint}" if failure.hint else ""
        return failure.error(
            f"{failure.text}{timeout}; results since the last check are undefined. "
            f"Close this communicator and make a new one{hint}"
        )

    def abandon(self) -> None:
        """Make every rank's waiting kernels leave, and its later calls fail."""
        self.board.abandon()

    def close(self) -> None:
        """Give up the board, the channel and the duplicated communicator."""
        self.closed = True
        self._undo.close()
        ranks.release(self.comm)

    def close_locally(self) -> None:
        """Give up the board and the channel; freeing the duplicate is collective."""
        self.closed = True
        self._undo.close()


def choose_backend(group: Group) -> tuple[Backend, dict[str, str]]:
    """Return the best backend that works between every pair of ranks. Collective.

    ``NUMBA_SYMM_BACKEND`` leaves one choice. Returns why others were refused too.
    """
    exchange = group.exchange
    with exchange.agreed("reading NUMBA_SYMM_BACKEND"):
        asked = environment.requested_backend()
    exchange.agree_equal(f"NUMBA_SYMM_BACKEND={asked}", "Communicator")
    refused: dict[str, str] = {}
    for name in [asked] if asked else environment.BACKENDS:
        try:
            with exchange.agreed(f"starting backend {name!r}"):
                backend = backends.create(name, group.gpu.ordinal)
            prove(group, backend)
        except SymmError as error:
            if type(error) is SymmError:  # no word on the memory: an interrupt, a bug
                raise
            refused[name] = str(error)
        else:
            return backend, refused
    reasons = "\n".join(f"  {name}: {text}" for name, text in refused.items())
    raise BackendError(f"no kind of memory can be shared by these ranks:\n{reasons}")


def prove(group: Group, backend: Backend) -> None:
    """Write to every peer's memory and read what they wrote. Collective.

    Raises:
        SymmError: on all ranks, if a step failed or a byte is wrong on any.
    """
    exchange, what = group.exchange, f"trying memory of kind {backend.name!r}"
    rank, size = exchange.rank, exchange.size
    with ExitStack() as undo:
        with exchange.agreed(what):
            block = backend.allocate(8 * size)
            undo.callback(backend.free, block)
        peers = map_peers(group, backend, block, block.nbytes, what)
        undo.callback(peers.close, exchange)
        with exchange.agreed(f"{what}: writing"):
            for r in range(size):
                slot = peers.addresses[r] + 8 * rank
                backend.write(slot, _pattern(rank, r))
        with exchange.agreed(f"{what}: reading"):
            for r in range(size):
                found = backend.read(block.address + 8 * r, 8)
                if found != _pattern(r, rank):
                    raise BackendError(
                        f"rank {r} wrote {_pattern(r, rank).hex()} into this rank's "
                        f"memory, which holds {found.hex()}"
                    )


def _pattern(source: int, target: int) -> bytes:
    return f"{source:03d}>{target:03d}\n".encode()


class Peers:
    """Every rank's copy of an allocation, mapped into this process.

    Attributes:
        addresses: by rank; this rank's own copy where it was allocated.
        seen: by rank, at which address that one sees this rank's.
        mappings: what keeps each peer's mapped; None for this rank.
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
            exchange: wait, after unmapping, until all ranks have done so; the memory
                may then be freed whatever its kind. None: a local close.
        """
        self.closed = True
        self.mappings = [None] * len(self.mappings)
        if exchange is None:
            self._undo.close()
            return
        with exchange.agreed("unmapping"):
            self._undo.close()


def map_peers(
    group: Group, backend: Backend, block: Any, nbytes: int, what: str
) -> Peers:
    """Map every rank's allocation here. Collective; fails on all ranks or none.

    Args:
        group: the ranks.
        backend: the allocations' kind, equal on all ranks.
        block: this rank's :class:`Allocation`.
        nbytes: its size, equal on all ranks.
        what: the step's name in errors.
    """
    try:
        return _map_peers(group, backend, block, nbytes, what)
    except BaseException:
        # Every rank is here. Descriptors that nobody took must not be taken for the
        # next ones; and once all have unmapped, the memory may be freed.
        group.channel.discard()
        group.exchange.barrier(f"{what}: undone")
        raise


def _map_peers(
    group: Group, backend: Backend, block: Any, nbytes: int, what: str
) -> Peers:
    exchange = group.exchange
    rank, size = exchange.rank, exchange.size
    with ExitStack() as undo:
        with exchange.agreed(f"{what}: exporting"):
            handle = backend.export(block)
            if backend.exports_fd:
                undo.callback(os.close, handle)
        with ExitStack() as received, ExitStack() as mapped:
            if backend.exports_fd:
                with exchange.agreed(f"{what}: passing descriptors"):
                    handles = group.channel.all_gather_fds(handle)
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
            everyone = exchange.all_gather(tuple(addresses), f"{what}: where it is")
            seen = tuple(theirs[rank] for theirs in everyone)
            return Peers(tuple(addresses), seen, mappings, mapped.pop_all())
