"""Changes the product in one place after another, and tells which changes tests notice.

    python -m tests.mutants [-k TEXT] [--jobs N] [--every] [--again] [--unrecorded]

Three groups of mutants: ``host`` and ``kernel``, which are listed, and ``drawn``, a
sample of the syntax trees. Each is made in a copy of the tree, and runs its nearest
tests (``nearest.py``) up to the first that fails; this test has to fail twice, as a
loaded machine fails tests, too. A mutant is killed, if a test fails, or if its tests
use much processor time, or none for minutes, while none of them ends; tests that are
merely slow kill nothing.

Results are in ``latest.tsv``; if the product and the tests are still the same, a run
goes on with those that are missing. ``baseline.tsv`` is the run to compare with.
"""

import argparse
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.mutants import drawn, host, kernels, results
from tests.mutants.mutant import Mutant
from tests.mutants.nearest import Nearest
from tests.mutants.results import EQUIVALENT, GONE, KILLED, LIVED, Result
from tests.mutants.trees import Run, Tree

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = 200
stopping = threading.Event()
UNKNOWN = 4
"""The exit code of pytest if there is no such test, or it cannot start."""

LIMIT = 150
"""Seconds of processor time of a mutant's tests of one kind, after which it lived."""


def every_mutant(root: Path) -> list[tuple[str, Mutant]]:
    """Return all mutants with their groups."""
    return [
        *(("host", mutant) for mutant in host.MUTANTS),
        *(("kernel", mutant) for mutant in kernels.MUTANTS),
        *(("drawn", mutant) for mutant in drawn.sample(root, SAMPLE)),
    ]


def judged(
    group: str, mutant: Mutant, nearest: Nearest, tree: Tree, every: bool
) -> Result:
    """Return what becomes of a mutant in a copy of the tree."""
    path = nearest.root / mutant.file
    text = path.read_text() if path.exists() else ""
    changed, about = mutant.applied(text), (group, mutant.name, mutant.file)
    change = mutant.change
    if changed is None:
        return Result(*about, GONE, change=change)
    if mutant.equivalent:
        return Result(*about, EQUIVALENT, why=mutant.equivalent, change=change)
    tree.change(mutant.file, changed)
    ran, seconds = 0, 0.0
    try:
        for kind, tests in nearest.choose(mutant, text).items():
            if not tests:
                continue
            run = _run(tree, kind, tests, every)
            ran, seconds = ran + len(run.outcomes), seconds + run.spent
            why = _killer(run)
            if why:
                failed = max(1, len(run.failed))
                return Result(*about, KILLED, ran, failed, seconds, why, change)
    finally:
        tree.restore()
    return Result(*about, LIVED, ran, 0, seconds, change=change)


def _run(tree: Tree, kind: str, tests: list[str], every: bool) -> Run:
    """Run tests, and again those that failed: if they pass, the machine was loaded."""
    options = [] if every else ["-x"]
    if any(test.startswith("tests/explore") for test in tests):
        options.append("-knot found")  # those break the text of kernels themselves
    run = tree.run(kind, tests, *options, limit=LIMIT)
    if run.ended == UNKNOWN:  # other trees have other tests
        errors = [each for each in run.output.splitlines() if "not found: " in each]
        # It omits which of a function's tests there is not.
        gone = {
            test
            for test in tests
            if any(line.endswith(test.partition("[")[0]) for line in errors)
        }
        there = [test for test in tests if test not in gone]
        if gone:
            return _run(tree, kind, there, every) if there else run._replace(ended=0)
    if run.failed:
        again = tree.run(kind, run.failed, *options, limit=LIMIT)
        spent = run.spent + again.spent
        if not _killer(again):  # alone; it may need what earlier tests have left
            again = tree.run(kind, tests, *options, limit=LIMIT)
            spent += again.spent
        if not _killer(again):
            print(f"passed the second time: {run.failed}", flush=True)
            return again._replace(spent=spent)
    return run


def _killer(run: Run) -> str:
    """Return what killed a mutant; '': nothing did."""
    if run.failed:
        return run.failed[0]
    if run.stuck:
        return "no test ends"
    if run.ended not in (0, None):
        lines = [line for line in run.output.splitlines() if line.startswith("E  ")]
        what = f"pytest ends with {run.ended}"
        return " ".join([what, *lines[-1:]]).replace("\t", " ")[:120]
    return ""


def main() -> int:
    """Run the mutants that have no result yet, and print the scores."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-k", default="", help="only mutants with this in their groups and names"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--every", action="store_true", help="go on after a failure")
    parser.add_argument(
        "--unrecorded", action="store_true", help="note no calls, use those known"
    )
    parser.add_argument("--again", action="store_true", help="also those with results")
    options = parser.parse_args()
    latest = ROOT / results.LATEST
    about = results.commit_of(ROOT), results.digest_of(ROOT)
    digest, found = results.read(latest)
    if digest != about[1]:
        found = []
    mutants = [
        (group, mutant)
        for group, mutant in every_mutant(ROOT)
        if options.k in f"{group} {mutant.name}"
    ]
    names = {mutant.name for _, mutant in mutants}
    if options.again:
        found = [result for result in found if result.name not in names]
    known = {result.name for result in found}
    left: queue.SimpleQueue[tuple[str, Mutant]] = queue.SimpleQueue()
    for group, mutant in mutants:
        if mutant.name not in known:
            left.put((group, mutant))
    print(f"{len(mutants)} mutants, {left.qsize()} without a result", flush=True)
    lock = threading.Lock()

    def work(tree: Tree) -> None:
        while not stopping.is_set():
            try:
                group, mutant = left.get_nowait()
            except queue.Empty:
                return
            result = judged(group, mutant, nearest, tree, options.every)
            with lock:
                found.append(result)
                results.write(latest, *about, found)
                print(f"{result.outcome:10} {result.name}  {result.why}", flush=True)

    nearest = Nearest(ROOT)
    if left.qsize():
        if not options.unrecorded and any(not each.tests for _, each in mutants):
            with Tree(ROOT) as tree:
                nearest.record(tree)
        _in_threads(work, options.jobs)
    _, before = results.read(ROOT / results.BASELINE)
    mine = [result for result in found if result.name in names]
    print(results.report(mine, before))
    return 0


def _in_threads(work: Callable[[Tree], None], number: int) -> None:
    """Let threads work, each with a copy of the tree of its own."""

    def with_a_tree() -> None:
        with Tree(ROOT) as tree:
            work(tree)

    threads = [threading.Thread(target=with_a_tree) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        print("ending when what runs now has ended", flush=True)
        stopping.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    sys.exit(main())
