"""When senders of messages in mpi4py's spelling reuse their memory."""

import gc
import time

import numpy as np
import pytest
from numba import cuda

from numba_symm import deferred, events
from numba_symm import mpi as MPI
from numba_symm.mpi import copies, messages, p2p
from numba_symm.mpi.buffers import message
from numba_symm.mpi.channels import MOST, SMALL
from numba_symm.mpi.messages import Post
from numba_symm.mpi.rooms import BLOCK, rooms_of
from numba_symm.sharing import stats
from numba_symm.streams import LEGACY_DEFAULT
from tests.ranks.helpers import of_one_island

pytestmark = of_one_island  # of messages of device arrays


@pytest.fixture
def own(comm):
    made = comm.Dup()
    yield made
    made.Free()


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_small_messages_have_receipts_together(own):
    right, left = around(own)
    receipts = own.post._receipts
    x, out = (cuda.device_array(SMALL + 1, "u1") for _ in range(2))

    def passed(nbytes):
        own.Sendrecv([x, nbytes], right, 1, [out, nbytes], left, 1)

    for nbytes in (SMALL + 1, SMALL, 1, 0):  # so that there is room for each
        passed(nbytes)
    own.Iprobe(left)  # as any probe, sends all receipts
    sent = receipts.sent[left]
    while receipts.unread:
        own.Iprobe(left)  # and takes them
    for _ in range(MOST - 1):
        passed(1)
    assert receipts.sent[left] == sent
    assert len(receipts.unread) == MOST - 1
    passed(SMALL)
    assert receipts.sent[left] == sent + 1
    passed(0)  # without memory, so without a receipt
    passed(1)
    assert receipts.sent[left] == sent + 1
    passed(SMALL + 1)  # the receipt of a larger message does not wait for others
    assert receipts.sent[left] == sent + 2


def test_an_interrupt_sends_no_receipt_again(own, monkeypatch):
    x, receipts = cuda.to_device(np.zeros(1, "i4")), own.post._receipts
    own.Sendrecv(x, own.rank, 1, x, own.rank, 1)

    def sent(*given):
        monkeypatch.undo()
        receipts.send(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(receipts, "send", sent)
    with pytest.raises(KeyboardInterrupt):
        own.post.reap()
    while receipts.unread:
        own.post.reap()
    own.Sendrecv(x, own.rank, 1, x, own.rank, 1)
    own.post.reap()


def test_an_event_is_used_again_once(monkeypatch):
    """The same holds if an interrupt ends a copy, which then begins again."""
    made, x = copies.CopyStream(), cuda.to_device(np.zeros(1, "i4"))
    into, after = message(x), made.event(LEGACY_DEFAULT)
    given = into, into.address, into.nbytes, x, after

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(copies.streams, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.begin(*given)
    done = made.begin(*given)
    assert made.event(LEGACY_DEFAULT) is not done
    made.settle()


def test_a_sender_looks_for_receipts_before_it_allocates(own):
    right, left = around(own)
    x, out = (cuda.device_array(BLOCK + 1, "u1") for _ in range(2))
    for step in range(3):
        own.Sendrecv(x, right, 1, out, left, 1)
        own.Barrier()  # the receipt has arrived afterwards
        if not step:
            before = stats().counters
    assert stats().counters == before


def settle(own, rooms):
    """Wait until all receipts have arrived, and free what is not used any more."""
    end = time.monotonic() + 300
    while own.post._receipts.unread or rooms._leaving:
        assert time.monotonic() < end
        own.post.reap()
    gc.collect()
    deferred.give_back()  # as the next allocation would


@pytest.mark.parametrize("limit", [0, BLOCK])
def test_rooms_shrink_again(own, monkeypatch, limit):
    """Also those of messages that are sent later."""
    right, left = around(own)
    rooms = rooms_of(own.post.words.allocator)
    own.Sendrecv(cuda.device_array(1), right, 1, cuda.device_array(1), left, 1)
    own.Barrier()
    settle(own, rooms)  # what earlier tests have left
    monkeypatch.setattr(rooms, "most", rooms._kept)
    for size in [size for size in rooms._free if size > BLOCK]:
        monkeypatch.setitem(rooms._free, size, [])
    monkeypatch.setattr(own.post.flow, "limit", limit)
    blocks, before = own.post.words.allocator._blocks, stats()
    number = len(blocks)
    xs = [cuda.to_device(np.full(BLOCK + 1, tag, "u1")) for tag in range(3)]
    requests = [own.Isend(x, right, tag) for tag, x in enumerate(xs)]
    # The thread that sends messages later may send one beside a call of this thread.
    assert len(blocks) - number in ((0, 1, 2) if limit else (3,))
    own.Barrier()
    out = cuda.device_array(BLOCK + 1, "u1")
    for tag in (2, 0, 1):
        own.Recv(out, left, tag)
        assert (out.copy_to_host() == tag).all()
    MPI.Request.Waitall(requests)
    own.Barrier()
    settle(own, rooms)
    own.Barrier()
    assert len(blocks) == number
    assert stats() == before
    own.Sendrecv(xs[2], right, 1, out, left, 1)
    assert (out.copy_to_host() == 2).all()


def test_a_message_that_nobody_waits_for_is_received(own, monkeypatch):
    """Later receives note the end of a copy whose request was given up."""
    right, left = around(own)
    outs = [cuda.to_device(np.full(1, -1, "i4")) for _ in range(2)]
    requests = [own.Irecv(out, left, tag) for tag, out in enumerate(outs)]
    for tag in range(2):
        own.Send(cuda.to_device(np.full(1, tag, "i4")), right, tag)
    own.Barrier()
    for request in requests:
        while not own.post._copying and not request._copying:
            request._progress()
    given_up = requests.pop(0)
    given_up.Free()
    with monkeypatch.context() as patch:
        patch.setattr(Post, "reap", None)
        requests[0].Wait()
    assert not own.post._copying
    assert [out.copy_to_host()[0] for out in outs] == [0, 1]
    MPI.Request.Waitall([given_up])


def test_no_message_is_copied_after_free(comm):
    """Its sender reuses the memory."""
    own, out = comm.Dup(), cuda.to_device(np.full(1, -1, "i4"))
    right, left = around(own)
    matched = own.Irecv(out, left, 1)
    for tag in range(3):
        own.Send(cuda.to_device(np.full(1, tag, "i4")), right, tag)
    own.Probe(left, 2)  # takes all from MPI
    prepared = [own.Recv_init(out, left, tag) for tag in (0, 3)]
    own.Free()
    for call in (matched.Wait, *(each.Start for each in prepared)):
        with pytest.raises(MPI.Exception, match="Free was called"):
            call()
    assert out.copy_to_host()[0] == -1


def test_waitall_starts_all_copies_before_it_waits_for_one(own, monkeypatch):
    copying = []

    class Event(events.Event):
        def synchronize(self):
            copying.append(len(own.post._copying))
            super().synchronize()

    def late():
        if not sent:
            sent.append(own.Isend(x, own.rank, 1))

    monkeypatch.setattr(copies, "Event", Event)
    x, sent = cuda.to_device(np.arange(3)), []
    outs = [cuda.device_array_like(x) for _ in range(2)]
    prepared = own.Recv_init(outs[0], own.rank, 0)
    prepared.Start()
    requests = [prepared, own.Isendrecv(x, own.rank, 0, outs[1], own.rank, 1)]
    monkeypatch.setattr(own.post, "check", late)
    MPI.Request.Waitall(requests)
    assert copying[0] == 2
    assert all(out.copy_to_host().tolist() == [0, 1, 2] for out in outs)


def test_persistent_messages_read_their_arguments_once(own, monkeypatch):
    x, out = cuda.to_device(np.arange(3)), cuda.to_device(np.zeros(3, int))
    for prepare in (own.Send_init, own.Ssend_init, own.Bsend_init, own.Recv_init):
        with pytest.raises(MPI.Exception, match="smaller count"):
            prepare([x, 4, MPI.INT64_T], own.rank)
        assert prepare(x, MPI.PROC_NULL)
    requests = own.Recv_init(out, own.rank, 1), own.Send_init(x, own.rank, 1)
    monkeypatch.delattr(p2p, "message")
    monkeypatch.delattr(messages, "message")
    MPI.Prequest.Startall(requests)
    MPI.Request.Waitall(iter(requests))  # an iterator ends after one pass
    assert out.copy_to_host().tolist() == [0, 1, 2]
