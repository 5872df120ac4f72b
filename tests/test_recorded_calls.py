"""The record of calls on ranks: what differs is found, and errors have the table.

The ranks are spawned processes, as in test_deadlines.py.
"""

import json
import os
import time

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from tests.absence import AWAY, SOON, input_of, warm_up
from tests.spawned import attempt


def calls_that_differ(world):
    """Make calls that end, with wrong results, because the ranks pass other operators.

    Only rank 0 synchronizes. Then all ranks raise.
    """
    with ns.Communicator(world) as before:
        before.all_reduce(input_of(before))
        before.synchronize()
        texts = []
        comm = before.dup()
        x = input_of(comm)
        for _ in range(3):
            comm.all_reduce(x, out=x, algorithm="one_shot_ll")
        if comm.rank == 0:
            comm.send(x, dst=2)
        elif comm.rank == 2:
            comm.recv(x, src=0)
        op = "sum" if comm.rank == AWAY else "max"
        comm.all_reduce(x, op=op, out=x, algorithm="one_shot_ll")
        comm.barrier()
        world.barrier()
        if world.rank == 0:
            texts.append(attempt(comm.synchronize)[0])
        world.barrier()
        texts += [attempt(comm.check)[0], attempt(comm.barrier)[0]]
        texts.append(attempt(comm.zeros, 3)[0])
        attempt(comm.close)
        before.all_reduce(x)
        before.synchronize()  # another communicator is not concerned
    return texts


def test_calls_that_differ_raise_on_all_ranks_with_a_table(three):
    facts = three.run(calls_that_differ)
    first = facts[0][0]
    words = "all_reduce of 120 float32 in C order, op '{}', algorithm 'one_shot_ll'"
    most, total = words.format("max"), words.format("sum")
    assert first.startswith(
        f"CallMismatch: rank 0's call 4 differs from rank 1's: {most}, and {total}; "
        "results since the last check are undefined. Close this communicator and make "
        "a new one\nThe calls of the ranks:\n"
    )
    assert first.partition("ranks:\n")[2].splitlines() == [
        f"  2        ranks 0, 1, 2: {total}",
        f"  3        ranks 0, 1, 2: {total}",
        "  after 3  rank 0: send of 480 bytes to rank 2",
        "           rank 2: recv of 480 bytes from rank 0",
        f"> 4        ranks 0, 2: {most}",
        f"           rank 1: {total}",
        "  5        ranks 0, 1, 2: barrier",
    ]
    for rank, texts in enumerate(facts):
        assert set(texts) == {first}, rank


def calls_that_wait_for_each_other(world):
    """Make calls of other sizes, so that the ranks wait until the deadline."""
    warm_up(world)
    comm = ns.Communicator(world, timeout=1.0)
    count = 400 if comm.rank == AWAY else 120
    x = cuda.to_device(np.zeros(count, np.float32))
    error = attempt(lambda: (comm.all_reduce(x), comm.synchronize()))[0]
    world.barrier()
    attempt(comm.close)
    return error


def test_calls_that_differ_are_no_timeout(three):
    texts = three.run(calls_that_wait_for_each_other)
    assert len(set(texts)) == 1
    first = "CallMismatch: rank 0's call 1 differs from rank 1's: all_reduce of 120 "
    assert texts[0].startswith(first)
    head, table = texts[0].split("\nThe calls of the ranks:\n")
    assert " waited for rank " in head
    assert "(timeout: 1 s); results since" in head
    assert "debug=True" not in head
    assert table.startswith("> 1  ranks 0, 2: all_reduce of 120 float32")


def one_rank_is_behind(world):
    warm_up(world)
    comm = ns.Communicator(world, timeout=1.0)
    x = input_of(comm)
    comm.all_reduce(x)
    comm.zeros(3)
    comm.device_workspace(1, 32, 16)
    comm.experts(experts=3, top_k=1, hidden=8, tokens=2)
    with pytest.raises(ns.ArgumentError):  # refused calls do not count
        comm.all_reduce(x, op="max", algorithm="none")
    comm.all_gather(cuda.device_array(0, np.float32))
    if world.rank == AWAY:
        error = attempt(wait_for_failure, comm)[0]
    else:
        error = attempt(call, comm, x)[0]
    world.barrier()
    attempt(comm.close)
    return error


def call(comm, x):
    comm.all_reduce(x, op="max")
    comm.synchronize()


def wait_for_failure(comm):
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        comm.check()
        time.sleep(0.01)


def test_a_timeout_shows_who_is_behind(three):
    texts = three.run(one_rank_is_behind)
    assert len(set(texts)) == 1  # so that they are printed once
    text, _, table = texts[0].partition("\nThe calls of the ranks:\n")
    assert text.startswith("CollectiveTimeout: rank ")
    lines = table.splitlines()
    assert lines[0].startswith("  1        ranks 0, 1, 2: all_reduce of 120 float32 in")
    assert lines[1] == "  after 1  ranks 0, 1, 2: zeros"
    for what in ("device_workspace", "experts"):  # once, whatever their steps
        assert lines.pop(2) == f"           ranks 0, 1, 2: {what}"
    assert lines[2].startswith("  2        ranks 0, 1, 2: all_gather of 0 float32 in C")
    assert lines[3].startswith("  3        ranks 0, 2: all_reduce of 120 float32 in C")
    assert "op 'max'" in lines[3]
    assert lines[4] == "           rank 1: not made yet"
    assert lines[5].startswith(
        "rank 1 is 1 call behind: its last call is 2, all_gather of 0 float32 in C "
    )
    assert "; it has made no other call for " in lines[5]
    assert len(lines) == 6


def what_ranks_may_do_differently(world):
    """Messages, groups, types of equal size, and a graph's capture are not compared."""
    with ns.Communicator(world) as comm:
        x, y = input_of(comm), input_of(comm)
        whole = cuda.device_array(comm.size * x.size, np.float32)
        if comm.rank == 0:
            with comm.group():
                comm.gather(x, out=whole)
        else:
            comm.gather(x)
        if comm.rank < 2:
            comm.sendrecv(x, dst=1 - comm.rank, out=y, src=1 - comm.rank)
        kind = np.int32 if comm.rank == 0 else np.float32
        comm.broadcast(x.view(kind))
        with comm.group():
            comm.all_reduce(x)
            comm.reduce(x, root=1)
        comm.reduce_scatter_v(whole, counts=[x.size] * comm.size)
        world.barrier()
        comm.synchronize()
        return comm._calls.members.board.record.number


def test_what_ranks_may_do_differently_is_no_difference(three):
    assert three.run(what_ranks_may_do_differently) == [4, 4, 4]


def calls_that_differ_unseen(world):
    """Make such calls with the record off on some ranks, and on all."""
    found = []
    for off in ([1, 2], [0, 1, 2]):
        os.environ["NUMBA_SYMM_RECORD"] = "0" if world.rank in off else "1"
        with ns.Communicator(world) as comm:
            comm.all_reduce(input_of(comm), op="sum" if comm.rank == AWAY else "max")
            world.barrier()
            found.append(attempt(comm.synchronize)[0])
    os.environ["NUMBA_SYMM_RECORD"] = "x" if world.rank == 1 else "1"
    found.append(attempt(ns.Communicator, world)[0])
    del os.environ["NUMBA_SYMM_RECORD"]
    return found


def test_the_record_can_be_switched_off(three):
    for *unseen, error in three.run(calls_that_differ_unseen):
        assert unseen == ["", ""]
        assert error.startswith("ArgumentError: Communicator failed on 1 of 3 ranks:")
        assert "NUMBA_SYMM_RECORD='x': expected 0 or 1" in error


def traced(world, folder):
    """Write a trace of calls within a tag, and try what is refused."""
    with ns.Communicator(world) as comm:
        step = comm.tag("step 3")
        with step, step:  # again, within itself
            pass
        with step:
            comm.all_reduce(input_of(comm))
            world.barrier()
            comm.trace(f"{folder}/{world.rank}.json")
        refused = [attempt(comm.tag, 3)[0]]
        refused += [attempt(comm.trace, each)[0] for each in (f"{folder}/no/x", 3)]
        with pytest.raises(ZeroDivisionError), comm.tag("fails"):
            _ = 1 / 0
        assert comm._calls.members.board.record.own.tag == b""
        os.environ["NUMBA_SYMM_RECORD"] = "0"
        with ns.Communicator(world) as unseen, unseen.tag("nothing"):
            refused.append(attempt(unseen.trace, "x.json")[0])
        del os.environ["NUMBA_SYMM_RECORD"]
    closed = (comm.tag, "x"), (comm.trace, "x"), (step.__enter__,)
    return [*refused, *(attempt(*each)[0] for each in closed)]


def test_a_trace_has_the_calls_of_all_ranks(two, tmp_path):
    for number, path, kind, off, *closed in two.run(traced, str(tmp_path)):
        assert number.startswith("ArgumentError: tag: expected text to be a str, got 3")
        assert "trace: expected the path of a file that can be written" in path
        assert "No such file or directory" in path
        assert "trace: expected the path of a file that can be written, got 3" in kind
        assert "expected a record of calls, got NUMBA_SYMM_RECORD=0" in off
        assert all(each.startswith("ClosedError: ") for each in closed)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        for pid in range(2):
            names = [each["name"] for each in found if each["pid"] == pid]
            assert names[0] == "process_name"
            assert sum("all_reduce of 120" in name for name in names) == 1
            assert "step 3" in names
