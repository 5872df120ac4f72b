"""From a program's second start on, its calls load no kernel."""

import subprocess
import sys
import textwrap

import pytest

from numba_symm.launch.devices import visible_gpus

PROGRAM = """
    import numpy as np
    from mpi4py import MPI
    import numba_symm as ns
    from numba_symm.gpu import loads

    world = MPI.COMM_WORLD
    with ns.Communicator(world, timeout=8) as comm:
        small, large = comm.zeros(1000), comm.zeros(1 << 20)
        y = comm.zeros(1000)
        comm.all_reduce(small, out=y)
        comm.synchronize()
        world.Barrier()
        text = "done"
        if world.rank != 0:
            world.recv(source=0)
        try:
            comm.all_reduce(small, out=y)
            comm.all_reduce(large, out=large, op="max")
        except ns.CollectiveError as error:
            text = str(error).replace(chr(10), " ")
        if world.rank == 0:
            for rank in range(1, world.size):
                world.send(None, rank)
        try:
            comm.synchronize()
        except ns.CollectiveError as error:
            text = str(error).replace(chr(10), " ")
        print("rank", world.rank, loads.Count.within_calls, text, flush=True)
"""


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Return the lines of two starts of the program, with a kernel cache of its own."""
    if not visible_gpus():
        pytest.skip("needs a GPU: nothing is loaded in the simulator")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    command = [sys.executable, "-m", "numba_symm.command.cli", "run", "-n", "2"]
    given = {"capture_output": True, "text": True, "timeout": 200, "check": False}
    runs = [subprocess.run([*command, str(program)], **given) for _ in "12"]
    return [
        sorted(line for line in run.stdout.splitlines() if line.startswith("rank "))
        for run in runs
    ]


def test_the_first_start_names_the_load_and_the_second_loads_nothing(starts):
    first, second = starts
    cause = "rank 0 has been loading all_reduce's kernel for "
    advice = "call comm.prepare('all_reduce') before other calls"
    assert all(cause in line and advice in line for line in first), first
    assert second == ["rank 0 0 done", "rank 1 0 done"]
