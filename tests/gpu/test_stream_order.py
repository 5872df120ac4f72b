"""Calls run in the order of their streams, of whichever library."""

import gc
import threading

import numpy as np
import pytest
from cuda.core import LEGACY_DEFAULT_STREAM, Device
from numba import cuda

import numba_symm as ns
from numba_symm.collectives.operations import ALL_REDUCE
from tests.gpu.helpers import add, fill, of_ranks, optional, to_device

LATE = 100  # milliseconds


def numba_stream():
    return cuda.stream()


def core_stream():
    return Device().create_stream()


def cupy_stream():
    return optional("cupy").cuda.Stream(non_blocking=True)


def torch_stream():
    torch = optional("torch")
    torch.cuda.set_device(cuda.get_current_device().id)
    return torch.cuda.Stream()


def raw_handle():
    kept.append(cuda.stream())
    return int(kept[-1].handle)


def numba_default():
    return cuda.default_stream()


def core_default():
    return LEGACY_DEFAULT_STREAM


def torch_default():
    torch = optional("torch")
    torch.cuda.set_device(cuda.get_current_device().id)
    return torch.cuda.default_stream()


kept = []
KINDS = [
    numba_stream,
    core_stream,
    cupy_stream,
    torch_stream,
    raw_handle,
    numba_default,
    core_default,
    torch_default,
    lambda: None,
]
NAMES = [*(kind.__name__ for kind in KINDS[:-1]), "none"]


@pytest.mark.parametrize("algorithm", ALL_REDUCE.algorithms)
@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_a_call_runs_between_earlier_and_later_work(comm, make, algorithm):
    stream = make()
    x, y = comm.empty(10_000), cuda.device_array(10_000, np.float32)
    fill(x, comm.rank + 1, stream, milliseconds=LATE)
    comm.all_reduce(x, out=y, stream=stream, algorithm=algorithm)
    fill(x, -1000, stream)  # must not overtake
    add(y, 0.5, stream)  # nor must what uses the result
    comm.synchronize(stream)
    assert (y.copy_to_host() == of_ranks(comm) + 0.5).all()


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_a_barrier_runs_after_earlier_work(comm, make):
    stream = make()
    x = comm.empty(1000)
    memory = comm.rendezvous(x)
    fill(x, comm.rank, stream, milliseconds=LATE * (comm.rank + 1))
    comm.barrier(stream=stream)
    comm.synchronize(stream)
    for rank in range(comm.size):
        assert (memory.get_buffer(rank, 1000, np.float32).copy_to_host() == rank).all()
    comm.barrier()
    comm.synchronize()


def test_a_memory_s_barrier_and_signals_are_ordered_on_their_stream(comm):
    stream = cuda.stream()
    x = comm.empty(1000)
    memory = comm.rendezvous(x)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    fill(x, comm.rank, stream, milliseconds=LATE)
    if comm.size > 1:
        memory.put_signal(right, channel=1, stream=stream)
        memory.wait_signal(left, channel=1, stream=stream)
    found = cuda.device_array(1000, np.float32)
    found.copy_to_device(memory.get_buffer(left, 1000, np.float32), stream=stream)
    memory.barrier(channel=2, stream=stream)
    comm.synchronize(stream)
    assert (found.copy_to_host() == left).all()


def test_calls_on_two_threads_default_streams_follow_one_another(comm):
    """Both threads name theirs by the same handle."""
    per_thread = 2
    x, y, z = (to_device(np.zeros(10_000, np.float32)) for _ in range(3))

    def first():
        cuda.select_device(comm.device.ordinal)
        fill(x, comm.rank + 1, per_thread, milliseconds=LATE)
        comm.all_reduce(x, out=y, stream=per_thread)

    def second():  # the call makes the GPU current
        comm.all_reduce(y, out=z, stream=per_thread)

    for work in (first, second):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    cuda.synchronize()
    comm.check()
    assert (z.copy_to_host() == comm.size * of_ranks(comm)).all()


def test_a_thread_on_another_gpu_is_refused(comm, world):
    gpus = len(cuda.gpus)
    if gpus < 2:
        pytest.skip("needs two GPUs")
    x, errors = to_device(np.ones(1000, np.float32)), []

    def work():
        cuda.select_device((comm.device.ordinal + 1) % gpus)
        with pytest.raises(ns.ArgumentError) as caught:
            comm.all_reduce(x)
        errors.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "to be current in this thread" in errors[0]
    world.barrier()
    assert (comm.all_reduce(x).copy_to_host() == comm.size).all()
    comm.synchronize()


@pytest.mark.parametrize("make", [numba_stream, core_stream, torch_stream, cupy_stream])
def test_a_stream_may_be_dropped_after_its_call(comm, make):
    x = to_device(np.ones(5000, np.int64))
    for _ in range(30):
        comm.all_reduce(x, out=x, stream=make())
        gc.collect()
    add(x, 0)
    comm.synchronize()
    cuda.synchronize()
    with np.errstate(over="ignore"):
        assert (x.copy_to_host() == np.int64(comm.size) ** np.int64(30)).all()


def test_a_numba_array_names_its_stream(comm):
    stream = cuda.stream()
    x = cuda.device_array(1000, np.float32, stream=stream)
    fill(x, comm.rank + 1, stream, milliseconds=LATE)
    y = comm.all_reduce(x)
    stream.synchronize()
    comm.check()
    assert (y.copy_to_host() == of_ranks(comm)).all()


def test_the_communicator_s_own_stream(world, comm):
    stream = Device().create_stream()
    x, y = (cuda.device_array(1000, np.float32) for _ in range(2))
    comm.synchronize()  # it has made the rank's GPU current, that of its streams
    with ns.Communicator(world, stream=stream, timeout=60) as comm:
        fill(x, comm.rank + 1, stream, milliseconds=LATE)
        comm.all_reduce(x, out=y)
        comm.barrier()
        comm.synchronize()
        assert (y.copy_to_host() == of_ranks(comm)).all()
