"""An algorithm that is added by the guide's own text, and wrong variants of it.

It has its file, its entry and its wait. No other file names it.
"""

import pytest

from explore.markers import removed, within
from explore.scenarios import breaks, calls_on_own_arrays, holds, worlds
from explore.source import device_code
from explore.test_operations import PAIRS, calls_of_pairs
from numba_symm.bench import tune
from numba_symm.collectives.operations import ALL_REDUCE
from numba_symm.errors import ArgumentError
from tests import added
from tests.host import test_machine_code as machine_code
from tests.kernels import bound_kernels

ADDED = "all_reduce", added.NAME
WRONG = {
    "an address": within("pulled", "address", "0", "16"),
    "no fence": removed("pulled", "fence"),
}


@pytest.fixture(scope="module", autouse=True)
def algorithm():
    added.add()
    bound_kernels.cache_clear()
    yield
    added.remove()
    bound_kernels.cache_clear()


@worlds
def test_it_is_explored_alone_and_among_others(ranks):
    holds(calls_of_pairs(device_code(), ADDED), ranks, 50)
    holds(calls_on_own_arrays(device_code(), names=["all_reduce"]), ranks, 50)
    holds(calls_of_pairs(device_code(), *PAIRS, *10 * [ADDED]), ranks, 50)


@worlds
@pytest.mark.parametrize("what", WRONG)
def test_wrong_ones_are_found(what, ranks):
    breaks(calls_of_pairs(device_code(WRONG[what]), ADDED), ranks)


def test_its_machine_code_is_looked_at():
    case = "numba_symm.collectives.kernels.pulled.make_pulled", 3
    assert case[0] in bound_kernels(3)
    for check in (
        machine_code.test_everything_stays_in_registers_and_a_block_fits,
        machine_code.test_a_collective_waits_for_the_grid_before_it_accesses_memory,
        machine_code.test_memory_is_global_and_nothing_is_atomic,
        machine_code.test_nothing_is_called,
    ):
        check(case, (9, 0))


def test_errors_and_the_measuring_of_limits_know_it():
    with pytest.raises(ArgumentError, match="'direct', 'pulled', or None"):
        ALL_REDUCE.check_algorithm("push")
    assert {added.NAME in case.algorithms for case in tune.cases(2)} == {True, False}
    assert added.NAME not in tune.cases(1)[0].algorithms
