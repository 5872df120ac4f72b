"""Ranks on two nodes, which are namespaces of this machine: one job, two islands."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.test_mpirun import environment, run
from tests.two_nodes import NODES, command, two_nodes, why_not

RANKS = 4


@pytest.mark.skipif(bool(why_not()), reason=f"no namespaces for nodes: {why_not()}")
def test_a_job_on_two_nodes(tmp_path, monkeypatch):
    for name, value in environment(RANKS).items():
        monkeypatch.setenv(name, value)
    program = [__file__, str(tmp_path)]
    with two_nodes(tmp_path) as within:
        words = command(RANKS, program, tmp_path, within)
        code = run(words, None, tmp_path / "mpirun.txt")
    assert code == 0, (tmp_path / "mpirun.txt").read_text()
    found = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(RANKS)]
    one, other = NODES
    for rank, (islands, total, shared, late) in enumerate(found):
        assert islands == [[0, 1], [2, 3]]
        assert total == sum(range(RANKS))
        assert shared == ([1, 1] if rank < 2 else [5, 5])  # 0 + 1; 2 + 3
        if rank == RANKS - 1:
            assert late == ""
        else:  # it names the rank or one of those that wait for it, and the node
            assert re.search(rf"waited for rank \d on ({one}|{other}) \(", late), late


def play(folder):
    import numpy as np
    from mpi4py import MPI

    import numba_symm as ns

    world, late = MPI.COMM_WORLD, ""
    comm = ns.Communicator(world, timeout=2)
    x = comm.empty(2000, np.int64)
    x.copy_to_device(np.full(2000, comm.rank))
    y = comm.all_reduce(x)
    comm.synchronize()
    with comm.split(comm.rank // 2) as island:  # memory is shared within a node
        z = island.all_reduce(x)
        island.synchronize()
    if comm.rank < comm.size - 1:
        try:
            comm.all_reduce(x)
            comm.synchronize()
        except ns.CollectiveTimeout as error:
            late = str(error)
    world.barrier()
    said = comm.islands, int(y.copy_to_host()[-1]), z.copy_to_host()[:2].tolist(), late
    (Path(folder) / f"{comm.rank}.json").write_text(json.dumps(said))
    try:
        comm.close()
    except ns.CollectiveError:
        assert comm.rank == comm.size - 1  # the others have raised it


if __name__ == "__main__":
    play(*sys.argv[1:])
