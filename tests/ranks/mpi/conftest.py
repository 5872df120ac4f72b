"""The communicator of these tests: mpi4py's spelling."""

import pytest

from numba_symm import mpi
from numba_symm.mpi.rooms import READ, READY


@pytest.fixture(scope="module")
def comm(world):
    made = mpi.Comm(world, timeout=20)
    yield made
    made.Free()


@pytest.fixture
def apart(world):
    """A communicator of mpi4py that no other test has wrapped."""
    made = world.Dup()
    yield made
    made.Free()


@pytest.fixture
def copying_late(monkeypatch):
    """What lets a communicator's receives start no copy, until they all begin.

    It returns the list of these copies, and what begins them.
    """

    def of(post):
        late, words, arrive = [], post.words, post.arrive

        def arrive_later(port, *given):
            *place, number, _ = given
            there = words.holds(place[-1], READY, number)
            if there:
                late.append((*place, READ, number))
            return int(there)

        def begin():
            monkeypatch.setattr(post, "arrive", arrive)
            while late:
                words.copy(words.port_at, *late.pop(0))

        monkeypatch.setattr(post, "arrive", arrive_later)
        return late, begin

    return of
