"""``numba-symm soak``: what it reports of a library with faults, and of this one."""

import json
import os
import signal
from pathlib import Path

import pytest

from numba_symm.bench.soak_marks import FAILURES, RankMarks
from numba_symm.command import cli, soak

BROKEN = Path(__file__).with_name("broken_soak.py")


@pytest.fixture
def soaked(monkeypatch, capfd):
    """Return a function: the exit code and the report of a soak of two ranks."""
    monkeypatch.setenv("NUMBA_SYMM_TIMEOUT", "3")
    monkeypatch.setattr(soak, "GRACE", 300)  # this machine may be busy

    def run(*words):
        code = cli.main(["soak", "-n", "2", "--simulate", "--json", *words])
        return code, json.loads(capfd.readouterr().out)

    return run


def test_faults_are_found(soaked, monkeypatch):
    """Wrong results do not end the job, and a step beyond its deadline does."""
    monkeypatch.setattr(soak, "PROGRAM", (str(BROKEN),))
    monkeypatch.setattr(soak, "GRACE", 2)
    code, found = soaked("--calls", "10000", "--kills", "0", "--seed", "3")
    assert code == 1
    assert not found["passed"]
    faults = {}
    for each in found["faults"]:
        faults.setdefault(each["kind"], []).append((each["rank"], each["text"]))
    assert found["wrong"] == len(faults["wrong"]) > 0
    for rank, text in faults["wrong"]:
        assert rank in (0, 1)  # the last one of a lane
        assert text.startswith("round 1: ")
        assert " int32 (min), " in text
    assert faults["deadline"]
    for _, text in faults["deadline"]:
        assert text.startswith("a call without an end: ")
        assert text.endswith(" s beyond the deadline")
    assert found["beyond"] > 2
    stacks = {rank for rank, text in faults["stack"] if " in hanging" in text}
    assert stacks == {0, 1}
    assert "ended" not in faults


CRASHING = """
import os, pathlib, sys
from mpi4py import MPI
from numba_symm.bench.soak_marks import JobMarks

place = JobMarks(pathlib.Path(sys.argv[1]), 2).places[MPI.COMM_WORLD.rank]
place.pid = os.getpid()
place.done = 1
MPI.Finalize()
os._exit(3)
"""


def test_a_rank_that_crashes_at_its_exit_is_found(soaked, monkeypatch):
    monkeypatch.setattr(soak, "PROGRAM", ("-c", CRASHING))
    code, found = soaked("--calls", "0", "--cycles", "0", "--kills", "0")
    assert code == 1
    assert found["faults"][0]["kind"] == "ended"
    assert found["faults"][0]["text"] == "mpirun has ended with exit code 3"


def test_failures_are_survived(soaked):
    code, found = soaked(
        "--calls", "120", "--cycles", "3", "--kills", "1", "--seed", "5"
    )
    assert code == 0, found
    assert found["passed"]
    assert found["faults"] == []
    assert found["jobs"] == 1
    assert found["calls"] >= 120
    assert found["cycles"] >= 3
    assert found["replays"] > 0
    assert found["failures"]["killed"] == 1
    assert found["failures"].keys() == set(FAILURES)
    assert found["rebuilds"] > 0
    assert found["wrong"] == 0
    assert found["beyond"] < soak.GRACE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_soak_ends_its_job_and_reports(soaked, monkeypatch, number):
    started = []

    def interrupted(process, *_):
        started.append(process)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(soak, "_watched", interrupted)
    code, found = soaked("--seconds", "9")
    assert code == 130
    assert [each["kind"] for each in found["faults"]] == ["interrupted"]
    assert started[0].poll() is not None


def test_a_job_kills_all_ranks_but_one():
    goal = soak.Goal(4, True, seed=1, calls=100, seconds=0, cycles=9, kills=7)
    report = soak.SoakReport(goal)
    played = []
    for job in soak.jobs(goal, report):
        played.append(job[1:])
        marks = RankMarks(calls=job.calls + 1, cycles=job.cycles)
        marks.failures[FAILURES.index("killed")] = job.kills
        report.jobs.append([marks])
    assert played == [
        (0, 34, 0, 3, 3),
        (1, 33, 0, 3, 3),
        (2, 31, 0, 3, 1),
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-n 1", "expected a number of at least 2, got '1'"),
        ("--seconds -1", "--seconds: expected a number of at least 0, got '-1'"),
        ("--calls many", "expected a number of at least 0, got 'many'"),
        ("--second 1", "unrecognized arguments: --second 1"),
        ("--seconds 1 --calls 1", "--calls: not allowed with argument --seconds"),
    ],
)
def test_wrong_options_are_reported(words, text, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["soak", *words.split()])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_a_soak_needs_deadlines(monkeypatch, capfd):
    monkeypatch.setenv("NUMBA_SYMM_TIMEOUT", "0")
    assert cli.main(["soak", "--simulate"]) == 1
    assert "expected deadlines, got NUMBA_SYMM_TIMEOUT=0" in capfd.readouterr().err
