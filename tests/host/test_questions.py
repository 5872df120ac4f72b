"""For whom a rank waits in the end, according to the answers of other ranks."""

import threading
import types

import pytest

from numba_symm.launch import ranks, waiting, watchdog
from numba_symm.launch.watchdog import Questions


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
        self.wait = types.SimpleNamespace(margin=120)
        self.wait.ending = self.wait.late = True
        self.wait.overdue = False

    def send(self, message, to, tag):
        assert tag == 7
        self.messages.append((message, to))
        return types.SimpleNamespace(Test=lambda: True)

    def deliver(self):
        messages, self.messages = self.messages, []
        for message, to in messages:
            if to not in self.silent:
                self.each[to].take(message)

    def found(self, rank):
        """Return what a rank finds after messages have been delivered often enough.

        The second result is whether it is certain.
        """
        self.wait.overdue = False
        for _ in self.each:
            self.each[rank].late(self.wait)
            self.deliver()
            self.deliver()
        certain = self.each[rank].late(self.wait)
        self.wait.overdue = True
        found = self.each[rank].late(self.wait)
        assert certain in ((), found)
        return found, bool(certain)


def test_one_thread_at_a_time_tests_requests(monkeypatch):
    """Two that test a request would both free it."""
    tests = []

    def test():
        tests.append(1)
        if len(tests) == 1:
            other = threading.Thread(target=waiting.drop_finished)
            other.start()
            other.join()
        return True

    monkeypatch.setattr(waiting, "unfinished", [types.SimpleNamespace(Test=test)])
    waiting.drop_finished()
    assert (tests, waiting.unfinished) == ([1], [])


def test_a_watchdog_waits_for_no_other_look_without_end(monkeypatch):
    monkeypatch.setattr(watchdog, "_LOCKED", 0.01)
    dog, locked = watchdog.Watchdog.__new__(watchdog.Watchdog), threading.Event()
    dog._lock, ended = threading.RLock(), threading.Event()

    def hold():
        with dog._lock:
            locked.set()
            ended.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait()
    dog.look()  # uses nothing else of the object
    ended.set()
    holder.join()


@pytest.fixture(autouse=True)
def mpi(monkeypatch):
    monkeypatch.setattr(
        ranks, "mpi_module", lambda: types.SimpleNamespace(Exception=OSError)
    )
    monkeypatch.setattr(watchdog, "_AGAIN", 60)


CHAIN = [(1, 2), (3,), (3,), (4, 0), ()]


def test_a_rank_that_waits_for_no_other_is_at_the_end_of_each_chain():
    """Its kernels may wait within its island, so that is not certain."""
    job = Network(CHAIN)
    assert [job.found(rank) for rank in range(4)] == [((4,), False)] * 4


def test_all_ranks_that_wait_for_no_other_are_named():
    job = Network([(1, 2, 3), (), (4,), (0,), ()])
    assert job.found(0) == ((1, 4), False)


def test_a_rank_that_does_not_answer_is_at_the_end_after_some_time():
    """Also if others wait for no rank, because they have done their part."""
    job = Network([*CHAIN[:3], (4, 0, 5), (), ()], silent=[4])
    for rank in range(4):
        job.wait.margin = 120
        assert job.found(rank) == (job.each[rank].absent, False)
        job.wait.margin = 0
        assert job.found(rank) == ((4,), True)
        assert job.each[rank].unanswered == {4}
    assert not job.messages  # each has asked it once


def test_a_rank_that_is_continued_answers_then():
    job = Network([*CHAIN[:4], (5,), ()], silent=[4])
    assert job.found(0) == ((1, 2), False)
    late, job.silent = job.each[0], set()
    job.each[4].take(watchdog.Question(0))
    assert job.found(0) == ((5,), False)
    assert not late.unanswered


def test_in_a_circle_a_rank_waits_for_its_neighbors():
    job = Network([(1,), (2,), (0,), (0, 4), (3,)])
    wanted = [((each,), True) for each in (1, 2, 0)] + [((0, 4), True), ((3,), True)]
    assert [job.found(rank) for rank in range(5)] == wanted


def test_nobody_is_asked_before_the_deadline_is_near():
    job = Network(CHAIN)
    job.wait.ending = False
    assert job.found(0) == ((), False)
    assert not job.each[0].unanswered
    job.wait.ending, job.wait.late = True, False
    assert job.found(0) == ((), False)
    assert job.each[0]._found == (4,)


def test_without_mpi_a_rank_names_those_that_it_waits_for():
    job = Network(CHAIN)
    job.each[0].silent, job.wait.margin = True, 0
    assert job.found(0) == ((1, 2), True)
    assert not job.messages


def test_a_rank_asks_no_more_than_answer_as_many(monkeypatch):
    monkeypatch.setattr(watchdog, "_MOST", 3)
    job = Network([(1,), (2, 3, 4), (5,), (), (), ()])
    assert job.found(0) == ((3, 4, 5), False)  # 4 and 5 were not asked
    everybody = [tuple({*range(6)} - {rank}) for rank in range(6)]
    job = Network(everybody, silent=[5])
    job.wait.margin = 0
    assert job.found(0) == ((4, 5), False)
    assert job.found(2) == ((5,), True)  # asks 3, 4 and 5


def test_a_rank_asks_again_because_answers_may_have_changed(monkeypatch):
    job = Network(CHAIN)
    assert job.found(0) == ((4,), False)
    job.each[3].absent, job.each[2].absent = (), ()
    assert job.found(0) == ((4,), False)
    monkeypatch.setattr(watchdog, "_AGAIN", -1)
    job.each[0]._again = 0
    job.each[0].late(job.wait)
    assert job.each[0]._found == (4,)  # until all have answered
    monkeypatch.setattr(watchdog, "_AGAIN", 60)
    assert job.found(0) == ((2, 3), False)
    job.each[0].absent = (2,)  # a message of rank 1 has arrived
    assert job.found(0) == ((2,), False)
