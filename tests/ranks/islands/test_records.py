"""The records of several islands: what is compared, shown and aborted between them."""

import contextlib
import io
import json
import os
import time

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.command import cli
from numba_symm.errors import CallMismatch
from tests.ranks.helpers import needs_peers

pytestmark = needs_peers


@pytest.fixture
def of_two(world, monkeypatch):
    """Return what makes a communicator of pretended islands."""
    if world.size == 1:
        pytest.skip("one rank is one island")
    size = 2 if world.size > 2 else 1
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", str(size))

    def make(timeout):
        comm = ns.Communicator(world, timeout=timeout)
        comm.all_reduce(cuda.to_device(np.ones(9, np.float32)))  # compiles
        comm.synchronize()
        world.barrier()
        return comm

    return make


def status_of(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["status", str(os.getpid()), *words]) == 0
    return out.getvalue()


def until_it_fails(comm, call):
    """Make calls until the communicator has failed; return the error."""
    try:
        while True:
            call()
            comm.synchronize()
            time.sleep(0.01)
    except ns.CollectiveError as error:
        return error


def test_calls_that_differ_between_islands_are_in_the_table_of_a_failure(world, of_two):
    comm = of_two(timeout=1.0)
    x = cuda.to_device(np.ones(9, np.float32))
    first = comm.rank in comm.islands[0]
    comm.all_reduce(x, op="max" if first else "sum")
    comm.synchronize()  # no error: results are wrong, and nothing has failed
    away = world.size - 1
    if comm.rank == away:
        error = until_it_fails(comm, lambda: None)
    else:
        error = until_it_fails(comm, comm.barrier)
    assert isinstance(error, CallMismatch)
    assert str(error).startswith("Calls differ between islands, from call 2 on; rank ")
    head, _, table = str(error).rpartition("Calls differ between islands, from call 2 ")
    assert "The calls of the ranks:" in head
    here, there = table.splitlines()[1:3]
    assert "op 'max'" in (here if first else there)
    assert "op 'sum'" in (there if first else here)
    world.barrier()
    with contextlib.suppress(ns.CollectiveError):
        comm.close()


def test_several_islands_are_shown_and_aborted(world, of_two):
    comm = of_two(timeout=60)
    away = world.size - 1
    shown = json.loads(status_of("--json"))[-1]
    mine = next(part for part in comm.islands if comm.rank in part)
    assert [each["rank"] for each in shown["ranks"]] == list(mine)
    assert all(each["last"].startswith("all_reduce of 9") for each in shown["ranks"])
    for rank in set(range(world.size)) - set(mine):
        assert str(rank) in shown["others"]
    world.barrier()
    if comm.rank == away:
        time.sleep(0.2)  # the others wait by then, in set-up calls or in MPI's
        moment = time.monotonic()
        comm.abort("enough")
    else:
        call = comm.barrier if comm.rank else lambda: comm.zeros(3)
        error = until_it_fails(comm, call)
        moment = time.monotonic()
        assert isinstance(error, ns.Aborted)
        assert f"rank {away} aborted the communicator: enough" in str(error)
    moments = world.allgather(moment)
    assert max(moments) - moments[away] < 1
    with contextlib.suppress(ns.CollectiveError):
        comm.close()
