"""Messages of many epochs, and arrays of more than 2**31 bytes."""

from collections import Counter

import numpy as np
import pytest
from numba import cuda

from numba_symm.collectives.operations import ALL_REDUCE
from tests.gpu.helpers import pattern, write_pattern


def reduced_pattern(comm, indices):
    """Return the sum over ranks of their patterns, which begin with their rank."""
    return pattern(indices, 0) * comm.size + comm.size * (comm.size - 1) // 2


def check(comm, array, start, end):
    found = array[start:end].copy_to_host()
    assert (
        found == reduced_pattern(comm, np.arange(start, end, dtype=np.int32))
    ).all(), (start, end)


@pytest.mark.parametrize("count", [64 << 20, (16 << 20) + 5, 8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_between_own_arrays_of_any_kind(comm, count, symmetric):
    x = comm.empty(count)
    y = comm.empty(count) if symmetric else cuda.device_array(count, np.float32)
    write_pattern(x, comm.rank)
    for _ in range(3):
        comm.all_reduce(x, out=y, algorithm="direct")
    comm.synchronize()
    check(comm, y, 0, count)
    assert (x[:4].copy_to_host() == pattern(np.arange(4), comm.rank)).all()
    for root in range(comm.size):
        y = comm.reduce(x, root=root, algorithm="direct")
        comm.synchronize()
        assert y is None or comm.rank == root
        if y is not None:
            check(comm, y, 0, count)
    comm.all_reduce(x, out=x, algorithm="direct")
    comm.synchronize()
    check(comm, x, 0, count)


@pytest.mark.parametrize("count", [2 << 20, (2 << 20) - 1, (3 << 20) + 12_345])
@pytest.mark.parametrize("algorithm", ALL_REDUCE.algorithms)
def test_many_epochs(comm, algorithm, count):
    x = cuda.device_array(count + 3, np.float32)[3:]  # aligned to 4 bytes only
    write_pattern(x, comm.rank)
    for _ in range(2):
        y = comm.all_reduce(x, algorithm=algorithm)
    comm.synchronize()
    check(comm, y, 0, count)


def test_more_than_2_gib(comm, world):
    sharing = Counter(world.allgather(comm.device.uuid))
    if max(sharing.values()) > 2:
        pytest.skip("more than 2 ranks share a GPU: it would take minutes")
    count = 2**29 + 1025
    free = cuda.current_context().get_memory_info().free
    if min(world.allgather(free)) < 2 * 4 * count:
        pytest.skip(f"less than {8 * count} bytes of GPU memory are free")
    x = comm.empty(count)
    write_pattern(x, comm.rank)
    comm.all_reduce(x, out=x)
    comm.synchronize()
    for start in (0, 2**28 - 5000, 2**29 - 5000, count - 5000):
        check(comm, x, start, min(start + 10_000, count))
    write_pattern(x, comm.rank)
    comm.all_reduce(x[2**29 :], out=x[2**29 :], algorithm="one_shot_ll")
    comm.synchronize()
    check(comm, x, 2**29, count)
    untouched = x[2**29 - 1000 : 2**29].copy_to_host()
    assert (untouched == pattern(np.arange(2**29 - 1000, 2**29), comm.rank)).all()
