"""Graphs that the library makes of calls that repeat."""

import numpy as np
from numba import cuda

import numba_symm as ns
from tests.gpu.helpers import fill, to_device
from tests.ranks.helpers import get, of_one_island

pytestmark = of_one_island


def test_graphs_of_calls_are_made_while_a_kernel_waits(comm):
    """It may wait for something that this host does only later."""
    stream, waiting = ns.Stream(), ns.Stream()
    away = to_device(np.zeros(8, np.float32))
    x, y = comm.zeros(8192, np.float32), comm.zeros(8192, np.float32)
    fill(x, 3)
    fill(away, 0, waiting)
    comm.all_reduce(x[:32], out=y[:32], stream=stream)
    cuda.synchronize()
    graphs = comm._calls.enqueuer.graphs
    before = len(graphs._made)
    fill(away, 1, waiting, milliseconds=3000)
    for count in range(32, 8192 + 1, 32):
        for _ in range(5):
            comm.all_reduce(x[:count], out=y[:count], stream=stream)
    assert not waiting.query()
    comm.synchronize(stream)
    assert not waiting.query()
    assert (y.copy_to_host() == 3 * comm.size).all()
    assert len(graphs._made) >= before + 50
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
