"""Messages of a rank to itself, in groups."""

import numpy as np

import numba_symm as ns
from tests.ranks.helpers import ordinary, put, refused


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
