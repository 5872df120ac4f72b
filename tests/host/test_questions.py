"""For whom a rank waits in the end, according to the answers of other ranks."""

import types

import pytest

from numba_symm import questions
from numba_symm.launch import ranks
from numba_symm.questions import Questions


class Network:
    """Ranks that wait for others, and answer unless they are silent."""

    def __init__(self, waits, silent=()):
        self.each = []
        for rank in range(len(waits)):
            comm = types.SimpleNamespace(rank=rank, ranks=range(len(waits)), tag=7)
            comm.mpi = types.SimpleNamespace(isend=self.send)
            self.each.append(Questions(comm))
            self.each[-1].absent = waits[rank]
        self.silent, self.messages = set(silent), []

    def send(self, message, to, tag):
        assert tag == 7
        self.messages.append((message, to))
        return types.SimpleNamespace(Test=lambda: True)

    def deliver(self):
        messages, self.messages = self.messages, []
        for message, to in messages:
            if to not in self.silent:
                self.each[to].take(message)

    def found(self, rank, patience=60):
        """Return what a rank finds after messages have been delivered often enough."""
        for _ in self.each:
            self.each[rank].last(patience)
            self.deliver()
            self.deliver()
        return self.each[rank].last(patience)


@pytest.fixture(autouse=True)
def mpi(monkeypatch):
    monkeypatch.setattr(ranks, "mpi", lambda: types.SimpleNamespace(Exception=OSError))
    monkeypatch.setattr(questions, "_AGAIN", 60)


CHAIN = [(1, 2), (3,), (3,), (4, 0), ()]


def test_a_rank_that_waits_for_no_other_is_at_the_end_of_each_chain():
    job = Network(CHAIN)
    assert [job.found(rank) for rank in range(4)] == [(4, True)] * 4


def test_a_rank_that_does_not_answer_is_at_the_end_after_some_time():
    job = Network(CHAIN, silent=[4])
    for rank in range(4):
        assert job.found(rank) == (4, False)
        assert job.found(rank, patience=0) == (4, True)
        assert job.each[rank].unanswered == {4}
    assert not job.messages  # each has asked it once


def test_a_rank_that_is_continued_answers_then():
    job = Network([*CHAIN[:4], (5,), ()], silent=[4])
    assert job.found(0) == (4, False)
    late, job.silent = job.each[0], set()
    job.each[4].take(questions.Question(0))
    assert job.found(0) == (5, True)
    assert not late.unanswered


def test_a_rank_that_its_own_island_may_delay_is_not_certain_to_be_late():
    job = Network(CHAIN)
    job.each[4].busy = True
    assert job.found(0, patience=0) == (4, False)


def test_in_a_circle_a_rank_waits_for_its_neighbor():
    job = Network([(1,), (2,), (0,), (0,), (3,)])
    assert [job.found(rank)[0] for rank in range(5)] == [1, 2, 0, 0, 3]


def test_a_rank_asks_again_because_answers_may_have_changed(monkeypatch):
    job = Network(CHAIN)
    assert job.found(0) == (4, True)
    job.each[3].absent, job.each[2].absent = (), ()
    assert job.found(0) == (4, True)
    monkeypatch.setattr(questions, "_AGAIN", -1)
    job.each[0].last(60)
    monkeypatch.setattr(questions, "_AGAIN", 60)
    assert job.found(0) == (3, True)
    job.each[0].absent = (2,)  # a message of rank 1 has arrived
    assert job.found(0) == (2, True)
