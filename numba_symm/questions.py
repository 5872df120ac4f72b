"""For whom ranks of other islands wait, which a rank asks before its deadline.

A rank may wait for a rank that itself waits for a third one. The deadlines of both pass
at almost the same time, and both errors must name the third rank. So shortly before its
deadline, a rank asks the rank that it waits for: for whom do you wait? It then asks the
rank in the answer, and so on. The last rank

- does not answer, because it has died or is stopped,
- answers that it makes no call, so it is late, or
- answers that it is in a call, but waits for no other island. Then its kernels wait
  within its island, and report for whom when their deadline passes, or it is slow.

The ranks' watchdogs pass these messages, so a rank also answers while it runs something
else. A rank that has failed answers with its failure.
"""

import time
from contextlib import suppress
from typing import NamedTuple

from numba_symm.launch import ranks, waiting
from numba_symm.launch.tagged import TaggedComm

_AGAIN = 0.05  # seconds after which a rank asks again


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
        busy: whether it is in a call.
    """

    rank: int
    absent: tuple[int, ...]
    busy: bool


class Questions:
    """The questions and answers of one rank.

    Args:
        comm: the ranks, by messages of their watchdogs alone.

    Attributes:
        absent: for which ranks of other islands this rank waits now; empty: for none.
        busy: whether this rank is in a call.
        unanswered: the ranks that have not answered this rank.
    """

    def __init__(self, comm: TaggedComm):
        self._comm = comm
        self.absent: tuple[int, ...] = ()
        self.busy = False
        self.unanswered: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self._chain: list[int] = []  # each rank waits for the next one
        self._asked = 0.0  # when the last of them was asked

    def last(self, patience: float) -> tuple[int, bool]:
        """Return for whom this rank waits in the end, and whether that is certain.

        Call it again and again. It asks further ranks, and waits for none.

        Args:
            patience: the seconds after which a rank is certain to give no answer.
        """
        if self._chain[:1] != [*self.absent[:1]]:
            self._begin()
        while (rank := self._chain[-1]) not in self.unanswered:
            answer, circle = self._answers[rank], {*self._chain, self._comm.rank}
            if not answer.absent or answer.absent[0] in circle:
                if time.monotonic() - self._asked > _AGAIN:  # answers may have changed
                    self._begin()
                if answer.absent:  # every rank of a circle waits for another one
                    return self.absent[0], True
                return rank, not answer.busy
            self._chain.append(answer.absent[0])
            self._ask(answer.absent[0])
        return rank, time.monotonic() - self._asked > patience

    def _begin(self) -> None:
        self._chain = [self.absent[0]]
        self._ask(self.absent[0])

    def _ask(self, rank: int) -> None:
        self._asked = time.monotonic()
        if rank not in self.unanswered:
            self.unanswered.add(rank)
            self.send(rank, Question(self._comm.rank))

    def take(self, message: Question | Answer) -> None:
        """Answer a question, or store an answer."""
        if isinstance(message, Question):
            self.send(message.rank, Answer(self._comm.rank, self.absent, self.busy))
        else:
            self._answers[message.rank] = message
            self.unanswered.discard(message.rank)

    def send(self, rank: int, message: object) -> None:
        """Send a message to a rank's watchdog."""
        comm = self._comm
        waiting.drop_finished()
        with suppress(ranks.mpi().Exception):  # it has died
            to = comm.ranks[rank], comm.tag
            waiting.begin(waiting.unfinished, comm.mpi.isend, message, *to)
