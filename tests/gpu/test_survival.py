"""A kernel that gives up ends: the CUDA context and its memory stay usable."""

import time

import numpy as np
import pytest
from cuda.core import Device
from numba import cuda

import numba_symm as ns
from numba_symm.collectives.operations import ALL_REDUCE
from tests.absence import context_is_alive
from tests.gpu.helpers import fill, of_ranks, to_device
from tests.ranks.helpers import check_works

ABORT = 0.1  # seconds until waiting kernels of all ranks have ended


@pytest.fixture
def away(world):
    """Return the absent rank."""
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    return world.size - 1


def all_fail(world, comm, texts):
    """Check that every rank raises the same failure, and close."""
    world.barrier()
    with pytest.raises(ns.CollectiveTimeout) as error:
        comm.check()
    for text in texts:
        assert text in str(error.value)
    assert context_is_alive()
    comm.close()  # every rank has raised the failure
    assert context_is_alive()
    with ns.Communicator(world, timeout=60) as another:
        check_works(another)


def test_a_replay_that_one_rank_does_not_make(world, away):
    comm = ns.Communicator(world, timeout=2)
    stream = Device().create_stream()
    x = to_device(np.full(100, comm.rank + 1, np.float32))
    y = cuda.device_array_like(x)
    builder = stream.create_graph_builder().begin_building()
    comm.all_reduce(x, out=y, stream=builder.stream, algorithm="one_shot_ll")
    graph = builder.end_building().complete()
    world.barrier()
    graph.launch(stream)
    stream.sync()
    comm.check()
    assert (y.copy_to_host() == of_ranks(comm)).all()
    world.barrier()
    if comm.rank != away:
        graph.launch(stream)
        graph.launch(stream)
        stream.sync()
    all_fail(world, comm, [f"waited for rank {away} in all_reduce (one_shot)"])


@pytest.mark.parametrize("algorithm", ALL_REDUCE.algorithms)
def test_an_abort_ends_waiting_kernels(world, away, algorithm):
    x = to_device(np.ones(1000, np.float32))
    comm = ns.Communicator(world, timeout=60)
    comm.all_reduce(x, algorithm=algorithm)  # loads the kernel
    comm.synchronize()
    if comm.rank != away:
        comm.all_reduce(x, algorithm=algorithm)
    world.barrier()
    if comm.rank == away:
        time.sleep(0.3)  # the others' kernels and hosts wait by then
        moment = time.monotonic()
        comm.abort("enough")
    else:
        cuda.synchronize()  # the kernels end; nothing else of the library is called
        moment = time.monotonic()
        with pytest.raises(ns.Aborted, match="enough"):
            comm.check()
    moments = world.allgather(moment)  # of one clock, which the processes share
    slowest = max(moments) - moments[away]
    if comm.rank == 0:
        print(f"abort of {algorithm}: {1e3 * slowest:.1f} ms")
    assert 0 <= slowest < ABORT
    assert context_is_alive()
    comm.close()


def test_slow_work_before_a_call_is_waited_for(world):
    """The deadline counts from a kernel's own waiting, and 0 is none."""
    for timeout in (0, 10):
        with ns.Communicator(world, timeout=timeout) as comm:
            x = comm.empty(1000)
            if comm.rank == 0:
                fill(x, 1, milliseconds=2500)
            else:
                fill(x, comm.rank + 1)
            comm.all_reduce(x, out=x)
            comm.synchronize()
            assert (x.copy_to_host() == of_ranks(comm)).all()
