"""Hides these tests from a plain pytest, as they need Numba's CUDA simulator.

``tests/host/test_simulated_device.py`` starts them. By hand:
``NUMBA_ENABLE_CUDASIM=1 pytest tests/simulated``.
"""

import math
import threading

import pytest

import numba_symm as ns
from numba_symm import simulator
from numba_symm.environment import SIMULATED

if not SIMULATED:
    collect_ignore_glob = ["test_*.py"]


class Alone:
    """A communicator of one rank."""

    rank, size = 0, 1

    def allgather(self, value):
        return [value]

    def barrier(self):
        pass

    def split(self, color, key):
        return self


@pytest.fixture
def world():
    return Alone()


@pytest.fixture
def comm(world):
    communicator = ns.Communicator(world, timeout=0.3)
    yield communicator
    communicator.close()


def threads_without_teams():
    """Return the number of threads that do not wait for a kernel."""
    idle = sum(math.prod(size) * len(teams) for size, teams in simulator._idle.items())
    return threading.active_count() - idle
