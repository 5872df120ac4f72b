"""Small messages, whose data is part of their envelope."""

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.mpi import inline
from numba_symm.mpi.envelopes import HEADER
from tests.ranks.helpers import needs_peers


def bytes_of(values):
    return cuda.to_device(np.asarray(values, "u1"))


@needs_peers
@pytest.mark.parametrize("islands", [False, True])
def test_sizes_around_the_limit(apart, monkeypatch, islands):
    """All arrive in order, whichever way each takes, and their memory is reused."""
    if islands:
        monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    comm = MPI.Comm(apart, timeout=20)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sizes = [1, inline.MOST + 1, inline.MOST, 0, inline.MOST - 1] * 8
    values = np.arange(2 * inline.MOST) * 7 % 251
    free = len(inline._free)
    outs = [bytes_of(np.full(size + 3, 255)) for size in sizes]
    requests = [comm.Irecv(out, left, 5) for out in outs]
    for number, size in enumerate(sizes):
        x = bytes_of((values[number : number + size] + comm.rank) % 251)
        comm.Send(x, right, 5)
        x.copy_to_device(np.zeros(size, "u1"))  # a sent array may be used
    MPI.Request.Waitall(requests)
    for number, (size, out) in enumerate(zip(sizes, outs, strict=True)):
        expected = [*(values[number : number + size] + left) % 251, 255, 255, 255]
        assert out.copy_to_host().tolist() == expected
    comm.post.reap()
    assert not comm.post._copying
    assert len(inline._free) == free
    comm.Free()


def test_messages_in_flight_need_no_pinned_memory(comm, monkeypatch):
    """While all of it is in use, messages use other memory, which is not kept."""
    assert inline.MOST + HEADER.size < 3900  # MPI sends it eagerly, with its headers
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    monkeypatch.setattr(inline, "_free", [])
    out = bytes_of(np.zeros(9))
    comm.Sendrecv(bytes_of(np.arange(9) + comm.rank), right, 1, out, left, 1)
    assert out.copy_to_host().tolist() == [each + left for each in range(9)]
    assert not inline._free
    comm.Barrier()


def test_items_with_gaps_and_messages_that_do_not_fit(comm):
    """A kernel stores the items; a message that does not fit changes nothing."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
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
    vector.Free()
    comm.Barrier()
