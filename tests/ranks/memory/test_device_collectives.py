"""Collectives that a user's own kernels call, many times within one kernel."""

import numpy as np
import pytest
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.environment import SIMULATED
from tests import operators
from tests.ranks.helpers import get, of_one_island, put, same

pytestmark = of_one_island

BLOCKS, THREADS, STEPS = 2, 4, 5
COUNT = 5  # elements of a shard, which are not whole vectors


@cuda.jit(device=True)
def farthest(a, b):
    """Not commutative: of two elements equally far from 0 the first one."""
    return a if abs(a) >= abs(b) else b


def starting(size):
    """Return a kernel that starts a collective of each kind before it waits for one.

    Again and again: the first wait of a round follows the first start of the next.
    """
    whole = COUNT * size

    @cuda.jit
    def start_all(ws, given, out, rounds, ok):
        block, thread, width = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        sums = cuda.shared.array((2, COUNT), np.float32)
        x = cuda.shared.array((4, whole), np.float32)
        y = cuda.shared.array((4, whole), np.float32)
        for i in range(thread, COUNT, width):
            sums[0, i] = given[block, i]
        symm.all_reduce_start(ws, sums[0])
        good = True
        for step in range(rounds):
            for k in range(4):
                for i in range(thread, whole, width):
                    x[k, i] = given[block, i % COUNT] + i + k + 10 * ws.rank
            symm.reduce_scatter_start(ws, x[0])
            symm.all_gather_start(ws, x[1, :COUNT])
            symm.broadcast_start(ws, x[2], step % size)
            symm.all_to_all_start(ws, x[3])
            good = symm.all_reduce_wait(ws, sums[step % 2]) and good
            if step + 1 < rounds:
                for i in range(thread, COUNT, width):
                    sums[1 - step % 2, i] = sums[step % 2, i] + ws.rank
                symm.all_reduce_start(ws, sums[1 - step % 2])
            good = symm.reduce_scatter_wait(ws, x[0], y[0, :COUNT], farthest) and good
            good = symm.all_gather_wait(ws, x[1, :COUNT], y[1]) and good
            good = symm.broadcast_wait(ws, x[2], step % size) and good
            good = symm.all_to_all_wait(ws, x[3], y[3]) and good
        for i in range(thread, COUNT, width):
            out[block, 0, i] = sums[(rounds - 1) % 2, i]
            out[block, 1, i] = y[0, i]
        for i in range(thread, whole, width):
            out[block, 2, i] = y[1, i]
            out[block, 3, i] = x[2, i]
            out[block, 4, i] = y[3, i]
        ok[block, thread] = good

    return start_all


def starts_by_numpy(given, rounds, rank):
    """Return what a rank's block has after so many rounds of that kernel."""
    size = len(given)
    sums = given.sum(0)
    for _ in range(rounds - 1):
        sums = size * sums + np.arange(size).sum()
    ranks, places = np.arange(size)[:, None], np.arange(COUNT * size)
    x = [np.tile(given, size) + places + k + 10 * ranks for k in range(4)]
    shards = slice(COUNT * rank, COUNT * (rank + 1))
    mine = x[0][:, shards]
    return (
        sums,
        mine[np.abs(mine).argmax(0), np.arange(COUNT)],
        x[1][:, :COUNT].reshape(-1),
        x[2][(rounds - 1) % size],
        x[3][:, shards].reshape(-1),
    )


def ranging(size):
    """Return a kernel whose ranks have different numbers of elements."""
    few = tuple(range(size))
    whole = size * (size - 1) // 2
    room = whole + 1

    @cuda.jit
    def exchange_ranges(ws, counts, sends, recvs, given, out, ok):
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        mine, total, sent, received = counts[ws.rank], 0, 0, 0
        for r in range(size):
            total += counts[r]
            sent += sends[r]
            received += recvs[r]
        x, y = given[block], out[block]
        good = symm.all_gather(ws, x[:mine], y[0, :total], counts=counts)
        symm.reduce_scatter_start(ws, x[:total], counts=counts)
        symm.exscan_start(ws, y[3, :5])
        symm.all_to_all_start(ws, x[:sent], send_counts=sends)
        z = y[1, :mine]
        done = symm.reduce_scatter_wait(ws, x[:total], z, farthest, False, counts)
        good = symm.exscan_wait(ws, y[3, :5], "max") and good and done
        z = y[2, :received]
        good = symm.all_to_all_wait(ws, x[:sent], z, False, sends, recvs) and good
        held = cuda.local.array(size, np.float32)
        every = cuda.local.array(room, np.float32)
        for i in range(ws.rank):
            held[i] = 100 * ws.rank + 10 * thread + i
        good = symm.all_gather(ws, held[: ws.rank], every[:whole], True, few) and good
        every[whole] = -7 - ws.rank
        good = symm.exscan(ws, every[whole:], farthest, items=True) and good
        for i in range(room):
            y[4 + thread, i] = every[i]
        ok[block, thread] = good

    return exchange_ranges


@pytest.mark.parametrize("most", [3, 40])
def test_ranks_may_have_different_numbers_of_elements(comm, world, most):
    """None, fewer than a vector, and more than a vector for each thread."""
    size, rank = comm.size, comm.rank
    lot = np.random.default_rng(most)
    counts = lot.integers(0, most + 1, size)
    sends = lot.integers(0, most + 1, (size, size))
    counts[0], sends[-1, 0] = most, 0
    given = lot.integers(-9, 9, (size, BLOCKS, 40 * size)).astype(np.float32)
    held = np.zeros((BLOCKS, 4 + THREADS, 40 * size), np.float32)
    held[:, 3] = given[rank]
    numbers = counts, sends[rank], sends[:, rank].copy(), given[rank], held
    *args, out = map(cuda.to_device, numbers)
    ws, ok = comm.device_workspace(BLOCKS, THREADS, 4 * 40, depth=4).ctx, flags()
    ranging(size)[BLOCKS, THREADS](ws, *args, out, ok)
    comm.synchronize()
    assert get(ok).all()
    ends = counts.cumsum()
    begins, mine = sends.cumsum(1) - sends, slice(ends[rank] - counts[rank], ends[rank])
    for block, found in enumerate(get(out)):
        every = given[:, block]
        shard = every[:, mine]
        ranges = [every[r, begins[r, rank] :][: sends[r, rank]] for r in range(size)]
        for row, wanted in enumerate(
            [
                np.concatenate(
                    [each[:n] for each, n in zip(every, counts, strict=True)]
                ),
                shard[np.abs(shard).argmax(0), np.arange(counts[rank])],
                np.concatenate(ranges),
                every[:rank, :5].max(0, initial=-np.inf),
            ]
        ):
            assert found[row, : len(wanted)].tolist() == wanted.tolist(), row
        for thread in range(THREADS):
            items = [100 * r + 10 * thread + i for r in range(size) for i in range(r)]
            # Of an exscan by a function, rank 0 keeps its own.
            items.append(-6 - max(rank, 1))
            assert found[4 + thread, : len(items)].tolist() == items
    world.barrier()


def halves(ctx):
    """Return this rank's team: the upper or the lower half of the ranks, reversed."""
    ranks = list(range(ctx.size))[::-1]
    teams = ranks[: ctx.size // 2], ranks[ctx.size // 2 :]
    return symm.Team.of(ctx, next(team for team in teams if ctx.rank in team))


@cuda.jit
def exchange_in_a_team(ws, half, out, ok):
    """Use one context for a peer's memory, signals and collectives; one for a team."""
    block, thread = cuda.blockIdx.x, cuda.threadIdx.x
    right = (ws.rank + 1) % ws.size
    if thread == 0:
        symm.peer_array(ws, right, BLOCKS, np.int64)[block] = 7 * ws.rank
    good = symm.barrier(ws, block)
    one, every = cuda.local.array(1, np.int64), cuda.shared.array(64, np.int64)
    one[0] = symm.peer_array(ws, ws.rank, BLOCKS, np.int64)[block]
    good = symm.all_reduce(ws, one, items=True) and good
    out[block, 0] = one[0]
    sent = cuda.shared.array(1, np.int64)
    for step in range(3):
        sent[0] = ws.rank + 100 * step
        good = symm.all_gather(half, sent, every[: half.team.size]) and good
        one[0] = ws.rank
        good = symm.broadcast(half, one, half.team.size - 1, items=True) and good
        out[block, 1] = one[0]
        good = symm.exscan(half, one, items=True) and good
        out[block, 2] = one[0]
    if thread < half.team.size:
        out[block, 3 + thread] = every[thread]
    ok[block, thread] = good


def test_a_team_has_collectives_and_one_context_has_all(comm, world):
    memory = comm.rendezvous(comm.zeros(BLOCKS, np.int64))
    sizes, team = (BLOCKS, THREADS, 8 * THREADS), halves(memory.ctx)
    ws = comm.device_workspace(*sizes, memory=memory).ctx
    half = comm.device_workspace(*sizes, team=team).ctx
    out, ok = cuda.to_device(np.zeros((BLOCKS, 3 + THREADS), np.int64)), flags()
    exchange_in_a_team[BLOCKS, THREADS](ws, half, out, ok)
    comm.synchronize()
    assert get(ok).all()
    total, last = 7 * sum(range(comm.size)), team.ranks[-1]
    wanted = [total, last, last * team.place]
    wanted += [rank + 200 for rank in team.ranks]
    assert get(out)[:, : len(wanted)].tolist() == [wanted] * BLOCKS
    world.barrier()


def test_a_failure_in_a_team_names_its_ranks(world):
    if world.size != 4:
        return
    comm = ns.Communicator(world, timeout=0.3)
    team = halves(comm.rendezvous(comm.zeros(1)).ctx)
    ws = comm.device_workspace(BLOCKS, THREADS, 8, team=team).ctx
    if comm.rank == 3:
        one = cuda.to_device(np.zeros(1, np.int64))
        reduce_words[1, 1](ws, 7, one, one)
    world.barrier()
    text = "rank 3 waited for rank 2 in all_reduce in a kernel, block 0, epoch 1"
    with pytest.raises(ns.CollectiveTimeout, match=text):
        comm.synchronize()
    world.barrier()
    comm.close()


@cuda.jit
def gather_ranges(ws, counts, x, out):
    symm.all_gather(ws, x, out, counts=counts)


def test_counts_may_have_few_bits(comm, world):
    each = 100  # two of them are more than a byte has
    ws = comm.device_workspace(1, 32, 8 * each).ctx
    counts = cuda.to_device(np.full(comm.size, each, np.int8))
    x = cuda.to_device(np.full(each, comm.rank))
    out = cuda.to_device(np.full(comm.size * each, -1))
    gather_ranges[1, 32](ws, counts, x, out)
    comm.synchronize()
    assert (get(out) == np.arange(comm.size).repeat(each)).all()
    world.barrier()


@cuda.jit
def scan_averages(ws, x):
    symm.exscan(ws, x, "avg")


def test_what_a_kernel_may_not_scan_is_refused(comm, world):
    ws, x = comm.device_workspace(1, 2, 64).ctx, cuda.to_device(np.ones(4))
    # On GPUs by Numba, which compiles the kernel; in the simulator by the first call.
    with pytest.raises(Exception, match="exscan: op='avg' is not defined"):
        scan_averages[1, 1](ws, x)
    world.barrier()


def reducing(op):
    """Return a kernel that reduces the row of each block."""

    @cuda.jit
    def reduce_rows(ws, rows, ok):
        good = symm.all_reduce(ws, rows[cuda.blockIdx.x], op)
        ok[cuda.blockIdx.x, cuda.threadIdx.x] = good

    return reduce_rows


def flags(value=0):
    return cuda.to_device(np.full((BLOCKS, THREADS), value))


def integers(comm, *shape):
    """Return floats whose sums are exact."""
    lot = np.random.default_rng(7)
    return lot.integers(-9, 9, (comm.size, *shape)).astype(np.float32)


def test_collectives_are_in_flight_together(comm, world):
    """Five, of different sizes; the second launch continues with the epochs."""
    kernel, size = starting(comm.size), comm.size
    ws = comm.device_workspace(BLOCKS, THREADS, 4 * COUNT * size, depth=8).ctx
    given = integers(comm, BLOCKS, COUNT)
    x, ok = cuda.to_device(given[comm.rank]), flags()
    out = cuda.to_device(np.zeros((BLOCKS, 5, COUNT * size), np.float32))
    for rounds in (3, 2):
        kernel[BLOCKS, THREADS](ws, x, out, rounds, ok)
        comm.synchronize()
        assert get(ok).all()
        for block in range(BLOCKS):
            wanted = starts_by_numpy(given[:, block], rounds, comm.rank)
            for found, each in zip(get(out)[block], wanted, strict=True):
                assert found[: each.size].tolist() == each.tolist()
    world.barrier()


NAMES = list(operators.ELEMENTS)
OPS = [
    (name, operators.dtypes.operators(kind)[i % len(operators.dtypes.operators(kind))])
    for i, (name, kind) in enumerate(operators.ELEMENTS.items())
]


@pytest.mark.parametrize(("name", "op"), OPS)
def test_the_bits_are_those_of_the_hosts_calls(comm, world, name, op):
    count = 3 if SIMULATED else 37
    kind = operators.ELEMENTS[name]
    if kind.narrow and not SIMULATED and comm.device.compute_capability < (8, 9):
        pytest.skip("8-bit floats need compute capability 8.9")
    inputs = [operators.random(name, BLOCKS * count, rank) for rank in range(comm.size)]
    ws = comm.device_workspace(BLOCKS, THREADS, kind.itemsize * count).ctx
    rows, x = (cuda.device_array((BLOCKS, count), kind.dtype) for _ in range(2))
    for array in (rows, x):
        put(array, inputs[comm.rank].reshape(BLOCKS, count))
    ok = flags()
    with np.errstate(all="ignore"):
        reducing(op)[BLOCKS, THREADS](ws, rows, ok)
        wanted = get(comm.all_reduce(x, op=op))
        comm.synchronize()
    assert get(ok).all()
    parts = np.float64 if name == "complex128" else kind.dtype
    found, called, total = (
        array.reshape(-1).view(parts)
        for array in (get(rows), wanted, operators.wanted(inputs, op))
    )
    assert same(found, called)
    assert same(called, total)
    world.barrier()


@cuda.jit
def call_alone(ws, out, ok):
    """Two calls of rank 0 alone: neither succeeds, in any thread."""
    block, thread = cuda.blockIdx.x, cuda.threadIdx.x
    one = cuda.shared.array(1, np.int64)
    if thread == 0:
        one[0] = 5
    if ws.rank == 0:
        first = symm.all_reduce(ws, one)
        second = symm.broadcast(ws, one, 0)
        ok[block, thread] = 10 * first + second
    cuda.syncthreads()  # orders the 5 before the others' load
    out[block] = one[0]


def test_calls_without_counterparts_end_by_the_deadline(world):
    """They store nothing, and so do those of the next launch."""
    comm = ns.Communicator(world, timeout=0.3)
    ws = comm.device_workspace(BLOCKS, THREADS, 8).ctx
    ok, out = flags(7), cuda.to_device(np.zeros(BLOCKS, np.int64))
    for _ in range(2):
        call_alone[BLOCKS, THREADS](ws, out, ok)
    text = r"waited for rank \d in all_reduce in a kernel, block \d, epoch 1"
    if comm.size > 1:
        for first in (True, False):  # the others' kernels wait for nobody
            if first == (comm.rank == 0):
                with pytest.raises(ns.CollectiveTimeout, match=text):
                    comm.synchronize()
            world.barrier()
        assert (get(ok) == (7 if comm.rank else 0)).all()
        assert (get(out) == 5).all()
    world.barrier()
    comm.close()


@cuda.jit
def broadcast_from(ws, root, ok):
    one = cuda.shared.array(1, np.int64)
    one[0] = 5
    ok[0, cuda.threadIdx.x] = symm.broadcast(ws, one, root)


def test_roots_that_differ_are_found(world):
    if world.size == 1:
        return
    comm = ns.Communicator(world, timeout=5)
    ws, ok = comm.device_workspace(1, THREADS, 8).ctx, flags(7)
    broadcast_from[1, THREADS](ws, 1 if comm.rank == 1 else 0, ok)
    world.barrier()
    text = r"expects rank \d to be the root of a broadcast in a kernel"
    with pytest.raises(ns.CallMismatch, match=text):
        comm.synchronize()
    assert get(ok)[0].tolist() == [0] * THREADS
    world.barrier()
    comm.close()


@cuda.jit
def of_different_sizes(ws, what, ok):
    """Make calls that differ between ranks by less than a vector."""
    given = cuda.shared.array(16, np.int64)
    out = cuda.shared.array(64, np.int64)
    odd, every = 1 if ws.rank == 1 else 0, ws.size
    if what == 0:
        good = symm.all_reduce(ws, given[: 5 + odd])
    elif what == 1:
        good = symm.all_reduce(ws, given[:odd])
    elif what == 2:
        good = symm.broadcast(ws, given[: 6 - odd], 1)
    elif what == 3:
        counts = cuda.local.array(16, np.int32)
        for r in range(every):
            counts[r] = 1
        for r in range(2):
            counts[(ws.rank + r) % every] += odd
        total = every + 2 * odd
        mine = counts[ws.rank]
        good = symm.all_gather(ws, given[:mine], out[:total], False, counts[:every])
    elif ws.rank == 1:
        good = symm.exscan(ws, given[:5])
    else:
        good = symm.all_reduce(ws, given[:5])
    ok[0, cuda.threadIdx.x] = good


@pytest.mark.parametrize("what", range(5))
def test_sizes_that_differ_between_ranks_are_found(world, what):
    if world.size == 1:
        return
    comm = ns.Communicator(world, timeout=5, debug=True)
    ws, ok = comm.device_workspace(1, THREADS, 64).ctx, flags(7)
    of_different_sizes[1, THREADS](ws, what, ok)
    world.barrier()
    text = r"expects \d+ bytes of rank \d in a collective in a kernel, block 0, and"
    with pytest.raises(ns.CallMismatch, match=text):
        comm.synchronize()
    assert 0 in get(ok)[0].tolist()
    world.barrier()
    comm.close()


@cuda.jit
def misuse(ws, what, out):
    """Make one mistake, or none."""
    few = cuda.shared.array(4, np.int64)
    many = cuda.shared.array(64, np.int64)
    if what == 3:
        symm.all_reduce(ws, many)
    elif what == 4:
        symm.broadcast(ws, few, -1)
    elif what == 5:
        symm.all_gather(ws, few, many)
    elif what == 6:
        for _ in range(2):
            symm.all_reduce_start(ws, few)
    elif what == 7:
        symm.all_reduce_wait(ws, few)
    elif what == 8:
        symm.all_reduce_start(ws, few)
    else:
        symm.all_reduce(ws, few)
    out[0] = 1


MISTAKES = [  # the launch; the text; its end in the simulator
    ((1, 4), "", ""),
    ((3, 4), "a collective in block 2 of 4", "threads, 2 blocks of 32 threads;"),
    ((1, 64), "a collective in block 0 of 64", "threads, 2 blocks of 32 threads;"),
    ((1, 4), "thread has 8 vectors", ", which has room for 1;"),
    # A GPU's record has 24 bits.
    ((1, 4), "a broadcast from rank (-1|16777215)", "the workspace, 0 to 0;"),
    ((1, 4), "of 4 elements with an output of 64", ", 4 and 4 elements;"),
    ((1, 4), "block 0, in which 1 collectives are started", "; its depth is 1;"),
    ((1, 4), "block 0, in which 0 collectives are started", "; its depth is 1;"),
]
if SIMULATED:
    text = r"test_device_collectives.py:\d+: all_reduce_start: .* got none by thread 0"
    MISTAKES.append(((1, 4), text, " of block 0; call all_reduce_wait"))


@pytest.mark.parametrize("what", range(len(MISTAKES)))
def test_mistakes_are_found(world, what):
    if world.rank > 0:
        world.barrier()
        return
    launch, text, more = MISTAKES[what]
    with ns.Communicator(MPI.COMM_SELF, timeout=5, debug=True) as comm:
        ws, out = comm.device_workspace(2, 4, 64).ctx, flags()
        if what == 0:
            misuse[launch](ws, what, out[0])
            comm.synchronize()
            assert get(out)[0, 0] == 1
        elif SIMULATED:
            with pytest.raises(ns.ArgumentError, match=f"{text}.*{more}"):
                misuse[launch](ws, what, out[0])
        else:
            misuse[launch](ws, what, out[0])
            with pytest.raises(ns.CollectiveError, match=text):
                comm.synchronize()
    world.barrier()


@cuda.jit
def reduce_words(ws, op, x, floats):
    symm.all_reduce(ws, x)


@cuda.jit
def access_a_peer(ws):
    symm.barrier(ws, 0)
    symm.peer_array(ws, 0, 1, np.int8)


@cuda.jit
def reduce_bits_of_floats(ws, op, x, floats):
    symm.all_reduce(ws, floats, "band")


@cuda.jit
def gather_into_another_type(ws, op, x, floats):
    symm.all_gather(ws, x, floats)


@cuda.jit
def reduce_with_gaps(ws, op, x, floats):
    symm.all_reduce(ws, x[::2])


@cuda.jit
def reduce_by_a_number(ws, op, x, floats):
    symm.all_reduce(ws, x, op)


@cuda.jit
def gather_by_counts_of_two_types(ws, op, x, floats):
    symm.all_gather(ws, x, x, counts=(op, floats[0]))


@cuda.jit
def gather_by_counts_of_two_widths(ws, op, x, floats):
    symm.all_gather(ws, x, x, counts=(np.int32(op), op))


WRONG = [
    *(reduce_words, reduce_bits_of_floats, gather_into_another_type),
    *(reduce_with_gaps, reduce_by_a_number),
    *(gather_by_counts_of_two_types, gather_by_counts_of_two_widths),
]


REFUSED = [  # the first one with another context
    (ns.ArgumentError, "all_reduce: expected the context of a workspace, got Context"),
    (ns.ArgumentError, "all_reduce: expected an operator of float32, got op='band'"),
    (ns.ArgumentError, "all_gather: expected an output of int64, got one of float32"),
    (
        ns.ArgumentError,
        "expected contiguous arrays of at least one dimension, got a strided",
    ),
    (ns.ArgumentError, "all_reduce: expected an operator, got op=7"),
    (ns.ArgumentError, "a count for each of . ranks, all of one type of integers, got"),
    (ns.ArgumentError, "a count for each of . ranks, all of one type of integers, got"),
]


@pytest.mark.skipif(not SIMULATED, reason="such kernels do not compile")
def test_wrong_arguments_are_refused(comm, world):
    ctx = comm.rendezvous(comm.zeros(1)).ctx
    made = comm.device_workspace(blocks=1, threads=1, bytes=64)
    x, floats = (cuda.to_device(np.zeros(4, kind)) for kind in (np.int64, np.float32))
    for what, (kind, text) in enumerate(REFUSED):
        ws = ctx if what == 0 else made.ctx
        with pytest.raises(kind, match=text):
            WRONG[what][1, 1](ws, 7, x, floats)
    with pytest.raises(ns.ArgumentError, match="got DeviceWorkspace; pass its attribu"):
        reduce_words[1, 1](made, 7, x, floats)
    with pytest.raises(ns.ArgumentError, match="a power of two, got 3; pass 4"):
        comm.device_workspace(1, 4, 8, depth=3)
    for wrong in ((0, 4, 8), (1, 1025, 8), (1, 4, 0), (True, 4, 8), (1, 4, 8, 128)):
        with pytest.raises(ns.ArgumentError, match=r"device_workspace: .* from 1 to"):
            comm.device_workspace(*wrong)
    if comm.size > 1:
        with pytest.raises(ns.ArgumentError, match="every rank must pass the same"):
            comm.device_workspace(1, 4, 8 + comm.rank)
    for wrong in (7, (0, 1), symm.Team(1, 2, (0, 1)), symm.Team(-1, 1, (5,))):
        with pytest.raises(ns.ArgumentError, match=r"a team of this rank|Team: expec"):
            comm.device_workspace(1, 4, 8, team=wrong if comm.rank == 0 else None)
    if comm.size > 1:
        alone = symm.Team.of(ctx, [0]) if comm.rank == 0 else None
        with pytest.raises(
            ns.ArgumentError, match=r"has the team .* must pass the same"
        ):
            comm.device_workspace(1, 4, 8, team=alone)
    closing = comm.dup()
    theirs = closing.rendezvous(closing.zeros(1))
    for wrong in (ctx, theirs):
        with pytest.raises(ns.ArgumentError, match="of this communicator's rendezvous"):
            comm.device_workspace(1, 4, 8, memory=wrong)
    with pytest.raises(ns.ArgumentError, match="expected at most the buffer's, 0, got"):
        access_a_peer[1, 1](made.ctx)
    kept = closing.device_workspace(1, 1, 64)
    ctx = kept.ctx
    closing.close()
    with pytest.raises(ns.ClosedError):
        reduce_words[1, 1](ctx, 7, x, floats)
    with pytest.raises(ns.ClosedError):
        _ = kept.ctx
    world.barrier()
