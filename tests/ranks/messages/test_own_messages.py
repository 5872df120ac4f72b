"""Messages of a rank to itself, in groups."""

import numpy as np
import pytest

import numba_symm as ns
from tests.ranks.helpers import ordinary, put, refused
from tests.ranks.messages.contents import right_and_left


@pytest.mark.parametrize("planned", [False, True])
def test_a_group_sends_to_its_own_rank(comm, world, planned):
    """Its messages to itself match in order, beside those of and to other ranks."""
    me, (right, left) = comm.rank, right_and_left(comm)
    sizes, field, column = (4, 4, 0, 2, 6), comm.zeros((6, 3)), comm.zeros((6, 2))
    xs, outs = ([ordinary(n, np.float32) for n in sizes] for _ in range(2))
    outs[3] = ordinary(5, np.float32)  # more than the two elements of its message
    number, none, last = (ordinary(1, np.int64) for _ in range(3))
    y, z = comm.zeros(4), comm.zeros(4)
    with (comm.group_init if planned else comm.group)() as plan:
        comm.send(xs[0], dst=me)
        # The second message to this rank, and the first one from it.
        comm.sendrecv(xs[1], dst=me, out=outs[0], src=me)
        for x in xs[2:]:
            comm.send(x, dst=me)
        comm.send(field[:, 1], dst=me)
        comm.send(xs[0], dst=right)
        comm.recv(outs[1], src=me)
        comm.recv(outs[2], src=me)
        comm.recv(outs[3], src=me, count=number)
        comm.recv(outs[4], src=me)
        comm.recv(column[:, 1], src=me)
        # One direction to this rank, the other one with a neighbour.
        comm.sendrecv(xs[1], dst=me, out=y, src=left)
        comm.sendrecv(xs[1], dst=None, out=z, src=None, count=none)
        comm.recv(z, src=me, count=last)
        for i, x in enumerate(xs):  # before anything is sent
            put(x, np.full(x.size, 10 * i + me, np.float32))
            put(outs[i], np.full(outs[i].size, -1, np.float32))
        put(field, np.arange(18, dtype=np.float32).reshape(6, 3))
    if planned:
        plan()
    comm.synchronize()
    found = [out.copy_to_host().tolist() for out in outs]
    assert found[:3] == [[me] * 4, [10 + me] * 4, []]
    assert found[3] == [30 + me] * 2 + [-1] * 3
    assert found[4] == [40 + me] * 6
    assert column.copy_to_host()[:, 1].tolist() == [1, 4, 7, 10, 13, 16]
    assert y.copy_to_host().tolist() == [left] * 4
    assert z.copy_to_host().tolist() == [10 + me] * 4
    counts = number, none, last
    assert [each.copy_to_host()[0] for each in counts] == [2, 0, 4]
    world.barrier()


def test_messages_of_a_rank_to_itself_that_do_not_match(comm, world):
    """Nothing of the call, of the group or of its plan is enqueued."""
    me, x, out, y = comm.rank, comm.zeros(4), comm.zeros(8), comm.zeros(4)
    put(x, np.full(4, 1, np.float32))
    count, doubles = ordinary(1, np.int64), ordinary(8, np.float64)

    def grouped(make, *calls):
        def group():
            with make():
                comm.sendrecv(x, dst=me, out=y, src=me)
                comm.all_reduce(x, out=x)
                for call in calls:
                    call()

        return group

    send, recv = comm.send_init(x, dst=me), comm.recv_init(y, src=me)
    alone = "expected this rank to receive from itself what it sends itself, got "
    for call, text in [
        (lambda: comm.send(x, dst=me), "send: " + alone + "1 sent and 0 received"),
        (lambda: comm.recv(x, src=me), "recv: " + alone + "0 sent and 1 received"),
        (send, "send: " + alone + "1 sent and 0 received"),
        (recv, "use sendrecv"),
        *(
            (grouped(make, *calls), text)
            for make in (comm.group, comm.group_init)
            for calls, text in [
                ([send], "group: " + alone + "2 sent and 1 received"),
                ([recv, recv, send], "2 sent and 3 received; make both calls in one"),
                (
                    [send, lambda: comm.recv(out, src=me)],
                    "group: expected x and out of equal size, got 16 and 32 bytes",
                ),
                (
                    [lambda: comm.send(out, dst=me), recv],
                    "expected x and out of equal size, got 32 and 16 bytes",
                ),
                (
                    [
                        lambda: comm.send(out, dst=me),
                        lambda: comm.recv(y, src=me, count=count),
                    ],
                    "group: expected x of at most 16 bytes",
                ),
                (
                    [
                        lambda: comm.send(out[:7], dst=me),
                        lambda: comm.recv(doubles, src=me, count=count),
                    ],
                    "whole elements of out, got 28 bytes",
                ),
                (
                    [
                        lambda: comm.send(out[:4], dst=me),
                        lambda: comm.recv(out[3:7], src=me),
                    ],
                    "group: expected out apart from x",
                ),
            ]
        ),
    ]:
        refused(world, ns.ArgumentError, call, text)
    comm.synchronize()
    assert (x.copy_to_host() == 1).all()
    assert (y.copy_to_host() == 0).all()
    with comm.group():
        send()
        recv()
    comm.synchronize()
    assert (y.copy_to_host() == 1).all()
