"""Runs tests/simulated in a process of its own, in Numba's CUDA simulator.

The choice is made when numba is imported, and the simulator disables the compiling
that the tests here need.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "simulated"


def test_in_the_simulator():
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {"PYTHONPATH": os.pathsep.join(path), "NUMBA_ENABLE_CUDASIM": "1"}
    options = ["-q", "--no-header", "-pno:cacheprovider", "--color=no", "--timeout=50"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER)],
        cwd=ROOT,
        env=os.environ | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
