"""Install the wheel of a folder into a new environment, and run it there.

    python3 -m tests.dist_check dist

`make dist` runs it. The tests are copied beside nothing else, so they import what the
wheel has installed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = ["-m", "pytest", "-q", "-pno:cacheprovider"]
RUN = ["numba-symm", "run", "-n", "2", "--simulate"]
COMMANDS = [
    ["numba-symm", "info"],
    [*RUN, "examples/digits.py"],
    [*RUN, *PYTEST, "tests/ranks/operations/test_reduce.py"],
    [*RUN, "--as-mpi4py", *PYTEST, "tests/in_place"],
    ["python", *PYTEST, "tests/host/test_record.py"],
    ["python", *PYTEST, "tests/sharing/test_references.py"],
    ["python", *PYTEST, "tests/explore/test_memory.py"],
    [
        "env",
        "NUMBA_ENABLE_CUDASIM=1",
        "python",
        *PYTEST,
        "tests/simulated/test_trees.py",
    ],
]
"""What runs there: the demo, and a file of each folder of tests that needs no GPU."""

EXTRAS = "mpi,demo,explore"
ALSO = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def main(folder):
    """Check the one wheel of a folder, and return the exit code."""
    (wheel,) = Path(folder).glob("*.whl")
    (sdist,) = Path(folder).glob("*.tar.gz")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    assert sdist.name == f"numba_symm-{version}.tar.gz", sdist.name
    with tempfile.TemporaryDirectory(prefix="numba-symm-dist-") as name:
        place = Path(name)
        programs = place / "venv/bin"
        venv.create(place / "venv", with_pip=True)
        pip = [programs / "python", "-m", "pip", "install", "-q"]
        run([*pip, f"{wheel.resolve()}[{EXTRAS}]", *ALSO], place)
        junk = shutil.ignore_patterns("__pycache__")
        for part in "tests", "examples":
            shutil.copytree(ROOT / part, place / part, ignore=junk)
        shutil.copy(ROOT / "pyproject.toml", place)  # pytest's settings
        said = run([programs / "numba-symm", "--version"], place)
        assert said.strip() == f"numba-symm {version}", said
        for command in COMMANDS:
            words = [str(programs / word) if word in ("python", "numba-symm") else word
                     for word in command]  # fmt: skip
            print("$", *command, flush=True)
            run(words, place)
    print(f"{wheel.name} and {sdist.name} are good")
    return 0


def run(command, place):
    """Run a command there; show its output if it fails."""
    ended = subprocess.run(
        command,
        cwd=place,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(f"{ended.stdout}\nfailed: {' '.join(map(str, command))}")
    return ended.stdout


def environment():
    """Return the environment without what would lead to this tree."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
