"""Programs that nobody edits, in the simulator: PyLops-MPI, mpi4py-fft, and others.

``on_devices.py`` puts ``numba_symm.mpi`` in mpi4py's place and passes NumPy's arrays
for arrays of a device. pip downloads fixed versions once; without a network, a test is
skipped.

NUMBA_SYMM_TEST_WHOLE   1: all tests of the packages, in minutes: `make nightly`
"""

import os
import re

import pytest

from numba_symm.command import launcher
from tests import packages, test_mpi4py_suite, test_mpirun
from tests.test_mpirun import ROOT
from tests.whole import WHOLE

PAGE = ROOT / "docs/porting-from-mpi4py.md"

PYLOPS_MPI = "0.8.0"
PYLOPS = "pylops==2.8.0", "pyproximal==0.13.0"
MPI4PY_FFT = "2.0.6"
NUMBA_MPI = "numba-mpi==1.3.1", "psutil==7.2.2"
MPI4PY = test_mpi4py_suite.VERSION

PYLOPS_MPI_TESTS = 519
"""All tests of PyLops-MPI. All pass."""

DEMO_COUNT = 23

HOST_TESTS = 2127
"""All tests of mpi4py, run with host arrays by ``host_suite.py``."""

HOST_FAILURES = {
    "test_doc": 1,
    "test_objmodel": 4,
    "test_p2p_buf": 4,
    "test_package": 2,
    "test_subclass": 3,
}
"""How many of them fail, by module; the page has the reasons."""

DEMOS = [
    "helloworld.py",
    "compute-pi/cpi-cco.py",
    "mpi-ref-v1/ex-*.py",
    "nxtval/nxtval-onesided.py",
    "sequential/test_seq.py",
]
"""mpi4py's demos of calls with arrays.

Not here are programs that plot, start processes, compile C or measure for minutes.
Others that are not here:

- ``cpi-rma`` and ``nxtval-scalable`` have windows over arrays of their own. In the
  simulator, windows of the device take memory of ``Win.Allocate_device`` only.
- In ``nxtval-mpi3``, rank 0 clears a counter that others may have increased.
"""

LATE = """
import time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 2:
    time.sleep(1)
"""
"""Runs before ``ex-2.29``, whose rank 2 probes for a message from any source.

``ex-2.29`` ends without a barrier. So rank 1 would start ``ex-2.32`` early, and rank 2
would find its first message by the probe of ``ex-2.29``. Then the ranks would wait for
each other. Each program is correct alone, but they are not correct in sequence.
Therefore ``on_devices.py`` calls a barrier after each program.
"""


in_full = pytest.mark.skipif(not WHOLE, reason="it takes minutes: make nightly")


def job(ranks, log, path, *program):
    """Run programs on ranks in the simulator, and return the job's output."""
    environ = test_mpirun.environment(ranks) | {"NUMBA_ENABLE_CUDASIM": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([*map(str, path), environ["PYTHONPATH"]])
    line = [str(ROOT / "tests/on_devices.py"), *map(str, program)]
    mpirun = launcher.mpirun_command(ranks, line, launcher.find_mpirun())
    code = test_mpirun.run(mpirun, environ, log)
    text = log.read_text(errors="replace")
    assert code == 0, text[-5000:]
    return text


@pytest.fixture(scope="module")
def mpi4py_fft(tmp_path_factory):
    """Return the folder of mpi4py-fft, whose C code is not compiled."""
    # It tells its version only where it finds FFTW.
    fftw = tmp_path_factory.mktemp("fftw")
    for name in ("libfftw3.so", "libfftw3f.so"):
        (fftw / name).touch()
    environ = os.environ | {"FFTW_LIBRARY_DIR": str(fftw)}
    ours = packages.WITH_OURS
    return packages.source("mpi4py-fft", MPI4PY_FFT, ours, environ=environ)


def test_the_page_has_a_row_for_each_package():
    """The tests below, and those of mpi4py's suite, assert what the rows say."""
    helpers = ", ".join(each.replace("==", " ") for each in PYLOPS)
    passed = sum(test_mpi4py_suite.PASSED.values())
    tests = passed + len(test_mpi4py_suite.LACKING)
    rows = [
        f"| PyLops-MPI {PYLOPS_MPI}, with {helpers} | its tests | 2 "
        f"| {PYLOPS_MPI_TESTS} of {PYLOPS_MPI_TESTS} pass | `whole` |",
        f"| mpi4py-fft {MPI4PY_FFT} | its test of pencils; transforms with NumPy's FFT "
        "| 3 | pass | `whole` |",
        f"| {', with '.join(NUMBA_MPI).replace('==', ' ')} | an allreduce of host "
        "arrays | 3 | pass | `whole` |",
        f"| mpi4py {MPI4PY} | {DEMO_COUNT} demos | 3 | pass | `whole` |",
        f"| mpi4py {MPI4PY} | its tests of calls with arrays "
        f"| {test_mpi4py_suite.RANKS} | {passed} of {tests} pass, see below "
        "| `NUMBA_SYMM_TEST_WHOLE=1 pytest tests/test_mpi4py_suite.py` |",
        f"| mpi4py {MPI4PY} | all its tests, with host arrays | 3 "
        f"| {HOST_TESTS - sum(HOST_FAILURES.values())} of {HOST_TESTS} pass or are "
        "skipped | `whole` |",
    ]
    table = PAGE.read_text().partition("## Packages that were tried")[2]
    found = [line for line in table.partition("\n## ")[0].splitlines() if "|" in line]
    assert found[2:] == rows


@in_full
def test_pylops_mpi_passes_its_own_tests(mpi4py_fft, tmp_path):
    pytest.importorskip("scipy", reason="PyLops needs it")
    pytest.importorskip("matplotlib", reason="PyLops-MPI imports it")
    folder = packages.source("pylops-mpi", PYLOPS_MPI)
    path = folder, packages.installed(*PYLOPS), mpi4py_fft
    tests = sorted(folder.glob("tests/test_*.py"))
    # Its conftest.py sets what pytest 9 does not have.
    options = "--noconftest", "-q", "-pno:cacheprovider", f"--rootdir={folder}"
    text = job(2, tmp_path / "log", path, "-m", "pytest", *options, *tests)
    passed = {int(number) for number in re.findall(r"(\d+) passed", text)}
    assert len(passed) == 1, text[-5000:]
    assert "failed" not in text
    assert passed == {PYLOPS_MPI_TESTS}, text[-5000:]


def test_demos_of_mpi4py_and_programs_of_packages_run(mpi4py_fft, tmp_path):
    folder = packages.source("mpi4py", MPI4PY, packages.WITH_OURS) / "demo"
    programs = [path for name in DEMOS for path in sorted(folder.glob(name))]
    assert len(programs) == DEMO_COUNT
    late = tmp_path / "late.py"
    late.write_text(LATE)
    names = [path.name for path in programs]
    programs.insert(names.index("ex-2.29.py"), late)
    programs += [ROOT / "tests/pencils.py", ROOT / "tests/c_allreduce.py"]
    if WHOLE:
        programs.append(mpi4py_fft / "tests/test_pencil.py")
    path = mpi4py_fft, packages.installed(*NUMBA_MPI)
    text = job(3, tmp_path / "log", path, *programs)
    assert text.count("pi is approximately 3.1416") == 1, text


@in_full
def test_all_of_mpi4pys_tests_pass_with_host_arrays(tmp_path):
    """Each module is a job, so that a rank that waits for others names its module."""
    folder = packages.source("mpi4py", MPI4PY, packages.WITH_OURS) / "test"
    environ = test_mpirun.environment(3) | {"NUMBA_ENABLE_CUDASIM": "1"}
    program = [str(ROOT / "tests/host_suite.py"), str(folder)]
    runner = [str(ROOT / "numba_symm/command/runner.py"), str(os.getpid()), "3"]
    failed, tests = {}, 0
    for path in sorted(folder.glob("test_*.py")):
        line = [*runner, "--as-mpi4py", *program, path.name]
        log = tmp_path / path.stem
        mpirun = launcher.mpirun_command(3, line, launcher.find_mpirun())
        code = test_mpirun.run(mpirun, environ, log)
        text = log.read_text(errors="replace")
        ran = {int(number) for number in re.findall(r"Ran (\d+) tests?", text)}
        assert len(ran) == 1, f"{path.stem}: {text[-3000:]}"
        tests += ran.pop()
        if code:
            names = re.findall(r"(?:FAIL|ERROR): (\w+ \([\w.]+\))", text)
            failed[path.stem] = len(set(names))
    assert (failed, tests) == (HOST_FAILURES, HOST_TESTS)
