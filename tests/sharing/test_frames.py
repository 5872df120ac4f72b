"""The example runs, and finds itself right."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example():
    ran = subprocess.run(
        [sys.executable, ROOT / "examples/frames.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "All good." in ran.stdout
    assert ran.stderr == ""
