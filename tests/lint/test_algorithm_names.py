"""No code asks what an algorithm is called: its entry in the table says what it is."""

import ast
from pathlib import Path

from numba_symm.collectives.operations import OPERATIONS
from tests.algorithms import ONE_SHOTS, TWO_SHOTS

ROOT = Path(__file__).parents[2]
FOLDERS = "numba_symm", "collectives", "launch", "bench", "docs", "tests", "examples"
NAMES = {name for operation in OPERATIONS.values() for name in operation.algorithms}
PIECES = {piece for name in ONE_SHOTS | TWO_SHOTS for piece in name.split("_")}
PIECES |= {"one_shot", "two_shot", "engine", *NAMES}
TAKING_APART = {"startswith", "endswith", "replace", "partition", "rpartition"}
TAKING_APART |= {"removeprefix", "removesuffix", "split", "rsplit"}


def constants(node):
    """Yield the strings in an expression, or in a tuple, list or set of them."""
    for each in getattr(node, "elts", [node]):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def asks(node):
    """Return whether an expression compares a name, or takes one apart."""
    if isinstance(node, ast.Compare):
        sides = (node.left, *node.comparators)
        return any(text in NAMES for side in sides for text in constants(side))
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in TAKING_APART:
        return any(t.strip("_") in PIECES for a in node.args for t in constants(a))
    return False


def asking(text):
    """Return the lines that ask for a name; tests may assert which was chosen."""
    tree = ast.parse(text)
    asserted = {
        id(node)
        for each in ast.walk(tree)
        if isinstance(each, ast.Assert)
        for node in ast.walk(each.test)
        if isinstance(node, ast.Compare)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if asks(node) and id(node) not in asserted
    ]


def test_no_code_asks_for_the_name_of_an_algorithm():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_symlink()
        for line in asking(path.read_text())
    ]
    assert found == []
