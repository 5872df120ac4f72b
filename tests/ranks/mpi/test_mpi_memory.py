"""When senders of messages in mpi4py's spelling reuse their memory."""

import ctypes
import gc
import time

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.collectives.kernels import message_copy
from numba_symm.environment import SIMULATED
from numba_symm.errors import CollectiveTimeout
from numba_symm.gpu import compiled, streams
from numba_symm.mpi import p2p, pending, progress, rooms
from numba_symm.mpi.posts import Post
from numba_symm.mpi.rooms import BLOCK_BYTES, FULL, LEAST, ROOMS, Stack
from numba_symm.sharing import collect, stats
from tests.ranks.helpers import needs_peers, of_one_island

pytestmark = of_one_island  # of messages of device arrays


@pytest.fixture
def own(comm):
    made = comm.Dup()
    yield made
    made.Free()


def array(*values):
    return cuda.to_device(np.array(values, "i4"))


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_a_sender_looks_for_read_messages_before_it_allocates(own):
    right, left = around(own)
    x, out = (cuda.device_array(BLOCK_BYTES + 1, "u1") for _ in range(2))
    for step in range(3):
        own.Sendrecv(x, right, 1, out, left, 1)
        own.Barrier()  # the receiver has read it
        if not step:
            before = stats().counters
    assert stats().counters == before


def test_slots_and_rooms_are_used_again(own):
    """A sender that never waits for anything else looks for those that were read."""
    right, left = around(own)
    words, out = own.post.words, array(-1)
    own.Sendrecv(array(0), right, 1, out, left, 1)
    rooms = words.rooms.stack(LEAST).free
    for step in range(1000):
        own.Sendrecv(array(step), right, 1, out, left, 1)
        assert out.copy_to_host()[0] == step
        assert words.port.lent <= 64
    assert words.rooms.stack(LEAST).free + words.port.lent <= rooms + 64


@needs_peers
def test_a_send_waits_for_a_room(own, world, monkeypatch):
    """What has matched goes on meanwhile; if none becomes free, it has a deadline."""
    right, left = around(own)
    stack, outs = own.post.words.rooms.stack(LEAST), [array(-1) for _ in range(3)]
    own.Sendrecv(array(0), right, 4, outs[0], left, 4)
    world.Barrier()
    own.post.take_back()
    slots = stack.rooms[: stack.free]
    stack.free = 1
    monkeypatch.setattr(own.post.words.rooms, "provide", lambda size: False)
    for tag, out in enumerate(outs):
        own.Irecv(out, left, tag).Free()
    for tag in range(3):  # each waits until the peer has read the one before
        own.Send(array(tag), right, tag)
    own.Send(array(3), right, 3)
    others = world.Ibarrier()  # of mpi4py: the peer has not received the last one
    while not others.Test():
        own.Iprobe()
    monkeypatch.setattr(own.post, "timeout", 0.1)
    with pytest.raises(MPI.Exception, match="send fewer ahead") as found:
        own.Isend(array(5), right, 5)
    assert isinstance(found.value.__cause__, CollectiveTimeout)
    world.Barrier()
    assert [out.copy_to_host()[0] for out in outs] == [0, 1, 2]
    own.Recv(outs[0], left, 3)
    assert outs[0].copy_to_host()[0] == 3
    assert not own.Iprobe(left, 5)
    world.Barrier()
    own.post.take_back()
    assert stack.rooms[: stack.free] == slots[:1]
    stack.free = len(slots)


def test_a_send_without_a_number_for_a_block_allocates_none(own, monkeypatch):
    """It looks again and again, and to allocate and free memory waits for the GPU."""
    found = own.post.words.rooms
    monkeypatch.setattr(own.post.words, "entries", [])
    given = []
    monkeypatch.setattr(found._allocator, "allocate", given.append)
    assert not found.provide(3 * BLOCK_BYTES)
    assert not given


def test_a_failed_send_keeps_no_memory(comm, monkeypatch):
    """If its envelope was sent, its receiver raises, too."""
    comm, out = comm.Dup(), array(0)
    comm.Sendrecv(array(1), comm.rank, 1, out, comm.rank, 1)
    words, post = comm.post.words, comm.post
    free = words.rooms.stack(LEAST)

    def used():
        post.reap()
        return free.free, words.port.lent, sum(post.unread)

    def failing(*_):
        raise MemoryError

    before = used()
    failed = compiled.callback(failing, 4)
    for owner, name, what, *without in (
        (words.port, "launch", compiled.address_of(failed)),
        (words.rooms, "provide", failing, (post, "_send", lambda *_: FULL)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, what)
            for given in without:
                patch.setattr(*given)
            with pytest.raises(MemoryError):
                comm.Send(array(1), comm.rank, 1)
        if name == "launch":  # the envelope was sent
            with pytest.raises(MPI.Exception, match="could not send its message"):
                comm.Recv(out, comm.rank, 1)
        assert used() == before
    with pytest.raises(MPI.Exception):
        comm.Sendrecv(array(1), comm.rank, 1, array(1), comm.size, 1)
    assert used() == before
    assert not post.posted
    comm.Sendrecv(array(1), comm.rank, 1, out, comm.rank, 1)
    assert out.copy_to_host()[0] == 1
    comm.Free()


def settle(own):
    """Wait until all messages were read, and free what is not used any more."""
    end = time.monotonic() + 60
    while any(own.post.unread) or own.post.words.rooms._leaving:
        assert time.monotonic() < end
        own.post.reap()
    gc.collect()
    collect()
    streams.give_back()  # as the next allocation would


@needs_peers
def test_a_rank_that_only_sends_frees_rooms_above_the_limit(own, world, monkeypatch):
    right, left = around(own)
    rooms, blocks = own.post.words.rooms, own.post.words.allocator._blocks._found
    own.Sendrecv(cuda.device_array(1), right, 1, cuda.device_array(1), left, 1)
    own.Barrier()
    settle(own)
    monkeypatch.setattr(rooms, "most", rooms._kept)
    for size in [size for size in rooms._free if size > BLOCK_BYTES]:
        monkeypatch.setitem(rooms._free, size, Stack())
    number, x = len(blocks), cuda.device_array(BLOCK_BYTES + 1, "u1")
    if own.rank == 0:
        for step in range(1, 9):
            own.Send(x, right, 1)  # the only call here
            world.recv(source=right)
            assert len(blocks) - number <= 2, step
    if own.rank == 1 % own.size:
        for _ in range(1, 9):
            own.Recv(x, left, 1)
            own.post.reap()
            world.send(None, left)
    own.Barrier()
    settle(own)


def test_rooms_shrink_again(own, monkeypatch):
    """Also those of messages that are sent later."""
    right, left = around(own)
    rooms, blocks = own.post.words.rooms, own.post.words.allocator._blocks._found
    own.Sendrecv(cuda.device_array(1), right, 1, cuda.device_array(1), left, 1)
    own.Barrier()
    settle(own)  # what earlier tests have left
    monkeypatch.setattr(rooms, "most", rooms._kept)
    for size in [size for size in rooms._free if size > BLOCK_BYTES]:
        monkeypatch.setitem(rooms._free, size, Stack())
    monkeypatch.setattr(own.post, "limit", 0)
    before, number = stats(), len(blocks)
    xs = [cuda.to_device(np.full(BLOCK_BYTES + 1, tag, "u1")) for tag in range(3)]
    requests = [own.Isend(x, right, tag) for tag, x in enumerate(xs)]
    assert len(blocks) - number == 3
    own.Barrier()
    out = cuda.device_array(BLOCK_BYTES + 1, "u1")
    for tag in (2, 0, 1):
        own.Recv(out, left, tag)
        assert (out.copy_to_host() == tag).all()
    MPI.Request.Waitall(requests)
    own.Barrier()
    settle(own)
    own.Barrier()
    assert len(blocks) == number
    assert stats() == before
    own.Sendrecv(xs[2], right, 1, out, left, 1)
    assert (out.copy_to_host() == 2).all()


def test_a_message_that_nobody_waits_for_is_received(own, monkeypatch, copying_late):
    """Later receives note the end of a copy whose request was given up."""
    right, left = around(own)
    late, begin = copying_late(own.post)
    outs = [array(-1) for _ in range(2)]
    requests = [own.Irecv(out, left, tag) for tag, out in enumerate(outs)]
    for tag in range(2):
        own.Send(array(tag), right, tag)
    while len(late) < 2:
        assert not any([request.Test() for request in requests])
    given_up = requests.pop(0)
    given_up.Free()
    begin()
    with monkeypatch.context() as patch:
        patch.setattr(Post, "reap", None)
        requests[0].Wait()
    own.Sendrecv(outs[1], right, 2, outs[1], left, 2)
    own.post.reap()
    assert not own.post.arriving
    assert [out.copy_to_host()[0] for out in outs] == [0, 1]
    MPI.Request.Waitall([given_up])


@pytest.mark.skipif(not SIMULATED, reason="looks at memory from the host")
def test_a_new_room_has_no_message(own, monkeypatch):
    """Memory that is allocated may contain anything, also a message's number.

    No stream is made then: the driver may wait for a kernel that waits for a message.
    """
    words, size, allocate = own.post.words, 1 << 16, own.post.words.allocator.allocate

    def used(nbytes):
        block = allocate(nbytes)
        ctypes.memset(block.address, 0x7F, nbytes)
        return block

    with monkeypatch.context() as patch:
        patch.setattr(words.allocator, "allocate", used)
        patch.delattr(rooms, "SideStream")
        stack = words.rooms.stack(size)
        before = stack.free
        words.rooms._make(size, stack)
    new = stack.rooms[before : stack.free]
    assert len(new) == BLOCK_BYTES // (size + message_copy.HEAD)
    for slot in new:
        at = words.port.rooms[5 * (slot % ROOMS)] - message_copy.HEAD
        assert ctypes.c_int64.from_address(at).value == 0


def test_arrays_of_dropped_receives_are_kept_until_their_copies_end(own):
    """Not longer, however many receives there are."""
    right, left = around(own)
    for number in range(3 * progress.MOST):
        own.Irecv(array(-1), left)
        own.Send(array(number), right)
        assert len(own.post.arriving) + len(own.post.posted) <= 2 * progress.MOST
        own.Barrier()
    while own.post.posted or own.post.arriving:
        own.Iprobe()
    own.Barrier()


def test_free_ends_receives_that_have_matched_and_no_others(comm):
    """The sender of other messages reuses their memory."""
    own, outs = comm.Dup(), [array(-1) for _ in range(2)]
    right, left = around(own)
    matched, other = own.Irecv(outs[0], left, 1), own.Irecv(outs[1], left, 4)
    for tag in range(3):
        own.Send(array(tag), right, tag)
    own.Probe(left, 2)  # after which all were matched
    prepared = [own.Recv_init(outs[1], left, tag) for tag in (0, 3)]
    own.Free()
    for call in (other.Wait, *(each.Start for each in prepared)):
        with pytest.raises(MPI.Exception, match="Free was called"):
            call()
    matched.Wait()
    assert [out.copy_to_host()[0] for out in outs] == [1, -1]


def test_waitall_starts_all_copies_before_it_waits_for_one(
    own, monkeypatch, copying_late
):
    late, begin = copying_late(own.post)
    x, looks, sent = cuda.to_device(np.arange(3)), [], []

    def check():
        looks.append(1)
        assert len(looks) < 1000
        if not sent:
            sent.append(own.Isend(x, own.rank, 1))
        if len(late) == 2:
            begin()

    outs = [cuda.device_array_like(x) for _ in range(2)]
    prepared = own.Recv_init(outs[0], own.rank, 0)
    prepared.Start()
    requests = [prepared, own.Isendrecv(x, own.rank, 0, outs[1], own.rank, 1)]
    monkeypatch.setattr(own.post, "check", check)
    MPI.Request.Waitall(requests)
    assert all(out.copy_to_host().tolist() == [0, 1, 2] for out in outs)


def test_persistent_messages_read_their_arguments_once(own, monkeypatch):
    x, out = cuda.to_device(np.arange(3)), cuda.to_device(np.zeros(3, int))
    for prepare in (own.Send_init, own.Ssend_init, own.Bsend_init, own.Recv_init):
        with pytest.raises(MPI.Exception, match="smaller count"):
            prepare([x, 4, MPI.INT64_T], own.rank)
        assert prepare(x, MPI.PROC_NULL)
    requests = own.Recv_init(out, own.rank, 1), own.Send_init(x, own.rank, 1)
    monkeypatch.delattr(p2p, "message")
    monkeypatch.delattr(pending.buffers, "message")
    MPI.Prequest.Startall(requests)
    MPI.Request.Waitall(iter(requests))  # an iterator ends after one pass
    assert out.copy_to_host().tolist() == [0, 1, 2]


def test_a_receive_whose_request_was_freed_stands_for_itself_alone(comm):
    """Requests that ended are equal, and each keeps its own place."""
    own, out = comm.Dup(), cuda.to_device(np.zeros(1, "i4"))
    requests = [own.Irecv(out, own.rank, tag) for tag in (1, 2)]
    (first, _) = own.post.posted
    for each in requests:
        each.Free()
    own.Send(cuda.to_device(np.ones(1, "i4")), own.rank, 2)
    assert not own.Iprobe(own.rank, 2)  # the second one has it
    (left,) = own.post.posted
    assert left is first
    words, context = own.post.words, own.post.context
    own.Free()
    assert context not in words.posts  # nothing keeps a communicator that was freed


def test_a_receive_that_was_freed_before_its_match_gets_its_message(own):
    """Its sender would keep the memory of the message otherwise."""
    right, left = around(own)
    out, short, end = array(-1), array(-1), time.monotonic() + 60
    for tag, room in enumerate((out, short)):
        own.Irecv(room, left, tag).Free()
    own.Barrier()
    own.Send(array(5), right, 0)
    own.Send(array(6, 7), right, 1)  # is refused, and nobody waits for the error
    while own.post.unread[right] or own.post.posted or own.post.arriving:
        assert time.monotonic() < end
        own.Iprobe()
    assert out.copy_to_host()[0] == 5
    assert short.copy_to_host()[0] == -1


def test_an_interrupt_right_after_a_launch_loses_no_memory(own, monkeypatch):
    post, out = own.post, array(-1)
    own.Sendrecv(array(1), own.rank, 1, out, own.rank, 1)
    stack = post.words.rooms.stack(LEAST)

    def free():
        post.take_back()
        return stack.free

    before = free()
    with monkeypatch.context() as patch:
        plain, calls = post._send, []

        def interrupted(*given):
            found = plain(*given)
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return found

        patch.setattr(post, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            own.Send(array(2), own.rank, 2)
    assert len(calls) == 1  # a second copy could come when another message is there
    own.Recv(out, own.rank, 2)
    assert out.copy_to_host()[0] == 2
    assert free() == before
