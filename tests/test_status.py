"""Running jobs from outside: what their ranks do, and how they are aborted.

The ranks are spawned processes, as in test_deadlines.py. The absent rank looks at the
others, which wait for it.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time

import pytest

import numba_symm as ns
from numba_symm.command import cli
from tests.absence import AWAY, PATIENT, SOON, context_is_alive, input_of, warm_up
from tests.spawned import attempt


def command(*words):
    """Return the exit code of ``numba-symm status``, and what it prints."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = cli.main(["status", *map(str, words)])
    return code, out.getvalue(), error.getvalue()


def until(done):
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        if done():
            return
        time.sleep(0.01)
    raise TimeoutError


def look_and_end(world, how):
    """Let two ranks wait in different calls; rank 1 looks at them, and ends that."""
    warm_up(world)
    comm = ns.Communicator(world, timeout=PATIENT)
    child = comm.dup()
    x = input_of(comm)
    child.barrier()
    comm.all_reduce(x)
    pids = world.allgather(os.getpid())
    seen = {}
    if world.rank == AWAY:
        record = comm._calls.members.board.record
        until(lambda: record.others(2)[-1:] and record.number < len(record.calls(0)))
        time.sleep(0.1)
        seen["json"] = [
            json.loads(command(pid, "--json")[1]) for pid in (pids[0], pids[2])
        ]
        seen["text"] = command(pids[2])
        if how == "command":
            seen["abort"] = command(pids[0], "--abort", "--reason", "enough")[0]
        else:
            thread = threading.Thread(target=comm.abort, args=("enough",))
            thread.start()
            thread.join()
        ended = time.monotonic()
        errors = [attempt(comm.check)[0]]
    else:
        call = (lambda: comm.all_reduce(x, op="max")) if world.rank == 0 else None
        call = call or (lambda: comm.zeros(3))
        errors = [attempt(call)[0]]
        if not errors[0]:  # on a GPU, the host does not wait
            errors = [attempt(comm.synchronize)[0]]
        ended = time.monotonic()
    errors += [attempt(comm.barrier)[0], attempt(comm.zeros, 3)[0]]
    alive = "" if how == "command" else attempt(child.barrier)[0]
    seen |= {"pids": pids, "errors": errors, "ended": ended, "child": alive}
    seen["close"] = [attempt(each.close)[0] for each in (comm, child)]
    seen["alive"] = context_is_alive()
    return seen


@pytest.mark.parametrize("how", ["command", "method"])
def test_waiting_ranks_are_shown_and_aborted(three, how):
    facts = three.run(look_and_end, how)
    by = f"rank {AWAY}"
    for rank, fact in enumerate(facts):
        for error in fact["errors"]:
            assert error.startswith("Aborted: ")
            assert " aborted the communicator: enough; results since" in error
            assert (by in error) == (how == "method")
        assert fact["ended"] - facts[AWAY]["ended"] < SOON, rank
        assert fact["child"] == ""
        assert fact["alive"]
    if how == "method":
        assert all(fact["close"] == ["", ""] for fact in facts)
    check_what_was_seen(facts[AWAY])


def check_what_was_seen(fact):
    first, other = fact["json"]
    for boards in (first, other):  # rank 2 does not have the child's board open
        assert [board["size"] for board in boards] == [3, 3]
        seen = boards[0]
        assert [each["pid"] for each in seen["ranks"]] == fact["pids"]
        assert [each["call"] for each in seen["ranks"]] == [2, 1, 1]
        assert [each["behind"] for each in seen["ranks"]] == [0, 1, 1]
        assert all(each["runs"] for each in seen["ranks"])
        last = [each["last"] for each in seen["ranks"]]
        assert last[0].startswith("all_reduce of 120 float32 in C order, op 'max'")
        assert last[1].startswith("all_reduce of 120 float32 in C order, op 'sum'")
        assert last[2] == "zeros"
        assert seen["failure"] is seen["differs"] is None
        assert seen["waits"].startswith(
            "rank 0: call 2, all_reduce of 120 float32 in C"
        )
        assert " waits for ranks 1, 2, without a call for " in seen["waits"]
        assert [each["last"] for each in boards[1]["ranks"]] == ["barrier"] * 3
    code, text, error = fact["text"]
    assert (code, error) == (0, "")
    assert "communicator 0: 3 ranks of this node; job " in text
    assert "waits: rank 0: call 2, all_reduce" in text
    assert str(fact["pids"][0]) in text


ASKS = """
import json, os
from numba_symm.command import doctor
print(json.dumps(doctor.job_of(os.getpid())))
"""


@pytest.mark.parametrize("flags", [[], ["--survive", "--as-mpi4py"]])
def test_a_job_is_named_by_its_command_and_program(tmp_path, flags):
    script = tmp_path / "asks a lot.py"
    script.write_text(ASKS)
    words = [sys.executable, "-m", "numba_symm.command.cli", "run", "--simulate"]
    words += [*flags, "-n", "1", str(script), "-x"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        job = json.loads(started.communicate()[0])
    assert job["pid"] == started.pid
    assert job["program"] == f"'{script}' -x"
    age = time.time() - time.mktime(time.strptime(job["began"], "%Y-%m-%d %H:%M:%S"))
    assert 0 <= age < SOON


def failures_are_shown(world):
    """Look at a communicator that has failed, that differs, and one without record."""
    shown = []
    os.environ["NUMBA_SYMM_RECORD"] = "0"
    with ns.Communicator(world) as unseen:
        del os.environ["NUMBA_SYMM_RECORD"]
        comm = ns.Communicator(world)
        comm.all_reduce(input_of(comm), op="sum" if comm.rank == AWAY else "max")
        world.barrier()
        if world.rank == 0:
            with comm.tag("step 3"):
                shown.append(command(os.getpid()))
            shown.append(command(os.getpid(), "--json"))
            comm.abort()
            shown.append(command(os.getpid(), "--json"))
            shown.append(command(os.getpid()))
        world.barrier()
        attempt(comm.close)
        unseen.barrier()
    return shown


def test_failures_and_differences_are_shown(two):
    (first, *looks, second), _ = two.run(failures_are_shown)
    assert [code for code, *_ in looks] == [0, 0]
    before, after = (json.loads(shown) for _, shown, *_ in looks)
    assert [each["failure"] for each in before] == [None, None]
    assert after[-1]["failure"] == "Aborted: rank 0 aborted the communicator"
    assert "no record of calls: NUMBA_SYMM_RECORD=0, or not made yet" in first[1]
    assert "calls differ from number: 1" in first[1]
    assert "step 3" in first[1]
    assert "failure" not in first[1]
    assert "failure: Aborted: rank 0 aborted the communicator\n" in second[1]


def refused(world):
    comm = ns.Communicator(world)
    wrong = attempt(comm.abort, 3)[0]
    check = attempt(comm.check)[0]
    comm.close()
    return wrong, check, attempt(comm.abort)[0]


def test_wrong_aborts_are_refused(two):
    for wrong, check, closed in two.run(refused):
        assert wrong == (
            "ArgumentError: abort: expected reason to be a str, got 3; pass a text for "
            "the errors of all ranks"
        )
        assert check == ""
        assert closed.startswith("ClosedError: ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((1 << 22) + 1, "which does not run"),
        (os.getpid(), "which has none, or is another user's"),
        (("--abort",), "expected the number of a process with --abort, got none"),
        ((os.getpid(), "--reason", "x"), "expected --reason with --abort only"),
    ],
    ids=["ended", "none", "abort", "reason"],
)
def test_a_job_that_is_none_is_refused(words, text):
    code, out, error = command(*(words if isinstance(words, tuple) else (words,)))
    assert (code, out) == (1, "")
    assert text in error


def test_what_is_no_process_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["status", "x"])
    assert "expected a number of at least 1, got 'x'" in capsys.readouterr().err
