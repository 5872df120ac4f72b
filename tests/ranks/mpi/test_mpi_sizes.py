"""Messages of sizes around limits, in order, with gaps, and that do not fit."""

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.mpi.rooms import BLOCK_BYTES, LEAST


def bytes_of(values):
    return cuda.to_device(np.asarray(values, "u1"))


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


LIMITS = 512, LEAST, 2 * LEAST


@pytest.mark.parametrize("islands", [False, True])
def test_sizes_around_limits(apart, monkeypatch, islands):
    """All arrive in order, whichever way each takes, from and to any address."""
    if islands:
        monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    comm = MPI.Comm(apart, timeout=20)
    right, left = around(comm)
    sizes = [limit + more for limit in LIMITS for more in (1, 0, -1, -8)]
    sizes = [*sizes, 0, 1, 7, 8, 16, 0, 24, *sizes[::-1], BLOCK_BYTES + 5]
    values = np.arange(max(sizes) + len(sizes)) * 7 % 251
    outs = [bytes_of(np.full(size + 19, 255)) for size in sizes]
    requests = [
        comm.Irecv(out[number % 16 :], left, 5) for number, out in enumerate(outs)
    ]
    x = bytes_of(np.zeros(values.size))
    for number, size in enumerate(sizes):
        x.copy_to_device(np.asarray((values + number + comm.rank) % 251, "u1"))
        comm.Send([x[number:], size, MPI.BYTE], right, 5)
    MPI.Request.Waitall(requests)
    for number, (size, out) in enumerate(zip(sizes, outs, strict=True)):
        first, found = number % 16, out.copy_to_host()
        expected = (values[number : number + size] + number + left) % 251
        assert found[first : first + size].tolist() == expected.tolist()
        assert {*found[:first], *found[first + size :]} == {255}
    comm.post.reap()
    assert not comm.post.arriving
    comm.Free()
