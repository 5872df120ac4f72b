"""mpi4py's own tests against ``numba_symm.mpi``, on three ranks.

They are in mpi4py's source distribution, which pip downloads once. Without a network
this file is skipped; ``tests/ranks/mpi`` covers the same calls. Except in full (`make
nightly`), only the modules in FEW are run.

NUMBA_SYMM_TEST_TYPES   NumPy's letters of the types of arrays; see mpi4py_suite.py
"""

import json

import pytest

from numba_symm.command import launcher
from tests import packages, test_mpirun
from tests.test_mpirun import ROOT
from tests.whole import WHOLE

VERSION = "4.1.2"
RANKS = 3

PASSED = {
    "test_cco_buf": 72,
    "test_cco_vec": 58,
    "test_cco_nb_buf": 70,
    "test_cco_nb_vec": 58,
    "test_cco_pr_buf": 70,
    "test_cco_pr_vec": 58,
    "test_cco_ngh_buf": 12,
    "test_cco_pr_ngh_buf": 12,
    "test_p2p_buf": 48,
    "test_p2p_buf_matched": 11,
    "test_rma": 36,
    "test_rma_nb": 14,
}
"""The number of tests of each module that pass; docs/porting-from-mpi4py.md has it."""

FEW = ("test_cco_ngh_buf", "test_p2p_buf_matched", "test_rma")
"""Modules of each kind of call: collectives, messages and windows."""

MODULES = {name: PASSED[name] for name in (PASSED if WHOLE else FEW)}

KINDS = ("Self", "SelfDup", "World", "WorldDup")
BOTTOM = {
    "test_cco_ngh_buf.TestCCONghBuf": "testNeighborAlltoallwBottom",
    "test_cco_vec.TestCCOVec": "testAlltoallwBottom",
    "test_cco_nb_vec.TestCCOVec": "testAlltoallwBottom",
    "test_cco_pr_vec.TestCCOVec": "testAlltoallwBottom",
}
LACKING = {
    f"test_p2p_buf.TestP2PBuf{kind}.testConstructor": "requests have no handles"
    for kind in KINDS
} | {
    f"{start}{kind}.{name}": "MPI.BOTTOM"
    for start, name in BOTTOM.items()
    for kind in KINDS
}
"""The tests that do not, and why."""


@pytest.fixture(scope="module")
def folder():
    """Return the folder of mpi4py's tests, or skip."""
    return packages.source("mpi4py", VERSION, packages.WITH_OURS) / "test"


@pytest.fixture(scope="module")
def outcomes(folder, tmp_path_factory):
    kept = tmp_path_factory.mktemp("mpi4py")
    results, log = kept / "results.json", kept / "log.txt"
    program = [ROOT / "tests/mpi4py_suite.py", folder, results, *MODULES]
    mpirun = launcher.mpirun_command(
        RANKS, [*map(str, program)], launcher.find_mpirun()
    )
    code = test_mpirun.run(mpirun, test_mpirun.environment(RANKS), log, busy=900)
    assert code == 0, log.read_text()[-5000:]
    return json.loads(results.read_text())


def test_every_test_of_mpi4py_passes_or_is_known_not_to(outcomes):
    failed = {name: text for name, (how, text) in outcomes.items() if how != "passed"}
    unknown = {name: text for name, text in failed.items() if name not in LACKING}
    assert not unknown, "\n".join(f"{name}: {text}" for name, text in unknown.items())
    lacking = {name for name in LACKING if name.partition(".")[0] in MODULES}
    assert lacking <= set(failed), "some of LACKING pass now: take them out"


def test_no_test_was_left_out(outcomes):
    found = dict.fromkeys(MODULES, 0)
    for name, (how, _) in outcomes.items():
        found[name.partition(".")[0]] += how == "passed"
    assert found == MODULES
