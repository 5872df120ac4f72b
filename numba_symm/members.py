"""The ranks of a communicator with their GPUs: one island, or several."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from numba_symm import environment, forks
from numba_symm.backends.protocol import Backend
from numba_symm.board import Board
from numba_symm.device.polling import Guard
from numba_symm.errors import (
    Aborted,
    ArgumentError,
    CallMismatch,
    ClosedError,
    CollectiveError,
    CollectiveTimeout,
)
from numba_symm.failures import Failure
from numba_symm.launch import nodes, ranks, tagged, waiting
from numba_symm.launch.devices import GPU
from numba_symm.launch.division import Parts
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.nodes import NodeKey
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.tagged import TaggedComm
from numba_symm.launch.waiting import Wait
from numba_symm.record import Description

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
        comm: the ranks, by messages of their own: see :func:`duplicates.duplicate`. It
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
        sent: the bytes that this rank's calls have given to the engine for others.
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
    sent = 0

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
            forks.watch(self)
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
                each.mine, each.usual = nodes.here(), f"timeout={self.timeout:g}{size}"
            exchange.refuse_different(each.usuals, "Communicator")
            seen = each.all
        self.seen = seen
        self.world, self.nodes = nodes.place(exchange.rank, seen)

    def _choose(self, timeout: float | None) -> None:
        """Set the settings that must be equal. Local."""
        self.timeout = environment.chosen_timeout(timeout)
        if not self._part:
            # A communicator of fewer ranks is made in many programs, too.
            self._most = environment.island_size(tagged.of_job(self.comm))

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
            f"communicator; {forks.ADVICE}"
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
        tagged.release(self.comm)

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
