"""Fixtures of the tests of misuse."""

import pytest

import numba_symm as ns
from tests.ranks.helpers import check_works, refused


@pytest.fixture
def last(world):
    """Whether this is the last rank, the one that errs."""
    return world.rank == world.size - 1


@pytest.fixture
def everywhere(world):
    """Return a check that all ranks raise one error, with one text, together."""

    def check(kind, call, *texts):
        (said,) = set(refused(world, kind, call, *texts))
        return said

    return check


@pytest.fixture
def fresh(world):
    """Check in the end that a new communicator works."""
    yield
    with ns.Communicator(world, timeout=60) as comm:
        check_works(comm)
