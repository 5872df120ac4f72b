"""No file above 500 lines, each exception with its reason; no function above 100."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("numba_symm", "collectives", "launch", "bench", "tests", "docs", "examples")
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("**/*.py"))
}

LONG_FILES = {
    "collectives/communicator.py": "the public methods, each with its docstring",
    "tests/mutants/kernels.py": "a table of changes and of tests",
}


def test_files_are_short():
    assert "numba_symm/board.py" in SOURCES
    lines = {file: len(text.splitlines()) for file, text in SOURCES.items()}
    long = {file: number for file, number in lines.items() if number > 500}
    assert long.keys() <= LONG_FILES.keys(), long


def test_functions_are_short():
    long = {
        f"{file}, {node.name}": node.end_lineno - node.lineno + 1
        for file, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name: lines for name, lines in long.items() if lines > 100}
    assert long == {}
