"""What kernels call, in explored programs: the library's functions and Numba's."""

import doctest
import inspect
import textwrap

import numpy as np
import pytest

from numba_symm import device, explore

HEAD = """
import math
import numpy as np
from mpi4py import MPI
from numba import cuda
import numba_symm as ns
from numba_symm import device as symm
"""
MADE = """
comm = ns.Communicator(MPI.COMM_WORLD)
ctx = comm.rendezvous(comm.zeros(64, np.int64)).ctx
old = cuda.to_device(np.zeros(1, np.int64))
"""

EXAMPLES = {
    name: doctest.DocTestParser().get_examples(inspect.getdoc(getattr(device, name)))
    for name in device.__all__
}
SHOWN = [name for name, examples in EXAMPLES.items() if examples]
MANY = {"grid_barrier"}  # of which eight threads first update one counter


@pytest.mark.parametrize("name", SHOWN)
def test_the_example_of_a_device_function(name, tmp_path):
    lines = [HEAD, MADE]
    for example in EXAMPLES[name]:
        if example.want:
            lines.append(f"shown = repr({example.source.strip()})\n")
            lines.append(f"assert shown == {example.want.strip()!r}, shown\n")
        else:
            lines.append(example.source)
    path = tmp_path / "example.py"
    path.write_text("".join(lines))
    report = explore.run(path, 1, 0.5 if name in MANY else 20)
    assert report.fault is None, str(report)
    assert report.complete or name in MANY


def run(tmp_path, kernel, host, ranks=2, launch="[1, 4]", seconds=600):
    """Explore a kernel, whose results the host's part checks."""
    path = tmp_path / "program.py"
    path.write_text(
        HEAD
        + textwrap.dedent(kernel)
        + "comm = ns.Communicator(MPI.COMM_WORLD)\n"
        + "x = comm.zeros((4, 64), np.int64)\n"
        + "ctx = comm.rendezvous(x).ctx\n"
        + "out = cuda.to_device(np.zeros(64, np.int64))\n"
        + (f"kernel{launch}(ctx, out)\ncomm.synchronize()\n" if launch else "")
        + "found = out.copy_to_host()\n" * bool(launch)
        + textwrap.dedent(host)
    )
    return explore.run(path, ranks, seconds)


TEAMS = """
    @cuda.jit
    def kernel(ws, half, out):
        symm.st_u64(symm.peer_address(ws, (ws.rank + 1) % ws.size), ws.rank)
        {barrier}
        one = cuda.local.array(1, np.int64)
        one[0] = symm.peer_array(ws, ws.rank, 1, np.int64)[0]
        symm.all_reduce(half, one, items=True)
        out[0] = one[0]
        symm.all_reduce(ws, one, "max", items=True)
        out[1] = one[0]
"""


@pytest.mark.parametrize("barrier", ["symm.barrier(ws, 0)", "pass"])
def test_a_team_and_a_memory_of_a_workspace(tmp_path, barrier):
    host = """
    mem = comm.rendezvous(x)
    ws = comm.device_workspace(1, 1, 8, memory=mem)
    team = symm.Team.of(mem.ctx, [1] if comm.rank == 1 else [2, 0])
    half = comm.device_workspace(1, 1, 8, team=team)
    kernel[1, 1](ws.ctx, half.ctx, out)
    comm.synchronize()
    assert list(out.copy_to_host()[:2]) == [0 if comm.rank == 1 else 3, 3]
    """
    kernel = TEAMS.format(barrier=barrier)
    report = run(tmp_path, kernel, host, 3, launch="")
    assert report.complete if barrier != "pass" else report.fault.kind == "race"


STARTS = """
    @cuda.jit
    def kernel(ws, out):
        t = cuda.threadIdx.x
        s = cuda.shared.array((4, 2), np.int64)
        every = cuda.shared.array(2, np.int64)
        for i in range(4):
            s[i, t] = i + t + 10 * ws.rank
        symm.all_reduce_start(ws, s[0])
        {early}
        symm.all_to_all_start(ws, s[1])
        {more}
        {wait}
        symm.all_to_all_wait(ws, s[1], every)
        {last}
        out[t], out[2 + t], out[4 + t] = s[0, t], every[t], s[2, t]
"""
AWAITED = "symm.all_reduce_wait(ws, s[0])"
HOST = """
    ws = comm.device_workspace(blocks=1, threads=2, bytes=64, depth=2)
    kernel[1, 2](ws.ctx, out)
    comm.synchronize()
    assert list(out.copy_to_host()[:2]) == [10, 12]
    assert list(out.copy_to_host()[2:4]) == [1 + comm.rank, 11 + comm.rank]
"""


def test_collectives_that_are_started_and_awaited(tmp_path):
    more = {"early": "", "more": "", "wait": AWAITED, "last": ""}
    report = run(tmp_path, STARTS.format(**more), HOST, launch="")
    assert report.complete, str(report)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"more": "symm.all_reduce_start(ws, s[2])"}, "in which 2 collectives are"),
        ({"last": AWAITED}, "in which 0 collectives are started"),
        (
            {"last": "symm.all_reduce_start(ws, s[2])"},
            "program.py:22  symm.all_reduce_start(ws, s[2])",
        ),
        ({"early": "s[0, 1 - t] = 5"}, "race"),
        ({"wait": f"{AWAITED}\n        every[1 - t] = 3"}, "race"),
    ],
)
def test_misuse_of_starts_and_waits_is_a_fault(tmp_path, change, text):
    more = {"early": "", "more": "", "wait": AWAITED, "last": ""} | change
    report = run(tmp_path, STARTS.format(**more), HOST, launch="")
    assert report.fault is not None
    assert text in str(report)


DIFFERENT = {
    "symm.all_reduce(ws, x[: 3 + ws.rank])": "0 expects 24 bytes of rank 1",
    "symm.all_reduce(ws, x[: 1 - ws.rank])": "0 expects 8 bytes of rank 1",
    "symm.broadcast(ws, x[: 3 + ws.rank], 1)": "0 expects 24 bytes of rank 1",
    "symm.exscan(ws, x) if ws.rank else symm.all_reduce(ws, x)": "another call",
    "symm.all_gather(ws, x[: n + 1], out[: n + 3], False, (2, n + 1))": (
        "0 expects 16 bytes of rank 1"
    ),
    "symm.all_to_all(ws, x[:2], out[:2], False, (1, 1), (1 + ws.rank, 1 - ws.rank))": (
        "1 expects 16 bytes of rank 0"
    ),
}


@pytest.mark.parametrize("call", DIFFERENT)
def test_sizes_that_differ_between_ranks_are_a_fault(tmp_path, call):
    kernel = f"""
    @cuda.jit
    def kernel(ws, out):
        x = cuda.shared.array(4, np.int64)
        n = 1 + ws.rank
        x[2 * cuda.threadIdx.x : 2 * cuda.threadIdx.x + 2] = 1
        {call}
    """
    host = """
    ws = comm.device_workspace(blocks=1, threads=2, bytes=64)
    kernel[1, 2](ws.ctx, out)
    comm.synchronize()
    """
    report = run(tmp_path, kernel, host, launch="")
    assert DIFFERENT[call] in str(report)
    assert report.fault.kind == "result"
    assert report.fault.places[0].code == call


CHANNELS = """
    mem = comm.rendezvous(x)
    other = comm.zeros(1, np.int64)
    mem = comm.rendezvous(other, channels=130)
    kernel[1, 1](mem.ctx, out)
    comm.synchronize()
    {more}
"""


@pytest.mark.parametrize(
    ("channel", "more", "text"),
    [
        (129, "", None),
        (130, "", "of channels 0 to 129"),
        (0, "comm.rendezvous(other, channels=131)", "at most 130 channels"),
        (
            0,
            "comm.rendezvous(x, channels=128 + comm.rank)",
            "calls rendezvous at byte 0 with channels=129",
        ),
    ],
)
def test_a_pad_has_as_many_channels_as_asked_for(tmp_path, channel, more, text):
    kernel = f"""
    @cuda.jit
    def kernel(ctx, out):
        symm.barrier(ctx, {channel})
    """
    report = run(tmp_path, kernel, CHANNELS.format(more=more), launch="")
    assert report.complete if text is None else text in str(report), str(report)


def test_roots_that_differ_are_a_fault(tmp_path):
    kernel = """
    @cuda.jit
    def kernel(ws, out):
        mine = cuda.local.array(1, np.int32)
        mine[0] = 7
        symm.broadcast(ws, mine, ws.rank, items=True)
    """
    host = """
    ws = comm.device_workspace(blocks=1, threads=4, bytes=64)
    kernel[1, 1](ws.ctx, out)
    comm.synchronize()
    """
    report = run(tmp_path, kernel, host, launch="")
    assert report.fault.kind == "result"


@pytest.mark.parametrize("team", ["None", "symm.Team.row(ctx, 2)"])
def test_grid_barriers_and_teams(tmp_path, team):
    kernel = """
    @cuda.jit
    def kernel(ctx, team, out):
        t, b, partner = cuda.threadIdx.x, cuda.blockIdx.x, ctx.rank ^ 1
        symm.peer_array(ctx, partner, (2, 2), np.int64)[b, t] = 1 + ctx.rank
        if symm.grid_barrier(ctx, 0, team):
            mine = symm.peer_array(ctx, ctx.rank, (2, 2), np.int64)
            out[2 * b + t] = mine[1 - b, 1 - t]
    """
    host = f"""
    kernel[2, 2](ctx, {team}, out)
    comm.synchronize()
    assert list(out.copy_to_host()[:4]) == 4 * [1 + (comm.rank ^ 1)]
    """
    ranks = 2 if team == "None" else 4
    report = run(tmp_path, kernel, host, ranks, launch="")
    assert report.complete, str(report)
    # Each rank's two blocks arrive in two orders.
    assert report.coverage[0].orders == 2**ranks


def test_fences_make_relaxed_accesses_release_and_acquire(tmp_path):
    kernel = """
    @cuda.jit
    def kernel(ctx, out):
        mine = symm.peer_address(ctx, ctx.rank)
        there = symm.peer_address(ctx, (ctx.rank + 1) % ctx.size)
        symm.st_u64(there, 5)
        {before}
        symm.st_relaxed_sys_u64(there + 8, 1)
        while symm.ld_relaxed_sys_u64(mine + 8) != 1:
            pass
        {after}
        out[0] = symm.ld_u64(mine)
    """
    fence = "symm.fence_acq_rel_sys()"
    system = "cuda.threadfence_system()"
    host = "assert found[0] == 5"
    right = run(tmp_path, kernel.format(before=fence, after=system), host, 2, "[1, 1]")
    assert right.complete, str(right)
    local = "cuda.threadfence()"
    for before, after in ((fence, "pass"), ("pass", fence), (local, fence)):
        given = kernel.format(before=before, after=after)
        assert run(tmp_path, given, host, 2, "[1, 1]").fault.kind == "race"


def test_fences_of_a_gpu_order_its_blocks(tmp_path):
    kernel = """
    @cuda.jit
    def kernel(ctx, out):
        if cuda.blockIdx.x == 0:
            out[1] = 5
            cuda.threadfence()
            cuda.atomic.add(out, 0, 1)
        else:
            while cuda.atomic.add(out, 0, 0) != 1:
                pass
            cuda.threadfence()
            out[2] = out[1]
    """
    right = run(tmp_path, kernel, "assert found[2] == 5", 1, "[2, 1]")
    assert right.complete, str(right)
    wrong = kernel.replace("cuda.threadfence()", "pass", 1)
    assert run(tmp_path, wrong, "", 1, "[2, 1]").fault.kind == "race"


def test_threads_of_three_dimensions_and_warps(tmp_path):
    kernel = """
    @cuda.jit
    def kernel(ctx, out):
        i = cuda.threadIdx
        flat = i.x + 2 * (i.y + 2 * i.z)
        x, y, z = cuda.grid(3)
        assert (x, y, z) == (i.x + 2 * cuda.blockIdx.x, i.y, i.z)
        assert cuda.gridsize(1) == 4
        assert cuda.laneid == flat
        total = flat
        for by in (1, 2, 4):
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, by)
        assert cuda.ballot_sync(0xFFFFFFFF, flat % 2) == 0b10101010
        if cuda.syncthreads_count(flat < 3) == 3 and cuda.syncthreads_and(1):
            out[8 * cuda.blockIdx.x + flat] = total
        dynamic = cuda.shared.array(0, np.int64)
        dynamic[flat] = flat
        cuda.syncwarp()
        assert dynamic[7 - flat] == 7 - flat
    """
    host = "assert list(found[:16]) == 16 * [28]"
    report = run(tmp_path, kernel, host, 1, "[2, (2, 2, 2), 0, 64]")
    assert report.complete, str(report)


def test_shuffles_order_no_accesses(tmp_path):
    kernel = """
    @cuda.jit
    def kernel(ctx, out):
        s = cuda.shared.array(4, np.int64)
        t = cuda.threadIdx.x
        s[t] = t
        cuda.{call}
        out[t] = s[3 - t]
    """
    assert run(tmp_path, kernel.format(call="syncwarp()"), "", 1).complete
    shuffle = "shfl_sync(0xFFFFFFFF, t, 0)"
    assert run(tmp_path, kernel.format(call=shuffle), "", 1).fault.kind == "race"


def test_collectives_of_the_host_copy_and_order(tmp_path):
    host = """
    n, r = comm.size, comm.rank
    mine = cuda.to_device(np.arange(4 * n) + 100 * r)
    every = [np.arange(4 * n) + 100 * q for q in range(n)]
    total = comm.all_reduce(mine)
    shard = comm.reduce_scatter(mine, op="max")
    gathered = comm.all_gather(mine)
    turned = comm.all_to_all(mine)
    comm.broadcast(mine, root=1)
    comm.synchronize()
    assert (total.copy_to_host() == sum(every)).all()
    assert (shard.copy_to_host() == every[-1][4 * r : 4 * r + 4]).all()
    assert (gathered.copy_to_host() == np.stack(every)).all()
    wanted = np.concatenate([each[4 * r : 4 * r + 4] for each in every])
    assert (turned.copy_to_host().ravel() == wanted).all()
    assert (mine.copy_to_host() == every[1]).all()
    world = MPI.COMM_WORLD
    assert world.allreduce(r, MPI.MAX) == n - 1
    assert world.allgather(r) == list(range(n))
    assert world.gather(r) == (list(range(n)) if r == 0 else None)
    sums = np.zeros(2)
    world.Allreduce(np.ones(2), sums, MPI.SUM)
    assert (sums == n).all()
    """
    assert run(tmp_path, "", host, [2, 3], launch="").complete


def test_a_collective_orders_kernels(tmp_path):
    kernel = """
    @cuda.jit
    def put(ctx):
        symm.peer_array(ctx, (ctx.rank + 1) % ctx.size, 1, np.int64)[0] = 3

    @cuda.jit
    def read(ctx, out):
        out[0] = symm.peer_array(ctx, ctx.rank, 1, np.int64)[0]
    """
    host = """
    put[1, 1](ctx)
    {between}
    read[1, 1](ctx, out)
    assert out.copy_to_host()[0] == 3
    """

    def explored(between):
        return run(tmp_path, kernel, host.format(between=between), launch="")

    assert explored("comm.barrier()").complete
    assert explored("comm.synchronize(); MPI.COMM_WORLD.Barrier()").complete
    assert explored("pass").fault.kind == "race"
    # MPI orders hosts, which do not wait for their kernels.
    assert explored("MPI.COMM_WORLD.Barrier()").fault.kind == "race"


def test_numbers_are_stored_as_on_a_gpu(tmp_path):
    kernel = """
    @cuda.jit
    def kernel(ctx, out):
        small = cuda.local.array(3, np.uint8)
        small[0] = 300
        small[1] = -1
        out[0] = small[0]
        out[1] = small[1]
        cuda.atomic.max(out, 2, 9)
        out[3] = symm.atomic_add(out, 4, 2.0)
    """
    host = "assert list(found[:5]) == [44, 255, 9, 0, 2]"
    assert run(tmp_path, kernel, host, 1, "[1, 1]").complete
    assert np.uint8(300 & 255) == 44


def test_a_loop_with_an_end_is_no_wait(tmp_path):
    kernel = """
    @cuda.jit
    def kernel(ctx, out):
        word = symm.peer_address(ctx, ctx.rank)
        for _ in range(3):
            if symm.ld_acquire_sys_u32(word) == 1:
                out[0] = 1
    """
    assert run(tmp_path, kernel, "", 1, "[1, 1]").complete


def test_two_loads_on_one_line_are_no_loop(tmp_path):
    kernel = """
    @cuda.jit
    def kernel(ctx, out):
        if ctx.rank == 0:
            symm.st_relaxed_sys_u32(symm.peer_address(ctx, 1), 1)
        else:
            word = symm.peer_address(ctx, 1)
            out[0] = symm.ld_relaxed_sys_u32(word) + symm.ld_relaxed_sys_u32(word)
    """
    report = run(tmp_path, kernel, "", 2, "[1, 1]")
    assert report.complete, str(report)
    assert report.coverage[0].orders == 3  # the sum is 0, 1 or 2


def test_threads_may_store_the_same_but_nothing_else(tmp_path):
    kernel = """
    @cuda.jit
    def kernel(ctx, out):
        out[0] = {value}
    """
    assert run(tmp_path, kernel.format(value="7"), "", 1).complete
    other = run(tmp_path, kernel.format(value="cuda.threadIdx.x"), "", 1)
    assert other.fault.kind == "race"
