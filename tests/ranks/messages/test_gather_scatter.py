"""Collectives made of messages: gather, scatter and the v forms."""

import gc

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives.kernels import transfer
from tests.ranks.helpers import (
    needs_peers,
    of_one_island,
    ordinary,
    put,
    refused,
)
from tests.ranks.messages.contents import (
    content,
    right_and_left,
    same,
)


def test_gather_and_scatter_in_place(comm, world):
    root, dtype = comm.size - 1, np.dtype(np.float32)
    whole = comm.zeros((comm.size, 21))
    mine = whole[comm.rank]
    put(mine, content(21, dtype, comm.rank))
    comm.gather(mine, root=root, out=whole if comm.rank == root else None)
    comm.synchronize()
    wanted = np.stack([content(21, dtype, r) for r in range(comm.size)])
    if comm.rank == root:
        assert same(whole.copy_to_host(), wanted)
    x = whole if comm.rank == root else None
    comm.scatter(x, root=root, out=mine.reshape(1, 21))
    comm.synchronize()
    assert same(mine.copy_to_host(), content(21, dtype, comm.rank))
    comm.all_gather_v(mine, counts=[21] * comm.size, out=whole)
    comm.synchronize()
    assert same(whole.copy_to_host(), wanted)
    world.barrier()


def test_what_only_the_root_has_is_ignored_on_other_ranks(comm, world):
    """MPI ignores it, too, because programs pass the same arguments on all ranks."""
    root, counts = comm.size - 1, [2] * comm.size
    whole, out = comm.zeros(2 * comm.size), comm.zeros(2)
    put(whole, np.full(2 * comm.size, comm.rank, np.float32))
    for other in (whole, np.zeros(3), "nothing"):
        put(out, np.full(2, -1, np.float32))
        given = whole if comm.rank == root else other
        comm.scatter(given, root=root, out=out)
        comm.scatter_v(given, counts=counts, displs=None, root=root, out=out)
        comm.synchronize()
        assert (out.copy_to_host() == root).all()
    mine, all_in = comm.zeros(2), comm.zeros(2 * comm.size)
    put(mine, np.full(2, comm.rank, np.float32))
    for other in (all_in, np.zeros(3), "nothing", all_in[:1]):
        into = all_in if comm.rank == root else other
        sum_in = out if comm.rank == root else other
        for found in (
            comm.gather(mine, root=root, out=into),
            comm.gather_v(mine, counts=counts, displs=None, root=root, out=into),
            comm.reduce(mine, op="sum", root=root, out=sum_in),
            comm.reduce_init(mine, op="sum", root=root, out=sum_in)(),
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


def test_the_stream_of_an_ignored_array_is_ignored(comm, monkeypatch):
    """Also of a call that is remembered."""
    root, streams, read = comm.size - 1, comm._calls.streams, []
    own = streams.of
    spy = lambda stream, array: read.append(array) or own(stream, array)  # noqa: E731
    x, out = comm.zeros(comm.size), comm.zeros(1)
    monkeypatch.setattr(streams, "of", spy)
    for _ in range(3):
        comm.scatter(x, root=root, out=out)
    comm.synchronize()
    wanted = x if comm.rank == root else out
    assert read
    assert all(each is wanted for each in read)


@pytest.fixture
def packed(monkeypatch):
    """The messages of all calls that were not remembered."""
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
            comm.send(x, dst=right)
            comm.recv(out, src=left)

    for call in [
        lambda: comm.sendrecv(x, dst=right, out=out, src=left),
        lambda: comm.gather(x, root=root, out=into),
        lambda: comm.gather_v(x, counts=counts, displs=None, root=root, out=into),
        lambda: comm.scatter(into, root=root, out=out),
        lambda: comm.scatter_v(into, counts=counts, displs=None, root=root, out=out),
        lambda: comm.all_gather_v(x, counts=counts, out=whole),
        lambda: comm.all_to_all_v(x, send_counts=ones, recv_counts=ones, out=out),
        group,
    ]:
        call()
        before = len(packed)
        call()
        assert len(packed) == before
        comm.synchronize()
    world.barrier()


@needs_peers
def test_wrong_arguments_that_equal_remembered_ones_are_refused(comm, world):
    """1.0 and True are 1 to a dictionary."""
    right, left = right_and_left(comm)
    x, out, size = comm.zeros(1), comm.zeros(1), comm.size
    for _ in range(2):
        comm.sendrecv(x, dst=right, out=out, src=left)
        comm.gather(x, root=1)
        comm.all_gather_v(x, counts=[1] * size)
        for call in [
            lambda: comm.sendrecv(x, dst=float(right), out=out, src=left),
            lambda: comm.gather(x, root=True),
            lambda: comm.gather(x, root=1.0),
            lambda: comm.all_gather_v(x, counts=[True] * size),
            lambda: comm.all_gather_v(x, counts=[1.0] * size),
            lambda: comm.all_gather_v(x, counts=[[1]] * size),
        ]:
            refused(world, ns.ArgumentError, call, ": expected ")
    comm.synchronize()
    world.barrier()


@needs_peers
@of_one_island
def test_memory_freed_and_allocated_anew(comm, world, packed):
    """It mostly has the same address, but what is remembered is of the old memory."""
    right, left = right_and_left(comm)
    out = ordinary(100, np.float32)
    for step in range(5):
        gc.collect()
        x = comm.zeros(100)  # frees the one before, of which nothing is kept
        assert len(comm._calls.heap._entries) == 2  # the other is the workspace
        put(x, np.full(100, step + comm.rank, np.float32))
        before = len(packed)
        for _ in range(2):
            comm.sendrecv(x, dst=right, out=out, src=left)
        assert len(packed) == before + 1
        comm.synchronize()
        assert (out.copy_to_host() == step + left).all()
        world.barrier()
        del x


def test_all_to_all_v_in_place(comm, world):
    """It works alone, as a plan, in a group beside another one, and with gaps."""
    size, rank, dtype = comm.size, comm.rank, np.dtype(np.int32)
    table = [[3 + (5 * r + 3 * s) % 7 for s in range(size)] for r in range(size)]
    sent, taken = table[rank], [row[rank] for row in table]
    room = max(sum(sent), sum(taken))

    def start(x):
        parts = [content(n, dtype, rank, s) for s, n in enumerate(sent)]
        put(x, np.resize(np.concatenate(parts), room).astype(dtype))

    x, y, spread = (ordinary(n * room, dtype) for n in (1, 1, 2))
    counts = {"send_counts": sent, "recv_counts": taken}
    plan = comm.all_to_all_v_init(x, **counts, out=x)
    wanted = [content(n, dtype, r, rank) for r, n in enumerate(taken)]
    wanted = np.concatenate(wanted)
    for call in (lambda: comm.all_to_all_v(x, **counts, out=x), plan):
        start(x)
        assert call() is x
        comm.synchronize()
        assert same(x.copy_to_host()[: wanted.size], wanted)
    start(x)
    start(y)
    with comm.group():
        comm.all_to_all_v(x, **counts, out=x)
        comm.all_to_all_v(y, **counts, out=y)
    comm.synchronize()
    for each in (x, y):
        assert same(each.copy_to_host()[: wanted.size], wanted)
    start(x)
    put(spread, np.repeat(x.copy_to_host(), 2))
    gaps = spread[::2]
    assert comm.all_to_all_v(gaps, **counts, out=gaps) is gaps
    comm.synchronize()
    found = spread.copy_to_host()
    assert np.array_equal(found[::2][: wanted.size], wanted)
    assert np.array_equal(found[1::2], x.copy_to_host())
    nothing, zeros = ordinary(0, dtype), [0] * size
    with ns.Communicator(world, timeout=60) as fresh:  # without memory for the copy
        both = {"send_counts": zeros, "recv_counts": zeros}
        assert fresh.all_to_all_v(nothing, **both, out=nothing) is nothing
    world.barrier()
