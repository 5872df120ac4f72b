"""The watchdog of failures on other islands, and its questions before deadlines.

The watchdog: a thread that reports a communicator's failures to its other islands.

Within an island, ranks see a failure on the status board. Two ranks of each island
report a new failure to other islands through MPI, and every rank stores the received
failures on its own board. The islands form two binomial trees, and each reports to its
neighbors in both. So a report reaches all islands after at most 2 ⌈log₂ islands⌉
successive reports, even if one island sends none. For one failure, all ranks together
send fewer than 8 reports per island.

Each report is followed by the latest calls of the rank that sends it. The receiver
compares them with its own, for the table of calls in errors.

A watchdog also answers the other ranks' questions.

The watchdog also queries the engine for errors and for exchanges that last too long,
and aborts it after a failure.

For whom ranks of other islands wait, which a rank asks before its deadline.

A rank may wait for a rank that itself waits for a third one. The deadlines of both pass
at almost the same time, and both errors must name the third rank. So shortly before its
deadline, a rank asks the ranks that it waits for: for whom do you wait? It then asks
the ranks in the answers, and so on. A rank at an end

- does not answer, because it has died or is stopped, or
- answers that it waits for no other island. Then it is late, or its kernels wait within
  its island, and report for whom when their deadline passes. With NCCL, it may also
  have done its part of an exchange whose other ranks have not.

The ranks' watchdogs pass these messages, so a rank also answers while it runs something
else. A rank that has failed answers with its failure.
"""

import contextlib
import math
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

from numba_symm import process
from numba_symm.engines.protocol import Engine
from numba_symm.errors import CollectiveError, RankLeft, summary
from numba_symm.launch import call_records, ranks, waiting
from numba_symm.launch.board import Board
from numba_symm.launch.devices import Parts
from numba_symm.launch.ranks import TaggedComm
from numba_symm.launch.waiting import Wait

_AGAIN = 0.05  # seconds after all answers, after which a rank asks again
_MOST = 256  # ranks that one asks: those after it, so that it answers as many


class Question(NamedTuple):
    """For whom do you wait?

    Attributes:
        rank: the rank that asks.
    """

    rank: int


class Answer(NamedTuple):
    """The answer.

    Attributes:
        rank: the rank that answers.
        absent: for which ranks of other islands it waits; empty: for none.
    """

    rank: int
    absent: tuple[int, ...]


class Questions:
    """The questions and answers of one rank.

    Args:
        comm: the ranks, by messages of their watchdogs alone.

    Attributes:
        absent: for which ranks of other islands this rank waits now; empty: for none.
            With NCCL, some of them may have done their part of the exchange.
        unanswered: the ranks that have not answered this rank.
        silent: whether it must not use MPI any more. Then no rank is asked.
    """

    def __init__(self, comm: TaggedComm):
        self._comm = comm
        self.absent: tuple[int, ...] = ()
        self.unanswered: set[int] = set()
        self.silent = False
        self._answers: dict[int, Answer] = {}  # to the latest questions
        self._of: tuple[Wait | None, tuple[int, ...]] = None, ()  # what it asks about
        self._reached: dict[int, float] = {}  # by rank, since when
        self._followed: set[int] = set()  # those whose answers were followed
        self._others: set[int] = set()  # those above the limit, which are not asked
        self._again = math.inf  # when to ask again
        self._found: tuple[int, ...] = ()  # by the latest answers of all

    def late(self, wait: Wait) -> tuple[int, ...]:
        """Return whom the error of a wait names if it is to be raised now, or nobody.

        Call it again and again during a wait for :attr:`absent`. Near the deadline it
        asks ranks, and waits for none.
        """
        absent = self.absent
        if not absent or not wait.ending:
            return ()
        found, certain = self._last(wait, absent)
        return found if wait.late and (certain or wait.overdue) else ()

    def _last(
        self, wait: Wait, absent: tuple[int, ...]
    ) -> tuple[tuple[int, ...], bool]:
        """Return for whom this rank waits in the end, and whether that is certain."""
        now = time.monotonic()
        if self._of != (wait, absent):
            self._of, self._again, self._found = (wait, absent), now, absent
        if now >= self._again:  # answers may have changed
            self._again = math.inf
            self._reached.clear()
            self._followed.clear()
            self._others.clear()
            self._answers.clear()
            self._reach(absent, now)
        while new := [
            answer
            for rank in self._reached
            if rank not in self._followed and (answer := self._answers.get(rank))
        ]:
            for rank, theirs in new:
                self._followed.add(rank)
                self._reach(theirs, now)
        silent = [rank for rank in self._reached if rank not in self._followed]
        dead = [rank for rank in silent if now - self._reached[rank] > wait.margin / 2]
        if dead:
            return tuple(dead), True
        if silent:
            return self._found, False
        if self._again == math.inf:
            self._again = now + _AGAIN
        ends = {each for each in self._reached if not self._answers[each].absent}
        ends |= self._others  # it may be one of these
        self._found = tuple(sorted(ends)) or absent  # in a circle, each waits
        return self._found, not ends

    def _reach(self, found: tuple[int, ...], now: float) -> None:
        """Ask the ranks that have not been reached."""
        own, size = self._comm.rank, len(self._comm.ranks)
        for rank in sorted(found, key=lambda each: (each - own) % size):
            if rank in self._reached or rank == own:
                continue
            if len(self._reached) == _MOST:
                self._others.add(rank)
                continue
            self._reached[rank] = now
            if rank not in self.unanswered:
                self.unanswered.add(rank)
                self.send(rank, Question(own))

    def take(self, message: Question | Answer) -> None:
        """Answer a question, or store an answer."""
        if isinstance(message, Question):
            self.send(message.rank, Answer(self._comm.rank, self.absent))
        else:  # in this order, because another thread may ask again meanwhile
            self.unanswered.discard(message.rank)
            self._answers[message.rank] = message

    def send(self, rank: int, message: object) -> None:
        """Send a message to a rank's watchdog."""
        if self.silent:
            return
        comm = self._comm
        waiting.drop_finished()
        with suppress(ranks.mpi_module().Exception):  # it has died
            to = comm.ranks[rank], comm.tag
            waiting.begin(waiting.unfinished, comm.mpi.isend, message, *to)


_PAUSE = 0.02  # seconds between two looks
_AT_FULL_RATE = 50
"""How many watchdogs of a process may look at that rate; more share it.

Each look holds Python's lock. At that rate, the looks of 700 would take a core.
"""
_REPORTERS = 2  # ranks of an island
_LOCKED = 1.0  # seconds for which a look waits for another one


def neighbors(index: int, islands: int) -> list[int]:
    """Return the islands to which one reports: its neighbors in two trees of them.

    In the second tree, islands have the place of the next one in the first. So each
    has no children in one of the trees, which does not need it to connect the others.
    """

    def near(place: int) -> list[int]:
        above = waiting.parent_of(place)
        found = waiting.children(place, islands)
        return found if above is None else [above, *found]

    second = [(place - 1) % islands for place in near((index + 1) % islands)]
    return sorted({*near(index), *second})


class Watchdog:
    """Watches one communicator of several islands.

    MPI must permit calls of several threads. After MPI was finalized, the thread only
    queries the engine.

    Args:
        comm: all ranks, by messages of the watchdog alone.
        board: the board of this rank's island.
        parts: the ranks of each island.
        index: the number of this rank's island.
        local: this rank's number there.

    Attributes:
        told: whether it has sent a failure, or begun to do so.
        questions: for whom ranks of other islands wait.
    """

    def __init__(
        self,
        comm: TaggedComm,
        board: Board,
        parts: Parts,
        index: int,
        local: int,
    ):
        self._comm, self._board = comm, board
        self.questions = Questions(comm)
        self._parts, self._index, self._local = parts, index, local
        self._sources = set(comm.ranks)
        self._engine: Engine | None = None
        self._lock = threading.RLock()  # a finalizer may report, too
        self._stopping = threading.Event()
        self._sent: list[Any] = []
        self._receives: list[Any] = []
        self.told = False
        _fall_silent_before_finalize()
        _running.add(self)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, daemon=True
        )
        process.start(self._thread, "Communicator")
        process.watch(self)

    def disown(self) -> None:
        """Watch nothing, in a forked child, which has no such thread."""
        self._lock = threading.RLock()  # the thread may have held it
        self._stopping.set()
        self._thread = None

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_pause()):
                self.look()
        except Exception as error:
            # Without this thread, failures of other islands would not be seen.
            try:
                self._board.abandon(f"cannot watch other islands ({summary(error)})")
                with contextlib.suppress(Exception):
                    self.look()
            finally:  # no other look may come before the wait for the GPU
                self._abort()

    def _abort(self) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.abort()

    def ask(self, engine: Engine) -> None:
        """Ask the engine between the islands for errors, from now on."""
        with self._lock:
            self._engine = engine
            if self._board.failure() is not None:  # no later look would abort it
                engine.abort()

    def look(self) -> None:
        """Exchange what is known of failures. Never waits for another rank."""
        # A signal's handler may call this in code that has the engine's lock, for which
        # the thread waits with this lock. The thread looks again, so give up then.
        if not self._lock.acquire(timeout=_LOCKED):
            return
        try:
            if self._stopping.is_set():
                return
            if not self.questions.silent:
                self._receive_reports()
            engine = self._engine
            if engine is not None and (error := engine.status()) is not None:
                self._board.fail(error)
            failure = self._board.failure()
            if failure is None or self.told:
                return
            error = failure.exception()
            # Nothing would repeat a report that an interrupt has ended.
            waiting.undisturbed(lambda: self._tell(error))
        finally:
            self._lock.release()

    def _tell(self, error: CollectiveError) -> None:
        self.told = True
        record = self._board.record
        try:
            if not self.questions.silent:
                peers = self._peers()
                self._send(error, peers)
                if record is not None:
                    self._send(call_records.sent(record), peers)
        finally:  # afterwards, because peers notice that a connection ends
            self._abort()

    def _send(self, message: Any, peers: list[int]) -> None:
        comm = self._comm
        for peer in peers:
            with contextlib.suppress(ranks.mpi_module().Exception):  # it has died
                self._sent.append(comm.mpi.isend(message, comm.ranks[peer], comm.tag))

    def _peers(self) -> list[int]:
        """Return the ranks to which this one reports failures.

        Two ranks of an island report, because a process may be stopped.
        """
        alive, size = self._board.alive, len(self._parts[self._index])
        running = [
            number
            for number in range(size)
            if number == self._local or alive is None or alive.runs(number)
        ]
        place = running.index(self._local)
        if place >= _REPORTERS:
            return []
        near = neighbors(self._index, len(self._parts))
        return [self._parts[j][place % len(self._parts[j])] for j in near]

    def _receive_reports(self) -> None:
        mpi, comm = ranks.mpi_module(), self._comm
        try:
            # An interrupt could lose what improbe returns, but no probe's result.
            while self._receives or comm.mpi.iprobe(mpi.ANY_SOURCE, comm.tag):
                if not waiting.undisturbed(self._receive):
                    return
        except mpi.Exception:
            if not self._report_dead():
                raise

    def _report_dead(self) -> bool:
        """Report ranks that MPI has found to be dead. Return whether there are any.

        Only an MPI that continues after a death finds them.
        """
        mpi, comm = ranks.mpi_module(), self._comm
        if not hasattr(comm.mpi, "Get_failed"):
            return False
        dead = comm.mpi.Get_failed()
        there = mpi.Group.Translate_ranks(dead, None, comm.mpi.Get_group())
        comm.mpi.Ack_failed(dead.size)  # otherwise each later probe would raise
        here = [rank for rank, at in enumerate(comm.ranks) if at in there]
        if here:
            text = f"{ranks.name_ranks(here)} ended without closing the communicator"
            self._board.fail(RankLeft(text, ranks=tuple(here)))
        return bool(there)

    def _receive(self) -> bool:
        """Begin or continue to receive a report. Return whether to do so again.

        MPI may not have all of a report, and its sender may have died.
        """
        mpi, comm = ranks.mpi_module(), self._comm
        if not self._receives:
            status = mpi.Status()
            message = comm.mpi.improbe(mpi.ANY_SOURCE, comm.tag, status)
            if message is None:
                return False
            self._receives.append((message.irecv(), status.source in self._sources))
        request, ours = self._receives[0]
        arrived, found = request.test()
        if not arrived:
            return False
        self._receives.clear()
        if not ours:  # from a rank of another communicator
            return True
        if isinstance(found, Question) and (known := self._board.failure()):
            self.questions.send(found.rank, known.exception())
        elif isinstance(found, Question | Answer):
            self.questions.take(found)
        elif not isinstance(found, call_records.Sent):
            self._board.fail(found)
        elif self._board.record is not None:
            call_records.compare_across(self._board.record, found)
        return True

    def fall_silent(self) -> None:
        """Look for the last time by MPI."""
        with self._lock:
            self.look()
            self.questions.silent = True

    def stop(self) -> None:
        """End the thread, and look no more. Local and idempotent."""
        with self._lock:
            self._stopping.set()
        _running.discard(self)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        # MPI may still read the reports, whose memory the requests own.
        waiting.unfinished.extend(self._sent)
        waiting.unfinished.extend(request for request, _ in self._receives)
        self._sent, self._receives = [], []


_running: "weakref.WeakSet[Watchdog]" = weakref.WeakSet()


def _pause() -> float:
    """Return the seconds until the next look of a watchdog."""
    return _PAUSE * max(1.0, len(_running) / _AT_FULL_RATE)


_keys: list[int] = []


def _fall_silent_before_finalize() -> None:
    """Stop using MPI when MPI_Finalize begins."""
    if not _keys:
        mpi = ranks.mpi_module()
        _keys.append(mpi.Comm.Create_keyval(delete_fn=_silence_all))
        mpi.COMM_SELF.Set_attr(_keys[0], None)  # MPI_Finalize deletes it first


def fall_silent_at_exit() -> None:
    """Stop using MPI at the exit of Python, while MPI can still call Python.

    A module that registers a report for the exit registers this function first.
    """
    while _keys:
        key = _keys.pop()
        if not ranks.mpi_module().Is_finalized():
            ranks.mpi_module().COMM_SELF.Delete_attr(key)


def _silence_all(*_: object) -> None:
    for each in list(_running):
        each.fall_silent()
