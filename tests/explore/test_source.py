"""The explorer steps through every device function, however its names are spelled."""

import ast
import re

from explore import intrinsics
from explore.source import device_code, paths
from numba_symm.gpu.kernels import _device_files

DECORATED = re.compile(
    r"^ *@.*\b(?:(?:device|array)_function|sliced\(\w+\))$", re.MULTILINE
)
NOT_EXPLORED = {"ptx", "sim", "checks", "buffers", "block_collectives"}
"""Instructions, and checks of their arguments; kernels on one rank's arrays; plain
arithmetic; functions that only call what ``block_exchange`` makes."""


def decorated(path):
    """Return the lines of a file that begin a device function, by their text."""
    text = path.read_text()
    return [text.count("\n", 0, at.start()) + 1 for at in DECORATED.finditer(text)]


def of_factories(path):
    """Return the first lines of the functions within ``make_…``, without decorators."""
    lines = []

    def look(node, outer):
        for inner in ast.iter_child_nodes(node):
            name = getattr(inner, "name", outer)
            made = isinstance(inner, ast.FunctionDef) and outer.startswith("make_")
            if made and not inner.decorator_list:
                lines.append(inner.lineno)
            look(inner, name)

    look(ast.parse(path.read_text()), "")
    return lines


def test_every_device_function_stops():
    device_code()
    here, found = {str(path) for path in paths().values()}, 0
    stepped = {place for place in intrinsics.stepped if place[0] in here}
    for path in paths().values():
        lines = {*decorated(path), *of_factories(path)}
        found += len(lines)
        assert lines == {line for file, line in stepped if file == str(path)}, path
    assert found == len(stepped) > 150


def test_every_module_with_device_functions_is_explored():
    having = {path.stem for path in _device_files() if decorated(path)}
    assert having - paths().keys() <= NOT_EXPLORED
    assert len(having & paths().keys()) > 15
