"""The ranks of a communicator of several islands.

Within an island, memory and kernels work as they do in a communicator of one. An engine
moves bytes between islands, and the ranks' hosts agree through messages of MPI.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from numba_symm import engines, environment
from numba_symm.engines.protocol import Engine
from numba_symm.errors import (
    ArgumentError,
    CollectiveError,
    CollectiveTimeout,
    ExchangeError,
    RankLeft,
    SymmError,
)
from numba_symm.launch import devices, failures, ranks, waiting
from numba_symm.launch.devices import Parts, Places, described, divide
from numba_symm.launch.failures import Failure
from numba_symm.launch.members import Island, Members
from numba_symm.launch.ranks import NodeKey, Purpose, TaggedComm
from numba_symm.launch.store import StoreExchange
from numba_symm.launch.waiting import Wait
from numba_symm.launch.watchdog import Questions, Watchdog, neighbors

T = TypeVar("T")


class Islands(Members):
    """The ranks of several islands.

    Collective: every rank passes the same ``timeout`` and ``parts``.

    Args:
        comm: the ranks; as for :class:`Members`.
        undo: as for :class:`Members`.
        device: as for :class:`Members`.
        timeout: as for :class:`Members`.
        part: as for :class:`Members`.
        seen: as for :class:`Members`.
        parts: the islands; None: they are found.
        parent: several islands with all these ranks, and their numbers there. Its
            sockets and locks within this rank's island are used here, too.

    Attributes:
        index: the number of this rank's island.
        local: this rank's number there.
        places: where the ranks are.
        inner: this rank's island.
        operation: the call that uses the engine, for errors.
        shown: whether this rank prints the islands.
    """

    comm: TaggedComm
    engine: Engine

    def __init__(
        self,
        comm: TaggedComm,
        undo: ExitStack,
        device: int | None,
        timeout: float | None,
        part: bool = False,
        seen: Sequence[NodeKey] = (),
        parts: Parts | None = None,
        parent: tuple[Members, Sequence[int]] | None = None,
    ):
        self._known = parts
        self.watchdog: Watchdog | None = None
        self._shared = ExitStack()  # what all ranks free together
        self.operation = "Communicator"
        super().__init__(comm, undo, device, timeout, part, parent=parent, seen=seen)

    def _make(self, device: int | None) -> None:
        exchange = self.exchange
        rank = self.world.rank
        exchange.nodes = self.nodes
        if self._known is None:
            # An interrupt since the ranks tried to be one island was reported to all.
            # Nobody reads that in the next step, which is of one node's ranks.
            exchange.barrier("Communicator")
        self.shown = environment.show_islands() and rank == 0
        self.parts = self._bind(device)
        self.places = Places(self.parts)
        self.index, self.local = self.places.of[rank]
        mine = self.parts[self.index]
        parent, self._parent = self._parent, None  # which may end first
        if parent is not None:
            whole, members = parent
            parent = whole.at_home([members[each] for each in mine])
        comm = self.comm.part(mine, Purpose.ISLAND)
        reports = self.comm.part(range(self.comm.size), Purpose.WATCHDOG)
        self._shared.callback(self._release_watchdog, reports)
        with exchange.agreed("Communicator"):
            try:
                self.inner = Island(
                    comm,
                    self._undo,
                    self.gpu.ordinal,
                    self.timeout,
                    part=True,
                    names=mine,
                    nodes=[self.world.node] * len(mine),
                    seen=[self.seen[rank] for rank in mine],
                    parent=parent,
                )
            except BaseException as error:
                if not isinstance(error, SymmError):
                    # Otherwise its ranks would wait for this one if it had not begun.
                    waiting.leave(comm, error, exchange.call)
                raise
            # Here, because another island may fail in this step.
            self._shared.callback(self.inner.close)
            self.channel, self.board = self.inner.channel, self.inner.board
            # A thread that nothing stops would use the duplicate after it was freed.
            waiting.undisturbed(lambda: self._start_watchdog(reports))
        others = tuple(part for part in self.parts if part != mine)
        self.inner.note = (
            "; ranks are numbered within the island of "
            f"{described((mine,), self.nodes)}, which cannot access the memory of "
            f"{described(others, self.nodes)}"
        )
        if self.board.record is not None:
            self.board.record.others_text = described(others, self.nodes)
        self.backend, self.refused = self.inner.backend, self.inner.refused
        self.guard = self.inner.guard
        self._across = _Across(self)
        exchange.meeting = self._across  # the watchdog reports the islands' failures

    def _start_watchdog(self, comm: TaggedComm) -> None:
        self.watchdog = Watchdog(comm, self.board, self.parts, self.index, self.local)
        self._undo.callback(self.watchdog.stop)

    def _release_watchdog(self, comm: TaggedComm) -> None:
        watchdog = self.watchdog
        if watchdog is None or not (watchdog.told or watchdog.questions.unanswered):
            comm.release()  # otherwise a message may not have arrived yet

    def connect(self, multiprocessors: int) -> None:
        """Start the engine, and try it. Collective.

        Args:
            multiprocessors: how many the communicator's kernels may occupy.

        Raises:
            SymmError: on all ranks: they have no common engine, or it does not work.
        """
        assert self.watchdog is not None
        try:
            engine = self.engine = engines.choose(self, multiprocessors)
            self._shared.callback(engine.close)
            self._undo.callback(engine.abort)
            self.watchdog.ask(engine)
            engines.prove(self, engine)
        except CollectiveError as error:
            self.fail(error)
            self.board.look()
            raise

    def _bind(self, device: int | None) -> Parts:
        """Bind this rank to a GPU of its node, and return the islands."""
        exchange, names = self.exchange, self.nodes
        here = [rank for rank, name in enumerate(names) if name == self.world.node]
        comm, clean = self.comm.part(here, Purpose.NODE), True
        with exchange.agreed("Communicator") as each:
            local = StoreExchange(comm, "node", exchange.timeout, here)
            try:
                local.call, local.nodes = exchange.call, [self.world.node] * len(here)
                self.gpu, self.gpus, reach = devices.bind(local, device)
            except BaseException as error:
                # Otherwise the ranks of this node would wait for this one indefinitely.
                if not (clean := local.is_everybodys(error)):
                    local.leave(error)
                raise
            finally:
                if clean:  # otherwise messages may be left
                    comm.release()
            _refuse_one_thread()  # here, because no rank of the node waits any more
            self.peer_access = reach
            if self.world.local_rank == 0 and self._known is None:
                each.mine = divide(here, reach, self._most)
        if self._known is not None:
            return self._known
        return tuple(sorted(part for parts in each.all for part in parts or ()))

    @property
    def island(self) -> Island:
        """This rank's island."""
        return self.inner

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        """Do work within each island; see :meth:`Members.within`."""
        with self.exchange.agreed(what):
            try:
                yield
            except BaseException as error:
                # Otherwise this rank would wait for all, and its island for this one.
                if not self.inner.exchange.is_everybodys(error):
                    self.abandon(error, what)
                raise

    def described(self) -> str:
        """Return "ranks 0, 1 on a, rank 2 on b; Open MPI v5.0.11 between them"."""
        parts = described(self.parts, self.nodes)
        return f"{parts}; {self.engine.version} between them"

    @property
    def questions(self) -> Questions:
        """This rank's questions to ranks of other islands, and its answers."""
        assert self.watchdog is not None
        return self.watchdog.questions

    def wait(self, what: str) -> Wait:
        """Start a wait for other islands within a call, and return it."""
        return Wait(
            what,
            self.world.rank,
            self.timeout,
            limit=f"timeout: {self.timeout:g} s",
            nodes=self.nodes,
            hint=failures.OTHER_MESSAGE
            if what == failures.MESSAGE
            else failures.OTHER_CALL,
        )

    def _gate(self, wait: Wait) -> Failure | None:
        failure = self.board.failure()
        if failure is not None:
            return failure
        try:
            # A gate's messages have no name, so they could end a step of another call.
            self.exchange.all_gather(None, wait.what, wait)
        except CollectiveError as error:
            self.fail(error)  # a rank refuses before the watchdogs report why
            return self.board.failure()
        return self._across.gate(wait)

    def fail(self, error: CollectiveError) -> None:
        """Make the communicator fail by an error that has named the ranks."""
        self.board.fail(error)
        self.watch()

    def failed_by(self, error: CollectiveError) -> CollectiveError:
        """Make the communicator fail by an error of the engine; return what to raise.

        That is the first failure of the island, which may be another one.
        """
        self.fail(error)
        failure = self.board.failure()
        return error if failure is None else self._error(failure)

    def abandon(self, cause: BaseException | str, operation: str = "") -> None:
        """Make the communicator fail on every rank of all islands."""
        super().abandon(cause, operation)
        self.watch()

    def watch(self) -> None:
        """Exchange what is known of failures with other islands."""
        if self.watchdog is not None and not self.closed:
            self.watchdog.look()

    def _explained(self, failure: Failure) -> tuple[Failure, str]:
        """Explain a failure, once the other islands that report have sent their calls.

        An island that has stopped sends nothing, so the wait is short.
        """
        record, end = self.board.record, time.monotonic() + _REPORTED
        if record is not None and not ranks.mpi_module().Is_finalized():
            wanted = len(neighbors(self.index, len(self.parts)))
            while time.monotonic() < end:
                self.watch()
                if max(each.heard for each in record.heads) >= wanted:
                    break
                if any(each.table for each in record.heads):
                    break  # made by another rank of this island
                time.sleep(_PAUSE)
        return super()._explained(failure)

    def refuse_finalized(self) -> None:
        """Raise ExchangeError if MPI is finalized."""
        if ranks.mpi_module().Is_finalized():
            raise ExchangeError(
                "MPI has been finalized, so the ranks of other islands cannot be "
                "reached; close communicators before MPI.Finalize()"
            )

    def look(self) -> None:
        """Raise if the communicator has failed, on any island, or MPI is finalized."""
        self.refuse_finalized()
        self.watch()
        self.board.look()

    def _release(self, error: BaseException) -> None:
        super()._release(error)
        self._shared.close()

    def _is_everybodys(self, error: BaseException) -> bool:
        # An error of the engine may be this rank's only, which has reported it.
        failed = self.watchdog is not None and self.failed
        return not failed and super()._is_everybodys(error)

    def close(self) -> None:
        """Close the engine and the island, and release all ranks' messages."""
        self.closed = True
        assert self.watchdog is not None
        self.watchdog.stop()
        self._shared.close()
        self._undo.pop_all()  # last, because it has what an error above leaves open
        self.comm.release()


def _refuse_one_thread() -> None:
    """Raise ArgumentError if MPI does not permit calls of several threads."""
    mpi = ranks.mpi_module()
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise ArgumentError(
            "between several islands, expected an MPI that permits calls of several "
            "threads (MPI.THREAD_MULTIPLE), because one of them watches for failures; "
            "do not set mpi4py.rc.thread_level, or set it to 'multiple'"
        )


class _Across:
    """Exchanges values between all ranks by MPI, until the communicator fails."""

    def __init__(self, islands: Islands):
        self._islands = islands

    def all_gather(self, value: T, wait: Wait) -> list[T]:
        """Return every rank's value, or raise CollectiveError. Collective."""
        islands = self._islands
        try:
            islands.look()
            # A process of this island that has ended is a failure, of which its island
            # informs the others.
            with waiting.watching(_looking(islands, wait, islands.look)):
                return waiting.all_gather(islands.comm, value, wait)
        except CollectiveTimeout as error:
            islands.fail(error)
            raise

    def gate(self, wait: Wait) -> Failure | None:
        """Wait for every rank. Return why none continues; None: all do. Collective."""
        islands = self._islands
        failure = islands.board.failure()
        if failure is not None:
            return failure

        def error_for(error: BaseException) -> CollectiveError:
            if isinstance(error, CollectiveError):
                islands.fail(error)
            else:
                islands.abandon(error, wait.what)
            failure = islands.board.failure()
            assert failure is not None
            return failure.exception()

        try:
            islands.look()
            with waiting.watching(_looking(islands, wait, islands.look)):
                lost = _looking(islands, wait, self._loss())
                waiting.gate(islands.comm, wait, error_for, lost, islands.timeout)
        except CollectiveError as error:
            islands.fail(error)
            return islands.board.failure()
        return None

    def _loss(self) -> Callable[[], None]:
        """Return what raises if a rank has left that gives no answer.

        A rank that answers first and leaves then has continued, as all others must. Its
        answer may arrive after the report that it has left. Other failures end no wait.
        """
        known = math.inf

        def look() -> None:
            nonlocal known
            self._islands.watch()
            failure = self._islands.board.failure()
            if failure is None or failure.error is not RankLeft:
                return
            known = min(known, time.monotonic())
            if time.monotonic() - known >= _ANSWERED:
                raise failure.exception()

        return look

    def look(self) -> None:
        """Raise CollectiveError if the communicator has failed."""
        self._islands.board.look()

    def is_ahead(self, rank: int) -> bool:
        """Return False: a rank that leaves a step reports that."""
        return False

    def late(self, wait: Wait, absent: Sequence[int]) -> CollectiveError:
        """Make the communicator fail because ranks are late. Return the error."""
        error = wait.error(absent)
        self._islands.fail(error)
        return error

    def abandon(self, cause: BaseException, operation: str) -> None:
        """Report to all ranks that this one leaves a call by an exception."""
        self._islands.abandon(cause, operation)


_REPORTED = 0.5
"""Seconds in which islands exchange their calls after a failure."""

_PAUSE = 5e-3  # seconds between two looks for these

# Seconds after a message, in which those sent before it arrive. If a rank stops for
# longer between the sends of one step, some ranks may raise because others are ahead.
_ANSWERED = 1.0
_UNSURE = 0.01  # seconds between two checks whether the ranks of this island live


def _looking(
    islands: Islands, wait: Wait, look: Callable[[], None]
) -> Callable[[], bool]:
    """Return what a wait calls: it reports processes that have ended, then looks."""
    due = _UNSURE

    def called() -> bool:
        nonlocal due
        if wait.seconds > due:
            due = wait.seconds + _UNSURE
            islands.board.report_ended(wait.what)
        look()
        return False

    return called
