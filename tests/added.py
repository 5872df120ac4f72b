"""Adds the algorithm of docs/adding-an-algorithm.md to the table of operations.

As a plugin of pytest, before tests are collected: ``-p added``.
"""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

from numba_symm.collectives import kernels, operations
from numba_symm.launch import failures

PAGE = Path(__file__).parents[1] / "docs/adding-an-algorithm.md"
NAME = "pulled"
_folder = tempfile.TemporaryDirectory()
_number = ""  # the name of its wait


def add():
    """Follow the page: what is in its blocks goes to the files that it names."""
    global _number
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    wait, kernel, entry = blocks
    before = set(vars(failures))
    exec(wait, vars(failures))
    (_number,) = set(vars(failures)) - before
    path = Path(_folder.name, f"{NAME}.py")
    path.write_text(kernel)
    name = f"{kernels.__name__}.{NAME}"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    exec(entry, {**vars(operations), NAME: module})


def remove():
    """Undo that."""
    made = operations.ALL_REDUCE.algorithms.pop(NAME)
    delattr(failures, _number)
    del failures.TABLE[made.waits[0]], sys.modules[f"{kernels.__name__}.{NAME}"]


def pytest_configure():
    add()
