"""Keeps what a user has set out of the tests. Imported before the library.

Measured limits (limits.json), caches and variables NUMBA_SYMM_… of the user would
change what is tested, and variables of the terminal what is printed. Tests have empty
folders of their own, which the processes that they start share. The variables in KEPT
are settings of the tests (README.md). Ranks that somebody starts by hand keep the
cache, which has kernels only, by their code. NUMBA_SYMM_TEST_ISOLATED=1 leaves
everything as it is.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

ISOLATED = "NUMBA_SYMM_TEST_ISOLATED"
KEPT = (
    "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES",
    "NUMBA_SYMM_ISLAND_SIZE",
    "NUMBA_SYMM_MULTIPROCESSORS",
)
TERMINAL = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
FOLDERS = ("XDG_DATA_HOME", "XDG_CACHE_HOME")
NOWHERE = "/nonexistent"


def isolate(environ, started_by_mpirun):
    """Change the environment of this process, and of those that it starts."""
    if environ.get(ISOLATED):
        return
    for name in list(environ):
        own = name.startswith("NUMBA_SYMM_") and not name.startswith("NUMBA_SYMM_TEST_")
        if (own and name not in KEPT) or name in TERMINAL:
            del environ[name]
    environ[ISOLATED] = "1"
    if started_by_mpirun:
        environ[FOLDERS[0]] = NOWHERE
        return
    folder = Path(tempfile.mkdtemp(prefix="numba-symm-tests-"))
    atexit.register(_remove, folder, os.getpid())
    for name in FOLDERS:
        environ[name] = str(folder / name)
        (folder / name).mkdir()


def _remove(folder, owner):
    """Remove the folder, unless this is a fork of the process that uses it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
