"""The programs of examples/mpi: the same in both spellings, with the same results."""

import difflib

import pytest

from numba_symm.command import launcher
from tests import test_mpirun
from tests.test_mpirun import ROOT

FOLDER = ROOT / "examples" / "mpi"
NAMES = ["conjugate_gradient", "jacobi", "k_means", "pipeline", "transpose"]


def text(spelling, name):
    return (FOLDER / spelling / f"{name}.py").read_text().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_only_the_import_and_the_communicator_differ(name):
    plain, ported = text("with_mpi4py", name), text("with_numba_symm", name)
    found = [line for line in difflib.ndiff(plain, ported) if line[0] in "+-"]
    assert {line for line in found if line[2:]} == {
        "- from mpi4py import MPI",
        "+ from numba_symm import mpi as MPI",
        "- comm = MPI.COMM_WORLD",
        "+ comm = MPI.Comm(MPI.COMM_WORLD)",
    }


def test_both_have_the_same_results(tmp_path):
    """All bits are equal on two ranks. The programs print floats in hexadecimal.

    On GPUs only the port runs: mpi4py's MPI may not take arrays of the device.
    """
    environ = test_mpirun.environment(2)
    simulated = environ.get("NUMBA_ENABLE_CUDASIM") == "1"
    said = {}
    for spelling in ["with_mpi4py"] * simulated + ["with_numba_symm"]:
        program = [str(ROOT / "tests/run_programs.py"), str(FOLDER / spelling)]
        log = tmp_path / f"{spelling}.txt"
        mpirun = launcher.mpirun_command(2, program, launcher.find_mpirun())
        code = test_mpirun.run(mpirun, environ, log)
        assert code == 0, log.read_text()
        lines = log.read_text().splitlines()
        said[spelling] = sorted(line for line in lines if line[0] != "\x1b")  # mpirun's
    ported = said["with_numba_symm"]
    assert said.get("with_mpi4py", ported) == ported
    assert len(ported) == 9
    assert not any("nan" in line for line in ported)
