"""Calls of many ranks in several divisions: results, messages and bytes.

Messages and bytes are those of the schedules. By hand, for other numbers, and for
islands of different sizes::

    numba-symm run -n 32 --simulate tests/test_many_islands.py 1,2,4,4x
    numba-symm run -n 24 --simulate tests/test_many_islands.py 5,1+2+8+3+6+4

"""

import sys
from collections import Counter
from itertools import accumulate, pairwise

import pytest

from numba_symm.command import launcher, runner
from tests.test_mpirun import environment, run

DIVISIONS = "1,2,3,2x"


def test_many_islands(tmp_path):
    command = launcher.mpirun_command(8, [__file__, DIVISIONS], launcher.find_mpirun())
    environ = environment(8) | {"NUMBA_ENABLE_CUDASIM": "1"}
    code = run(command, environ, tmp_path / "mpirun.txt")
    assert code == 0, (tmp_path / "mpirun.txt").read_text()


def divided(division, ranks):
    """Return the ranks of each island: of one size, or of those that are named.

    With ``x`` after the size, neighbors are in different islands.
    """
    if division.endswith("x"):
        apart = ranks // int(division[:-1])
        return tuple(tuple(range(i, ranks, apart)) for i in range(apart))
    sizes = list(map(int, division.split("+")))
    if len(sizes) == 1:
        sizes = [min(sizes[0], ranks - at) for at in range(0, ranks, sizes[0])]
    assert sum(sizes) == ranks, division
    ends = list(accumulate(sizes, initial=0))
    return tuple(tuple(range(a, b)) for a, b in pairwise(ends))


def made(world, division):
    """Return a communicator of islands of that division."""
    import numba_symm as ns
    from numba_symm import islands

    parts = divided(division, world.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_SYMM_ISLAND_SIZE", str(max(map(len, parts))))
        patch.setattr(islands, "divide", lambda *given: parts)
        comm = ns.Communicator(world, timeout=60)
    assert comm.islands == parts
    return comm


def whole_calls(rank, ranks, count):
    """Yield calls with a schedule: name, input, result, and the root if there is one.

    The result is None where the call has none.
    """
    import numpy as np

    whole = [np.arange(count * ranks) % 7 + each for each in range(ranks)]
    first = [each[:count] for each in whole]
    shard = slice(count * rank, count * (rank + 1))
    yield "all_reduce", first[rank], sum(first), {}
    yield "reduce", first[rank], sum(first) if rank == 1 else None, {"root": 1}
    yield "broadcast", first[rank], first[1], {"root": 1}
    yield "all_gather", first[rank], np.concatenate(first), {}
    yield "reduce_scatter", whole[rank], sum(whole)[shard], {}
    yield "all_to_all", whole[rank], np.concatenate([each[shard] for each in whole]), {}
    yield "scan", first[rank], sum(first[: rank + 1]), {}
    yield "exscan", first[rank], sum(first[:rank], np.zeros(count, int)), {}
    yield "reverse_scan", first[rank], sum(first[rank:]), {}


def check(world, division):
    from numba import cuda

    from numba_symm.collectives.islands.site import DEFAULT_SIZES
    from numba_symm.engines import mpi as engine
    from numba_symm.launch import waiting
    from tests.island_schedules import ScheduledJob, exchanges

    begin, sent = engine.begin, Counter()

    def counted(into, call, *given):
        if call.__name__ == "Isend":
            sent["messages"] += 1
            sent["bytes"] += memoryview(given[0][0]).nbytes
        return begin(into, call, *given)

    def made_by(steps):
        parcels = [parcel for each in exchanges(steps) for parcel in each.sends]
        nbytes = sum(parcel.nbytes for parcel in parcels)
        return Counter(messages=len(parcels), bytes=nbytes)

    engine.begin = counted
    rank, ranks = world.rank, world.size
    run, steps, received = waiting._Step.run, Counter(), Counter()

    def counted_step(step):
        found, size = run(step), step._comm.size
        steps[size] += 1
        for peer, values in step._parts.items():
            received[size] += len(waiting.packed(values)) * (peer != step._comm.rank)
        return found

    waiting._Step.run = counted_step
    with made(world, division) as comm:
        waiting._Step.run = run
        assert steps[ranks] == 12, steps
        few = 20 * ranks + 600 * (ranks - 1).bit_length()
        assert rank or received[ranks] < few, received  # bytes of its children
        job = ScheduledJob(comm.islands, DEFAULT_SIZES)
        # Only schedules depend on whether neighbors are in different islands.
        mixed = division.endswith("x")
        for count in (5,) if mixed else (5, 300):
            for name, x, result, options in whole_calls(rank, ranks, count):
                sent.clear()
                out = getattr(comm, name)(cuda.to_device(x.copy()), **options)
                comm.synchronize()
                if result is not None:
                    assert (out.copy_to_host().ravel() == result).all(), name
                planned = made_by(job.schedule(rank, name, count, **options))
                assert +sent == +planned, (name, count, sent, planned)
        sent.clear()
        comm.barrier()
        comm.synchronize()
        assert +sent == +made_by(job.schedule(rank, "barrier", 0))
        if division == "1":
            check_prepared(comm)
    engine.begin = begin


def check_prepared(comm):
    """Check that ``prepare`` lists what scans use within islands, also larger ones."""
    from numba import cuda

    from numba_symm.collectives import kernel_set
    from numba_symm.engines import deadline
    from numba_symm.gpu import kernels

    calls = comm._calls
    given = ("scan", "exscan"), ("float32",), ("sum",)
    listed = kernel_set.kernels(*given, calls.end, "prepare", calls.binder)
    with kernels.bound(loading=True) as used:
        for count in (300, 1024, 4096):
            comm.scan(cuda.device_array(count, "float32"))
            comm.exscan(cuda.device_array(count, "float32"))
    comm.synchronize()
    missing = {each.kernel for each in used} - {*listed, deadline.kernel()}
    assert not missing, [(each.factory, each.constants) for each in missing]


def main(divisions):
    from mpi4py import MPI

    for division in divisions.split(","):
        check(MPI.COMM_WORLD, division)


if __name__ == "__main__":
    runner.show_errors_whole()
    main(sys.argv[1])
