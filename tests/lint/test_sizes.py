"""No function above 100 lines."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("numba_symm", "collectives", "launch", "bench", "tests", "docs", "examples")
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("**/*.py"))
}


def test_functions_are_short():
    long = {
        f"{file}, {node.name}": node.end_lineno - node.lineno + 1
        for file, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name: lines for name, lines in long.items() if lines > 100}
    assert long == {}
