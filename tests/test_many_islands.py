"""Calls of many ranks in several divisions: results, messages and bytes, and deaths.

Messages and bytes are those of the schedules. By hand, for other numbers, and for
islands of different sizes::

    numba-symm run -n 32 --simulate tests/test_many_islands.py 1,2,4,4x
    numba-symm run -n 24 --simulate tests/test_many_islands.py 5,1+2+8+3+6+4

A rank that dies or stops, on 32 ranks, whose others raise in time, and name it::

    python -m tests.test_many_islands 32 1,2,4

With GPUs for all ranks, or if ranks may share GPUs, that uses them.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from numba_symm.command import launcher, runner
from tests.test_mpirun import environment, run

DIVISIONS = "1,2,3,2x"
TIMEOUT = 2.0
LATER = 300.0  # seconds, half of a timeout that never passes
"""Seconds after the deadline in which every rank raises."""


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


def made(world, division, timeout):
    """Return a communicator of islands of that division."""
    import numba_symm as ns
    from numba_symm import islands

    parts = divided(division, world.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_SYMM_ISLAND_SIZE", str(max(map(len, parts))))
        patch.setattr(islands, "divide", lambda *given: parts)
        comm = ns.Communicator(world, timeout=timeout)
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


def calls_of_messages(rank, ranks, count):
    """Yield the other calls: name, input, result, and the other arguments."""
    import numpy as np

    counts = [count + each % 3 for each in range(ranks)]
    ends = [*accumulate(counts, initial=0)]
    whole = [np.arange(ends[-1]) % 5 + each for each in range(ranks)]
    mine = slice(ends[rank], ends[rank + 1])
    own = whole[rank][: counts[rank]]
    joined = np.concatenate([whole[r][: counts[r]] for r in range(ranks)])
    root, last = rank == ranks - 1, {"root": ranks - 1}
    yield "gather_v", own, joined if root else None, {"counts": counts, **last}
    yield "scatter_v", whole[rank], whole[-1][mine], {"counts": counts, **last}
    yield "all_gather_v", own, joined, {"counts": counts}
    yield "reduce_scatter_v", whole[rank], sum(whole)[mine], {"counts": counts}
    gives = {"send_counts": counts, "recv_counts": [counts[rank]] * ranks}
    arrived = np.concatenate([each[mine] for each in whole])
    yield "all_to_all_v", whole[rank], arrived, gives
    even = whole[rank][:count]
    gathered = np.concatenate([each[:count] for each in whole])
    yield "gather", even, gathered if root else None, last
    shards = np.arange(count * ranks)
    yield "scatter", shards, shards[count * rank : count * (rank + 1)], last
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    yield "sendrecv", even, whole[before][:count], {"dst": after, "src": before}
    pair = np.concatenate([whole[before][:count], whole[after][:count]])
    near = {"sources": [before, after], "destinations": [before, after]}
    yield "neighbor_all_gather", even, pair, near


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
    with made(world, division, 60) as comm:
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
        for name, x, result, options in calls_of_messages(rank, ranks, 7):
            if mixed:
                break
            if name in ("scatter", "scatter_v", "sendrecv"):
                options = options | {"out": cuda.device_array(len(result), "int64")}
            out = getattr(comm, name)(cuda.to_device(x.copy()), **options)
            comm.synchronize()
            if result is not None:
                assert (out.copy_to_host().ravel() == result).all(), name
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


HOW = ("killed", "stopped", "raises")


def lose(world, division, how, folder):
    """Lose the last rank in the middle of calls; write what this rank raises."""
    import numpy as np
    from numba import cuda

    import numba_symm as ns

    if "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES" in os.environ:
        os.environ["NCCL_HOSTID"] = str(world.rank)  # or NCCL refuses shared GPUs
    pids = world.allgather(os.getpid())
    comm = made(world, division, 2 * LATER if how == "raises" else TIMEOUT)
    x = cuda.to_device(np.arange(300.0))
    comm.all_reduce(x)
    comm.synchronize()
    world.barrier()
    lost = world.size - 1
    began = time.monotonic()
    if world.rank == lost:
        if how == "raises":
            comm.abort("enough")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    found = None
    while found is None:
        try:
            comm.all_reduce(x)
            comm.synchronize()
            comm.barrier()
            comm.synchronize()
        except ns.CollectiveError as error:
            seconds = time.monotonic() - began
            found = type(error).__name__, str(error), error.ranks, seconds
    file = Path(folder) / f"{world.rank}.json"
    file.with_suffix(".new").write_text(json.dumps(found))
    file.with_suffix(".new").rename(file)
    others = [Path(folder) / f"{rank}.json" for rank in range(lost)]
    end = time.monotonic() + 300
    while time.monotonic() < end and not all(path.exists() for path in others):
        time.sleep(0.05)
    if how == "stopped" and world.rank == 0:
        os.kill(pids[lost], signal.SIGKILL)
    os._exit(0)


def kills(ranks, divisions):
    """Check, in a job for each division and way, that all ranks raise in time."""
    for division in divisions.split(","):
        for how in HOW:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                program = [__file__, division, how, name]
                found = launcher.find_mpirun()
                command = launcher.mpirun_command(ranks, program, found)
                command.insert(1, "--continuous")  # after a rank has died
                run(command, environment(ranks), folder / "mpirun.txt")
                files = [folder / f"{rank}.json" for rank in range(ranks - 1)]
                all_wrote = all(each.exists() for each in files)
                assert all_wrote, (folder / "mpirun.txt").read_text()
                raised = [json.loads(each.read_text()) for each in files]
            latest = max(seconds for *_, seconds in raised)
            lost = ranks - 1  # alone, beside the rank that waited for it
            naming = sum(
                names[-1] == lost and len(names) <= 2 for *_, names, _ in raised
            )
            print(
                f"{ranks} ranks, islands of {division}, {how}: {len(raised)} raised "
                f"after {latest:.2f} s at most, {naming} name the lost rank alone",
                flush=True,
            )
            assert latest < LATER, raised
            assert naming == ranks - 1, raised


def main(argv):
    if argv[0].isdecimal() and len(argv) == 2:
        kills(int(argv[0]), argv[1])
        return
    from mpi4py import MPI

    if argv[1:]:
        lose(MPI.COMM_WORLD, *argv)
    for division in argv[0].split(","):
        check(MPI.COMM_WORLD, division)


if __name__ == "__main__":
    runner.show_errors_whole()
    main(sys.argv[1:])
