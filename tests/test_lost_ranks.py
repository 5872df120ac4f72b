"""Ranks that die, leave or fail, and set-up calls without them: the others raise.

The ranks are spawned processes, because mpirun would end the whole job. Without a GPU
they run in Numba's CUDA simulator. Functions on ranks return facts, and the tests check
these.
"""

import builtins
import contextlib
import os
import re
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.gpu.kernels import Kernel
from numba_symm.launch import fds, ranks, waiting
from tests.absence import (
    AWAY,
    PATIENT,
    SOON,
    context_is_alive,
    input_of,
    reduced,
    warm_up,
)
from tests.spawned import attempt, open_files, outcomes, run_ranks


def fails_within(world, how):
    warm_up(world)
    begin = time.monotonic()
    text = ""
    try:
        with ns.Communicator(world, timeout=1) as comm:
            x = input_of(comm)
            if world.rank != AWAY:
                comm.all_reduce(x, algorithm="one_shot_ll")
                if how == "check":
                    comm.synchronize()
                if how == "caught":
                    with pytest.raises(ns.CollectiveTimeout) as caught:
                        comm.synchronize()
                    text = str(caught.value)
            else:
                time.sleep(0.5 if how == "leaves first" else 2)
    except ns.CollectiveTimeout as error:
        text += str(error)
    return text, time.monotonic() - begin, context_is_alive()


@pytest.mark.parametrize("how", ["check", "caught", "no check", "leaves first"])
def test_leaving_a_with_statement_raises_a_failure(three, how):
    """``close`` raises a failure that was not raised, and does not wait after one."""
    for text, seconds, alive in three.run(fails_within, how):
        assert re.match(rf"rank [02] waited for rank {AWAY} in all_reduce", text), how
        assert text.count(" waited for ") == 1
        assert seconds < 2 + SOON
        assert alive


def dies(world, at):
    warm_up(world)
    comm = ns.Communicator(world, timeout=2)
    reduced(comm, "one_shot_ll")
    if world.rank == AWAY:
        if at == "between calls":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def work():
        while True:
            assert reduced(comm, "one_shot_ll")

    text, seconds = attempt(work)
    closing = attempt(comm.close)
    survivors = world.among([rank for rank in range(world.size) if rank != AWAY])
    with ns.Communicator(survivors, timeout=PATIENT) as comm:
        again = reduced(comm, "one_shot_ll") and reduced(comm, "chunked")
    return text, seconds, closing, again, context_is_alive()


@pytest.mark.parametrize("at", ["between calls", "amid calls"])
def test_a_rank_that_is_killed(at):
    ended = outcomes(3, dies, at)
    assert ended[AWAY].code == -signal.SIGKILL
    for rank in (0, 2):
        assert not ended[rank].error, ended[rank].trace
        text, seconds, closing, again, alive = ended[rank].value
        assert re.match(
            rf"RankLeft: rank {AWAY} has ended without closing the communicator; rank "
            r"\d waited for rank \d in all_reduce .*\(timeout: 2\.?5? s\).*rebuild\(\)",
            text,
        )
        assert seconds < SOON
        assert closing[0] == ""  # it has raised the failure before
        assert closing[1] < SOON
        assert again
        assert alive


def killed(world, at):
    """Rank AWAY dies before the others close, or while all allocate."""
    comm = ns.Communicator(world, timeout=PATIENT)
    world.barrier()
    if world.rank == AWAY:
        channel = comm._calls.members.channel
        channel.all_gather_fds = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        if at == "close":
            channel.all_gather_fds(0)
    found = attempt(comm.close if at == "close" else lambda: comm.zeros(10))
    return found, attempt(comm.close)


@pytest.mark.parametrize("at", ["close", "zeros"])
def test_set_up_calls_do_not_wait_for_a_dead_rank(at):
    ended = outcomes(3, killed, at)
    for rank in (0, 2):
        (text, seconds), closing = ended[rank].value
        assert text.startswith(
            f"RankLeft: rank {AWAY} has ended without closing the communicator; rank "
        )
        assert f" waited for it in {at}; results" in text
        assert seconds < SOON
        assert closing[0] == ""
        assert closing[1] < SOON


def late_for_set_up_calls(world):
    facts = {}
    waiting.PATIENCE = 0.3
    if world.rank == AWAY:
        real = fds.IpcChannel.all_gather_fds
        fds.IpcChannel.all_gather_fds = lambda *args: (time.sleep(2), real(*args))[1]
    facts["constructor"] = attempt(lambda: ns.Communicator(world))
    if world.rank == AWAY:
        fds.IpcChannel.all_gather_fds = real
    world.barrier()
    comm = ns.Communicator(world, timeout=PATIENT)
    world.barrier()
    if world.rank == AWAY:
        time.sleep(2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        facts["zeros"] = attempt(lambda: comm.zeros(10))
    facts["warned"] = [str(each.message) for each in warned]
    facts["where"] = {each.filename for each in warned}
    facts["close"] = attempt(comm.close)
    return facts


def test_a_deadline_of_set_up_calls():
    """One timeout for all waits; the error names the late rank and the call."""
    environ = [{"NUMBA_SYMM_SETUP_TIMEOUT": "1"}] * 3
    waited = rf"rank [02] (has )?waited for rank {AWAY} in "
    for rank, facts in enumerate(run_ranks(3, late_for_set_up_calls, environ=environ)):
        for call, name in (("constructor", "Communicator"), ("zeros", "zeros")):
            text, seconds = facts[call]
            assert re.match(
                rf"CollectiveTimeout: {waited}{name} \(set-up timeout: 1 s\)", text
            )
            assert seconds < 2 + SOON
        if rank != AWAY:
            (text,) = facts["warned"]
            assert re.match(rf"{waited}zeros for 0.3 s; NUMBA_SYMM_SETUP_TIMEOUT", text)
            assert facts["where"] == {__file__}  # the line that waits
        assert facts["close"][0] == ""


def raises_within(world, error):
    begin, told = 0.0, None
    with ns.Communicator(world, timeout=PATIENT) as comm:
        assert reduced(comm)
        if world.rank == AWAY:
            time.sleep(0.5)
            raise getattr(builtins, error)("7\nsecond line")
        begin = time.monotonic()
        # One waits in a kernel, the other for all to close.
        if world.rank != 0:
            comm.barrier()
        with pytest.raises(ns.RankLeft) as caught:
            comm.close() if world.rank == 0 else comm.synchronize()
        told = str(caught.value), caught.value.ranks, caught.value.operation
        attempt(comm.close)
    return told, time.monotonic() - begin


def errs_as_one_that_has_left(world, debug):
    comm = ns.Communicator(world, timeout=PATIENT, debug=debug)
    x = comm.zeros(6, np.float32)
    calls = [
        lambda: comm.broadcast(x, root=3),
        lambda: comm.all_reduce(x, algorithm="fast"),
        lambda: comm.gather(x, root=3),
        lambda: comm.reduce_scatter_v(x, counts=[6, 6, 6]),
        lambda: comm.send(x, dst=3),
        lambda: comm.recv(x, src=3),
        lambda: comm.sendrecv(x, dst=3, out=x, src=3),
    ]
    y, part = comm.zeros(6, np.float32), comm.zeros(2, np.float32)
    known = [
        lambda: comm.all_reduce(x, out=y),
        lambda: comm.reduce_scatter_v(x, counts=[2, 2, 2], out=part),
    ]
    for call in known:
        call()
    comm.synchronize()
    world.barrier()  # all ranks have looked
    right = [
        *known,
        lambda: comm.broadcast(x),
        lambda: comm.all_reduce_init(x),
        lambda: comm.gather(x),
        lambda: comm.reduce_scatter_v(x, counts=[2, 2, 2]),
        lambda: comm.send(x, dst=(comm.rank + 1) % 3),
    ]
    errors, told, bound = [], [], []
    if world.rank == AWAY:
        with contextlib.suppress(ns.ArgumentError), comm:
            comm.send(x, dst=3)
    world.barrier()
    if world.rank != AWAY:
        Kernel.bind = lambda *args, **options: bound.append(args)
        errors = [attempt(call)[0] for call in calls]
        told = [attempt(call)[0] for call in right]
        attempt(comm.close)
    return errors, told, len(bound)


@pytest.mark.parametrize("debug", [False, True])
def test_an_argument_error_is_raised_after_another_rank_has_left(debug):
    """Other calls are refused before a kernel is compiled for them."""
    for rank, facts in enumerate(run_ranks(3, errs_as_one_that_has_left, debug)):
        if rank != AWAY:
            own, told, bound = facts
            assert {error.partition(":")[0] for error in own} == {"ArgumentError"}
            for error in told:
                assert error.startswith(f"RankLeft: rank {AWAY} left with ArgumentErr")
            assert bound == 0


@pytest.mark.parametrize("error", ["ValueError", "SystemExit", "KeyboardInterrupt"])
def test_a_rank_that_leaves_by_an_exception(error):
    """The errors of the others have its type and its first line."""
    ended = outcomes(3, raises_within, error)
    if error == "ValueError":
        assert ended[AWAY].error == "ValueError: 7\nsecond line"
    else:
        assert ended[AWAY].code == 1
    for rank in (0, 2):
        assert not ended[rank].error, ended[rank].trace
        told, seconds = ended[rank].value
        text, ranks, operation = told
        assert text.startswith(f"rank {AWAY} left with {error}: 7; results"), (
            rank,
            text,
        )
        assert ranks == (AWAY,)
        assert operation == ""
        assert seconds < 0.5 + SOON


open_at_exit = []  # as a script's global variable would be


def exits_with_an_open_communicator(world):
    warm_up(world)
    comm = ns.Communicator(world, timeout=PATIENT)
    if world.rank == AWAY:
        open_at_exit.append(comm)
        sys.exit(3)
    began = time.monotonic()
    text, _ = attempt(lambda: comm.zeros(10))
    attempt(comm.close)
    return text, time.monotonic() - began


def test_exit_with_an_open_communicator():
    """The rank warns, and the others raise. The exit code does not change."""
    ended = outcomes(2, exits_with_an_open_communicator)
    assert ended[AWAY].code == 3
    output = ended[AWAY].output
    assert re.search(r"RuntimeWarning: <Communicator rank 1 of 2.*open at exit", output)
    assert "Traceback" not in output
    assert "Exception ignored" not in output
    assert not ended[0].error, ended[0].trace
    text, seconds = ended[0].value
    assert text.startswith(f"RankLeft: rank {AWAY} ended without closing the comm")
    assert seconds < SOON
    assert ended[0].output == ""


def late(world):
    right = []
    for timeout, lateness in ((0, 3), (10, 2)):
        with ns.Communicator(world, timeout=timeout) as comm:
            world.barrier()
            if world.rank == AWAY:
                time.sleep(lateness)
            right.append(reduced(comm))
    return right


def all_reduces(world):
    with ns.Communicator(world) as comm:
        right = [reduced(comm, name) for name in (None, "one_shot_ll", "chunked")]
        comm.barrier()
        comm.synchronize()
    return right, sorted(name for name in sys.modules if name.startswith("mpi4py"))


def test_a_job_without_mpi():
    """The library takes any communicator, and imports no MPI."""
    assert run_ranks(4, all_reduces) == [([True] * 3, [])] * 4


def fails_on_one_rank(world, how):
    one = world.rank == AWAY
    with ns.Communicator(world):
        pass  # what is made once in a process is there
    before = open_files()
    options = {}
    undo = contextlib.ExitStack()
    with undo:
        if how == "timeouts differ":
            options["timeout"] = 7 if one else 8
        elif how == "no timeout" and one:
            options["timeout"] = -1
        elif how == "no such device" and one:
            options["device"] = 99
        elif how == "backend" and one:
            os.environ["NUMBA_SYMM_BACKEND"] = "floppy"
            undo.callback(os.environ.pop, "NUMBA_SYMM_BACKEND")
        elif how == "no set-up timeout" and one:
            os.environ["NUMBA_SYMM_SETUP_TIMEOUT"] = "soon"
            undo.callback(os.environ.pop, "NUMBA_SYMM_SETUP_TIMEOUT")
        elif how == "nodes" and one:
            undo.callback(setattr, ranks, "BOOT_ID", ranks.BOOT_ID)
            ranks.BOOT_ID = Path("/nowhere")
        elif how == "no memory" and one:

            def refuse(self, nbytes, *args):
                raise ns.BackendError(f"no {nbytes} bytes left")

            real = ns.SymmetricMemoryAllocator.allocate
            undo.callback(setattr, ns.SymmetricMemoryAllocator, "allocate", real)
            ns.SymmetricMemoryAllocator.allocate = refuse
        error, seconds = attempt(lambda: ns.Communicator(world, **options))
    leaked = open_files() - before
    with ns.Communicator(world, timeout=PATIENT) as comm:
        again = reduced(comm)
    return error, seconds, leaked, again


CREATION = {
    "timeouts differ": "ArgumentError: Communicator: ranks 0, 2 have timeout=8, rank 1 "
    "has timeout=7",
    "no timeout": "ArgumentError: .*\n *rank 1: timeout=-1",
    "no such device": "ArgumentError: .*\n *rank 1: device=99",
    "backend": "ArgumentError: .*\n *rank 1: NUMBA_SYMM_BACKEND='floppy'",
    "no set-up timeout": "ArgumentError: .*\n *rank 1: NUMBA_SYMM_SETUP_TIMEOUT='soon'",
    "nodes": r"PeerAccessError: .*ranks 0, 2 are on .*, rank 1 is on .*; between "
    "several islands, expected an mpi4py communicator",
    "no memory": r"BackendError: .*\n *rank 1: no \d+ bytes left",
}


@pytest.mark.parametrize("how", CREATION)
def test_a_communicator_that_cannot_be_made_on_one_rank(three, how):
    """All ranks raise, no resource stays open, and the next communicator works."""
    for error, seconds, leaked, again in three.run(fails_on_one_rank, how):
        assert re.match(CREATION[how], error), error
        assert seconds < SOON
        assert not leaked
        assert again
