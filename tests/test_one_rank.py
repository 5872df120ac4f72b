"""Runs tests/ranks, and each file of tests/gpu, on one rank.

In a file of its own, for a worker that has no other ranks to run.
"""

import pytest

from tests import test_mpirun

JOBS = [(test_mpirun.TESTS / "ranks",)]
JOBS += filter(test_mpirun.on_gpus, test_mpirun.jobs())


@pytest.mark.skipif(1 not in test_mpirun.RANKS, reason="NUMBA_SYMM_TEST_RANKS")
@pytest.mark.parametrize("job", JOBS, ids=test_mpirun.name_of)
def test_on_one_rank(job, tmp_path):
    test_mpirun.check(job, 1, tmp_path)
