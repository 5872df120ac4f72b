"""Messages between islands, through MPI, beside those in an island."""

import os

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.mpi import pending, progress
from numba_symm.mpi.rooms import LEAST
from tests.ranks.helpers import needs_peers, of_one_island

pytestmark = [needs_peers, of_one_island]


def array(*values):
    return cuda.to_device(np.array(values, "i4"))


def room(number):
    return cuda.to_device(np.full(number, -1, "i4"))


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.fixture(params=["1", "2"])
def islands(request, apart, monkeypatch):
    """A communicator of islands of one or two ranks."""
    if int(request.param) >= apart.size:
        pytest.skip("needs ranks of another island")
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", request.param)
    made = MPI.Comm(apart, timeout=20)
    yield made
    made.Free()


def test_several_islands(islands):
    """Collectives and messages cross them; windows do not."""
    x, made = array(1), islands
    made.Allreduce(MPI.IN_PLACE, x)
    assert x.copy_to_host()[0] == made.size
    part = made.Create_cart([made.size])
    for comm in (made, part):
        check_messages(comm)
        comm.Send(x, comm.rank)  # to itself
        comm.Recv(x, comm.rank)
    size = int(os.environ["NUMBA_SYMM_ISLAND_SIZE"])
    with pytest.raises(NotImplementedError, match="got the islands rank"):
        MPI.Win.Allocate_device(8, comm=made)
    assert made.post.islands == [rank // size for rank in range(made.size)]
    right, left = around(made)
    host = np.zeros(1)
    made.Sendrecv(np.ones(1), right, recvbuf=host, source=left)
    assert host[0] == 1
    # Messages that nobody receives, larger than MPI sends them before a receive.
    large = cuda.to_device(np.zeros(1 << 20, "i4"))
    for tag in (1, 2, 3):
        part.Send(large, right, tag)
    assert part.Mprobe(left, 2)
    part.Irecv(room(1 << 20), left, 1).Free()
    part.Free()


def check_messages(comm):
    """Check messages of all kinds to the rank on the right."""
    right, left = around(comm)
    pairs = MPI.INT.Create_vector(2, 1, 3).Commit()
    status = MPI.Status()
    for count in (0, 1, 300_000):
        x, out = cuda.to_device(np.arange(count, dtype="i4")), room(count + 1)
        request = comm.Irecv(out, left, 1)
        for tag in (3, 2, 1):
            comm.Send(x, right, tag)
            if count:
                x[0] = comm.rank + tag  # the next message has this value
        request.Wait()
        found = out.copy_to_host()
        assert found[1:count].tolist() == list(range(1, count))
        assert found[0] == (left + 2 if count else -1)
        assert comm.Iprobe(left, 3, status)
        assert status.Get_count(MPI.INT) == count
        if count:
            with pytest.raises(MPI.Exception, match="at most 0 bytes"):
                comm.Recv(room(0), left, 3)
        else:
            comm.Recv(room(0), left, 3)
        comm.Mprobe(left, 2).Recv(out, status)
        assert status.Get_count(MPI.INT) == count
        assert not count or out.copy_to_host()[0] == left + 3
    x, out = array(1, 2, 3, 4), room(4)
    comm.Sendrecv([x, 1, pairs], right, 0, [out, 1, pairs], left)
    assert out.copy_to_host().tolist() == [1, -1, -1, 4]
    pairs.Free()


def test_synchronous_sends_and_cancelled_receives(islands):
    """A probe, a cancelled receive and one with another tag match nothing."""
    comm, x, out = islands, array(1, 2, 3, 4), room(4)
    right, left = around(comm)
    requests = [comm.Issend(x, right, tag) for tag in (5, 6)]
    comm.Probe(left, 6)
    cancelled = comm.Irecv(out, left, 4)
    cancelled.Cancel()
    status = MPI.Status()
    cancelled.Wait(status)
    assert status.Is_cancelled()
    comm.Barrier()
    assert not any([request.Test() for request in requests])
    comm.Barrier()
    matched = comm.Mprobe(left, 6)
    requests[1].Wait()  # a matched probe is enough
    late = comm.Irecv(out, left, 5)
    requests[0].Wait()
    late.Cancel()  # too late
    late.Wait(status)
    assert not status.Is_cancelled()
    assert out.copy_to_host().tolist() == [1, 2, 3, 4]
    out = room(4)
    matched.Recv(out)
    assert out.copy_to_host().tolist() == [1, 2, 3, 4]
    comm.Barrier()


def test_any_source_gets_the_messages_of_each_rank_in_order(islands):
    """Some come through the island's memory, and others by MPI."""
    comm, number, status = islands, 40, MPI.Status()
    requests = [
        (comm.Issend if step % 8 == 7 else comm.Isend)(array(comm.rank, step), rank, 9)
        for step in range(number)
        for rank in range(comm.size)
    ]
    found, out = {rank: [] for rank in range(comm.size)}, room(2)
    for step in range(number * comm.size):
        if step % 3:
            comm.Recv(out, MPI.ANY_SOURCE, 9, status)
        else:
            comm.Mprobe(MPI.ANY_SOURCE, MPI.ANY_TAG).Recv(out, status)
        source, value = out.copy_to_host().tolist()
        assert source == status.source
        found[source].append(value)
    assert all(each == list(range(number)) for each in found.values())
    MPI.Request.Waitall(requests)
    assert not comm.Iprobe()
    comm.Barrier()


def test_messages_above_the_limit_of_all_islands(islands, monkeypatch):
    """Those that do not fit under the limit come in order with the others."""
    comm = islands
    monkeypatch.setattr(comm.post, "limit", 8)
    requests = [
        comm.Isend(array(comm.rank, step), rank, 9)
        for step in range(5)
        for rank in range(comm.size)
    ]
    out = room(2)
    for rank in range(comm.size):
        for step in range(5):
            comm.Recv(out, rank, 9)
            assert out.copy_to_host().tolist() == [rank, step]
    MPI.Request.Waitall(requests)
    comm.Barrier()


@pytest.mark.parametrize("islands", ["1"], indirect=True)
def test_data_for_other_islands(islands, monkeypatch):
    """More items than a count of C can be have a datatype of their own."""
    monkeypatch.setattr(progress, "_MOST", 1000)
    comm, (right, left) = islands, around(islands)
    post, x, out = comm.post, array(*range(600)), array(*(-1 for _ in range(600)))
    comm.Sendrecv(x, right, 1, out, left, 1)
    assert out.copy_to_host().tolist() == list(range(600))
    assert post.mpi.sent[right] == 1
    comm.Barrier()
    for _ in range(1000):  # later messages let go of data that was sent
        comm.Sendrecv(x, comm.rank, 1, out, comm.rank, 1)
        if not (post.mpi._kept or post.unread[right]):
            break
    assert not post.mpi._kept
    assert not post.unread[right]

    class Refused:
        @staticmethod
        def Isend(*_):
            raise OverflowError

    with monkeypatch.context() as patch:
        patch.setattr(post.mpi, "comm", Refused)
        with pytest.raises(OverflowError):
            comm.Send(x, right, 2)
    comm.Send(np.ones(1, "i4"), right, 3)
    comm.Probe(left, 3)  # this message, of the host, is the last one sent
    assert not comm.Iprobe(left, 2)
    comm.Recv(np.ones(1, "i4"), left, 3)


@pytest.mark.parametrize("islands", ["1"], indirect=True)
def test_a_copy_that_fails_is_reported_by_its_request(islands, monkeypatch):
    """Other calls, which may start it when its data arrives, do not raise."""
    comm, (right, left), out = islands, around(islands), array(0)
    comm.Sendrecv(array(1), comm.rank, 1, out, comm.rank, 1)
    comm.Barrier()
    comm.post.reap()
    rooms = comm.post.words.rooms.stack(LEAST)
    before = rooms.free
    requests = [comm.Irecv(out, left, tag) for tag in (1, 2)]

    def failing(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(pending.streams, "copy_from_host", failing)
        comm.Send(array(1), right, 1)
        requests[0]._await_start()
    comm.Send(array(2), right, 2)
    requests[1].Wait()
    assert out.copy_to_host()[0] == 2
    with pytest.raises(MemoryError):
        requests[0].Wait()
    assert not requests[0]
    assert rooms.free == before


@pytest.mark.parametrize("then", ["Recv", "Send", "Wait"])
def test_a_message_that_an_interrupt_leaves_arrives_once(
    islands, world, monkeypatch, then
):
    """Which MPI has brought, and which has matched a receive or none."""
    last, x, out = islands.size - 1, array(7), array(-1)
    if islands.rank == last:
        islands.Send(x, 0, 1)
    world.Barrier()
    if islands.rank == 0:
        post, match = islands.post, islands.post.match
        receives = islands.Irecv(out, last, 1) if then == "Wait" else None

        def interrupted_after(found):
            match(found)
            raise KeyboardInterrupt

        def wait():
            while True:
                progress.advance()

        with monkeypatch.context() as patch:
            patch.setattr(post, "match", interrupted_after)
            with pytest.raises(KeyboardInterrupt):
                wait()
        if then != "Recv":
            islands.Send(x, 0, 2)
        if receives is None:
            islands.Recv(out, last, 1)
        else:
            receives.Wait()
        assert out.copy_to_host()[0] == 7
        assert not islands.Iprobe(last, 1)
        assert not post.brought
        if then != "Recv":
            islands.Recv(out, 0, 2)
    world.Barrier()
