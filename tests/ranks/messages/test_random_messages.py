"""Messages that are drawn, on communicators of several kinds, and as requests."""

import pytest

import numba_symm as ns
from numba_symm.environment import SIMULATED
from tests.drivers import exchanges
from tests.ranks.helpers import of_one_island
from tests.ranks.test_random_calls import KINDS, OF_ISLANDS

ROUNDS = 40  # on a GPU, messages around chunks have megabytes


@pytest.mark.parametrize("make", KINDS + OF_ISLANDS, ids=lambda make: make.__name__)
def test_messages_that_are_drawn(world, make):
    if world.size < 3 and make in OF_ISLANDS[world.size == 2 :]:
        pytest.skip("one rank has no islands, and two only those of one rank")
    with make(world) as comm:
        exchanges.run(comm, [*KINDS, *OF_ISLANDS].index(make), 0, ROUNDS)


@of_one_island
def test_requests_that_are_drawn(world):
    with ns.Communicator(world, timeout=20, requests=True) as comm:
        if not SIMULATED:  # loading a kernel later would wait for pending requests
            comm.prepare("sendrecv", "all_reduce", dtypes=("int64",))
        exchanges.run(comm, 1, 0, ROUNDS, exchanges.Requests)
