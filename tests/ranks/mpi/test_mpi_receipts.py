"""When senders of messages in mpi4py's spelling reuse their memory."""

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.mpi.channels import MOST, SMALL
from numba_symm.mpi.messages import Post
from numba_symm.mpi.rooms import BLOCK, rooms_of
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
    own.Barrier()
    own.Iprobe(left)  # and takes them
    assert not receipts.unread
    for _ in range(MOST - 1):
        passed(1)
    assert receipts.sent[left] == sent
    assert len(receipts.unread) == MOST - 1
    passed(SMALL)
    assert receipts.sent[left] == sent + 1
    passed(0)  # without memory, so without a receipt
    passed(1)
    assert receipts.sent[left] == sent + 1
    passed(SMALL + 1)  # whose receipt does not wait for others
    assert receipts.sent[left] == sent + 2


def test_a_sender_looks_for_receipts_before_it_allocates(own):
    right, left = around(own)
    x, out = (cuda.device_array(BLOCK + 1, "u1") for _ in range(2))
    known = rooms_of(own.post.allocator)
    for step in range(3):
        own.Sendrecv(x, right, 1, out, left, 1)
        own.Barrier()  # after which the receipt has arrived
        if not step:
            before = len(known._shared)
    assert len(known._shared) == before


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
