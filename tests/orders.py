"""What only a GPU needs on the host, and the tests of its order.

The simulator's launches and copies block. So the host's waits and events are behind a
branch on ``SIMULATED``, which no test without a GPU would take, or wait for nothing.
Tests take them with a driver that executes the order of what is called
(``executing.py``).
"""

import ast
import os
import re
from pathlib import Path

import numba_symm

PACKAGE = Path(numba_symm.__file__).parent
TESTS = Path(__file__).parent

OF_KERNELS = {"device", "bench", "command", "__pycache__"}
"""Folders without such branches on the host of a call."""

DRIVER = re.compile(r"cu.*(Synchronize|WaitEvent|EventRecord|Query|Async)")
"""The driver's functions that wait, order streams, ask, or enqueue."""

WAITS = {
    *("synchronize", "synchronize_device", "settle", "wait", "record", "follow"),
    *("mark", "lead", "joined", "defer_cleanup", "_join", "_record", "is_done"),
}
"""The package's functions that do so."""

_WAIT = "streams.synchronize("  # does nothing in the simulator


def orders(*places):
    """Mark a test that takes the branch of a GPU in places, and asserts the order.

    Args:
        places: functions as ``guarded`` names them.
    """
    return lambda test: test


def guarded():
    """Return the functions in which only a GPU's branch waits or orders streams.

    Each is named by its module and qualified name: ``mpi.p2p.Sends._wait``.
    """
    found = set()
    for folder, folders, files in os.walk(PACKAGE, followlinks=True):
        folders[:] = [each for each in folders if each not in OF_KERNELS]
        for file in files:
            path = Path(folder, file)
            text = path.read_text() if path.suffix == ".py" else ""
            if "SIMULATED" in text or _WAIT in text:
                module = path.relative_to(PACKAGE).with_suffix("").parts
                parts = [part for part in module if part != "__init__"]
                found |= set(_guarded(ast.parse(text), parts))
    return found


def _guarded(node, names):
    for part in _parts_of_a_gpu(node):
        if any(map(_orders, ast.walk(part))):
            yield ".".join(names)
    for inner in ast.iter_child_nodes(node):
        named = isinstance(inner, ast.FunctionDef | ast.ClassDef)
        yield from _guarded(inner, [*names, inner.name] if named else names)


def _parts_of_a_gpu(node):
    """Yield what only a GPU runs of a node and its statements, but no deeper."""
    if isinstance(node, ast.IfExp | ast.BoolOp) and _simulated(node):
        yield node
    for _, body in ast.iter_fields(node):
        for at, inner in enumerate(body if isinstance(body, list) else []):
            if isinstance(inner, ast.If) and _simulated(inner.test):
                yield from _branch_of_a_gpu(inner, body[at + 1 :])
            elif isinstance(inner, ast.Expr) and ast.unparse(inner).startswith(_WAIT):
                yield inner


def _simulated(test):
    return any(getattr(node, "id", None) == "SIMULATED" for node in ast.walk(test))


def _branch_of_a_gpu(branch, following):
    """Return the statements that only a GPU runs, of a branch and what follows it."""
    text = ast.unparse(branch.test)
    if "not SIMULATED" in text or "or SIMULATED)" in text:
        return branch.body
    returns = isinstance(branch.body[-1], ast.Return | ast.Raise)
    return branch.orelse + (following if returns else [])


def _orders(node):
    """Return whether a node waits for a GPU or orders its work."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in WAITS
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and DRIVER.fullmatch(text) is not None


def places_in_tests():
    """Return the places that tests name with ``orders``, and the tests' names."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text if "@orders" in text else "")):
            for each in getattr(node, "decorator_list", ()):
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "orders":
                    for place in ast.walk(each):
                        if isinstance(place, ast.Constant):
                            found.setdefault(place.value, []).append(node.name)
    return found
