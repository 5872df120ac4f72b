"""Outputs that the program drops: no call waits to free them or uses one early."""

import numpy as np
import pytest
from cuda.core import Device
from numba import cuda

import numba_symm as ns
from numba_symm.sharing.kinds import locate
from tests.gpu.helpers import fill, to_device

COUNT = 1 << 20  # float32: large enough that Numba would free some in each call


def test_dropping_outputs_does_not_wait_for_other_ranks(comm, world):
    """Rank 0 drops outputs of calls that wait for the others, then lets them call."""
    x = to_device(np.full(COUNT, comm.rank + 1, np.float32))
    comm.all_reduce(x)
    comm.all_gather(x)
    comm.synchronize()
    world.barrier()
    if comm.rank != 0:
        world.recv(source=0)
    for _ in range(30):
        comm.all_reduce(x)
        comm.all_gather(x)
    last = comm.all_reduce(x)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            world.send(None, rank)
    comm.synchronize()
    assert (last.copy_to_host() == comm.size * (comm.size + 1) / 2).all()


def test_a_dropped_output_is_not_reused_before_other_streams_are_done(comm):
    """The library does not know the stream on which the program uses the output."""
    x = to_device(np.full(COUNT, comm.rank + 1, np.float32))
    copy = cuda.device_array(COUNT, np.float32)
    behind = Device().create_stream()
    total = comm.size * (comm.size + 1) / 2
    y = comm.all_reduce(x)
    comm.synchronize()
    seen = set()
    for _ in range(20):
        y = comm.all_reduce(x)
        seen.add(y.gpu_data.device_pointer_value)
        comm.synchronize()
        fill(copy, 0, behind, milliseconds=5)
        copy.copy_to_device(y, stream=cuda.external_stream(int(behind.handle)))
        del y
        for _ in range(3):
            seen.add(comm.all_reduce(x, op="max").gpu_data.device_pointer_value)
        behind.sync()
        assert (copy.copy_to_host() == total).all()
    assert len(seen) < 20  # and yet, memory was reused


def test_an_output_can_be_registered_and_shared(comm):
    """Memory that is reused is of cudaMalloc, which other processes can map."""
    y = comm.all_reduce(comm.zeros(1000))
    comm.synchronize()
    del y
    y = comm.all_reduce(to_device(np.full(1000, comm.rank + 1, np.float32)))
    memory = comm.rendezvous(y)
    comm.synchronize()
    there = memory.get_buffer((comm.rank + 1) % comm.size, 1000, np.float32)
    assert (there.copy_to_host() == comm.size * (comm.size + 1) / 2).all()
    comm.barrier()
    comm.synchronize()
    assert locate(y.gpu_data.device_pointer_value, y.nbytes).kind == "ipc"


def test_a_new_output_beside_a_capture_is_refused(comm):
    x, y = comm.zeros(1000), comm.zeros(1000)
    comm.all_reduce(x)
    comm.all_reduce(x)  # the first one was dropped
    stream = Device().create_stream()
    builder = stream.create_graph_builder().begin_building("relaxed")
    with pytest.raises(ns.ArgumentError, match="pass out= while a stream is being"):
        comm.all_reduce(x)
    with pytest.raises(RuntimeError):
        builder.end_building()
    comm.all_reduce(x, out=y)
    comm.synchronize()
    comm.check()
