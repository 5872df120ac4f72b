"""Calls that are drawn, against NumPy, on communicators of several kinds.

NUMBA_SYMM_TEST_CALLS   the calls on each communicator
NUMBA_SYMM_TEST_SEED    the seed of them; default 1
"""

import os
from dataclasses import replace

import pytest

import numba_symm as ns
from numba_symm.environment import SIMULATED
from tests.drivers import calls
from tests.ranks.islands.test_islands import (
    even_and_odd,
    in_pairs,
    interleaved,
    of_one,
)

CALLS = int(os.environ.get("NUMBA_SYMM_TEST_CALLS", 70 if SIMULATED else 200))
SEED = int(os.environ.get("NUMBA_SYMM_TEST_SEED", 1))


def whole(world):
    return ns.Communicator(world, timeout=20)


def reverse(world):
    """A part of all ranks, in another order."""
    with whole(world) as comm:
        return comm.split(0, key=-comm.rank)


def of_few_blocks(world):
    """One in whose calls even small messages take several epochs."""
    comm = whole(world)
    comm._calls.end = replace(comm._calls.end, max_blocks=2)
    return comm


KINDS = [whole, of_few_blocks, reverse]
OF_ISLANDS = [of_one, in_pairs, interleaved, even_and_odd]


def failed(world, make, seed, first, last):
    """Return what fails on any rank in calls on a new communicator, or None."""
    with make(world) as comm:
        try:
            calls.run(comm, (calls.drawn(comm, seed, n) for n in range(first, last)))
            text = None
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        found = [each for each in world.allgather(text) if each]
    return "\n".join(found) or None


@pytest.mark.parametrize("make", KINDS + OF_ISLANDS, ids=lambda make: make.__name__)
def test_calls_that_are_drawn(world, make):
    """After a failure, as few of the last calls as fail are made again."""
    if world.size < 3 and make in OF_ISLANDS[world.size == 2 :]:
        pytest.skip("one rank has no islands, and two only those of one rank")
    seed = 10 * SEED + [*KINDS, *OF_ISLANDS].index(make)
    text = failed(world, make, seed, 0, CALLS)
    if text is None:
        return
    for first, last in ((n - k, n) for k in (1, 2, 8) for n in range(k, CALLS + 1)):
        if (again := failed(world, make, seed, first, last)) is not None:
            text = f"calls {first} to {last} on {make.__name__}: {again}"
            break
    pytest.fail(text)
