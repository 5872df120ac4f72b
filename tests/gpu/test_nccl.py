"""Calls between islands by NCCL: asynchronous, in graphs, with a deadline."""

import contextlib
import os
import threading
import time

import numpy as np
import pytest
from cuda.bindings import driver as binding
from cuda.core import Device
from numba import cuda

import numba_symm as ns
from numba_symm.engines import nccl
from numba_symm.gpu import streams
from tests.absence import context_is_alive
from tests.gpu.helpers import (
    add,
    capturing,
    fill,
    of_ranks,
    to_device,
)
from tests.ranks.helpers import check_works, refused

LATE = 300  # milliseconds


def made(world, engine="nccl", timeout=60, size=1):
    """Return a communicator of pretended islands of that size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_SYMM_ISLAND_SIZE", str(size))
        patch.setenv("NUMBA_SYMM_ENGINE", engine)
        return ns.Communicator(world, timeout=timeout)


@pytest.fixture(scope="module", autouse=True)
def possible(world):
    if world.size == 1:
        pytest.skip("one rank is one island")
    if any(world.allgather(nccl.found().missing)):
        pytest.skip("NCCL is not installed")
    if len(cuda.gpus) < world.size and "NCCL_HOSTID" not in os.environ:
        pytest.skip("NCCL needs a GPU for each rank of a node")


@pytest.fixture(scope="module")
def islands(world):
    with made(world) as comm:
        assert comm._calls.members.engine.name == "nccl"
        yield comm


@pytest.fixture
def stream():
    stream = Device().create_stream()
    yield stream
    stream.sync()


def test_calls_do_not_wait_on_the_host(islands, world):
    comm = islands
    x = to_device(np.full(1000, comm.rank + 1, np.float32))
    outs = [cuda.device_array_like(x) for _ in range(2)]
    gathered = cuda.device_array((comm.size, 1000), np.float32)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    plan = comm.all_reduce_init(x, out=outs[1])

    def calls():
        comm.all_reduce(x, out=outs[0])
        plan()
        comm.all_gather(x, out=gathered)
        comm.sendrecv(x, dst=right, out=outs[1], src=left)
        comm.barrier()

    fill(x, comm.rank + 1)
    calls()
    comm.synchronize()
    world.barrier()
    began = time.monotonic()
    fill(x, comm.rank + 2, milliseconds=LATE)
    calls()
    assert time.monotonic() - began < LATE / 2000
    comm.synchronize()
    total = of_ranks(comm) + comm.size
    assert (outs[0].copy_to_host() == total).all()
    assert (outs[1].copy_to_host() == left + 2).all()
    wanted = np.arange(comm.size).repeat(1000) + 2
    assert (gathered.copy_to_host().ravel() == wanted).all()


@pytest.mark.parametrize("mode", ["relaxed", "thread_local", "global"])
@pytest.mark.parametrize("count", [100, 3_000_001])
def test_graphs(islands, stream, mode, count):
    comm = islands
    x = to_device(np.full(count, comm.rank, np.float32))
    y, z = (cuda.device_array_like(x) for _ in range(2))
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    plan = comm.broadcast_init(z, root=0, stream=stream)
    add(x, 0, stream)  # compiled
    comm.all_reduce(x, out=y, stream=stream)
    with capturing(stream, mode) as (builder, graphs):
        on = builder.stream
        add(x, 1, on)
        comm.all_reduce(x, out=y, stream=on)
        comm.sendrecv(x, dst=right, out=z, src=left, stream=on)
        comm.all_reduce(y, op="max", out=y, stream=on)
        comm.barrier(stream=on)
    first = comm.size * (comm.size - 1) // 2
    for replay in range(1, 11):
        graphs[0].launch(stream)
        if replay in (1, 5, 10):
            comm.synchronize(stream)
            assert (y.copy_to_host() == first + comm.size * replay).all()
            assert (z.copy_to_host() == left + replay).all()
            plan()
            aside = comm.all_reduce(x, op="min", stream=stream)
            comm.synchronize(stream)
            assert (aside.copy_to_host() == replay).all()
            assert (z.copy_to_host() == comm.size - 1 + replay).all()


@pytest.mark.parametrize("count", [1, 1000, 3 << 20])
def test_calls_between_islands_of_one_rank(islands, count):
    comm = islands
    last, part = comm.size - 1, slice(comm.rank * count, (comm.rank + 1) * count)
    inputs = [
        np.random.default_rng(rank).standard_normal(count * comm.size, np.float32)
        for rank in range(comm.size)
    ]
    whole = inputs[0]
    for each in inputs[1:]:
        whole = whole + each
    x = to_device(inputs[comm.rank])
    y = to_device(inputs[comm.rank][:count])
    total, shard = comm.all_reduce(x), comm.reduce_scatter(x)
    gathered = comm.all_gather(y)
    rooted = comm.reduce(x, root=last)
    comm.broadcast(y, root=last)
    comm.synchronize()
    assert (total.copy_to_host() == whole).all()
    assert (shard.copy_to_host() == whole[part]).all()
    wanted = np.concatenate([each[:count] for each in inputs])
    assert (gathered.copy_to_host().ravel() == wanted).all()
    assert (y.copy_to_host() == inputs[last][:count]).all()
    if comm.rank == last:
        assert (rooted.copy_to_host() == whole).all()
    comm.all_reduce(x, out=x)
    comm.all_gather(gathered[comm.rank], out=gathered)
    comm.reduce_scatter(x, out=x[part])
    comm.synchronize()
    whole[part] = whole[part] * comm.size if comm.size == 2 else whole[part]
    assert (gathered.copy_to_host().ravel() == wanted).all()
    if comm.size == 2:  # more sums are rounded
        assert (x.copy_to_host() == whole).all()


def test_the_default_stream_of_a_thread(islands):
    comm = islands
    x = to_device(np.full(1000, comm.rank + 1, np.float32))
    y = cuda.device_array_like(x)

    def call():
        cuda.select_device(comm._calls.gpu.ordinal)
        fill(x, comm.rank + 2, streams.PER_THREAD, LATE)
        comm.all_reduce(x, out=y, stream=streams.PER_THREAD)
        comm.synchronize(streams.PER_THREAD)

    fill(x, comm.rank + 1)
    cuda.synchronize()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert (y.copy_to_host() == of_ranks(comm) + comm.size).all()


def test_a_graph_may_outlive_the_communicator(world, stream):
    comm = made(world)
    x = to_device(np.full(1000, comm.rank + 1, np.float32))
    add(x, 0, stream)
    with capturing(stream) as (builder, graphs):
        comm.all_reduce(x, out=x, stream=builder.stream)
    graphs[0].launch(stream)
    comm.synchronize(stream)
    assert (x.copy_to_host() == of_ranks(comm)).all()
    began = time.monotonic()
    comm.close()
    assert time.monotonic() - began < 10
    graphs.clear()
    with made(world) as another:
        check_works(another)


def test_mpi_cannot_be_captured(world, stream):
    with made(world, "mpi") as comm:
        x = comm.zeros(1000)
        builder = stream.create_graph_builder().begin_building("relaxed")
        with pytest.raises(ns.ArgumentError, match="that is not being captured"):
            comm.all_reduce(x, out=x, stream=builder.stream)
        with contextlib.suppress(Exception):  # CUDA gives the capture up
            builder.end_building()
        binding.cuStreamEndCapture(int(builder.stream.handle))  # if that did not end it
        check_works(comm)


def late(world, comm, rank, operation="all_reduce"):
    """Check that every rank raises that a rank is late, and close."""
    for _ in range(500):
        if comm._calls.members.failed:
            break
        time.sleep(0.01)
    said = rf"waited for ranks? .*{rank} on .* in {operation} \(timeout: 2 s\)"
    with pytest.raises(ns.CollectiveTimeout, match=said):
        comm.check()
    assert context_is_alive()
    comm.close()
    with made(world) as another:
        check_works(another)


@pytest.mark.parametrize("count", [1000, 3_000_000])
def test_a_call_that_one_rank_does_not_make(world, count):
    comm, away = made(world, timeout=2), world.size - 1
    x = to_device(np.ones(count, np.float32))
    began = time.monotonic()
    if comm.rank != away:
        comm.all_reduce(x)
        with pytest.raises(ns.CollectiveTimeout):
            comm.synchronize()
        assert 1.9 < time.monotonic() - began < 6
    late(world, comm, away)


def test_a_replay_that_one_rank_does_not_make(world, stream):
    comm, away = made(world, timeout=2), world.size - 1
    x = to_device(np.ones(1000, np.float32))
    add(x, 0, stream)
    with capturing(stream) as (builder, graphs):
        comm.all_reduce(x, out=x, stream=builder.stream)
    graphs[0].launch(stream)
    comm.synchronize(stream)
    world.barrier()
    if comm.rank != away:
        began = time.monotonic()
        graphs[0].launch(stream)
        graphs[0].launch(stream)
        stream.sync()
        assert 1.9 < time.monotonic() - began < 6
    late(world, comm, away)


def test_a_rank_that_leaves_a_replay_after_its_first_call(world, stream):
    """The second call follows the first one, so one mark is between them."""
    comm, away = made(world, timeout=2), world.size - 1
    x = to_device(np.ones(1000, np.float32))
    comm.all_reduce(x, stream=stream)  # compiled
    comm.broadcast(x, root=away, stream=stream)
    with capturing(stream) as (builder, graphs):
        comm.all_reduce(x, out=x, stream=builder.stream)
        comm.broadcast(x, root=away, stream=builder.stream)
    graphs[0].launch(stream)
    comm.synchronize(stream)
    assert (x.copy_to_host() == world.size).all()
    world.barrier()
    began = time.monotonic()
    if comm.rank == away:
        comm.all_reduce(x, out=x, stream=stream)
    else:
        graphs[0].launch(stream)
    stream.sync()
    if comm.rank != away:
        assert 1.9 < time.monotonic() - began < 6
    late(world, comm, away, "broadcast")


def test_work_before_a_call_does_not_count(world, stream):
    """The deadline begins with the exchange, not when it is enqueued."""
    with made(world, timeout=1) as comm:
        x = to_device(np.ones(1000, np.float32))
        comm.all_reduce(x)
        comm.synchronize()
        fill(x, 1, milliseconds=2500)
        y = comm.all_reduce(x)
        comm.synchronize()
        assert (y.copy_to_host() == comm.size).all()
        with capturing(stream) as (builder, graphs):
            on = builder.stream
            comm.all_reduce(x, out=y, stream=on)
            fill(x, 2, on, milliseconds=2500)
            comm.all_reduce(x, out=y, stream=on)
        graphs[0].launch(stream)
        comm.synchronize(stream)
        assert (y.copy_to_host() == 2 * comm.size).all()


def test_ranks_that_disagree_are_refused(world, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    monkeypatch.delenv("NUMBA_SYMM_ENGINE", raising=False)
    if world.rank == 0:
        monkeypatch.setattr(nccl, "found", lambda: nccl.Installation("NCCL 1.0.0", ""))
    refused(
        world,
        ns.BackendError,
        lambda: ns.Communicator(world, timeout=20),
        "expected the same engine on all ranks, but rank 0 has NCCL 1.0.0, rank",
        "NUMBA_SYMM_ENGINE=mpi",
    )
