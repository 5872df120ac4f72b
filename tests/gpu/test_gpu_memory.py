"""Each kind of device memory works when it is asked for, and none of it is lost."""

import gc

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.gpu import streams
from tests.gpu.helpers import add, fill
from tests.ranks.helpers import check_works

COUNT = 64 << 20  # float32: 256 MiB
SLACK = 16 << 20  # bytes that the driver may keep for itself


@pytest.fixture(params=["vmm", "ipc"])
def backend(request, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_BACKEND", request.param)
    return request.param


def free_bytes(world):
    """Return the free memory of this rank's GPU while no rank does anything."""
    gc.collect()
    cuda.synchronize()
    streams.give_back()
    cuda.current_context().deallocations.clear()
    world.barrier()
    free = cuda.current_context().get_memory_info().free
    world.barrier()
    return free


def test_the_backend_asked_for_is_used(world, backend):
    with ns.Communicator(world, timeout=60) as comm:
        assert comm.backend == backend
        assert ns.backend() == backend
        assert comm.refused_backends == {}
        check_works(comm)


def test_two_backends_simultaneously(world, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_BACKEND", "ipc")
    with ns.Communicator(world, timeout=60) as by_ipc:
        monkeypatch.setenv("NUMBA_SYMM_BACKEND", "vmm")
        with ns.Communicator(world, timeout=60) as by_vmm:
            check_works(by_ipc)
            check_works(by_vmm)
            x, y = by_ipc.zeros(100), by_vmm.zeros(100)
            add(x, by_ipc.rank + 1)
            by_vmm.all_reduce(x, out=y)
            by_ipc.all_reduce(y, out=x, op="max")
            by_ipc.synchronize()
            assert (x.copy_to_host() == world.size * (world.size + 1) / 2).all()


def test_the_default_is_the_best(world, monkeypatch):
    monkeypatch.delenv("NUMBA_SYMM_BACKEND", raising=False)
    with ns.Communicator(world, timeout=60) as comm:
        assert comm.backend == "vmm"
        assert comm.refused_backends == {}


def use(world):
    with ns.Communicator(world, timeout=60) as comm:
        x = comm.empty(COUNT)
        fill(x, comm.rank)
        memory = comm.rendezvous(x)
        comm.all_reduce(x[:1000])
        comm.barrier()
        comm.synchronize()
        last = comm.size - 1
        found = memory.get_buffer(last, 1000, np.float32, COUNT - 1000).copy_to_host()
        assert (found == last).all()
        comm.barrier()
        comm.synchronize()


def test_closing_gives_all_memory_back(world, backend):
    for _ in range(2):
        use(world)
    before = free_bytes(world)
    for _ in range(10):
        use(world)
    assert before - free_bytes(world) < SLACK


def test_dropped_arrays_are_given_back(world, backend):
    with ns.Communicator(world, timeout=60) as comm:
        before = free_bytes(world)
        for _ in range(10):
            x = comm.empty(COUNT)
            fill(x, 1)
            comm.synchronize()
            del x
        gc.collect()
        x = comm.empty(10)  # the ranks agree now
        assert before - free_bytes(world) < SLACK
        del x


def test_an_array_outlives_its_communicator(world, backend):
    for _ in range(2):
        use(world)
    before = free_bytes(world)
    with ns.Communicator(world, timeout=60) as comm:
        x = comm.empty(COUNT)
        fill(x, 5)
    add(x, 1)
    assert (x[-1000:].copy_to_host() == 6).all()
    assert before - free_bytes(world) > 4 * COUNT - SLACK
    del x
    assert before - free_bytes(world) < SLACK


def test_more_memory_than_there_is(world, backend):
    with ns.Communicator(world, timeout=60) as comm:
        before = free_bytes(world)
        total = cuda.current_context().get_memory_info().total
        with pytest.raises(ns.BackendError, match=r"(?s)empty.*OUT_OF_MEMORY"):
            comm.empty(total + (1 << 30), np.uint8)
        assert before - free_bytes(world) < SLACK
        check_works(comm)
