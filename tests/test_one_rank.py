"""Runs the files and folders in tests/ranks and tests/gpu on one rank.

In a file of its own, for a worker that has no other ranks to run.
"""

import pytest

from tests import test_mpirun


@pytest.mark.skipif(1 not in test_mpirun.RANKS, reason="NUMBA_SYMM_TEST_RANKS")
@test_mpirun.by_file
def test_on_one_rank(file, tmp_path):
    test_mpirun.check(file, 1, tmp_path)
