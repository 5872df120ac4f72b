"""What of a user's settings the tests see, and what is printed as they fail."""

import os
import subprocess
import sys
from pathlib import Path

from tests import isolation

ROOT = Path(__file__).parents[2]


def test_settings_of_a_user_are_left_out():
    environ = {
        "NUMBA_SYMM_TIMEOUT": "1",
        "NUMBA_SYMM_NONSENSE": "1",
        "NUMBA_SYMM_TEST_RANKS": "2",
        "NUMBA_SYMM_ISLAND_SIZE": "2",
        "COLUMNS": "40",
        "XDG_DATA_HOME": "/home/ada",
        "XDG_CACHE_HOME": "/home/ada/cache",
    }
    alone, rank = dict(environ), dict(environ)
    isolation.isolate(alone, started_by_mpirun=False)
    kept = {name: environ[name] for name in [*environ][2:4]}
    made = {name: alone.pop(name) for name in isolation.FOLDERS}
    assert alone == kept | {isolation.ISOLATED: "1"}
    assert all(list(Path(each).iterdir()) == [] for each in made.values())
    isolation.isolate(rank, started_by_mpirun=True)
    where = {"XDG_DATA_HOME": isolation.NOWHERE, "XDG_CACHE_HOME": "/home/ada/cache"}
    assert rank == alone | where
    before = dict(rank)
    isolation.isolate(rank, started_by_mpirun=False)  # a process that a test starts
    assert rank == before


def test_these_tests_have_folders_of_their_own():
    assert os.environ[isolation.ISOLATED]


FAILING = """
def test_first(): assert False
def test_second(): print("the second test runs now", flush=True)
"""


def test_the_names_of_failed_tests_are_printed_as_they_fail(tmp_path):
    file = tmp_path / "test_two.py"
    file.write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-sq", "-p", "tests.conftest", str(file)]
    options = ["-pno:cacheprovider", f"--rootdir={tmp_path}"]
    said = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    assert said.index("FAILED test_two.py::test_first (call)") < said.index("now")
