"""When a test's processes hang, and what is said of them then."""

import sys
import types

import pytest

from tests import patience, processor, test_mpirun
from tests.patience import Watch


@pytest.fixture
def machine(monkeypatch):
    """Return a process tree whose numbers the test sets; a look takes a second."""
    made = types.SimpleNamespace(now=0.0, used=0.0, runs=False, printed=0)

    def tree(root):
        made.now += 1
        return {root: processor.Process("S", 1, 1, made.used)}

    monkeypatch.setattr(patience.processor, "tree", tree)
    monkeypatch.setattr(patience.processor, "runs", lambda pid: made.runs)
    monkeypatch.setattr(patience.time, "monotonic", lambda: made.now)
    made.watch = Watch([7], busy=10, idle=5, progress=lambda: made.printed)
    return made


def looks(machine, most, **change):
    """Return after how many looks the tree hangs, and by which rule."""
    for look in range(1, most + 1):
        for name, step in change.items():
            setattr(machine, name, getattr(machine, name) + step)
        if rule := machine.watch.broken():
            return look, rule
    return None


def test_processes_that_starve_do_not_hang(machine):
    """Others have the processors, for as long as they like."""
    machine.runs = True
    assert looks(machine, 1000, used=0.001) is None


def test_processes_that_only_poll_hang(machine):
    assert looks(machine, 9, used=0.05) == (6, "none of its processes ran for 5 s")


def test_processor_time_counts_from_the_latest_output(machine):
    assert looks(machine, 100, used=1, printed=1) is None
    rule = "it used 10 s of processor time without any output"
    assert looks(machine, 100, used=1) == (11, rule)


def test_a_job_that_hangs_says_by_which_rule_and_where(tmp_path):
    """Also in processes that it has started, and below a process that is no Python."""
    inner = "def waits():\n    import signal\n    signal.pause()\nwaits()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    command = ["sh", "-c", 'echo begun; "$0" -c "$1"; true', sys.executable, outer]
    with pytest.raises(test_mpirun.Hung) as hung:
        test_mpirun.run(command, None, tmp_path / "log.txt", idle=1)
    text = str(hung.value)
    assert text.startswith(
        "the job was ended: none of its processes ran for 1 s\nbegun"
    )
    assert "in waits" in text
    assert "Fatal Python error: Aborted" in text
