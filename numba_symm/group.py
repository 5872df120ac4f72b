"""Ranks bound to GPUs: what symmetric memory and kernels need of a communicator."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from numba_symm import backends, environment, forks
from numba_symm.backends.protocol import Backend, Mapping
from numba_symm.board import Board, Failure
from numba_symm.device.signals import Guard
from numba_symm.errors import (
    ArgumentError,
    BackendError,
    ClosedError,
    CollectiveError,
    CollectiveTimeout,
    SymmError,
)
from numba_symm.launch import devices, ranks, waiting
from numba_symm.launch.exchange import StoreExchange
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.waiting import Wait

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
        own: ``comm`` is for this group alone, and need not be duplicated.

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
        why_closed: what whoever uses it all the same is told.
    """

    def __init__(
        self,
        comm: ranks.Comm,
        device: int | None,
        timeout: float | None,
        own: bool = False,
    ):
        self.closed = False
        self.why_closed = "the communicator was closed; make a new one"
        self.told: Failure | None = None
        self._undo = ExitStack()
        comm, patience = ranks.checked(comm), _patience()
        if not own:
            comm = waiting.duplicate(comm, Wait("Communicator", comm.rank, patience))
        self.comm = comm
        self.exchange = StoreExchange(self.comm, "communicator", patience)
        self.exchange.call = "Communicator"
        try:
            self._make(device, timeout)
        except BaseException as error:
            self.give_up(error)
            raise

    def _make(self, device: int | None, timeout: float | None) -> None:
        exchange = self.exchange
        self.world = ranks.discover(exchange)
        with exchange.agreed("Communicator"):
            environment.chosen_setup_timeout()
            self.timeout = environment.chosen_timeout(timeout)
        exchange.agree_equal(f"timeout={self.timeout:g}", "Communicator")
        if self.world.local_size < self.world.size:
            hosts = exchange.all_gather(self.world.host, "hosts")
            ranks.refuse_several_hosts(hosts)
        ranks.refuse_too_many(self.world.size)
        self.channel = self._undo.enter_context(IpcChannel(exchange))
        self.board = Board(exchange, self.channel, self._undo)
        exchange.meet_at(self.board)
        self.gpu = devices.bind(exchange, device)
        self.peer_access = devices.check_peer_access(exchange, self.gpu)
        with exchange.agreed("letting the GPU reach the status board"):
            self.board.register()
        self.backend, self.refused = choose_backend(self)
        self.guard = Guard(
            self.board.address,
            self.world.rank,
            self.world.size,
            math.ceil(self.timeout * 1e9),
        )
        forks.watch(self)

    def disown(self) -> None:
        """Leave everything to the parent, in a forked child."""
        self.closed = True
        self.why_closed = (
            f"this process was forked from rank {self.world.rank}'s, which alone can "
            f"use the communicator; {forks.ADVICE}"
        )
        self._undo.pop_all()

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
            raise ClosedError(self.why_closed)

    @contextmanager
    def set_up(self, what: str) -> Iterator[None]:
        """Make a call that all ranks make, once every rank is here. Collective.

        All ranks begin, or none does. A rank that leaves the block by an exception that
        is not every rank's tells the others, whose call and later ones raise.

        Args:
            what: the call, as the user names it.

        Raises:
            CollectiveError: it has failed.
            ClosedError: it was closed.
        """
        self.exchange.call = what
        try:
            self.check_open()
            failure = self.board.gate(self.exchange.wait(what))
            if failure is not None:
                raise failure.exception()
            yield
        except CollectiveError:
            failure = self.board.failure()
            if failure is None:  # a communicator that it makes has failed
                raise
            raise self._error(failure) from None
        except BaseException as error:
            if not self.exchange.is_everybodys(error):
                self.abandon(error, what)
            raise

    def failure_after_meeting(self) -> CollectiveError | None:
        """Wait for every rank to come to its end; return why one has failed.

        Collective, with no kernel of this rank running; all ranks return the same.
        Does not wait for the others once one has failed, or for the timeout.
        """
        self.exchange.call = what = "close"
        wait = self.exchange.wait(what)
        # A little longer than kernels wait: theirs is the better reason.
        seconds = self.timeout and self.timeout + _MARGIN
        if seconds and not 0 < self.exchange.timeout < seconds:
            limit = f"timeout: {self.timeout:g} s"
            wait = Wait(what, self.world.rank, seconds, limit)
        failure = self.board.gate(wait)
        return None if failure is None else self._error(failure)

    def _error(self, failure: Failure) -> CollectiveError:
        """Return what is to be raised, and remember that it was."""
        self.told = failure
        if failure.error is CollectiveTimeout and not failure.limit:
            failure = failure._replace(limit=f"timeout: {self.timeout:g} s")
        hint = f". {failure.hint}" if failure.hint else ""
        return failure.exception(
            "; results since the last check are undefined. Close this communicator "
            f"and make a new one{hint}"
        )

    def abandon(self, cause: BaseException | str, operation: str = "") -> None:
        """Make every rank's waiting kernels leave, and its later calls fail.

        This rank knows why. See :meth:`Board.abandon`.
        """
        if not self.failed:
            self.board.abandon(cause, operation)
            self.told = self.board.failure()

    def give_up(self, error: BaseException) -> None:
        """Undo what was made of it, as its construction has failed.

        Args:
            error: why. If it is this rank's alone, the others are told, and nothing
                that takes all ranks is undone.
        """
        self.closed = True
        everybodys = self.exchange.is_everybodys(error)
        if not everybodys:
            self.exchange.leave(error)
        self._undo.close()
        if everybodys:
            ranks.release(self.comm)

    def close(self) -> None:
        """Give up the board, the channel and the duplicated communicator."""
        self.closed = True
        self._undo.close()
        ranks.release(self.comm)

    def close_locally(self) -> None:
        """Give up the board and the channel; freeing the duplicate is collective."""
        self.closed = True
        self._undo.close()


def _patience() -> float:
    """Return the seconds that ranks wait to find each other.

    A mistake in them is told when all ranks are there.
    """
    try:
        return environment.chosen_setup_timeout()
    except ArgumentError:
        return 0.0


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
            # No word on the memory: an interrupt, a bug, a rank that is late or gone.
            if type(error) is SymmError or isinstance(error, CollectiveError):
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

            @undo.push
            def free(kind: Any, error: BaseException | None, trace: Any) -> None:
                if backend.frees_while_mapped or exchange.is_everybodys(error):
                    backend.free(block)

        peers = map_peers(group, backend, block, block.nbytes, what)

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
    except BaseException as error:
        # If every rank is here, descriptors that nobody took must not be taken for the
        # next ones; and once all have unmapped, the memory may be freed.
        if group.exchange.is_everybodys(error):
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
