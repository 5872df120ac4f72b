"""What a report of an exploration says, and what the command does with it."""

import json
import re
import subprocess
import sys
import textwrap

import pytest

from numba_symm import explore
from numba_symm.command import cli
from numba_symm.errors import ArgumentError, SymmError

HEAD = """
import numpy as np
from mpi4py import MPI
from numba import cuda
import numba_symm as ns
from numba_symm import device as symm
"""

RUN = """
with ns.Communicator(MPI.COMM_WORLD) as comm:
    x = comm.zeros((2, 4), np.int64)
    mem = comm.rendezvous(x)
    out = cuda.device_array(4, np.int64)
    kernel[{launch}](mem.ctx, out)
    comm.synchronize()
"""


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a kernel's program."""

    def write(body, launch="1, 2", decorated=True):
        kernel = "@cuda.jit\n" * decorated + "def kernel(ctx, out):\n"
        kernel += textwrap.indent(textwrap.dedent(body), "    ")
        path = tmp_path / "program.py"
        path.write_text(HEAD + kernel + RUN.format(launch=launch))
        return path

    return write


SIGNALS = """
t, right = cuda.threadIdx.x, (ctx.rank + 1) % ctx.size
mine = symm.peer_array(ctx, ctx.rank, (2, 4), np.int64)
there = symm.peer_array(ctx, right, (2, 4), np.int64)
there[1, t] = t
{before}
if t == 0:
    symm.put_signal(ctx, right, 3)
    symm.wait_signal(ctx, (ctx.rank - 1) % ctx.size, 3)
{after}
out[t] = mine[1, t]
"""
SYNC = "cuda.syncthreads()"


def test_right_order_is_complete(program):
    report = explore.run(program(SIGNALS.format(before=SYNC, after=SYNC)), [2, 3], 20)
    assert report.complete
    first, second = str(report).splitlines()
    assert first == "complete: the only order of 8 steps, 2 ranks, these inputs"
    assert second == "complete: the only order of 12 steps, 3 ranks, these inputs"


def test_a_race_names_lines_threads_elements_and_the_nearest_order(program):
    report = explore.run(program(SIGNALS.format(before="pass", after=SYNC)), 2, 20)
    fault = report.fault
    assert fault.kind == "race"
    store, load = fault.places
    assert store.text.startswith("store by rank ")
    assert store.text.endswith("block 0 thread 1")
    assert store.code == "there[1, t] = t"
    assert store.element == f"there[1, 1] (x of rank {load.text[13]})"
    assert load.code == "out[t] = mine[1, t]"
    assert load.element.startswith("mine[1, 1] (x of rank ")
    [hint] = fault.hints
    assert hint.startswith(f"It seems that the {store.text} should come first. ")
    assert "The put_signal of thread 0 at line 16" in hint
    assert hint.endswith("is a syncthreads missing before line 16?")


def test_a_missing_syncthreads_after_a_wait_is_named(program):
    report = explore.run(program(SIGNALS.format(before=SYNC, after="pass")), 2, 20)
    [hint] = report.fault.hints
    assert hint.startswith("It seems that the store by rank ")
    assert "Thread 0 of that block knows of it, by its wait_signal at line 17" in hint
    assert hint.endswith("is a syncthreads missing after line 17?")


def test_a_deadlock_says_who_waits_for_whom(program):
    body = """
    if cuda.threadIdx.x == 0 and ctx.rank == 0:
        symm.wait_signal(ctx, 1, 5)
    """
    report = explore.run(program(body), 2, 20)
    assert report.fault.kind == "deadlock"
    [place] = report.fault.places
    assert place.text == (
        "rank 0 block 0 thread 0 waits for the signal of rank 1 on channel 5, which "
        "was never sent, in wait_signal"
    )
    assert place.code == "symm.wait_signal(ctx, 1, 5)"


def test_a_signal_that_nobody_takes_is_named(program):
    body = """
    if cuda.threadIdx.x == 0:
        for i in range(2):
            symm.put_signal(ctx, 1 - ctx.rank, 5)
    """
    report = explore.run(program(body), 2, 20)
    assert report.fault.kind == "deadlock"
    assert "waits for rank 1 to take the signal before on channel 5" in str(report)


def test_packets_that_do_not_come_are_named(program):
    body = """
    box = symm.peer_array(ctx, ctx.rank, 4, np.uint64)
    symm.get_packets(ctx, 1 - ctx.rank, out[:1], box, 1)
    """
    report = explore.run(program(body, "1, 1"), 2, 20)
    assert report.fault.kind == "deadlock"
    text = "rank 1 block 0 thread 0 waits for packets of rank 0, which it has not sent"
    assert f"{text}, in get_packets\n" in str(report)


CREDIT = """
right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
for step in range(1, 4):
    symm.peer_array(ctx, right, 4, np.int64)[0] = step
    symm.signal_set(ctx, right, 0, step)
    symm.wait_until(ctx, left, 0, symm.GE, step)
    out[0] = symm.peer_array(ctx, ctx.rank, 4, np.int64)[0]
"""


def test_a_missing_signal_back_is_named(program):
    fault = explore.run(program(CREDIT, "1, 1"), 3, 20).fault
    assert fault.kind == "race"
    [hint] = fault.hints
    load = next(place.text for place in fault.places if place.text.startswith("load"))
    assert hint.startswith(f"It seems that the {load} should come first. Nothing tells")
    assert hint.endswith(
        "has loaded, before its next access: is a barrier, or a signal back, missing "
        "after line 15?"
    )


def test_both_accesses_of_a_race_name_the_element_that_they_share(program):
    """Also if one of them is a copy of a whole array."""
    path = program("out[1] = symm.peer_array(ctx, 0, (2, 4), np.int64)[1, 2]")
    text = path.read_text()
    copied = "    x.copy_to_device(np.ones((2, 4), np.int64))\n    mem ="
    path.write_text(text.replace("    mem =", copied))
    fault = explore.run(path, 2, 20).fault
    assert fault.kind == "race"
    names = {place.element for place in fault.places}
    assert names == {"x[1, 2] (x of rank 0)", "x[1, 2] of rank 0"}


def test_steps_show_what_updates_store(program):
    body = """
    symm.signal_add(ctx, 0, 3, 5)
    symm.grid_barrier(ctx, 0)
    out[4] = 1
    """
    trace = explore.run(program(body, "1, 1"), 1, 20).fault.trace
    found = [(each["does"], each["element"], each["value"]) for each in trace]
    pad = "in the signal pad of rank 0"
    assert found[0] == ("updates", f"the word of rank 0, channel 3, {pad}", 5)
    assert found[1][:2] == ("loads", f"the grid barrier, channel 0, {pad}")


def test_a_wrong_result_names_the_assertion(program):
    path = program("out[cuda.threadIdx.x] = 1")
    path.write_text(path.read_text() + "    assert out.copy_to_host()[0] == 2, 'no'\n")
    fault = explore.run(path, 2, 20).fault
    assert (fault.kind, fault.text) == ("result", "AssertionError: no")
    assert fault.places[0].code.startswith("assert")


ATOMIC = """
first = symm.peer_array(ctx, 0, 4, np.int64)
if ctx.rank == 0:
    cuda.atomic.add(first, 0, 1)
else:
    symm.atomic_add(first, 0, 1)
"""
BRANCHES = """
if cuda.threadIdx.x == 0:
    cuda.syncthreads()
else:
    cuda.syncthreads()
"""
POLL = """
word = symm.peer_address(ctx, ctx.rank)
while symm.ld_acquire_sys_u32(word) != 1:
    pass
"""
PLAIN_POLL = """
mine = symm.peer_array(ctx, ctx.rank, 4, np.int64)
while mine[0] != 1:
    pass
"""


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("out[4] = 1", "access", "index 4 is out of bounds"),
        ("out[0] += 1", "access", "a load of memory that was not stored before"),
        ("symm.st_u32(symm.peer_address(ctx, 0) + 2, 1)", "access", "multiple of 4"),
        ("symm.st_u32(symm.peer_address(ctx, 0) + 4096, 1)", "access", "outside"),
        (ATOMIC, "race", "x[0, 0]"),
        ("symm.barrier(ctx, 128)", "error", "of channels 0 to 127"),
        (BRANCHES, "divergence", "all threads must reach the same one"),
        (POLL, "deadlock", "wait for x[0, 0] of rank 1 to change, which is 0"),
        (PLAIN_POLL, "livelock", "polls with a plain load"),
    ],
)
def test_other_faults(program, body, kind, text):
    report = explore.run(program(body), 2, 20)
    assert report.fault is not None
    assert report.fault.kind == kind
    assert text in str(report)
    assert report.fault.places
    for place in report.fault.places:
        assert re.search(r"rank \d block 0 thread \d|threads of rank", place.text)
        assert place.code in body


def test_atomics_of_one_gpu_are_right_within_it(program):
    body = """
    s = cuda.shared.array(1, np.int64)
    if cuda.threadIdx.x == 0:
        s[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(s, 0, 1 + cuda.laneid)
    cuda.syncthreads()
    out[cuda.threadIdx.x] = s[0]
    """
    path = program(body)
    path.write_text(path.read_text() + "    assert out.copy_to_host()[1] == 3\n")
    report = explore.run(path, 1, 20)
    assert report.complete, str(report)
    assert "complete: the only order of 2 steps, 1 ranks" in str(report)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("cuda.nanosleep(10)", "numba.cuda.nanosleep"),
        ("symm.globaltimer()", "globaltimer"),
        ("out[0] = np.sqrt(out)[0]", "np.sqrt of a device array"),
        ("cuda.syncwarp(3)", "the mask 0x3 of a warp"),
        ("import torch", "the module torch"),
    ],
)
def test_what_has_no_stand_in_is_an_error_with_its_line(program, body, what):
    with pytest.raises(SymmError, match=r"program\.py:9: expected") as found:
        explore.run(program(body), 2, 20)
    assert what in str(found.value)


def test_arguments_are_checked(program, tmp_path):
    path = program("pass")
    for ranks in (0, 65, [], [2, "3"]):
        with pytest.raises(ArgumentError, match="numbers of ranks"):
            explore.run(path, ranks)
    with pytest.raises(ArgumentError, match="seconds above 0"):
        explore.run(path, 2, 0)
    with pytest.raises(ArgumentError, match="a Python program"):
        explore.run(tmp_path / "none.py", 2)
    path.write_text("def")
    with pytest.raises(ArgumentError, match="a Python program"):
        explore.run(path, 2)


def test_ranks_that_make_different_calls_are_named(tmp_path):
    path = tmp_path / "calls.py"
    path.write_text(
        "from mpi4py import MPI\n"
        "c = MPI.COMM_WORLD\n"
        "c.Barrier() if c.rank else c.bcast(1)\n"
    )
    fault = explore.run(path, 2, 20).fault
    assert fault.kind == "divergence"
    assert "bcast" in fault.text
    assert "MPI's barrier" in fault.text


def test_the_command_prints_and_repeats_a_fault(program, tmp_path, capsys, monkeypatch):
    path = program(SIGNALS.format(before="pass", after=SYNC))
    monkeypatch.chdir(path.parent)
    assert cli.main(["explore", path.name, "--json"]) == 1
    monkeypatch.chdir("/")
    text = capsys.readouterr().out
    given = json.loads(text)
    assert given["fault"]["kind"] == "race"
    assert not given["complete"]
    file = tmp_path / "report.json"
    file.write_text(text)
    assert cli.main(["explore", "--replay", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(given["fault"]["trace"]) > 0
    assert "program.py:16 in put_signal, stores the signal of rank" in "".join(lines)
    file.write_text("{}")
    assert cli.main(["explore", "--replay", str(file)]) == 3
    assert "the JSON of a report" in capsys.readouterr().err


def test_exit_codes(program, capsys):
    right = str(program(SIGNALS.format(before=SYNC, after=SYNC)))
    assert cli.main(["explore", right, "-n", "2,3", "--complete"]) == 0
    many = """
    for i in range(4):
        old = symm.atomic_add(symm.peer_array(ctx, 0, 4, np.int64), 0, 1)
    """
    path = str(program(many))
    assert cli.main(["explore", path, "--seconds", "0.3", "--complete"]) == 2
    assert cli.main(["explore", path, "--seconds", "0.3"]) == 0
    assert "incomplete: " in capsys.readouterr().out
    other = program("cuda.atomic.add(symm.peer_array(ctx, 0, 4, np.int64), 0, 1)")
    assert cli.main(["explore", str(other)]) == 3
    assert "cuda.atomic.add of another rank's array" in capsys.readouterr().err
    assert cli.main(["explore"]) == 3


def test_arguments_reach_the_program(tmp_path):
    path = tmp_path / "arguments.py"
    path.write_text("import sys\nassert sys.argv[1:] == ['-v', '--'], sys.argv\n")
    assert cli.main(["explore", str(path), "--", "-v", "--"]) == 0


def test_without_greenlet_the_error_has_the_command():
    code = (
        "import sys; sys.modules['greenlet'] = None\n"
        "from numba_symm.command import cli\n"
        "sys.exit(cli.main(['explore', 'program.py']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3
    assert "got none; pip install greenlet" in done.stderr
