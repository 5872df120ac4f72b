"""For whom ranks of other islands wait, which a rank asks before its deadline.

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

import math
import time
from contextlib import suppress
from typing import NamedTuple

from numba_symm.launch import ranks, waiting
from numba_symm.launch.tagged import TaggedComm
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
        with suppress(ranks.mpi().Exception):  # it has died
            to = comm.ranks[rank], comm.tag
            waiting.begin(waiting.unfinished, comm.mpi.isend, message, *to)
