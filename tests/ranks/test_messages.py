"""Sends and receives, their groups, and the collectives that are made of them."""

import contextlib
import gc
import random
import time

import numpy as np
import pytest
from mpi4py import MPI

import numba_symm as ns
from numba_symm.collectives.kernels import transfer
from numba_symm.collectives.kernels.transfer import most_messages
from numba_symm.collectives.protocols.workspace import (
    DEPTH,
    THREADS,
    VECTOR,
    channels_of,
    transfer_rows,
)
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import Window, meet, ordinary, put, refused

TWELVE = np.dtype([("a", np.int32), ("b", np.float64)], align=False)
DTYPES = [np.dtype(kind) for kind in (np.uint8, np.int16, np.float32, np.float64)]
DTYPES += [np.dtype(np.complex128), TWELVE]
needs_peers = pytest.mark.skipif(
    "config.pluginmanager.get_plugin('agreement').comm.size == 1",
    reason="one rank alone has nobody to send to",
)


def content(count, dtype, *seed):
    """Return elements of any bits, which all ranks can tell."""
    random = np.random.default_rng([*seed, count])
    return random.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)


class Part:
    """Elements in the middle of device memory whose rest nobody may touch."""

    def __init__(self, comm, count, dtype, host=None, symmetric=False, offset=0):
        self.dtype = dtype
        self.nbytes = count * dtype.itemsize
        offset *= dtype.itemsize
        size = offset + self.nbytes + Window.MARGIN
        # Every rank allocates, whichever it uses: allocating is collective.
        shared = comm.empty(1 << 12 if SIMULATED else 1 << 22, np.uint8)
        whole = shared[:size] if symmetric and size <= shared.size else None
        whole = ordinary(size, np.uint8) if whole is None else whole
        self.window = Window(whole, offset, self.nbytes)
        filled = np.zeros(self.nbytes, np.uint8) if host is None else host
        self.window.fill(filled.view(np.uint8))
        self.array = self.window.array.view(dtype) if count else ordinary(0, dtype)

    def read(self):
        return self.window.read().view(self.dtype)


def edges(size):
    """Return bytes of messages around where another piece or channel begins."""
    row = THREADS * VECTOR
    channels, rows = channels_of(size), transfer_rows(size)
    whole = [row, row * channels, row * channels * rows, row * channels * rows * DEPTH]
    found = {0, 1, 3, VECTOR, *(n + d for n in whole for d in (-1, 0, 1))}
    return sorted(n for n in found | {3 * whole[-1] + 5} if n >= 0)


def right_and_left(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def same(found, wanted):
    return found.tobytes() == wanted.tobytes()


def test_a_ring_of_every_size(comm, world):
    right, left = right_and_left(comm)
    calls = []
    for nbytes in edges(comm.size):
        dtype = DTYPES[0]
        x = Part(comm, nbytes, dtype, content(nbytes, dtype, comm.rank))
        out = Part(comm, nbytes, dtype)
        calls.append((nbytes, x, out))
    for _, x, out in calls:
        assert comm.sendrecv(x.array, right, out.array, left) is out.array
    comm.synchronize()
    for nbytes, x, out in calls:
        assert same(out.read(), content(nbytes, DTYPES[0], left)), nbytes
        assert same(x.read(), content(nbytes, DTYPES[0], comm.rank))
    world.barrier()


def test_types_and_places(comm, world):
    lot = random.Random(3)
    right, left = right_and_left(comm)
    calls = []
    for step in range(12 if SIMULATED else 100):
        dtype = DTYPES[step % len(DTYPES)]
        count = lot.randrange(0, 300 if SIMULATED else 200_000)
        # Where it lies differs between ranks, and changes nothing.
        mine = random.Random(100 * step + comm.rank)
        places = [
            {"symmetric": mine.random() < 0.5, "offset": mine.choice([0, 0, 1, 3])}
            for _ in range(2)
        ]
        x = Part(
            comm, count, dtype, content(count, dtype, comm.rank, step), **places[0]
        )
        out = Part(comm, count, dtype, **places[1])
        calls.append((count, dtype, step, out))
        comm.sendrecv(x.array, right, out.array, left)
        if step % 4 == 0:  # other kernels in between
            comm.all_reduce(comm.zeros(50))
    comm.synchronize()
    for count, dtype, step, out in calls:
        assert same(out.read(), content(count, dtype, left, step)), (count, dtype)
    world.barrier()


@needs_peers
def test_a_sender_far_ahead_of_its_receivers(comm, world):
    """Calls that nobody has received wait their turn, and none is lost."""
    calls = 40 if SIMULATED else 1000
    dtype, sizes = DTYPES[2], (3, 700, 40)
    arrays = [ordinary(sizes[call % 3], dtype) for call in range(calls)]
    wanted = [content(each.size, dtype, call) for call, each in enumerate(arrays)]
    if comm.rank == 0:
        for x, host in zip(arrays, wanted, strict=True):
            put(x, host)
        world.barrier()
        for x in arrays:
            for peer in range(1, comm.size):
                comm.send(x, peer)
        comm.synchronize()
    else:
        world.barrier()
        time.sleep(0.3 * comm.rank)
        for out in arrays:
            comm.recv(out, 0)
        comm.synchronize()
        for call, (out, host) in enumerate(zip(arrays, wanted, strict=True)):
            assert same(out.copy_to_host(), host), call
    world.barrier()


@needs_peers
def test_a_group_goes_on_together(comm, world):
    """All send first, messages that no buffer holds; each to all, in a group."""
    dtype = DTYPES[2]
    count = edges(comm.size)[-1] // 4
    outs = {}
    with comm.group():
        for peer in range(comm.size):
            if peer != comm.rank:
                x = Part(comm, count, dtype, content(count, dtype, comm.rank, peer))
                comm.send(x.array, peer)
        del x  # kept until it is sent
        total = comm.all_reduce(comm.zeros(10))
        for peer in reversed(range(comm.size)):
            if peer != comm.rank:
                outs[peer] = Part(comm, count, dtype)
                comm.recv(outs[peer].array, peer)
    comm.synchronize()
    for peer, out in outs.items():
        assert same(out.read(), content(count, dtype, peer, comm.rank)), peer
    assert (total.copy_to_host() == 0).all()
    world.barrier()


@needs_peers
@pytest.mark.parametrize("number", [2, 3, 9])
def test_messages_of_a_pair_match_in_order(comm, world, number):
    """Whether their ranks group them or not."""
    right, left = right_and_left(comm)
    dtype, counts = DTYPES[1], [5 + 7 * (i % 4) for i in range(number)]
    xs = [ordinary(n, dtype) for n in counts]
    outs = [ordinary(n, dtype) for n in counts]
    for i, x in enumerate(xs):
        put(x, content(counts[i], dtype, comm.rank, i))

    def one_by_one():
        for out in outs:
            comm.recv(out, left)

    if comm.rank % 2:
        one_by_one()
    with comm.group():
        for x in xs:
            comm.send(x, right)
        if comm.rank % 2 == 0 and comm.rank % 4:
            one_by_one()
    if comm.rank % 4 == 0:
        one_by_one()
    comm.synchronize()
    for i, out in enumerate(outs):
        assert same(out.copy_to_host(), content(counts[i], dtype, left, i)), i
    world.barrier()


@needs_peers
def test_empty_messages_are_messages(comm, world):
    """They take their turn; in the vector forms, too, where counts are 0."""
    right, left = right_and_left(comm)
    nothing, x, out = comm.zeros(0), comm.zeros(5), comm.zeros(5)
    put(x, np.full(5, comm.rank, np.float32))
    comm.sendrecv(nothing, right, comm.zeros(0), left)
    comm.sendrecv(x, right, out, left)
    counts = [0] * comm.size
    comm.all_to_all_v(nothing, counts, counts)
    comm.gather(nothing)
    comm.synchronize()
    assert (out.copy_to_host() == left).all()
    world.barrier()


@needs_peers
def test_a_group_takes_so_many_messages_of_a_pair(comm, world):
    right, left = right_and_left(comm)
    most = most_messages(comm.size)
    x, outs = comm.zeros(1), [comm.zeros(1) for _ in range(most)]
    put(x, np.full(1, comm.rank, np.float32))
    with comm.group():
        for out in outs:
            comm.send(x, right)
            comm.recv(out, left)
        with pytest.raises(ns.ArgumentError, match="more than"):
            comm.send(x, right)  # and is not among them
    comm.synchronize()
    assert all(out.copy_to_host()[0] == left for out in outs)

    def one_more():
        with comm.group():
            for _ in range(most + 1):
                comm.send(x, right)

    refused(world, ns.ArgumentError, one_more, f"more than {most} messages")


@needs_peers
def test_numpys_integers_are_ranks(comm, world):
    """Also unsigned ones, with which nobody must calculate."""
    right, left = (np.uint8(rank) for rank in right_and_left(comm))
    x, out = comm.zeros(5), comm.zeros(5)
    put(x, np.full(5, comm.rank, np.float32))
    comm.sendrecv(x, right, out, left)
    for root in range(comm.size):
        y = comm.zeros(5)
        put(y, np.full(5, comm.rank, np.float32))
        for algorithm in ("ll", "marked", "signalled"):
            comm.broadcast(y, np.uint8(root), algorithm=algorithm)
        found = comm.reduce(y, root=np.uint8(root))
        gathered = comm.gather(x, root=np.uint8(root))
        comm.synchronize()
        assert (y.copy_to_host() == root).all()
        if comm.rank == root:
            assert (found.copy_to_host() == root * comm.size).all()
            assert (gathered.copy_to_host()[:, 0] == np.arange(comm.size)).all()
    comm.synchronize()
    assert (out.copy_to_host() == left).all()
    world.barrier()


def test_what_an_open_group_refuses(comm, world):
    for what in ("close", "synchronize", "group"):
        with contextlib.ExitStack() as open_group:
            open_group.enter_context(comm.group())
            calls = {
                "close": comm.close,
                "synchronize": comm.synchronize,
                "group": comm.group().__enter__,
            }
            refused(world, ns.ArgumentError, calls[what], f"{what}: a group is open")
    comm.barrier()
    comm.synchronize()


@needs_peers
def test_debug_mode_tells_of_one_ranks_mistake(world):
    """On all ranks, whatever it is, and of calls that differ."""
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        size, last = comm.size, comm.rank == comm.size - 1
        x, odd = comm.zeros(2 * size), comm.zeros(3 * size + 1)
        root, even = size - 1, [2 * size] * size
        plan = comm.all_reduce_init(x)

        def scatter():
            comm.scatter(odd if last else None, root, x[:3])

        def reduce_scatter_v():
            comm.reduce_scatter_v(x, [2] * size, out=x[1:3] if last else None)

        def too_many():
            with comm.group():
                for _ in range(most_messages(size) * last):
                    comm.send(x[:1], 0)
                comm.gather(x[:2])

        for root_of_all in range(size):
            comm.gather(x, root_of_all)  # remembered; what follows differs all the same
        mistakes = [
            (lambda: comm.gather(x[::2] if last else x), "contiguous"),
            (scatter, "must be a multiple"),
            (lambda: comm.all_gather_v(x, 8 if last else even), "for each"),
            (reduce_scatter_v, "overlaps"),
            (lambda: comm.gather(x, root=int(last)), "root 0"),
            (too_many, f"rank {size - 1}: group: more than"),
            (lambda: comm.barrier("no" if last else 0), f"{size - 1}: stream='no'"),
            (lambda: plan("no" if last else 0), f"{size - 1}: stream='no'"),
            *mistaken_counts(comm, x, last),
        ]
        for call, text in 2 * mistakes:
            refused(world, ns.ArgumentError, call, text)
        counts = np.full(size, 2) if last else [2] * size
        comm.all_gather_v(x[:2], counts)
        comm.reduce_scatter_v(x, counts, added)


def mistaken_counts(comm, x, last):
    """Return calls in which the last rank passes a wrong count, and what they say."""
    size, r = comm.size, comm.size - 1
    two, three = [2] * size, x[: 3 if last else 2]
    out = ordinary(three.size, np.float32)  # apart from x
    ints = ordinary(2, np.int32 if last else np.float32)
    ones, taken = [1] * size, [2 if last else 1] + [1] * (size - 1)
    return [
        (
            lambda: comm.gather_v(three, two),
            f"gather_v: rank {r} sends 3 elements (x.size) to rank 0, which expects 2 "
            f"(counts[{r}]); pass counts that agree",
        ),
        (
            lambda: comm.scatter(x, 0, out),
            f"scatter: rank 0 sends 2 elements (x.size // size) to rank {r}, which "
            "expects 3 (out.size)",
        ),
        (
            lambda: comm.scatter_v(x, two, out=out),
            f"scatter_v: rank 0 sends 2 elements (counts[{r}]) to rank {r}, which "
            "expects 3 (out.size)",
        ),
        (
            lambda: comm.all_to_all_v(x[:size], ones, taken),
            f"all_to_all_v: rank 0 sends 1 elements (send_counts[{r}]) to rank {r}, "
            "which expects 2 (recv_counts[0])",
        ),
        (lambda: comm.scatter(x, 0, ints), "int32, root 0"),
    ]


def added(a, b):
    return a + b


def test_nothing_of_a_group_is_started_after_an_error(comm, world):
    right, left = right_and_left(comm)
    x, out = comm.zeros(10), comm.zeros(10)
    with contextlib.suppress(KeyError), comm.group():
        comm.sendrecv(x, right, out, left)
        raise KeyError("a user's")
    put(x, np.full(10, comm.rank, np.float32))
    comm.sendrecv(x, right, out, left)
    comm.synchronize()
    assert (out.copy_to_host() == left).all()
    world.barrier()


def test_a_line_has_ends(comm, world):
    """A rank may send to nobody, or receive from nobody."""
    x, out = comm.zeros(30), comm.zeros(30)
    put(x, np.full(30, comm.rank, np.float32))
    put(out, np.full(30, -1, np.float32))
    right = comm.rank + 1 if comm.rank + 1 < comm.size else None
    left = comm.rank - 1 if comm.rank > 0 else None
    comm.sendrecv(x, right, out, left)
    comm.synchronize()
    assert (out.copy_to_host() == comm.rank - 1).all()
    world.barrier()


@pytest.mark.parametrize("uneven", [False, True])
def test_gather_and_scatter(comm, world, uneven):
    calls = []
    for step, dtype in enumerate(DTYPES):
        root = step % comm.size
        counts = [3 + (r * 57 + step) % 91 * uneven for r in range(comm.size)]
        counts[step % comm.size] *= step != 1  # one that has none
        if not uneven:
            counts = [17 + step] * comm.size
        parts = [content(n, dtype, r, step) for r, n in enumerate(counts)]
        wanted = np.concatenate(parts)
        x = Part(comm, counts[comm.rank], dtype, parts[comm.rank])
        back = Part(comm, counts[comm.rank], dtype)
        out = Part(comm, wanted.size, dtype)
        is_root = comm.rank == root
        if uneven:
            listed = counts if is_root else None
            found = comm.gather_v(
                x.array, listed, None, root, out.array if is_root else None
            )
            whole = found if is_root else None
            comm.scatter_v(whole, listed, None, root, back.array)
        else:
            into = out.array if is_root else None
            found = comm.gather(x.array, root, into)
            comm.scatter(found, root, back.array)
        assert found is (out.array if is_root else None)
        calls.append((is_root, wanted, out, back, parts[comm.rank]))
    comm.synchronize()
    for is_root, wanted, out, back, part in calls:
        assert same(out.read(), wanted if is_root else np.zeros_like(wanted))
        assert same(back.read(), part)
    world.barrier()


def test_new_outputs_and_their_shapes(comm, world):
    x = comm.zeros((2, 3), np.int16)
    put(x, np.full((2, 3), comm.rank, np.int16))
    found = comm.gather(x, root=comm.size - 1)
    last = comm.rank == comm.size - 1
    assert (found.shape if last else found) == ((comm.size, 2, 3) if last else None)
    mine = ordinary((1, 2, 3), np.int16)
    part = comm.scatter(found, comm.size - 1, None if last else mine)
    assert part.shape == (1, 2, 3)
    flat = comm.all_gather_v(x, [6] * comm.size)
    assert flat.shape == (6 * comm.size,)
    comm.synchronize()
    assert (part.copy_to_host() == comm.rank).all()
    assert (flat.copy_to_host() == np.repeat(np.arange(comm.size), 6)).all()
    world.barrier()


def test_gather_and_scatter_in_place(comm, world):
    root, dtype = comm.size - 1, DTYPES[2]
    whole = comm.zeros((comm.size, 21))
    mine = whole[comm.rank]
    put(mine, content(21, dtype, comm.rank))
    comm.gather(mine, root, whole if comm.rank == root else None)
    comm.synchronize()
    wanted = np.stack([content(21, dtype, r) for r in range(comm.size)])
    if comm.rank == root:
        assert same(whole.copy_to_host(), wanted)
    x = whole if comm.rank == root else None
    comm.scatter(x, root, mine.reshape(1, 21))
    comm.synchronize()
    assert same(mine.copy_to_host(), content(21, dtype, comm.rank))
    comm.all_gather_v(mine, [21] * comm.size, out=whole)
    comm.synchronize()
    assert same(whole.copy_to_host(), wanted)
    world.barrier()


def test_what_only_the_root_has_is_ignored_on_other_ranks(comm, world):
    """As MPI does: programs pass the same to all."""
    root, counts = comm.size - 1, [2] * comm.size
    whole, out = comm.zeros(2 * comm.size), comm.zeros(2)
    put(whole, np.full(2 * comm.size, comm.rank, np.float32))
    for other in (whole, np.zeros(3), "nothing"):
        put(out, np.full(2, -1, np.float32))
        given = whole if comm.rank == root else other
        comm.scatter(given, root, out)
        comm.scatter_v(given, counts, None, root, out)
        comm.synchronize()
        assert (out.copy_to_host() == root).all()
    mine, all_in = comm.zeros(2), comm.zeros(2 * comm.size)
    put(mine, np.full(2, comm.rank, np.float32))
    for other in (all_in, np.zeros(3), "nothing", all_in[:1]):
        into = all_in if comm.rank == root else other
        sum_in = out if comm.rank == root else other
        for found in (
            comm.gather(mine, root, into),
            comm.gather_v(mine, counts, None, root, into),
            comm.reduce(mine, "sum", root, sum_in),
            comm.reduce_init(mine, "sum", root, sum_in)(),
        ):
            assert found is None or comm.rank == root
        comm.synchronize()
        if comm.rank == root:
            assert (all_in.copy_to_host() == np.repeat(np.arange(comm.size), 2)).all()
            assert (out.copy_to_host() == sum(range(comm.size))).all()
        else:
            assert (all_in.copy_to_host() == 0).all()
            assert (out.copy_to_host() == root).all()
    world.barrier()


@pytest.fixture
def packed(monkeypatch):
    """The messages of all calls that were worked out, and not only remembered."""
    found, bind = [], transfer.bind
    spy = lambda *args: found.append(args[1:]) or bind(*args)  # noqa: E731
    monkeypatch.setattr(transfer, "bind", spy)
    return found


@needs_peers
def test_a_call_is_worked_out_once(comm, world, packed):
    right, left = right_and_left(comm)
    size, rank, root = comm.size, comm.rank, 1
    x, out = comm.zeros(size), comm.zeros(size)
    whole = comm.zeros(size * size)
    into = whole if rank == root else None
    counts, ones = [size] * size, np.ones(size, int)

    def group():
        with comm.group():
            comm.send(x, right)
            comm.recv(out, left)

    for call in [
        lambda: comm.sendrecv(x, right, out, left),
        lambda: comm.gather(x, root, into),
        lambda: comm.gather_v(x, counts, None, root, into),
        lambda: comm.scatter(into, root, out),
        lambda: comm.scatter_v(into, counts, None, root, out),
        lambda: comm.all_gather_v(x, counts, out=whole),
        lambda: comm.all_to_all_v(x, ones, ones, out=out),
        group,
    ]:
        call()
        before = len(packed)
        call()
        assert len(packed) == before
        comm.synchronize()
    world.barrier()


@needs_peers
def test_remembered_calls_are_told_apart(comm, world):
    """Those of equal addresses: by count, type, shape, peer, root, displacements."""
    right, left = right_and_left(comm)
    size, rank = comm.size, comm.rank
    x, out = comm.zeros(240, np.uint8), comm.zeros(240 * size, np.uint8)
    calls = [(n, dtype) for n in (5, 3) for dtype in (np.uint8, np.float64)]
    calls = [(n, np.dtype(dtype)) for n, dtype in calls]
    for step, (count, dtype) in enumerate(2 * calls):
        mine, all_in = x.view(dtype)[:count], out.view(dtype)[: size * count]

        def cleared():
            out.copy_to_device(np.full(240 * size, 0xA5, np.uint8))

        def holds(places, count=count, dtype=dtype, step=step):
            """Check what is in ``out``: at each of these elements, that rank's."""
            wanted = np.full(240 * size, 0xA5, np.uint8).view(dtype)
            for first, r in places:
                wanted[first : first + count] = content(count, dtype, r, step)
            assert same(out.copy_to_host(), wanted), (count, dtype)

        put(mine, content(count, dtype, rank, step))
        for to, source in [(right, left), (left, right)]:
            cleared()
            comm.sendrecv(mine, to, all_in[:count], source)
            comm.synchronize()
            holds([(0, source)])
        for root in (0, size - 1):
            cleared()
            comm.gather(mine, root, all_in if rank == root else None)
            comm.synchronize()
            holds([(r * count, r) for r in range(size)] if rank == root else [])
            cleared()
            comm.scatter(all_in if rank == root else None, root, mine)
            comm.synchronize()
            assert (mine.view(np.uint8).copy_to_host() == 0xA5).all()
            put(mine, content(count, dtype, rank, step))
        for order in (range(size), range(size)[::-1]):
            cleared()
            displs = [place * count for place in order]
            comm.all_gather_v(mine, [count] * size, displs, all_in)
            comm.synchronize()
            holds(list(zip(displs, range(size), strict=True)))
    world.barrier()


@needs_peers
def test_remembered_calls_make_new_outputs(comm, world):
    size, x = comm.size, comm.zeros(6)
    kept = []
    for step in range(4):
        shape = (6,) if step % 2 else (2, 3)
        put(x, np.full(6, step + comm.rank, np.float32))
        kept.append((step, shape, comm.gather(x.reshape(shape)), comm.rank == 0))
        kept.append((step, (6,), comm.all_gather_v(x, [6] * size), True))
        comm.synchronize()
    meet(comm, world)
    for step, shape, found, here in kept:
        assert (found is None) != here
        if here:
            assert found.size == 6 * size
            assert found.shape in ((size, *shape), (6 * size,))
            every = found.copy_to_host().reshape(size, 6)
            assert (every == step + np.arange(size)[:, None]).all()


@needs_peers
def test_what_equals_remembered_arguments_is_refused_all_the_same(comm, world):
    """1.0 and True are 1 to a dictionary."""
    right, left = right_and_left(comm)
    x, out, size = comm.zeros(1), comm.zeros(1), comm.size
    for _ in range(2):
        comm.sendrecv(x, right, out, left)
        comm.gather(x, 1)
        comm.all_gather_v(x, [1] * size)
        for call in [
            lambda: comm.sendrecv(x, float(right), out, left),
            lambda: comm.gather(x, True),
            lambda: comm.gather(x, 1.0),
            lambda: comm.all_gather_v(x, [True] * size),
            lambda: comm.all_gather_v(x, [1.0] * size),
            lambda: comm.all_gather_v(x, [[1]] * size),
        ]:
            refused(world, ns.ArgumentError, call, "give a")
    comm.synchronize()
    world.barrier()


@needs_peers
def test_memory_freed_and_allocated_anew(comm, world, packed):
    """Mostly at the same address: what is remembered is of the old memory."""
    right, left = right_and_left(comm)
    out = ordinary(100, np.float32)
    for step in range(5):
        gc.collect()
        x = comm.zeros(100)  # frees the one before, of which nothing is kept
        assert len(comm.heap._entries) == 2  # the other is the workspace
        put(x, np.full(100, step + comm.rank, np.float32))
        before = len(packed)
        for _ in range(2):
            comm.sendrecv(x, right, out, left)
        assert len(packed) == before + 1
        comm.synchronize()
        assert (out.copy_to_host() == step + left).all()
        world.barrier()
        del x


def test_all_gather_v_and_all_to_all_v(comm, world):
    lot = random.Random(17)
    largest = 300 if SIMULATED else 100_000
    calls = []
    for step in range(6 if SIMULATED else 30):
        dtype = DTYPES[step % len(DTYPES)]
        table = [
            [lot.choice([0, 1, lot.randrange(largest)]) for _ in range(comm.size)]
            for _ in range(comm.size)
        ]
        gaps = lot.choice([0, 0, 2])
        sent, taken = table[comm.rank], [row[comm.rank] for row in table]
        there = [sum(taken[:r]) + gaps * r for r in range(comm.size)]
        room = max(first + n for first, n in zip(there, taken, strict=True))
        parts = [content(n, dtype, comm.rank, r, step) for r, n in enumerate(sent)]
        x = Part(comm, sum(sent), dtype, np.concatenate(parts))
        out = Part(comm, room, dtype)
        comm.all_to_all_v(x.array, sent, taken, None, there, out.array)
        wanted = np.zeros(room * dtype.itemsize, np.uint8).view(dtype)
        for r, first in enumerate(there):
            one = content(taken[r], dtype, r, comm.rank, step)
            wanted[first : first + taken[r]] = one
        calls.append((wanted, out))
        counts = [row[0] for row in table]
        y = Part(comm, counts[comm.rank], dtype, content(counts[comm.rank], dtype, 5))
        gathered = Part(comm, sum(counts), dtype)
        comm.all_gather_v(y.array, counts, None, gathered.array)
        wanted = np.concatenate([content(n, dtype, 5) for n in counts])
        calls.append((wanted, gathered))
    comm.synchronize()
    for step, (wanted, out) in enumerate(calls):
        assert same(out.read(), wanted), step
    world.barrier()


@needs_peers
def test_bad_messages(comm, world):
    x, out = comm.zeros(8), comm.zeros(8)
    for call, texts in [
        (lambda: comm.send(x, comm.rank), ("itself", "sendrecv")),
        (lambda: comm.send(x, comm.size), (f"dst={comm.size}", "give a rank")),
        (lambda: comm.recv(x, -1), ("src=-1", "give a rank")),
        (lambda: comm.recv(x, 1.0), ("src=1.0",)),
        (lambda: comm.sendrecv(x, comm.rank, x, comm.rank), ("overlaps",)),
        (lambda: comm.sendrecv(x, comm.rank, out, None), ("sends itself",)),
        (lambda: comm.send(np.zeros(3), (comm.rank + 1) % comm.size), ("host",)),
        (lambda: comm.gather(x, root=9), ("root=9",)),
        (
            lambda: comm.gather(x, comm.rank, out),
            (f"gather: expected out of {8 * comm.size} elements", "got 8"),
        ),
        (
            lambda: comm.scatter(comm.zeros(2 * comm.size), comm.rank, out),
            ("scatter: expected out of 2 elements", "got 8"),
        ),
        (
            lambda: comm.sendrecv(x, 0, out, MPI.PROC_NULL),
            (f"src={MPI.PROC_NULL}", "None, not MPI.PROC_NULL, for nobody"),
        ),
        (
            lambda: comm.reduce_scatter_v(x, [8] + [0] * (comm.size - 1), "mean"),
            ("reduce_scatter_v: expected an operator, got op='mean'",),
        ),
        (lambda: comm.scatter_v(x, [1], root=comm.rank), ("for each of",)),
        (lambda: comm.scatter_v(x, root=comm.rank), ("counts=None",)),
        (lambda: comm.all_gather_v(x, [7] * comm.size), ("counts[rank] is 7",)),
        (lambda: comm.all_gather_v(x, [-8] * comm.size), ("integer from 0",)),
        (lambda: comm.all_gather_v(x, 8), ("integer from 0",)),
        (
            lambda: comm.all_gather_v(x, [8] * comm.size, [1] * comm.size),
            ("parts of two ranks overlap",),
        ),
        (
            lambda: comm.all_gather_v(x, [8] * comm.size, out=out),
            ("has 8 elements", f"reach to {8 * comm.size}"),
        ),
        (
            lambda: comm.all_to_all_v(x, [1] * comm.size, [2] * comm.size),
            ("sends itself 1", "receives 2"),
        ),
        (
            lambda: comm.all_to_all_v(x, [1] * comm.size, [1] * comm.size, out=x),
            ("overlaps",),
        ),
        (
            lambda: comm.gather(comm.zeros((2, 2))[:, :1], root=0),
            ("contiguous",),
        ),
    ]:
        refused(world, ns.ArgumentError, call, *texts)
    comm.barrier()
    comm.synchronize()


@needs_peers
def test_another_number_of_bytes_is_told(world):
    """Of all ranks, also those that were not in it."""
    comm = ns.Communicator(world, timeout=60)
    x = comm.zeros(10)
    if comm.rank == 0:
        comm.send(x, 1)
    elif comm.rank == 1:
        comm.recv(x[:4], 0)
    if comm.rank < 2:
        with contextlib.suppress(ns.CallMismatch):
            comm.synchronize()
    world.barrier()
    text = "rank 1 receives another number of bytes than rank 0 sends"
    refused(world, ns.CallMismatch, comm.synchronize, text)
    comm.close()  # all were told
