"""Ranks bound to GPUs: what symmetric memory and kernels need of a communicator."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from numba_symm import environment, forks
from numba_symm.backends.peers import choose_backend
from numba_symm.board import Board, Failure
from numba_symm.device.signals import Guard
from numba_symm.errors import (
    ArgumentError,
    ClosedError,
    CollectiveError,
    CollectiveTimeout,
)
from numba_symm.launch import devices, hosts, ranks, waiting
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
        self.world = hosts.discover(exchange)
        with exchange.agreed("Communicator"):
            environment.chosen_setup_timeout()
            self.timeout = environment.chosen_timeout(timeout)
        exchange.agree_equal(f"timeout={self.timeout:g}", "Communicator")
        if self.world.local_size < self.world.size:
            found = exchange.all_gather(self.world.host, "hosts")
            hosts.refuse_several_hosts(found)
        hosts.refuse_too_many(self.world.size)
        self.channel = self._undo.enter_context(IpcChannel(exchange))
        self.board = Board(exchange, self.channel, self._undo)
        exchange.meet_at(self.board)
        self.gpu = devices.bind(exchange, device)
        self.peer_access = devices.check_peer_access(exchange, self.gpu)
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
