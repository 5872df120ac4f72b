"""The watchdog's thread, on stand-ins for MPI and the board."""

from types import SimpleNamespace

import pytest

from numba_symm import watchdog
from numba_symm.board import Failure
from numba_symm.errors import RankLeft


class Board:
    found = None

    def failure(self):
        return self.found

    def abandon(self, cause):
        self.found = Failure(RankLeft, f"rank 0 {cause}", "", (0,))


class Comm:
    """Its probes fail once; what is sent is kept."""

    def __init__(self):
        self.sent, self.broken = [], True

    def improbe(self, source, tag):
        broken, self.broken = self.broken, False
        if broken:
            raise RuntimeError("the network is down")

    def isend(self, error, peer, tag):
        self.sent.append((peer, str(error)))


@pytest.fixture
def no_mpi(monkeypatch):
    monkeypatch.setattr(watchdog, "_stop_before_finalize", lambda: None)
    monkeypatch.setattr(watchdog.ranks, "mpi", lambda: SimpleNamespace(ANY_SOURCE=-1))


def test_a_thread_that_fails_makes_the_communicator_fail(no_mpi):
    board, comm = Board(), Comm()
    watching = watchdog.Watchdog(comm, board, [3], "a")
    watching._thread.join(10)
    text = "rank 0 cannot watch other islands (RuntimeError: the network is down)"
    assert board.failure().text == text
    assert comm.sent == [(3, text)]
    watching.stop()
