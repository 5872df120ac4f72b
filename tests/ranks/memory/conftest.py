"""What tests of memory share."""

from functools import partial

import pytest

from tests.ranks.helpers import wait_for_all


@pytest.fixture
def finished(comm, world):
    """Return a function that waits until all ranks' work is done."""
    return partial(wait_for_all, comm, world)
