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


def test_items_with_gaps_and_messages_that_do_not_fit(comm):
    """A kernel stores the items; a message that does not fit changes nothing."""
    right, left = around(comm)
    vector = MPI.BYTE.Create_vector(3, 2, 5).Commit()
    x, out = bytes_of(np.arange(24) + comm.rank), bytes_of(np.full(48, 255))
    status = MPI.Status()
    comm.Sendrecv([x, 18, MPI.BYTE], right, 1, [out, 3, vector], left, 1, status)
    host = np.arange(12 * 3) % 12  # an item has 12 bytes, 6 of them in the message
    kept = np.isin(host, [0, 1, 5, 6, 10, 11])
    found = out.copy_to_host()
    assert status.Get_count(MPI.BYTE) == 18
    assert found[:36][kept].tolist() == [each + left for each in range(18)]
    assert set(found[:36][~kept]) | set(found[36:]) == {255}
    comm.Send(x, right, 2)
    comm.Send(x, right, 2)
    out = bytes_of(np.full(23, 255))
    with pytest.raises(MPI.Exception, match="at most 23 bytes"):
        comm.Recv(out, left, 2)
    assert set(out.copy_to_host()) == {255}
    message = comm.Mprobe(left, 2, status)
    assert status.Get_count(MPI.BYTE) == 24
    out = bytes_of(np.zeros(24))
    message.Recv(out)
    assert out.copy_to_host().tolist() == [each + left for each in range(24)]
    x = bytes_of([])  # there is nothing to pack
    comm.Sendrecv([x, 0, vector], right, 3, out, left, 3, status)
    assert status.Get_count(MPI.BYTE) == 0
    vector.Free()
    comm.Barrier()
