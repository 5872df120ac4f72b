"""Copies of the tree, and tests that run in one, watched for progress."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from numba_symm.command import launcher

RANKS = 3
PLUGIN = "tests.mutants.watching"
KINDS = "plain", "simulated", "ranks"
"""How tests run: in this interpreter, in the simulator, on ranks of the simulator."""

STUCK, IDLE = 60, 120
"""Seconds of processor time, or of time, in which no test ended: a run is stuck."""


class Run(NamedTuple):
    """What became of some tests.

    Attributes:
        outcomes: by test, ``passed``, ``failed`` or ``skipped``.
        seconds: by test, the processor time it took.
        calls: by test, the functions it called, if they were noted.
        ended: the exit code, or minus a signal's number; None: ended from here.
        stuck: whether it was ended because no test had ended for long.
        spent: the processor time of all processes.
        output: what pytest printed.
    """

    outcomes: dict[str, str]
    seconds: dict[str, float]
    calls: dict[str, set[str]]
    ended: int | None
    stuck: bool
    spent: float
    output: str

    @property
    def failed(self) -> list[str]:
        """The tests that failed."""
        return [test for test, how in self.outcomes.items() if how == "failed"]


def kind_of(test: str) -> str:
    """Return how a test, or a file of tests, runs."""
    folder = test.split("/")[1]
    return folder if folder in KINDS else "plain"


class Tree:
    """A copy of a checkout, in which one file after another is changed.

    Use it as a context manager: at its end it removes the copy.
    """

    def __init__(self, checkout: Path):
        self.root = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.tree = self.root / "tree"
        listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        found = subprocess.run(listed, cwd=checkout, capture_output=True, check=True)
        for name in filter(None, found.stdout.decode().split("\0")):
            source, target = checkout / name, self.tree / name
            if source.is_symlink() or source.exists():  # removed files are listed, too
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        self._changed: dict[Path, tuple[str, float]] = {}
        self._clock = time.time()

    def __enter__(self) -> "Tree":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def change(self, file: str, text: str) -> None:
        """Write a file's other text."""
        path = self.tree / file
        self._changed.setdefault(path, (path.read_text(), path.stat().st_mtime))
        path.write_text(text)
        # Bytecode of a text of the same length in the same second would be used again.
        self._clock += 2
        os.utime(path, (self._clock, self._clock))

    def restore(self) -> None:
        """Write all files as they were."""
        for path, (text, written) in self._changed.items():
            path.write_text(text)
            os.utime(path, (written, written))
        self._changed.clear()

    def run(
        self,
        kind: str,
        tests: list[str],
        *options: str,
        limit: float = 1e9,
        calls: bool = False,
        stuck: float | None = None,
    ) -> Run:
        """Run tests of one kind, in this order.

        Args:
            kind: one of ``KINDS``.
            tests: tests, or files.
            options: of pytest.
            limit: the processor time after which the run is ended.
            calls: whether to note the functions that each test calls.
            stuck: the processor time without progress; None: ``STUCK``.
        """
        watch = Path(tempfile.mkdtemp(prefix="watch-", dir=self.root))
        given = ["-q", "-pno:cacheprovider", f"-p{PLUGIN}", *options, *tests]
        command, environ = [sys.executable, "-m", "pytest", *given], dict(os.environ)
        if kind == "simulated":
            environ["NUMBA_ENABLE_CUDASIM"] = "1"
        elif kind == "ranks":
            mpirun = launcher.find_mpirun()
            command = launcher.mpirun_command(RANKS, ["-m", "pytest", *given], mpirun)
            environ = launcher.job_environment(environ, simulate=True)
            # Other packages' plugins double the time that ranks need to start.
            environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        # Before the checkout that is installed, also in child processes.
        environ["PYTHONPATH"] = str(self.tree)
        environ["XDG_CACHE_HOME"] = str(self.root / "cache")
        environ["NUMBA_SYMM_TEST_ISOLATED"] = "1"  # the cache is kept from test to test
        environ["NUMBA_SYMM_TEST_WHOLE"] = "1"  # all schedules of the explorer
        environ["MUTANTS_WATCH"] = str(watch)
        if calls:
            environ["MUTANTS_WATCH_CALLS"] = "1"
        log = watch / "output.txt"
        with log.open("w") as output:
            job = subprocess.Popen(
                command,
                cwd=self.tree,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                is_stuck, spent = _wait(job, watch, limit, stuck or STUCK)
                ended = job.poll()
            finally:
                _end(job)
        output_text = log.read_text(errors="replace")
        log.unlink()
        return Run(*_read(watch), ended, is_stuck, spent, output_text)


def _wait(
    job: "subprocess.Popen[bytes]", watch: Path, limit: float, stuck: float
) -> tuple[bool, float]:
    """Wait for a job's end; return whether it is stuck, and its processor time.

    Being slow is not being stuck: what counts is the job's own processor time since a
    test last ended, and only for a job that uses none, the time.
    """
    size, at, spent, since = -1, 0.0, 0.0, time.monotonic()
    idle_from = (0.0, since)
    while job.poll() is None:
        time.sleep(0.1)
        spent, now = max(spent, processor_time(job.pid)), time.monotonic()
        written = sum(path.stat().st_size for path in watch.glob("*.tsv"))
        if written != size:
            size, at, idle_from = written, spent, (spent, now)
        if spent > idle_from[0] + 1:
            idle_from = spent, now
        if spent - at > stuck or now - idle_from[1] > IDLE:
            return True, spent
        if spent > limit:
            return False, spent
    return False, spent


def _processes(first: int) -> dict[int, list[str]]:
    """Return what /proc tells of a session's processes, and of their descendants.

    Open MPI gives each rank a process group of its own, and tests begin other sessions.
    """
    every = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            every[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    found = {pid for pid, fields in every.items() if int(fields[3]) == first}
    before = -1
    while before != len(found):
        before = len(found)
        found |= {pid for pid, fields in every.items() if int(fields[1]) in found}
    return {pid: every[pid] for pid in found}


def processor_time(first: int) -> float:
    """Return the processor time of a session's processes, and of ended children."""
    ticks = sum(sum(map(int, fields[11:15])) for fields in _processes(first).values())
    return ticks / os.sysconf("SC_CLK_TCK")


def _end(job: "subprocess.Popen[bytes]") -> None:
    """End a job's processes."""
    family = _processes(job.pid)
    if job.poll() is None:
        job.terminate()  # mpirun ends its ranks and removes its files
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(5)
    for pid, fields in (family | _processes(job.pid)).items():
        with contextlib.suppress(OSError):
            if _started(pid) == fields[19]:  # not another process with its number
                os.kill(pid, signal.SIGKILL)
    job.wait()


def _started(pid: int) -> str:
    """Return when a process was started."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _read(
    watch: Path,
) -> tuple[dict[str, str], dict[str, float], dict[str, set[str]]]:
    """Return the outcomes, the processor times and the calls of tests by processes.

    If ranks ran a test, it failed where it did on any of them.
    """
    outcomes: dict[str, str] = {}
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted(watch.glob("*.tsv")):
        for line in path.read_text().splitlines():
            test, *rest = line.split("\t")
            if len(rest) == 1:
                calls[test].add(rest[0])
            elif outcomes.get(test) != "failed":
                outcomes[test] = rest[0]
                seconds[test] += float(rest[1])
    return outcomes, dict(seconds), dict(calls)
