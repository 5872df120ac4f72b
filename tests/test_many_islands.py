"""Calls of eight ranks in three divisions: results, and messages as in the schedules.

By hand, for other numbers: ``numba-symm run -n 32 --simulate tests/test_many_islands.py
1,2,8`` divides 32 ranks into islands of 1, 2 and 8.
"""

import os
import sys

from numba_symm.command import launcher
from tests.test_mpirun import environment, run

SIZES = "1,2,3"


def test_many_islands(tmp_path):
    command = launcher.mpirun_command(8, [__file__, SIZES], launcher.find_mpirun())
    environ = environment(8) | {"NUMBA_ENABLE_CUDASIM": "1"}
    code = run(command, environ, tmp_path / "mpirun.txt", 100)
    assert code == 0, (tmp_path / "mpirun.txt").read_text()


def check(world, size):
    import numpy as np
    from numba import cuda

    import numba_symm as ns
    from numba_symm.collectives.islands.sizes import DEFAULT
    from numba_symm.engines import mpi as engine
    from tests.schedules import Job, exchanges

    os.environ["NUMBA_SYMM_ISLAND_SIZE"] = str(size)
    begin, sent = engine.begin, 0

    def counted(into, call, *given):
        nonlocal sent
        sent += call.__name__ == "Isend"
        return begin(into, call, *given)

    engine.begin = counted
    rank, ranks = world.rank, world.size
    with ns.Communicator(world, timeout=60) as comm:
        job = Job(comm.islands, DEFAULT)
        assert len(comm.islands) == -(-ranks // size)
        for count in (5, 300):
            whole = [np.arange(count * ranks) % 7 + each for each in range(ranks)]
            first = [each[:count] for each in whole]
            shard = slice(count * rank, count * (rank + 1))
            wanted = {
                "all_reduce": sum(first),
                "reduce": sum(first) if rank == 1 else None,
                "broadcast": first[1],
                "all_gather": np.concatenate(first),
                "reduce_scatter": sum(whole)[shard],
                "all_to_all": np.concatenate([each[shard] for each in whole]),
                "scan": sum(first[: rank + 1]),
            }
            for name, result in wanted.items():
                many = name in ("reduce_scatter", "all_to_all")
                x = cuda.to_device((whole if many else first)[rank].copy())
                before = sent
                root = {"root": 1} if name in ("reduce", "broadcast") else {}
                out = getattr(comm, name)(x, **root)
                comm.synchronize()
                if result is not None:
                    assert (out.copy_to_host().ravel() == result).all(), name
                steps = job.schedule(rank, name, count, **root)
                planned = sum(len(each.sends) for each in exchanges(steps))
                assert sent - before == planned, (name, count)
        before = sent
        comm.barrier()
        comm.synchronize()
        steps = job.schedule(rank, "barrier", 0)
        assert sent - before == sum(len(each.sends) for each in exchanges(steps))
    engine.begin = begin


if __name__ == "__main__":
    from mpi4py import MPI

    for each in sys.argv[1].split(","):
        check(MPI.COMM_WORLD, int(each))
