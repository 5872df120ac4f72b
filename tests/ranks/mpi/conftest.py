"""The communicator of these tests: mpi4py's spelling."""

import pytest

from numba_symm import mpi
from numba_symm.mpi import inline


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
def through_rooms(monkeypatch):
    """No message is small, so the data of none is part of its envelope."""
    monkeypatch.setattr(inline, "MOST", 0)


@pytest.fixture(params=["inline", "through_rooms"])
def both_ways(request):
    """Small messages are part of their envelopes, and then not."""
    if request.param == "through_rooms":
        request.getfixturevalue("through_rooms")
