"""Sends, receives and probes in mpi4py's spelling."""

import ctypes
import gc
from itertools import repeat
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.collectives.kernels import message_copy
from numba_symm.environment import SIMULATED
from numba_symm.errors import CollectiveTimeout
from numba_symm.gpu import kernels
from numba_symm.gpu.compiled import Config
from numba_symm.mpi.p2p import Together
from numba_symm.mpi.rooms import LEAST
from tests.ranks.helpers import needs_peers, of_one_island

pytestmark = of_one_island
simulated = pytest.mark.skipif(not SIMULATED, reason="kernels of the simulator")


def array(*values, dtype="i4"):
    return cuda.to_device(np.array(values, dtype))


def room(number, dtype="i4"):
    return cuda.to_device(np.full(number, -1, dtype))


def read_only(array):
    if SIMULATED:
        array.flags.writeable = False
        return array
    found = array.__cuda_array_interface__
    facts = found | {"data": (found["data"][0], True)}
    return SimpleNamespace(__cuda_array_interface__=facts, array=array)


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_requests_stay_active_until_all_are_done(comm):
    """A request that ended earlier keeps its status for the call that reports it."""
    right, left = around(comm)
    outs, host = [room(2) for _ in range(3)], np.zeros(3, "i4")
    requests = [comm.Irecv(out, left, tag) for tag, out in enumerate(outs[:2])]
    requests.append(comm.Irecv(host, left, 0))
    matched = comm.Issend(array(5), right, 3)
    requests.append(Together(comm.Irecv(outs[2], left, 4), matched))
    for x, tag in ((array(1), 0), (array(4, 4), 4), (np.ones(1, "i4"), 0)):
        comm.Send(x, right, tag)
    comm.Probe(left, 3)  # which matches no Issend
    statuses = []
    while not all(requests[index].Get_status() for index in (0, 2)):
        assert not MPI.Request.Testall(requests, statuses)
    assert not MPI.Request.Testall(requests, statuses)
    assert all(requests)
    comm.Barrier()
    comm.Recv(room(1), left, 3)
    comm.Send(array(2, 3), right, 1)
    while not MPI.Request.Testall(iter(requests), statuses):
        pass
    found = [(each.source, each.tag, each.Get_count(MPI.INT)) for each in statuses]
    assert found == [(left, 0, 1), (left, 1, 2), (left, 0, 1), (left, 4, 2)]
    assert not any(requests)
    assert MPI.Request.Testall(requests, statuses)
    assert {each.source for each in statuses} == {MPI.ANY_SOURCE}
    comm.Barrier()


def test_synchronous_and_persistent_messages(comm):
    right, left = around(comm)
    out = room(1)
    request = comm.Issend(array(comm.rank), right)
    comm.Barrier()
    assert not request.Test()  # nobody has received it
    comm.Barrier()
    comm.Recv(out, left)
    request.Wait()
    assert out.copy_to_host()[0] == left
    x = array(0)
    send, recv = comm.Send_init(x, right, 3), comm.Recv_init(out, left, 3)
    for step in range(3):
        x[0] = 10 * step + comm.rank
        MPI.Prequest.Startall([send, recv])
        MPI.Request.Waitall([send, recv])
        assert out.copy_to_host()[0] == 10 * step + left
    recv.Start()
    with pytest.raises(MPI.Exception, match="not active"):
        recv.Start()
    send.Start()
    MPI.Request.Waitall([send, recv])
    for finish in (MPI.Prequest.Wait, MPI.Prequest.Test, MPI.Prequest.Get_status):
        recv.Start()
        comm.Send([array(1, 2), 2, MPI.INT], right, 3)
        comm.Barrier()
        with pytest.raises(MPI.Exception, match="expected at most"):
            any(map(finish, repeat(recv)))
        assert not recv.is_active  # it may be started again
    reduce = comm.Allreduce_init(MPI.IN_PLACE, recvbuf=x)
    replaced = room(1)
    for attribute in ("_ary", "gpu_data"):  # in the simulator, and on a GPU
        if hasattr(x, attribute):
            setattr(x, attribute, getattr(replaced, attribute))
    for request in (send, reduce):
        with pytest.raises(MPI.Exception, match="Start: expected arrays of the addr"):
            request.Start()
        assert not request.is_active
    recv.Free()
    with pytest.raises(MPI.Exception, match="Free was called on the persistent req"):
        recv.Start()
    comm.Barrier()


def test_a_refused_receive_takes_no_message(comm, captured):
    right, left = around(comm)
    early = comm.Irecv(room(1), left, 2)
    comm.Send(array(7), right, 1)
    found = comm.Mprobe(left, 1)
    with captured(comm.post):
        for call in (
            lambda: comm.Send(array(9), right, 3),
            lambda: comm.Irecv(room(1), left, 3),
            lambda: found.Recv(room(1)),
            early.Wait,
            early.Test,
        ):
            with pytest.raises(NotImplementedError, match="is not being captured"):
                call()
    short, constant = [room(1), 5, MPI.INT], read_only(room(1))
    for spec, words in ((short, "within the array"), (constant, "a writable array")):
        for call in (lambda x: comm.Irecv(x, left, 3), found.Recv):
            with pytest.raises(MPI.Exception, match=words):
                call(spec)
    comm.Barrier()  # else it may be received before the call in the capture
    comm.Send(array(8), right, 2)
    comm.Send(array(9), right, 3)
    late, out = room(1), room(1)
    comm.Recv(late, left, 3)  # no refused receive has it
    found.Recv(out)
    assert (out.copy_to_host()[0], late.copy_to_host()[0]) == (7, 9)
    assert early
    early.Wait()
    assert not comm.post.posted
    comm.Barrier()


def test_a_receive_is_done_when_its_copy_is(comm, copying_late):
    """Test never waits for a copy, and the sender keeps the data until its end."""
    (right, left), (late, begin) = around(comm), copying_late(comm.post)
    outs = [room(1) for _ in range(2)]
    requests = [comm.Irecv(out, left, tag) for tag, out in enumerate(outs)]
    for tag in (0, 1):
        comm.Send(array(tag), right, tag)
    while len(late) < 2:
        assert not any([request.Test() for request in requests])
    del requests[1]  # its array lives until the copy has ended
    gc.collect()
    assert any(each._array is outs[1] for each in comm.post.arriving)
    comm.Barrier()
    comm.post.reap()
    assert comm.post.unread[right] == 8
    assert not requests[0].Test()
    comm.Barrier()
    begin()
    requests[0].Wait()
    while comm.post.arriving or comm.post.unread[right]:
        comm.post.reap()
    assert [out.copy_to_host()[0] for out in outs] == [0, 1]
    comm.Barrier()


@needs_peers
def test_a_receive_ends_when_the_communicator_fails(apart):
    """Its sender may never send."""
    made = MPI.Comm(apart, timeout=0.5)
    last = made.size - 1
    calls = [lambda: made.Recv(room(1), last), lambda: made.Mprobe(last)]
    if made.rank == last:
        calls = [lambda: made.Allreduce(MPI.IN_PLACE, array(1))]
    with pytest.raises(MPI.Exception, match="in all_reduce") as found:
        calls[made.rank % len(calls)]()
    assert isinstance(found.value.__cause__, CollectiveTimeout)
    made.Free()


@needs_peers
def test_communicators_do_not_mix(comm):
    """A message of a communicator that was freed does not reach the next one."""
    for step in range(4):
        other = comm.Dup()
        right, left = around(other)
        other.Send(array(step), right, 1)
        comm.Send(array(-step - 1), right, 1)
        out = room(1)
        other.Recv(out, left, 1)
        assert out.copy_to_host()[0] == step
        other.Free()
    for step in range(4):
        comm.Recv(out, left, 1)
        assert out.copy_to_host()[0] == -step - 1
    comm.Barrier()


@needs_peers
def test_a_communicator_is_freed_with_messages_that_nobody_received(comm):
    """Sends that wait end, receives end, and the memory is reused."""
    other = comm.Dup()
    right, left = around(other)
    rooms = other.post.words.rooms
    before = rooms.stack(LEAST).free
    other.Send(array(1), right, 1)
    request = other.Issend(array(2), right, 2)
    other.Irecv(room(1), left, 3)  # is dropped
    other.Irecv(room(1), left, 4).Free()
    other.Irecv(room(1), left, 5).Free()
    other.Irecv(room(1), left, 6).Cancel()
    other.Send(array(3), right, 5)
    gc.collect()
    assert other.post.posted
    comm.Barrier()
    assert not request.Test()
    other.Free()
    assert request.Test()
    assert not other.post.posted
    assert not sum(other.post.unread)
    assert rooms.stack(LEAST).free >= max(before, 3)
    comm.Barrier()


@simulated
@pytest.mark.parametrize("number", [2, 100], ids=["one block", "two blocks"])
@pytest.mark.parametrize("name", ["Sendrecv", "Irecv"])
def test_the_copies_of_an_exchange_are_launched_together(
    comm, monkeypatch, name, number
):
    """If the sender's was late, the receiver's is launched again, alone."""
    launches, kernel = [], message_copy.kernel()

    def simulate(launch):
        values = list(launch._values)
        sends, receives = values[4], values[12]
        launches.append((sends > 0) + (receives > 0))
        if len(launches) == 1:
            kernels.simulate(kernel, receives, 1, (*values[:4], 0, *values[5:]))
            receives = 0
        kernels.simulate(kernel, sends + receives, 1, tuple(values))

    x, out = array(*range(number)), room(number)
    comm.Sendrecv(x, comm.rank, 0, out, comm.rank)  # makes what later messages use
    monkeypatch.setattr(message_copy.Simulated, "simulate", simulate)
    for _ in range(2):
        out.copy_to_device(-x.copy_to_host())
        if name == "Irecv":
            requests = [comm.Irecv(out, comm.rank), comm.Isend(x, comm.rank)]
            MPI.Request.Waitall(requests)
        else:
            comm.Sendrecv(x, comm.rank, 0, out, comm.rank)
        assert list(out.copy_to_host()) == list(range(number))
    assert launches == [2, 1, 2]


@simulated
def test_a_simulated_copy_of_many_bytes_is_late_too():
    head = message_copy.HEAD
    memory, out = np.arange(head + 1024, dtype="u1"), np.zeros(1024, "u1")
    words, count = np.zeros(3, int), np.zeros(1, int)  # READY, READ, LATE
    memory[:8] = 0
    room, at = memory.ctypes.data + head, words.ctypes.data + 8
    received = out.ctypes.data, room, 1024, 16, 2, count.ctypes.data, at, 5
    values = (ctypes.c_int64 * message_copy.ARGUMENTS)(*8 * [0], *received, 1)
    copies = message_copy.Simulated(values, ctypes.addressof(Config()))
    copies.simulate()
    assert (list(words), out.any()) == ([0, 0, 5], False)
    memory[0] = 5
    copies.simulate()
    assert list(words) == [0, 5, 5]
    assert list(out) == list(memory[head:])


def test_a_refused_tag_keeps_no_memory(comm):
    comm.Isend(array(1), comm.rank, 1)
    rooms = comm.post.words.rooms.stack(LEAST)
    before = rooms.free
    with pytest.raises(MPI.Exception) as found:
        comm.Send(array(1), comm.rank, -5)
    assert found.value.Get_error_class() == MPI.ERR_TAG
    assert rooms.free == before
    comm.Recv(room(1), comm.rank, 1)


def test_requests_of_mpi4py(comm):
    """They are null requests, and those of pickled objects."""
    assert MPI.Request() == MPI.REQUEST_NULL
    assert not MPI.Request()
    assert MPI.Request().Wait()
    right, left = around(comm)
    requests = [comm.isend(comm.rank, right), comm.irecv(source=left)]
    index, _ = MPI.Request.waitany(requests)
    assert requests[1 - index].wait() == (left if index == 0 else None)
    done = comm.Isend(array(1), MPI.PROC_NULL)
    assert MPI.Request.testall([done]) == (True, [None])
    assert MPI.Request.Testall([done, MPI.Request(), MPI.REQUEST_NULL])
