"""The ranks of a communicator: one island or several, their memory, their backend."""

import functools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from numba_symm import environment, process
from numba_symm.device import instructions
from numba_symm.device.polling import Guard
from numba_symm.environment import SIMULATED
from numba_symm.errors import (
    Aborted,
    ArgumentError,
    BackendError,
    CallMismatch,
    ClosedError,
    CollectiveError,
    CollectiveTimeout,
    PeerAccessError,
    SymmError,
)
from numba_symm.launch import devices, ranks, waiting
from numba_symm.launch.board import Board
from numba_symm.launch.call_records import Description
from numba_symm.launch.devices import GPU, Parts
from numba_symm.launch.failures import Failure
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.ranks import NodeKey, TaggedComm
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait
from numba_symm.memory import backends
from numba_symm.memory.backends import Backend, Mapping

_MARGIN = 1.0  # seconds


class Between(Protocol):
    """What moves bytes between islands, as a communicator needs it: an ``Engine``."""

    name: str
    version: str
    capturable: bool

    def keep(self, *objects: Any) -> None: ...

    def settle(self) -> None: ...


class Members(ABC):
    """The ranks of a communicator, with their GPUs, exchange and failures.

    Collective: every rank passes the same ``timeout``.

    Args:
        comm: the ranks, by messages of their own: see :func:`locks.duplicate`. It
            is released in the end.
        undo: gives the construction up if an exception ends its block. Otherwise its
            end closes what was made here, without other ranks.
        device: the ordinal of this rank's GPU. None: one is assigned.
        timeout: seconds that a kernel waits for a peer; 0: indefinitely; None:
            ``NUMBA_SYMM_TIMEOUT``, else 300.
        part: whether the ranks are a part of a communicator, or a child of one, which
            ``NUMBA_SYMM_ISLAND_SIZE`` does not divide.
        names: by rank, its number in texts, where a larger communicator has these
            ranks; None: the same.
        nodes: by rank, the name of its node, for texts; empty: texts name no nodes.
        parent: an island with these ranks, of several with those of this rank's island;
            and the numbers there. Its sockets and locks are used here, too. None: new
            ones are made.
        seen: the attribute of a larger communicator, or of an island that raised, where
            these ranks have agreed on their settings; empty: they agree now.

    Attributes:
        timeout: the seconds, checked.
        comm: the ranks, by messages of their own.
        seen: by rank, the node that it runs on.
        world: this rank's place.
        nodes: by rank, the name of its node.
        parts: the ranks of each island.
        exchange: exchanges small values between the ranks.
        channel: sends file descriptors between the ranks of this rank's island.
        gpu: this rank's GPU.
        gpus: the GPUs of this node's ranks, in the order of these ranks.
        peer_access: which of these can access which; None where it is unknown.
        backend: allocates and maps memory of this rank's island.
        refused: why better backends were not used, by name.
        board: the status board of this rank's island, where kernels report failures.
        guard: what kernels need to give up a wait.
        engine: moves bytes between the islands; None if there is one.
        note: which ranks of a larger communicator these are, for errors; "" if it is
            the whole communicator.
        known_failure: the last failure that a call of this rank has raised or caused;
            after one, ``close`` raises none.
        closed: whether it was closed.
        why_closed: the text of the error that later calls raise.
    """

    parts: Parts
    gpu: GPU
    gpus: tuple[GPU, ...]
    peer_access: list[list[bool | None]]
    backend: Backend
    refused: dict[str, str]
    board: Board
    guard: Guard
    channel: IpcChannel
    note = ""
    engine: Between | None = None

    def __init__(
        self,
        comm: ranks.Comm | TaggedComm,
        undo: ExitStack,
        device: int | None,
        timeout: float | None,
        part: bool = False,
        names: Sequence[int] | None = None,
        nodes: Sequence[str] = (),
        parent: "tuple[Members, Sequence[int]] | None" = None,
        seen: Sequence[NodeKey] = (),
    ):
        self.closed = False
        self.why_closed = "the communicator was closed; make a new one"
        self.known_failure: Failure | None = None
        self._part = part
        self._parent = parent
        self._most: int | None = None
        self._setting_up = False  # whether a set-up call is open
        self._noted: dict[str, Description] = {}  # set-up calls
        self._undo = ExitStack()
        self.comm = comm
        self.exchange = StoreExchange(self.comm, "communicator", patience(), names)
        self.exchange.call, self.exchange.nodes = "Communicator", nodes
        try:
            self._agree(timeout, seen)
            self._make(device)
            process.watch(self)
            # Last, but here: an interrupt may follow before the caller has this object.
            # Twice, because a second interrupt may end one before it has reported.
            for _ in range(2):
                undo.push(self._end)
        except BaseException as error:
            self.give_up(error)
            raise

    def _agree(self, timeout: float | None, seen: Sequence[NodeKey]) -> None:
        """Find this rank's place, and check the settings that must be equal."""
        exchange = self.exchange
        if seen:
            self._choose(timeout)
        else:
            with exchange.agreed("Communicator") as each:
                environment.chosen_setup_timeout()
                environment.requested_engine()
                environment.show_islands()
                environment.message_limit()
                environment.records_calls()
                self._choose(timeout)
                most = self._most
                size = f", NUMBA_SYMM_ISLAND_SIZE={most}" if most else ""
                each.mine, each.usual = ranks.here(), f"timeout={self.timeout:g}{size}"
            exchange.refuse_different(each.usuals, "Communicator")
            seen = each.all
        self.seen = seen
        self.world, self.nodes = ranks.place(exchange.rank, seen)

    def _choose(self, timeout: float | None) -> None:
        """Set the settings that must be equal. Local."""
        self.timeout = environment.chosen_timeout(timeout)
        if not self._part:
            # A communicator of fewer ranks is made in many programs, too.
            self._most = environment.island_size(ranks.of_job(self.comm))

    @abstractmethod
    def _make(self, device: int | None) -> None:
        """Find the GPUs, and make what the ranks share. Collective."""

    @property
    @abstractmethod
    def island(self) -> "Members":
        """The ranks of this rank's island."""

    def at_home(self, members: Sequence[int]) -> "tuple[Members, list[int]]":
        """Return this rank's island, and the numbers there of ranks of it. Local."""
        home = next(part for part in self.parts if self.world.rank in part)
        return self.island, [home.index(member) for member in members]

    @abstractmethod
    def within(self, what: str) -> AbstractContextManager[None]:
        """Do what all ranks of each island do together; it fails on all or on none.

        Collective. ``what`` is the call, as the user names it.
        """

    @abstractmethod
    def _gate(self, wait: Wait) -> Failure | None:
        """Wait for every rank; see :meth:`Board.gate`. Collective."""

    @abstractmethod
    def described(self) -> str:
        """Return the islands in words."""

    @abstractmethod
    def close(self) -> None:
        """Close everything, and release ``comm``. Collective."""

    def disown(self) -> None:
        """Give everything up, in a forked child, because the parent owns it."""
        self.closed = True
        self.why_closed = (
            f"this process was forked from rank {self.world.rank} and cannot use its "
            f"communicator; {process.ADVICE}"
        )
        self._undo.pop_all()

    def check(self) -> None:
        """Raise if the communicator has failed or was closed.

        Raises:
            CollectiveError: it has failed; the text states the cause.
            ClosedError: it was closed.
        """
        if self.closed:
            self.check_open()
        failure = self.board.failure()
        if failure is not None:
            raise self._error(failure)

    @property
    def failed(self) -> bool:
        """Whether it has failed or was closed; reads host memory only."""
        return self.closed or self.board.failure() is not None

    def ended(self) -> list[int]:
        """Return the ranks of this island whose processes ended without a close."""
        rank = self.world.rank
        mine = next(part for part in self.parts if rank in part)
        return [mine[number] for number in self.board.ended()]

    def check_open(self) -> None:
        """Raise ClosedError if the communicator was closed."""
        if self.closed:
            raise ClosedError(self.why_closed)

    @contextmanager
    def set_up(self, what: str, recorded: bool = True) -> Iterator[None]:
        """Wait for every rank, then make a call that all ranks make. Collective.

        All ranks begin, or none does. If a rank leaves the block by an exception that
        not every rank raises, it reports that: the others' call, and later ones, raise.
        Within such a block, another one is a step of the same call, and does nothing.

        Args:
            what: the call, as the user names it.
            recorded: whether to note it in the record; other calls do that themselves.

        Raises:
            CollectiveError: it has failed.
            ClosedError: it was closed.
        """
        if self._setting_up:
            yield
            return
        self.exchange.call = what
        try:
            self._setting_up = True
            self.check_open()
            if recorded and self.board.record is not None:
                about = self._noted.setdefault(what, Description(what))
                self.board.record.note(about, 0)
            failure = self._gate(self.exchange.wait(what))
            if failure is not None:
                raise failure.exception()
            yield
        except CollectiveError:
            failure = self.board.failure()
            if failure is None:  # a communicator that the call makes has failed
                raise
            raise self._error(failure) from None
        except BaseException as error:
            if not self.exchange.is_everybodys(error):
                self.abandon(error, what)
            raise
        finally:
            self._setting_up = False

    def failure_after_meeting(self) -> CollectiveError | None:
        """Wait for every rank to close. Return the failure if there is one, else None.

        Collective. No kernel of this rank may be running. All ranks return the same.
        The wait ends when a rank has failed, or after the timeout.
        """
        self.exchange.call = what = "close"
        wait = self.exchange.wait(what)
        # Longer than kernels wait, because their record has more details.
        seconds = self.timeout and self.timeout + _MARGIN
        if seconds and not 0 < self.exchange.timeout < seconds:
            limit = f"timeout: {self.timeout:g} s"
            wait = self.exchange.wait(what, seconds, limit)
        failure = self._gate(wait)
        if failure is None:
            return None
        return self._error(failure, "This communicator is closed now")

    def _error(
        self,
        failure: Failure,
        advice: str = "Close this communicator and make a new one",
    ) -> CollectiveError:
        """Return the exception to raise, and remember its failure."""
        self.known_failure = failure
        # The text of another island, or of an engine's wait, has its deadline.
        named = failure.limit or "timeout: " in failure.text
        if failure.error is CollectiveTimeout and not named:
            failure = failure._replace(limit=f"timeout: {self.timeout:g} s")
        calls = ""
        if failure.error in (CallMismatch, CollectiveTimeout):
            failure, calls = self._explained(failure)
        hint = f". {failure.hint}" if failure.hint else ""
        return failure.exception(
            f"; results since the last check are undefined. {advice}{hint}"
            + (calls and f"\n{calls}")
        )

    def _explained(self, failure: Failure) -> tuple[Failure, str]:
        """Return a failure with its cause, and a table; see :meth:`Board.explained`."""
        return self.board.explained(failure)

    def compare_calls(self) -> None:
        """Raise CallMismatch if calls of another rank of the island differ. Local."""
        self.board.compare()
        self.check()

    def abandon(self, cause: BaseException | str, operation: str = "") -> None:
        """Make the communicator fail on every rank; see :meth:`Board.abandon`.

        Later calls of this rank need not report this failure, whose cause it knows.
        """
        if not self.failed:
            self.board.abandon(cause, operation)
            self.known_failure = self.board.failure()

    def abort(self, reason: str) -> None:
        """Make the communicator fail on every rank, from any thread."""
        self.check_open()
        rank = self.world.rank
        text = f"rank {rank} aborted the communicator" + (reason and f": {reason}")
        another = self.board.failure()  # which this rank may not have raised yet
        self.fail(Aborted(text, ranks=(rank,)))
        if another is None:
            self.known_failure = self.board.failure()

    def fail(self, error: CollectiveError) -> None:
        """Make the communicator fail by an error that has named the ranks."""
        self.board.fail(error)

    def _end(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End the block in which this was made."""
        if error is None:
            self.close_locally()
        else:
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """Undo what was made, after the construction has failed. Idempotent.

        Args:
            error: the cause. If only this rank raises it, the rank reports it to the
                others, and undoes nothing that needs all ranks.
        """
        everybodys = self._is_everybodys(error)
        if not everybodys:
            self.exchange.leave(error)  # what is closed reports nothing
        self.close_locally()
        if everybodys:
            self._release(error)

    def _is_everybodys(self, error: BaseException) -> bool:
        """Return whether all ranks give up by an error, and undo things together."""
        return self.exchange.is_everybodys(error)

    def _release(self, error: BaseException) -> None:
        """Undo what needs all ranks, after the construction has failed on all."""
        ranks.release(self.comm)

    def close_locally(self) -> None:
        """Close the board and the channel. Messages may be left in ``comm``."""
        # What an interrupt left open could not be closed later.
        waiting.undisturbed(self._close_parts)

    def _close_parts(self) -> None:
        self.closed = True
        self._undo.close()


def patience() -> float:
    """Return the seconds that ranks wait for each other's first message.

    A mistake in the variable is reported later, when all ranks can raise it.
    """
    try:
        return environment.chosen_setup_timeout()
    except ArgumentError:
        return 0.0


if SIMULATED:
    from numba_symm import simulator


class MappingRanks(Protocol):
    """Ranks that map each other's memory, such as an :class:`Island`.

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


class Apart(PeerAccessError):
    """The ranks are not one island. Raised on all of them.

    ``comm`` is then not released, because the ranks use its messages to make several
    islands. It is released only if they are a part of a communicator.

    Attributes:
        seen: by rank, the node that it runs on.
    """

    def __init__(self, text: str, seen: Sequence[NodeKey]):
        super().__init__(text)
        self.seen = seen


class Island(Members):
    """The ranks of one node, which access each other's memory."""

    def _make(self, device: int | None) -> None:
        exchange = self.exchange
        self.parts = (tuple(range(self.world.size)),)
        self._refuse_several()
        ranks.refuse_too_many(self.world.size)
        parent, self._parent = self._parent, None  # which may end first
        presence = None
        if parent is not None and isinstance(self.comm, TaggedComm):
            other, members = parent
            presence = functools.partial(other.board.alive.part, members)
            channel = other.channel.beside(exchange, members, self.comm.tag)
        else:
            channel = IpcChannel(exchange)
        self.channel = self._undo.enter_context(channel)
        try:
            self.board = Board(exchange, self.channel, self._undo, presence)
        except BaseException as error:
            if exchange.is_everybodys(error):
                # A sibling made later uses the same sockets, and gets this number.
                self.channel.discard()
            raise
        exchange.meeting = self.board
        self.gpu, self.gpus, self.peer_access = devices.bind(exchange, device)
        try:
            devices.refuse_missing_access(
                self.peer_access, [each.uuid for each in self.gpus]
            )
        except PeerAccessError as error:
            raise Apart(str(error), self.seen) from error
        instructions.note_missing(devices.without_atomics(self.gpu, self.gpus))
        with exchange.agreed("letting the GPU reach the status board"):
            self.board.register()
        self.backend, self.refused = choose_backend(self, self.gpu.ordinal)
        self.guard = Guard(
            self.board.address,
            self.world.rank,
            self.world.size,
            math.ceil(self.timeout * 1e9),
        )

    def _refuse_several(self) -> None:
        """Raise :class:`Apart` if the ranks are on several nodes, or pretend to be."""
        if self.world.local_size < self.world.size:
            found = dict(enumerate(self.nodes))
            raise Apart(
                f"expected the ranks of an island on one node, and "
                f"{ranks.sentence(found, 'is on', 'are on')}",
                self.seen,
            )
        if self._most is not None and self._most < self.world.size:
            text = f"NUMBA_SYMM_ISLAND_SIZE={self._most} divides the ranks"
            raise Apart(text, self.seen)

    @property
    def island(self) -> "Island":
        """The island itself."""
        return self

    def within(self, what: str) -> AbstractContextManager[None]:
        """Do nothing more: the steps within an island fail on all its ranks."""
        return nullcontext()

    def _gate(self, wait: Wait) -> Failure | None:
        return self.board.gate(wait)

    def described(self) -> str:
        """Return "one, ranks 0, 1"."""
        return f"one, {ranks.name_ranks(range(self.world.size))}"

    def _release(self, error: BaseException) -> None:
        if self._part or not isinstance(error, Apart):
            super()._release(error)

    def close(self) -> None:
        """Close the board and the channel, and release ``comm``. Collective."""
        self.close_locally()
        ranks.release(self.comm)
