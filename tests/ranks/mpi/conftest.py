"""The communicator of these tests: mpi4py's spelling."""

import pytest

from numba_symm import mpi


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
