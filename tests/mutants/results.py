"""The file of results, by which a run goes on, and what is printed of it."""

import hashlib
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from tests.mutants import drawn

LATEST = Path("tests/mutants/latest.tsv")
BASELINE = Path("tests/mutants/baseline.tsv")

KILLED = "killed"
LIVED = "lived"
EQUIVALENT = "equivalent"
GONE = "gone"


class Result(NamedTuple):
    """What became of a mutant.

    Attributes:
        group: ``host``, ``kernel`` or ``drawn``.
        name: the mutant's.
        file: that it changes.
        outcome: ``killed``, ``lived``, ``equivalent``: no test can notice it, or
            ``gone``: the tree no longer has the old text.
        ran: how many tests ran, which is all of its nearest ones where it lived.
        failed: how many of them failed: one, if the run ended at the first.
        seconds: the processor time of its tests.
        why: the test that killed it, ``no test ends``, or why it is equivalent.
        change: the old and the new text.
    """

    group: str
    name: str
    file: str
    outcome: str
    ran: int = 0
    failed: int = 0
    seconds: float = 0.0
    why: str = ""
    change: str = ""


def digest_of(root: Path) -> str:
    """Return a hash of the product and its tests, without what is in this folder."""
    made = hashlib.sha256()
    tests = [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("*.py"))
        if not path.is_relative_to(root / "tests/mutants")
    ]
    for file in [*drawn.files(root), *tests]:
        made.update(file.encode() + (root / file).read_bytes())
    return made.hexdigest()[:12]


def commit_of(root: Path) -> str:
    """Return the commit that is checked out."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def read(path: Path) -> tuple[str, list[Result]]:
    """Return the digest of the tree that a file is of, and its results."""
    if not path.exists():
        return "", []
    first, *lines = path.read_text().splitlines()
    found = []
    for line in lines:
        *about, ran, failed, seconds, why, change = line.split("\t")
        numbers = int(ran), int(failed), float(seconds)
        found.append(Result(*about, *numbers, why, change))
    return first.split()[2], found


def write(path: Path, commit: str, digest: str, results: list[Result]) -> None:
    """Write the results, sorted, so that two runs can be compared."""
    lines = [f"# tree {digest} commit {commit} seed {drawn.SEED}"]
    for result in sorted(results):
        *fields, seconds, why, change = result
        lines.append("\t".join(map(str, [*fields, f"{seconds:.1f}", why, change])))
    path.write_text("\n".join(lines) + "\n")


def score(results: list[Result]) -> str:
    """Return how many of those that tests can notice they noticed."""
    counts = Counter(result.outcome for result in results)
    can = counts[KILLED] + counts[LIVED]
    share = f"{100 * counts[KILLED] / can:3.0f} %" if can else "  none"
    named = [EQUIVALENT, GONE]
    others = ", ".join(f"{counts[each]} {each}" for each in named if counts[each])
    return f"{counts[KILLED]:3} of {can:3} killed, {share}" + (
        f"; {others}" if others else ""
    )


def report(results: list[Result], before: list[Result]) -> str:
    """Return the scores by group and by file, beside those of the baseline."""
    lines, old = [], defaultdict(list)
    by_file = defaultdict(list)
    for result in before:
        old[result.group, result.file].append(result)
    for result in sorted(results):
        by_file[result.group, result.file].append(result)
    for (group, file), mine in by_file.items():
        note = ""
        if group == "drawn" and share(mine) < share(old[group, file]):
            note = f"  BELOW the baseline: {score(old[group, file])}"
        lines.append(f"{group:6} {file:45} {score(mine)}{note}")
    lines.append("")
    for result in sorted(results):
        if result.outcome in (LIVED, EQUIVALENT):
            why = f": {result.why}" if result.outcome == EQUIVALENT else ""
            lines.append(f"{result.outcome}: {result.name} {result.change}{why}")
    lines.append("")
    for group in dict.fromkeys(result.group for result in sorted(results)):
        mine = [result for result in results if result.group == group]
        killed = [result for result in mine if result.outcome == KILLED]
        ran = sum(result.ran for result in killed) / max(1, len(killed))
        failed = sum(result.failed for result in killed) / max(1, len(killed))
        lines.append(
            f"{group:6} {score(mine)}; of each killed one {failed:.1f} tests failed,"
            f" and {ran:.1f} ran"
        )
    return "\n".join(lines)


def share(results: list[Result]) -> float:
    """Return the share that was killed; 0 if there is none."""
    killed = sum(result.outcome == KILLED for result in results)
    lived = sum(result.outcome == LIVED for result in results)
    return killed / (killed + lived) if killed + lived else 0.0
