"""Ends processes that hang, whatever else this machine does.

Seconds of a clock say little on a loaded machine. So a tree of processes hangs if it
uses much processor time without any output, or if none of it runs or wants to run.
"""

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

from tests import processor

STEP = 2.0
"""Seconds between two looks. Each one reads /proc, in milliseconds."""

QUIET = 0.1
"""The part of one processor that a tree of waiting processes may use, by polling."""


class Watch:
    """Looks at trees of processes, and says when they hang.

    Args:
        roots: the ids of the processes at their roots.
        busy: seconds of processor time that they may use without progress.
        idle: seconds for which all may wait, without progress.
        progress: returns a value that differs after progress.
    """

    def __init__(self, roots, busy, idle, progress=lambda: None):
        self.roots = list(roots)
        self.busy, self.idle = busy, idle
        self._progress = progress
        self._state = progress()
        self._used = self._before = 0.0
        self._waited = 0.0
        self._looked = time.monotonic()

    def broken(self):
        """Return the rule that the processes have broken, or None."""
        trees = [processor.tree(root) for root in self.roots]
        members = {pid: each for tree in trees for pid, each in tree.items()}
        used = max(self._used, sum(each.seconds for each in members.values()))
        now = time.monotonic()
        # Not all of a time in which this process itself could not run.
        passed = min(now - self._looked, 2 * STEP)
        quiet = used - self._used < QUIET * passed
        quiet = quiet and not any(map(processor.runs, members))
        self._waited = max(0.0, self._waited + (passed if quiet else -passed))
        self._used, self._looked = used, now
        if (state := self._progress()) != self._state:
            self._state, self._before, self._waited = state, used, 0.0
        if used - self._before > self.busy:
            return f"it used {self.busy:g} s of processor time without any output"
        if self._waited > self.idle:
            return f"none of its processes ran for {self.idle:g} s"
        return None


def abort(pids):
    """End Python processes; each first prints where its threads are.

    They print it to stderr, or where faulthandler.enable() says. Other processes are
    left alone. mpirun then ends, and says nothing of use.
    """
    pids = [pid for pid in pids if _is_python(pid)]
    while pids:
        # Dumps into one file at once would be mixed, word by word.
        now = {_stderr(pid): pid for pid in pids}.values()
        for pid in now:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                os.kill(pid, signal.SIGABRT)
        watch = Watch(now, busy=20, idle=5)
        while any(_is_python(pid) for pid in now) and not watch.broken():
            time.sleep(0.1)
        pids = [pid for pid in pids if pid not in now]


DUMPS = {"PYTHONFAULTHANDLER": "1"}
"""Lets Python print its stacks at :func:`abort`."""


def _stderr(pid):
    """Return what a process's standard error is: a file, or a pipe by its number."""
    try:
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    except OSError:
        return pid


def _is_python(pid):
    """Return whether a process exists and runs Python, also as a rank of a program."""
    found = processor.process(pid)
    if found is None or found.state == "Z":
        return False
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False


def written(folder):
    """Return the bytes of a folder's files, which grow as its job prints."""
    sizes = []
    for file in Path(folder).glob("*.txt"):
        with contextlib.suppress(OSError):
            sizes.append((file.name, file.stat().st_size))
    return sorted(sizes)


def meet(comm):
    """Wait for all ranks; MPI's barrier uses the processor until the last one comes."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(5e-4)
