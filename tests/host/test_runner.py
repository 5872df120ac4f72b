"""The output of ``numba-symm run``: errors are shown once, the rest unchanged."""

import os
import pty
import select
import subprocess
import sys
import threading
import time

import pytest

import numba_symm as ns
from numba_symm.command import runner

RUN = [sys.executable, "-m", "numba_symm.command.cli", "run", "--simulate", "-n"]

FAILS = """
import atexit, os, sys

for error in LookupError, SystemExit(3):
    if not os.fork():  # a child that fails is not a rank that does
        sys.stderr = None
        raise error
    os.wait()

from mpi4py import MPI
import numba_symm as ns

comm = ns.Communicator(MPI.COMM_WORLD)  # left open, which needs no warning here

def check(rank):
    if rank < 2:
        raise ValueError("first line\\nsecond line " + 100_000 * "x")

print(f"before {MPI.COMM_WORLD.rank}")
atexit.register(print, f"after {MPI.COMM_WORLD.rank}")
check(MPI.COMM_WORLD.rank)
MPI.COMM_WORLD.Barrier()
"""

SHOWN = """\
ranks 0-1:
Traceback (most recent call last):
  File "{0}", line 21, in <module>
    check(MPI.COMM_WORLD.rank)
  File "{0}", line 17, in check
    raise ValueError("first line\\nsecond line " + 100_000 * "x")
ValueError: first line
second line {1}
"""


def test_an_error_of_several_ranks_is_shown_once_and_ends_those_that_wait(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    ended = subprocess.run(
        [*RUN, "3", str(script)], capture_output=True, text=True, timeout=120
    )
    shown = ended.stderr.partition("Abort(1) on node")[0]  # MPICH's words
    assert shown == SHOWN.format(script, 100_000 * "x")
    assert ended.returncode == 1
    assert all(f"before {rank}" in ended.stdout for rank in range(3))
    assert "after 0" in ended.stdout or "after 1" in ended.stdout  # exit handlers run


ASKS = """
import sys
print("working", file=sys.stderr)
print("hello", input("name?\\n"))
input()
"""


def test_ranks_read_the_terminal_whose_interrupt_ends_them_with_one_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ASKS)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(RUN[0], [*RUN, "1", str(script)])
    try:
        read_until(terminal, "working", "name?")
        os.write(terminal, b"Ada\n")
        read_until(terminal, "hello Ada")
        os.write(terminal, b"\x03")  # Ctrl-C
        shown = read_until(terminal).replace("\r", "")
        assert shown == "^Cnumba-symm run: interrupted\n"
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 130
    finally:
        os.close(terminal)


def read_until(terminal, *words):
    """Return what is printed until all words have been, or until the end."""
    printed = ""
    deadline = time.monotonic() + 300
    while not words or not all(word in printed for word in words):
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], (
            printed
        )
        try:
            printed += os.read(terminal, 4096).decode()
        except OSError:  # every other end is closed
            assert not words, printed
            return printed
    return printed


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([2], "rank 2"),
        ([0, 1], "ranks 0-1"),
        ([7, 0, 2, 3, 1, 5], "ranks 0-3, 5, 7"),
    ],
)
def test_neighbouring_ranks_are_named_by_the_first_and_last(ranks, name):
    assert runner.named(ranks) == name


def test_ranks_that_fail_print_each_text_once(tmp_path, capsys):
    texts = ["same", "another", "same", "cut off"]
    failures = [
        runner.RankFailure(0, tmp_path, len(texts), rank) for rank in range(len(texts))
    ]

    def fail(rank):
        failures[rank].report(texts[rank], 1)

    first = threading.Thread(target=fail, args=[0])
    first.start()
    (tmp_path / "part-3").write_text("cut o")  # of a rank that was ended as it failed
    others = [threading.Thread(target=fail, args=[rank]) for rank in (1, 2)]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join()
    shown = capsys.readouterr().err
    assert sorted(shown.splitlines()) == ["rank 1: another", "ranks 0, 2: same"]


def test_a_rank_that_fails_later_prints_its_own_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "QUIET", 0.1)
    for rank in range(2):
        runner.RankFailure(0, tmp_path, 3, rank).report(f"error {rank}", 1)
    assert capsys.readouterr().err.splitlines() == [
        "rank 0: error 0",
        "rank 1: error 1",
    ]


def test_a_rank_of_another_node_prints_its_own_error(tmp_path, monkeypatch, capsys):
    failure = runner.RankFailure(0, tmp_path / "elsewhere", 2, 0)
    monkeypatch.setattr(runner, "LAST", 600)
    began = time.monotonic()
    failure.report("my own error", 1)
    failure.end()
    assert time.monotonic() - began < runner.LAST / 2
    assert capsys.readouterr().err == "rank 0: my own error\n"


def test_the_program_does_not_see_the_variable_of_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib\n"
        "mpirun = pathlib.Path(f'/proc/{os.getppid()}/status').read_text()\n"
        "print('NUMBA_SYMM_RUN' in os.environ, mpirun.split('PPid:')[1].split()[0],"
        " pathlib.Path('/proc/self/cmdline').read_bytes().split(b'\\0')[2:4])\n"
    )
    ended = subprocess.run([*RUN, "1", str(script)], capture_output=True, text=True)
    seen, command, arguments = ended.stdout.split(maxsplit=2)
    assert seen == "False"
    assert eval(arguments) == [command.encode(), b"1"]


def test_a_trace_shows_the_programs_frames(tmp_path):
    script = tmp_path / "script.py"
    calls = "import numba_symm as ns\nns.Communicator('no communicator')\n"
    script.write_text(calls)
    with pytest.raises(ns.SymmError) as raised:
        runner.runpy.run_path(str(script))
    error = raised.value
    error.__traceback__ = error.__traceback__.tb_next  # this test's own frame
    lines = runner.described(error).splitlines()
    assert lines[:3] == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 2, in <module>',
        "    ns.Communicator('no communicator')",
    ]
    assert "ArgumentError: expected a communicator, got 'no comm" in lines[-1]
    assert not [line for line in lines if runner.__file__ in line or "runpy" in line]
    assert len([line for line in lines if line.startswith("  File ")]) == 1


AGREES = """
import numba_symm as ns
from numba_symm.mpi.datatypes import translated
from numba_symm.launch.store import StoreExchange

class Comm:
    rank, size, barrier = 0, 1, lambda self: None
    allgather = lambda self, value: [value]

def call():
    with StoreExchange(Comm(), "test").agreed("step"):
        raise {kind}("wrong")

{call}()
"""


@pytest.mark.parametrize("call", ["call", "translated(call)"])
@pytest.mark.parametrize(
    ("kind", "traces", "text"),
    [("ns.ArgumentError", 1, "wrong"), ("OSError", 2, "OSError: wrong")],
)
def test_a_trace_omits_errors_that_the_last_one_repeats(
    tmp_path, call, kind, traces, text
):
    script = tmp_path / "script.py"
    script.write_text(AGREES.format(kind=kind, call=call))
    with pytest.raises(Exception, match="step failed") as raised:
        runner.runpy.run_path(str(script))
    error = raised.value
    error.__traceback__ = error.__traceback__.tb_next  # this test's own frame
    lines = runner.described(error).splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback")]
    assert len(starts) == traces
    frames = [line for line in lines[starts[-1] :] if line.startswith("  File ")]
    assert frames
    assert all(str(script) in frame for frame in frames)
    assert lines[-1].startswith(f"  rank 0: {text}")


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (None, "", 0),
        (0, "exit code 0", 0),
        (3, "exit code 3", 3),
        (-1, "exit code 255", 255),
        ("why", "why", 1),
    ],
)
def test_an_exit_has_the_code_that_python_gives_it(code, text, status):
    assert runner.exit_of(SystemExit(code)) == (text, status)
