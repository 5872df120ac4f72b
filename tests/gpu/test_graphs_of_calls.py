"""Graphs that the library makes of calls that repeat."""

import numpy as np
from numba import cuda

import numba_symm as ns
from tests.gpu.helpers import fill, to_device
from tests.ranks.helpers import get, needs_peers, of_one_island

pytestmark = of_one_island


@needs_peers
def test_graphs_of_calls_are_made_while_a_kernel_waits(comm):
    """It may wait for something that this host does only later."""
    stream, waiting = ns.Stream(), ns.Stream()
    away = to_device(np.zeros(8, np.float32))
    x, y = comm.zeros(8192, np.float32), comm.zeros(8192, np.float32)
    z = comm.zeros(8192 * comm.size, np.float32)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def reduce(count):
        comm.all_reduce(x[:count], out=y[:count], stream=stream)

    def gather_by_copies(count):
        out = z[: count * comm.size].reshape(comm.size, count)
        comm.all_gather(x[:count], out=out, stream=stream, algorithm="copy_engine")

    def exchange(count):
        with comm.group():
            for first in range(0, count, 8):
                comm.send(x[first : first + 8], dst=right, stream=stream)
                comm.recv(y[first : first + 8], src=left, stream=stream)

    calls = [(reduce, range(32, 2048, 32))]
    calls += [(gather_by_copies, range(64, 4096, 128)), (exchange, range(8, 64, 8))]
    fill(x, 3)
    fill(away, 0, waiting)
    for call, counts in calls:  # so that no kernel is loaded later
        for count in counts:
            call(count)
    cuda.synchronize()
    graphs = comm._calls.enqueuer.graphs
    before = len(graphs._made)
    fill(away, 1, waiting, milliseconds=3000)
    for call, counts in calls:
        for count in counts:
            for _ in range(5):
                call(count)
        assert not waiting.query(), call
    comm.synchronize(stream)
    assert not waiting.query()
    assert (get(y)[:56] == 3).all()
    assert (get(z)[:1024] == 3).all()
    assert len(graphs._made) >= before + 90
    waiting.synchronize()


def test_repeated_calls_have_the_bits_of_first_ones(comm):
    """The third call launches the graph, on any stream and with new contents."""
    streams = [ns.Stream(), ns.Stream()]
    for count in (1, 1000, 300_001, 5_000_000):
        for algorithm in (None, "chunked", "direct"):
            x = to_device(np.zeros(count, np.float32))
            y = cuda.device_array_like(x)
            for step in range(8):
                stream = streams[step // 3 % 2]
                fill(x, step + comm.rank, stream)
                comm.all_reduce(x, out=y, stream=stream, algorithm=algorithm)
                comm.synchronize(stream)
                total = comm.size * step + comm.size * (comm.size - 1) // 2
                assert (get(y) == total).all()
