"""``numba_symm.mpi`` in the place of ``mpi4py.MPI``: runs tests/in_place on 3 ranks.

The runner of ``numba-symm run --as-mpi4py`` runs their program.
"""

import os
from pathlib import Path

from numba_symm.command import runner
from tests import test_mpirun

FOLDER = Path(__file__).parent / "in_place"
RUNNER = [runner.__file__, str(os.getpid()), "3", runner.IN_PLACE]


def test_in_mpi4pys_place_on_ranks(tmp_path):
    test_mpirun.check((FOLDER,), 3, tmp_path, RUNNER)
