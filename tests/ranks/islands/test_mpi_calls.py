"""No rank waits within MPI, nor with signals held back, in what makes communicators.

In a call of MPI that blocks, a rank that has died leaves the others without a deadline.
"""

import sys
import time
from collections import Counter

import pytest

import numba_symm as ns
from numba_symm.launch import waiting
from numba_symm.launch.waiting import Wait
from tests.ranks.helpers import check_works, needs_peers
from tests.ranks.watched import WatchedComm, blocking, called

pytestmark = needs_peers


def is_undisturbed():
    frame = sys._getframe()
    while frame is not None and frame.f_code is not waiting.undisturbed.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("most", [None, "1", "2"])
def test_no_call_of_mpi_blocks(world, monkeypatch, most):
    if most is None:
        monkeypatch.delenv("NUMBA_SYMM_ISLAND_SIZE", raising=False)
    else:
        monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", most)
    pause, waits = Wait.pause, Counter()

    def noting(wait, absent):
        waits[is_undisturbed()] += 1
        return pause(wait, absent)

    monkeypatch.setattr(Wait, "pause", noting)
    called.clear()
    for step in range(2):
        world.barrier()
        if step == world.rank:
            time.sleep(0.05)  # so that others wait for this rank
        with ns.Communicator(WatchedComm(world)) as comm:
            half = comm.split(world.rank % 2, -world.rank)
            other = half.dup()
            assert comm.split(None) is None
            assert waits.pop(True, 0) == 0  # close holds signals back
            check_works(other)
            other.close()
            half.close()
            assert called["Idup"] == step + 1
            assert called.pop("Free", 0) == 0
        assert called.pop("Free") == 1
        waits.pop(True, 0)
    assert not blocking()
    assert {"Idup", "Isend", "Improbe", "Irecv", "Test"} <= {*called}
    assert waits[False] > 0
