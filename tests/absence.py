"""Calls that need an absent rank, and how long the others wait."""

import numpy as np
from numba import cuda

import numba_symm as ns

AWAY = 1  # the absent rank
PATIENT = 600  # a timeout that never passes
SOON = PATIENT / 2  # who raises before has not waited; a busy machine takes seconds


def input_of(comm, value=None):
    # Whole vectors for each of two or three ranks, as copy engines need.
    return cuda.to_device(np.full(120, comm.rank + 1 if value is None else value, "f4"))


def reduced(comm, algorithm=None):
    """Return whether an all-reduce of 1, 2, … gives their sum."""
    y = comm.all_reduce(input_of(comm), algorithm=algorithm)
    comm.synchronize()
    return bool((y.copy_to_host() == comm.size * (comm.size + 1) / 2).all())


def warm_up(world):
    """Compile and load the kernels, which may take longer than a short timeout."""
    with ns.Communicator(world, timeout=PATIENT) as comm:
        assert reduced(comm, "one_shot_ll")


@cuda.jit
def double(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] = 2 * x[i]


def context_is_alive():
    """Return whether an ordinary kernel and ordinary copies still work."""
    x = cuda.to_device(np.arange(10, dtype=np.float32))
    double[1, 16](x)
    return x.copy_to_host().tolist() == [2.0 * i for i in range(10)]
