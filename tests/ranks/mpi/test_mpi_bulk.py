"""Bulk data in the simulator, which moves them as NumPy slices."""

import time

import numpy as np
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.environment import SIMULATED

COUNT = 125_000  # 1 MB of float64
MOST = 0.1  # seconds of a rank's processor time, because others may load the cores
TIMED = 2  # ranks, at most; more have too few cores


def test_a_megabyte_of_each_rank_takes_a_tenth_of_a_second(comm):
    rank, size = comm.rank, comm.size
    values = [np.random.default_rng(r).integers(0, 99, COUNT) for r in range(size)]
    x = cuda.to_device(values[rank].astype(float))
    y, z = cuda.device_array(COUNT), cuda.device_array(size * COUNT)
    places = [COUNT] * size, [COUNT * (size - 1 - r) for r in range(size)]
    calls = {
        "Allreduce": (lambda: comm.Allreduce(x, y), y, sum(values)),
        "Allgatherv": (
            lambda: comm.Allgatherv(x, [z, *places, MPI.DOUBLE]),
            z,
            np.concatenate(values[::-1]),
        ),
        "Sendrecv": (
            lambda: comm.Sendrecv(x, (rank + 1) % size, 0, y, (rank - 1) % size, 0),
            y,
            values[rank - 1],
        ),
    }
    for name, (call, result, expected) in calls.items():
        took = []
        for _ in range(9 if size <= TIMED else 1):
            result[:] = -1
            comm.Barrier()
            before = time.process_time()
            call()
            took.append(time.process_time() - before)
            np.testing.assert_array_equal(result.copy_to_host(), expected)
        assert not SIMULATED or size > TIMED or min(took) < MOST, (name, took)
