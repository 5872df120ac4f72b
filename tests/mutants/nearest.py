"""Which tests are the nearest to a function: a recorded map of who calls what.

Each file of tests runs once, and each of its tests notes the functions of the product
that it calls. ``FOLDER`` keeps that by file, until the file changes. Tests that compile
device code for GPUs call none of it; the names of their files tell what they test.
"""

import ast
import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.mutants.mutant import Mutant
from tests.mutants.trees import KINDS, Tree, kind_of

FOLDER = Path("build/mutants/calls")
SEARCHED = "explore", "host", "sharing", "simulated", "ranks"
"""Folders of tests/. The tests above them start whole jobs, which takes too long."""

UNRECORDED = re.compile(r"machine_code")
BROKEN = re.compile(r"found(\[|$)|/test_(markers|source)\.py|/test_broken_")
"""Tests that break the product's text themselves, and need it as it is."""

BUDGET = {"plain": 16.0, "simulated": 8.0, "ranks": 8.0}
"""Seconds of processor time of a mutant's tests, by kind, as they were recorded."""

TOGETHER, LONG = 10, 600
"""How many files are recorded at a time, and the longest time without progress."""

TRACED = 2.0
"""How much longer a test takes where its calls are noted."""


def test_files(root: Path) -> list[str]:
    """Return the files of tests that are searched."""
    return sorted(
        str(path.relative_to(root))
        for folder in SEARCHED
        for path in (root / "tests" / folder).rglob("test_*.py")
        if path.name != "test_simulated_device.py"  # runs a folder that is searched
    )


class Nearest:
    """The recorded map of a tree, which chooses tests."""

    def __init__(self, root: Path):
        self.root = root
        self.files = test_files(root)
        self._tests: dict[str, tuple[float, int]] = {}  # seconds, number of functions
        self._callers: defaultdict[str, set[str]] = defaultdict(set)
        for file in self.files:
            found = self._kept(file)
            if found is not None:
                self._take(found)

    def _path(self, file: str) -> Path:
        return self.root / FOLDER / (file.replace("/", ".") + ".json")

    def _digest(self, file: str) -> str:
        return hashlib.sha256((self.root / file).read_bytes()).hexdigest()

    def _kept(self, file: str) -> Any:
        """Return what is kept of a file; None: nothing, or of another text."""
        path = self._path(file)
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        return found if found["digest"] == self._digest(file) else None

    def _take(self, found: Any) -> None:
        names = found["functions"]
        for test, (outcome, seconds, called) in found["tests"].items():
            if outcome == "passed" and not BROKEN.search(test):
                self._tests[test] = seconds / TRACED, len(called)
                for number in called:
                    self._callers[names[number]].add(test)

    @property
    def missing(self) -> list[str]:
        """The files that have changed since they were recorded, or never were."""
        return [
            file
            for file in self.files
            if not UNRECORDED.search(file) and self._kept(file) is None
        ]

    def keep(self, files: list[str], run: Any) -> None:
        """Keep what a run of these files has noted."""
        for file in files:
            tests = [test for test in run.outcomes if test.partition("::")[0] == file]
            called = {test: sorted(run.calls.get(test, ())) for test in tests}
            names = sorted(set().union(*called.values()))
            number = {name: i for i, name in enumerate(names)}
            found = {
                "digest": self._digest(file),
                "functions": names,
                "tests": {
                    test: [
                        run.outcomes[test],
                        run.seconds[test],
                        [number[name] for name in called[test]],
                    ]
                    for test in tests
                },
            }
            path = self._path(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found))
            self._take(found)

    def record(self, tree: Tree) -> None:
        """Run the files that are missing, a few at a time, and keep what they note."""
        for kind in KINDS:
            left = [file for file in self.missing if kind_of(file) == kind]
            while left:
                some, left = left[:TOGETHER], left[TOGETHER:]
                print(f"recording {some[0]} and {len(some) - 1} more", flush=True)
                run = tree.run(kind, some, calls=True, stuck=LONG)
                ran = {test.partition("::")[0] for test in run.outcomes}
                self.keep([file for file in some if file in ran], run)
                for file in some:  # those after a test that ended the run, or hung
                    if file not in ran:
                        alone = tree.run(kind, [file], calls=True, stuck=LONG)
                        self.keep([file], alone)

    def choose(self, mutant: Mutant, text: str) -> dict[str, list[str]]:
        """Return a mutant's nearest tests by their kinds, in the order to run them."""
        found: dict[str, list[str]] = {kind: [] for kind in KINDS}
        for test in mutant.tests:
            found[kind_of(test)].append(test)
        if mutant.tests:
            return found
        name = f"{mutant.file}:{mutant.function(text)}"
        tests = self._callers.get(name, set())
        if not tests:
            prefix = f"{mutant.file}:"
            near = (
                who
                for each, who in self._callers.items()
                if each[: len(prefix)] == prefix
            )
            tests = set().union(*near)
        for kind in KINDS:
            mine = [test for test in tests if kind_of(test) == kind]
            found[kind] += self._cheapest(mine, BUDGET[kind])
        if not tests:
            found["plain"] += self._named(mutant.file)
        return found

    def _cheapest(self, tests: list[str], budget: float) -> list[str]:
        """Return tests within a budget, first those that call little else.

        Of each function of tests one follows another, before a second one of any.
        """
        order = sorted(tests, key=lambda test: (self._cost(test), test))
        turns: defaultdict[str, int] = defaultdict(int)
        ranked = []
        for place, test in enumerate(order):
            function = test.partition("[")[0]
            ranked.append((turns[function], place, test))
            turns[function] += 1
        found, left = list[str](), budget
        for _, _, test in sorted(ranked):
            seconds = self._tests[test][0] + 0.01
            if seconds <= left or not found:
                found.append(test)
                left -= seconds
        return found

    def _cost(self, test: str) -> float:
        seconds, functions = self._tests[test]
        return seconds + functions / 200

    def _named(self, file: str) -> list[str]:
        """Return files of tests that import a file of the product, or have its name."""
        stem = Path(file).stem
        found = []
        for each in self.files:
            if kind_of(each) != "plain":
                continue
            imported = _imports((self.root / each).read_text(), stem)
            if stem in Path(each).stem or imported:
                found.append(((stem in Path(each).stem) + imported, each))
        return [each for _, each in sorted(found, reverse=True)[:4]]


def _imports(text: str, stem: str) -> bool:
    """Return whether a text imports a module of this name, or from one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = {*(node.module or "").split("."), *(a.name for a in node.names)}
        elif isinstance(node, ast.Import):
            names = {part for a in node.names for part in a.name.split(".")}
        else:
            continue
        if stem in names:
            return True
    return False
