"""One-sided copies on streams and in graphs, ordered by signals."""

import numpy as np
import pytest
from cuda.core import Device
from numba import cuda

import numba_symm as ns
from tests.gpu.helpers import add, capturing, fill, to_device
from tests.ranks.helpers import needs_peers

MIB = 1 << 20
SLOW = 20  # milliseconds


@pytest.fixture
def stream(comm):
    stream = Device().create_stream()
    yield stream
    stream.sync()


@needs_peers
@pytest.mark.parametrize("fenced", [False, True])
def test_a_put_follows_its_source_and_precedes_its_signal(comm, stream, fenced):
    """The source is late and the copy takes long; the signal arrives after both."""
    count = 16 * MIB
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    memory = comm.rendezvous(comm.zeros(count, np.float32))
    here = memory.get_buffer(comm.rank, count, np.float32)
    source = cuda.device_array(count, np.float32)
    seen = [cuda.device_array(count, np.float32) for _ in range(5)]
    for step, out in enumerate(seen, 1):
        fill(source, 100 * step + comm.rank, stream, SLOW)
        memory.put(source, right, stream=stream)
        if fenced:
            memory.fence(stream)
        memory.put_signal(right, stream=stream)
        memory.wait_signal(left, stream=stream)
        memory.get(comm.rank, count, np.float32, out=out, stream=stream)
        add(here, 0.5, stream)  # so that only the next put makes it right
        memory.barrier(
            1, stream
        )  # all ranks have finished this step before any puts again
    comm.synchronize(stream)
    for step, array in enumerate(seen, 1):
        assert (array.copy_to_host() == 100 * step + left).all()


@needs_peers
def test_halos_in_a_graph(comm, stream):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    memory = comm.rendezvous(comm.zeros(2, np.int64))
    own, back = to_device(np.array([comm.rank])), to_device(np.zeros(1, np.int64))
    add(own, 0, stream)  # compiled
    memory.fence(stream)
    memory.barrier(0, stream)
    memory.put_signal(right, stream=stream)
    memory.wait_signal(left, stream=stream)
    comm.synchronize(stream)
    with capturing(stream) as (builder, graphs):
        on = builder.stream
        add(own, 10, on)
        memory.put(own, right, 1, stream=on)
        memory.fence(on)
        memory.put_signal(right, stream=on)
        memory.wait_signal(left, stream=on)
        memory.get(comm.rank, 1, np.int64, 1, out=back, stream=on)
        with pytest.raises(ns.ArgumentError, match="pass out= while a stream"):
            memory.get(left, 1, np.int64, stream=on)
        memory.barrier(1, on)
    for replay in range(1, 51):
        graphs[0].launch(stream)
        if replay in (1, 2, 50):
            comm.synchronize(stream)
            assert back.copy_to_host()[0] == left + 10 * replay


def test_arrays_in_host_memory_are_refused(comm):
    memory = comm.rendezvous(comm.zeros(4, np.float32))
    x = cuda.managed_array(4, np.float32)
    with pytest.raises(ns.ArgumentError, match=r"put: .* in managed memory"):
        memory.put(x, 0)
    with pytest.raises(ns.ArgumentError, match=r"get: out: .* in managed memory"):
        memory.get(0, 4, np.float32, out=x)
