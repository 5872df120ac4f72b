"""Messages above the limit of what their receivers have not received."""

import time

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.errors import CollectiveTimeout, RankLeft
from numba_symm.mpi import progress
from tests.interrupts import Interrupt
from tests.ranks.helpers import needs_peers, of_one_island

LIMIT = 100_000
SIZE = 40_000  # bytes of a message: two pass, and MPI sends none before its receive


def array(value, nbytes=SIZE):
    return cuda.to_device(np.full(nbytes, value, "u1"))


def value(array):
    (found,) = np.unique(array.copy_to_host())
    return int(found)


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.fixture(params=["island", "islands"])
def limited(request, apart, monkeypatch):
    """A communicator with a limit, also of ranks that are islands of one."""
    if request.param == "islands":
        if apart.size == 1:
            pytest.skip("needs several ranks")
        monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    monkeypatch.setenv("NUMBA_SYMM_MESSAGE_LIMIT", str(LIMIT))
    made = MPI.Comm(apart, timeout=20)
    yield made
    made.Free()
    assert not any(made.post.unread)


def received(comm, source, tag=0):
    out = array(255)
    comm.Recv(out, source, tag)
    return value(out)


def test_isends_above_the_limit_end_later_and_in_order(limited, world):
    """Such a message is not overtaken."""
    right, left = around(limited)
    post, xs = limited.post, [array(number) for number in range(7)]
    requests = [limited.Isend(x, right, 1) for x in xs[:5]]
    assert not requests[4].Test()
    requests.append(limited.Issend(xs[5], right, 2))
    requests.append(limited.Isend(xs[6], right, 1))
    world.Barrier()  # of mpi4py: MPI moves messages on, but none is received
    assert not any(each.Test() for each in requests[2:])
    world.Barrier()
    assert limited.Iprobe(left, 2)
    found = limited.Mprobe(left, 1)
    out = array(255)
    found.Recv(out)
    assert value(out) == 0
    assert [received(limited, left, tag) for tag in (2, 1, 1)] == [5, 1, 2]
    assert received(limited, left, MPI.ANY_TAG) == 3
    status = MPI.Status()
    last = limited.Irecv(out, left, 1), limited.Irecv(array(0), left, 1)
    MPI.Request.Waitall([*last, *requests])
    assert value(out) == 4
    assert not limited.Iprobe(left, MPI.ANY_TAG, status)
    world.Barrier()
    while post.unread[right]:
        limited.Iprobe()


def test_a_send_waits_for_its_receiver(limited, world):
    first, last, ends = 0, limited.size - 1, []
    begin = time.monotonic() + 0.3
    if limited.rank == first != last:
        for number in range(6):
            limited.Send(array(number), last, 3)
            ends.append(time.monotonic())  # of the node's clock
            assert limited.post.unread[last] <= LIMIT + SIZE
    elif limited.rank == last != first:
        time.sleep(0.3)
        assert [received(limited, first, 3) for _ in range(6)] == [*range(6)]
    begin = world.bcast(begin, last)
    assert all(end >= begin for end in ends[2:])
    x = array(9, 3 * LIMIT)
    right, left = around(limited)
    world.Barrier()
    while limited.post.unread[right]:
        limited.Iprobe()
    limited.Send(x, right, 3)  # alone, whatever its size
    for tag in (4, 4):
        limited.Bsend(array(tag), right, tag)  # is never limited
    assert limited.post.unread[right] == 3 * LIMIT + 2 * SIZE
    world.Barrier()
    out = array(0, 3 * LIMIT)
    limited.Recv(out, left, 3)
    assert value(out) == 9
    assert received(limited, left, 4) == received(limited, left, 4) == 4


def test_a_message_without_data_never_waits(limited, world):
    """Its order holds."""
    right, left = around(limited)
    for number in range(3):
        limited.Bsend(array(number), right, 1)
    limited.Send(array(9, 0), right, 1)  # no rank receives before
    world.Barrier()
    status, found = MPI.Status(), []
    for _ in range(4):
        out = array(255)
        limited.Recv(out, left, 1, status)
        found.append((status.Get_count(MPI.BYTE), value(out)))
    assert found == [(SIZE, 0), (SIZE, 1), (SIZE, 2), (0, 255)]


def test_later_receives_match_later_messages(limited, world):
    """No wait for one message is a wait for another one."""
    first, last = 0, limited.size - 1
    if limited.rank == last != first:
        for tag in (2, 3, 1, 1, 1):
            assert received(limited, first, tag) == tag
        world.Barrier()
        assert received(limited, first, 5) == 5
    elif limited.rank == first != last:
        requests = [limited.Isend(array(1), last, 1) for _ in range(3)]
        limited.Send(array(2), last, 2)
        limited.Ssend(array(3), last, 3)
        world.Barrier()  # the other rank receives the third one before this
        MPI.Request.Waitall(requests)
        limited.Send(array(5), last, 5)
    else:
        world.Barrier()


def test_calls_that_send_and_receive(limited, world):
    right, left = around(limited)
    blocks = [limited.Isend(array(7), right, 1) for _ in range(2)]
    out = array(255)
    limited.Sendrecv(array(1), right, 2, out, left, 2)
    assert value(out) == 1
    limited.Sendrecv_replace(out, right, 3, left, 3)
    assert value(out) == 1
    out = array(limited.rank)
    request = limited.Isendrecv_replace(out, right, 4, left, 4)
    request.Wait()
    assert value(out) == left
    vector = MPI.BYTE.Create_vector(2, SIZE // 2, SIZE).Commit()
    wide = array(limited.rank, 2 * SIZE)
    sends = limited.Send_init([wide, 1, vector], right, 5)
    receives = limited.Recv_init(out, left, 5)
    for _ in range(2):
        MPI.Prequest.Startall([sends, receives])
        MPI.Request.Waitall([receives, sends])
        assert value(out) == left
        out.copy_to_device(array(255))
    vector.Free()
    assert [received(limited, left, 1) for _ in blocks] == [7, 7]
    MPI.Request.Waitall(blocks)
    own = [limited.Irecv(array(0), limited.rank, 6) for _ in range(4)]
    for number in range(4):
        limited.Send(array(number), limited.rank, 6)
    MPI.Request.Waitall(own)


@of_one_island
def test_a_refused_message_keeps_nothing(limited, world):
    right, left = around(limited)
    requests = [limited.Isend(array(tag), right, tag) for tag in range(4)]
    with pytest.raises(MPI.Exception, match="expected at most 1 bytes") as found:
        limited.Recv(array(0, 1), left, 3)
    assert found.value.Get_error_class() == MPI.ERR_TRUNCATE
    requests[3].Wait()
    assert [received(limited, left, tag) for tag in (2, 0, 1)] == [2, 0, 1]
    MPI.Request.Waitall(requests)
    world.Barrier()
    while limited.post.unread[right]:
        limited.Iprobe()
    assert not limited.post.mpi._kept


@needs_peers
def test_a_message_of_a_withdrawn_receive_is_left_to_a_later_one(limited, world):
    """Also if its data has come before."""
    limited.post.limit = 300
    xs, out = [array(number, 200) for number in range(3)], array(255, 200)
    if limited.rank == 0:
        MPI.Request.Waitall([limited.Isend(x, 1, tag) for tag, x in enumerate(xs)])
    elif limited.rank == 1:
        receive = limited.Irecv(out, 0, 1)
        while receive.envelope is None:
            progress.advance()
        receive._withdraw()
        for tag in (1, 0, 2):
            limited.Recv(out, 0, tag)
            assert value(out) == tag


@of_one_island
def test_waits_for_others_receive_what_has_matched(limited, world):
    """A sender above the limit ends, although nobody waits for its receive."""
    right, left = around(limited)
    outs = [array(255) for _ in range(4)]
    receives = [limited.Irecv(out, left, tag) for tag, out in enumerate(outs)]
    world.Barrier()
    for tag in range(4):
        limited.Send(array(tag), right, tag)
    MPI.Request.Waitall(receives)
    assert [value(out) for out in outs] == [*range(4)]
    assert limited.post.fetch in progress.matching or right in limited.post.to


def test_a_wait_ends_by_a_signal(limited, world, monkeypatch):
    """The message is sent nevertheless; its array may change."""
    right, left = around(limited)
    for tag in range(2):
        limited.Send(array(tag), right, tag)

    def interrupt():
        raise Interrupt

    x = array(2)
    with monkeypatch.context() as patch:
        patch.setattr(limited.post, "check", interrupt)
        with pytest.raises(Interrupt):
            limited.Send(x, right, 2)
    x.copy_to_device(array(99))
    world.Barrier()
    assert [received(limited, left, tag) for tag in range(3)] == [0, 1, 2]


@needs_peers
def test_two_ranks_that_send_before_they_receive(apart, monkeypatch):
    """As MPI's rendezvous, but with a deadline, whose text names the limit."""
    monkeypatch.setenv("NUMBA_SYMM_MESSAGE_LIMIT", str(LIMIT))
    comm = MPI.Comm(apart, timeout=0.3)
    right, left = around(comm)
    for tag in range(2):
        comm.Send(array(tag), right, tag)
    for call in (comm.Send, lambda *given: comm.Isend(*given).Wait()):
        with pytest.raises(MPI.Exception) as found:
            call(array(2), right, 2)
        assert isinstance(found.value.__cause__, CollectiveTimeout)
        assert found.value.__cause__.ranks == (comm.rank, right)
        text = str(found.value)
        assert f"rank {comm.rank} waited for rank {right} to receive its mess" in text
        assert f"{SIZE} bytes with tag 2" in text
        assert f"NUMBA_SYMM_MESSAGE_LIMIT is {LIMIT} (timeout: 0.3 s)" in text
    apart.Barrier()  # no rank receives before
    found = [received(comm, left, tag) for tag in (0, 1, 2, 2)]
    assert found == [0, 1, 2, 2]
    apart.Barrier()
    for tag in range(2):
        comm.Send(array(tag), right, tag)
    apart.Barrier()  # else a rank may see the end in its second call
    if comm.rank == 0:
        comm.communicator._calls.members.abandon(ValueError("7"), "Recv")
    else:
        with pytest.raises(
            MPI.Exception, match="left Recv with ValueError: 7"
        ) as found:
            comm.Ssend(array(3), right, 3)
        assert isinstance(found.value.__cause__, RankLeft)
    apart.Barrier()
    comm.Free()


def test_free_lets_peers_receive_first(limited):
    right, left = around(limited)
    made = limited.Dup()
    requests = [made.Isend(array(tag), right, tag) for tag in range(5)]
    if made.rank == 0:
        assert [received(made, left, tag) for tag in range(4)] == [*range(4)]
    made.Free()
    MPI.Request.Waitall(requests)


def test_a_wrong_limit(apart, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_MESSAGE_LIMIT", "1G")
    with pytest.raises(MPI.Exception, match="expected a number of bytes, or 0 for no"):
        MPI.Comm(apart)
    monkeypatch.setenv("NUMBA_SYMM_MESSAGE_LIMIT", "0")
    made = MPI.Comm(apart)
    right, left = around(made)
    for _ in range(3):
        made.Send(array(1), right)
    for _ in range(3):
        assert received(made, left) == 1
    made.Free()
