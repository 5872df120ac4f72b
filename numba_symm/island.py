"""Ranks with their GPUs: the part of a communicator that memory and kernels need."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from numba_symm import environment, forks
from numba_symm.backends.peers import choose_backend
from numba_symm.board import Board, Failure
from numba_symm.device import links
from numba_symm.device.polling import Guard
from numba_symm.errors import (
    ArgumentError,
    ClosedError,
    CollectiveError,
    CollectiveTimeout,
    PeerAccessError,
)
from numba_symm.launch import devices, nodes, ranks, tagged, waiting
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.islands import Parts
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.tagged import TaggedComm
from numba_symm.launch.waiting import Wait

_MARGIN = 1.0  # seconds


class Apart(PeerAccessError):
    """The ranks are not one island. Raised on all of them.

    Unless they are a part of a communicator, ``comm`` is not released, because the
    ranks make several islands by its messages.
    """


class Island:
    """The ranks of one node, with their GPUs, backend, status board and exchange.

    Collective: every rank passes the same ``timeout``.

    Args:
        comm: the ranks, by messages of their own: see :func:`waiting.duplicate`. It is
            released in the end.
        device: the ordinal of this rank's GPU. None: one is assigned.
        timeout: seconds that a kernel waits for a peer; 0: indefinitely; None:
            ``NUMBA_SYMM_TIMEOUT``, else 300.
        part: whether the ranks are a part of a communicator, or a child of one, which
            ``NUMBA_SYMM_ISLAND_SIZE`` does not divide.
        names: by rank, its number in texts, where a larger communicator has these
            ranks; None: the same.
        nodes: by rank, the name of its node, for texts; empty: texts name no nodes.

    Attributes:
        timeout: the seconds, checked.
        comm: the ranks, by messages of their own.
        world: this rank's place.
        parts: the ranks of each island; here of one.
        exchange: exchanges small values between the ranks.
        channel: sends file descriptors between the ranks.
        gpu: this rank's GPU.
        gpus: by rank, its GPU.
        peer_access: which GPU can access which, by rank; None where it is unknown.
        backend: allocates and maps memory.
        refused: why better backends were not used, by name.
        board: the status board, where kernels report failures.
        guard: what kernels need to give up a wait.
        known_failure: the last failure that a call of this rank has raised or caused.
        note: which ranks of a larger communicator these are, for errors; "" if it is
            the whole communicator.
        closed: whether it was closed.
        why_closed: the text of the error that later calls raise.
    """

    def __init__(
        self,
        comm: ranks.Comm | TaggedComm,
        device: int | None,
        timeout: float | None,
        part: bool = False,
        names: Sequence[int] | None = None,
        nodes: Sequence[str] = (),
    ):
        self.closed = False
        self.why_closed = "the communicator was closed; make a new one"
        self.known_failure: Failure | None = None
        self.note = ""
        self._part = part
        self._most: int | None = None
        self._undo = ExitStack()
        self.comm = comm
        self.exchange = StoreExchange(self.comm, "communicator", patience(), names)
        self.exchange.call, self.exchange.nodes = "Communicator", nodes
        try:
            waiting.claim(comm)
            self._make(device, timeout)
        except BaseException as error:
            self.give_up(error)
            raise

    def _make(self, device: int | None, timeout: float | None) -> None:
        exchange = self.exchange
        self._agree(timeout)
        self._refuse_several()
        nodes.refuse_too_many(self.world.size)
        self.channel = self._undo.enter_context(IpcChannel(exchange))
        self.board = Board(exchange, self.channel, self._undo)
        exchange.meet_at(self.board)
        self.gpu = devices.bind(exchange, device)
        try:
            found = devices.check_peer_access(exchange, self.gpu)
            self.peer_access, self.gpus = found
        except PeerAccessError as error:
            raise Apart(str(error)) from error
        links.note_missing(devices.without_atomics(self.gpu, self.gpus))
        with exchange.agreed("letting the GPU reach the status board"):
            self.board.register()
        self.backend, self.refused = choose_backend(self, self.gpu.ordinal)
        self.guard = Guard(
            self.board.address,
            self.world.rank,
            self.world.size,
            math.ceil(self.timeout * 1e9),
        )
        forks.watch(self)

    def _agree(self, timeout: float | None) -> None:
        """Find this rank's place, and check the settings that must be equal."""
        exchange = self.exchange
        self.world = nodes.discover(exchange)
        with exchange.agreed("Communicator"):
            environment.chosen_setup_timeout()
            environment.requested_engine()
            environment.message_limit()
            environment.show_islands()
            self.timeout = environment.chosen_timeout(timeout)
            if not self._part:
                # A communicator of fewer ranks is made in many programs, too.
                self._most = environment.island_size(tagged.of_job(self.comm))
        pretended = f", NUMBA_SYMM_ISLAND_SIZE={self._most}" if self._most else ""
        exchange.agree_equal(f"timeout={self.timeout:g}{pretended}", "Communicator")
        self.parts: Parts = (tuple(range(self.world.size)),)

    def _refuse_several(self) -> None:
        """Raise :class:`Apart` if the ranks are on several nodes, or pretend to be."""
        if self.world.local_size < self.world.size:
            found = dict(enumerate(self.exchange.all_gather(self.world.node, "nodes")))
            raise Apart(
                f"expected the ranks of an island on one node, and "
                f"{ranks.sentence(found, 'is on', 'are on')}"
            )
        if self._most is not None and self._most < self.world.size:
            raise Apart(f"NUMBA_SYMM_ISLAND_SIZE={self._most} divides the ranks")

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
            CollectiveError: it has failed; the text has the cause.
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

    def check_open(self) -> None:
        """Raise ClosedError if the communicator was closed."""
        if self.closed:
            raise ClosedError(self.why_closed)

    @contextmanager
    def set_up(self, what: str) -> Iterator[None]:
        """Wait for every rank, then make a call that all ranks make. Collective.

        All ranks begin, or none does. If a rank leaves the block by an exception that
        not every rank raises, it reports that: the others' call, and later ones, raise.

        Args:
            what: the call, as the user names it.

        Raises:
            CollectiveError: it has failed.
            ClosedError: it was closed.
        """
        self.exchange.call = what
        try:
            self.check_open()
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

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        """Do what all ranks of each island do together; it fails on all or on none.

        Collective. ``what`` is the call, as the user names it.
        """
        yield

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

    def _gate(self, wait: Wait) -> Failure | None:
        """Wait for every rank; see :meth:`Board.gate`. Collective."""
        return self.board.gate(wait)

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
        hint = f". {failure.hint}" if failure.hint else ""
        return failure.exception(
            f"; results since the last check are undefined. {advice}{hint}"
        )

    def abandon(self, cause: BaseException | str, operation: str = "") -> None:
        """Make the communicator fail on every rank; see :meth:`Board.abandon`.

        Later calls of this rank need not report this failure, whose cause it knows.
        """
        if not self.failed:
            self.board.abandon(cause, operation)
            self.known_failure = self.board.failure()

    def give_up(self, error: BaseException) -> None:
        """Undo what was made, after the construction has failed.

        Args:
            error: the cause. If only this rank raises it, the rank reports it to the
                others, and undoes nothing that needs all ranks.
        """
        everybodys = self._is_everybodys(error)
        if not everybodys:
            self.exchange.leave(error)  # what is closed reports nothing
        self.close_locally()
        if everybodys and (self._part or not isinstance(error, Apart)):
            tagged.release(self.comm)

    def _is_everybodys(self, error: BaseException) -> bool:
        """Return whether all ranks give up by an error, and undo things together."""
        return self.exchange.is_everybodys(error)

    def keep(self, *objects: Any) -> None:
        """Keep objects of a call that has failed if MPI may still use their memory."""

    def settle(self) -> None:
        """Wait for threads that run kernels, before memory is unmapped."""

    def close(self) -> None:
        """Close the board and the channel, and release ``comm``. Collective."""
        self.close_locally()
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
