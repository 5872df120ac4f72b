"""Messages that are shorter than the room for them, and longer ones."""

import contextlib

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives.protocols.workspace import most_messages
from tests.drivers.exchanges import edges
from tests.ranks.helpers import needs_peers, of_one_island, ordinary, put, refused
from tests.ranks.messages.contents import (
    right_and_left,
)

pytestmark = of_one_island


def a_count(value=-1):
    count = ordinary(1, np.int64)
    put(count, np.full(1, value))
    return count


@needs_peers
@pytest.mark.parametrize("wrong", ["too long", "part of an element"])
def test_a_message_too_long_is_an_error_of_both_and_changes_nothing(world, wrong):
    comm = ns.Communicator(world, timeout=60)
    long = wrong == "too long"
    length = edges(comm.size)[-1] if long else 4 * 7
    x, count = comm.zeros(length, np.uint8), a_count()
    out = comm.zeros(length // 8 - 1 if long else 7, np.float64)
    put(x, np.full(length, 1, np.uint8))
    if comm.rank == 0:
        comm.send(x, dst=1)
    elif comm.rank == 1:
        comm.recv(out, src=0, count=count)
    if comm.rank < 2:
        with contextlib.suppress(ns.CallMismatch):
            comm.synchronize()
    world.barrier()
    text = "rank 0 sends rank 1 more bytes than it has room for, or not a multiple"
    refused(world, ns.CallMismatch, comm.synchronize, text)
    assert not out.copy_to_host().any()
    assert count.copy_to_host()[0] == -1
    comm.close()  # every rank has raised the failure


@needs_peers
def test_wrong_counts_are_refused(comm, world):
    right, left = right_and_left(comm)
    x, out = comm.zeros(8), comm.zeros(8)
    for count, text in [
        (comm.zeros(1, np.int32), "recv: expected count of 1 int64, got 1 int32"),
        (comm.zeros(2, np.int64), "got 2 int64"),
        (np.zeros(1, np.int64), "host memory"),
        (out.view(np.int64)[:1], "recv: expected count apart from the other arrays"),
        (3, "recv: count: expected a device array"),
    ]:
        wrong = lambda c=count: comm.recv(out, src=left, count=c)  # noqa: E731
        refused(world, ns.ArgumentError, wrong, text)
    itself = {"dst": comm.rank, "src": comm.rank}
    for given, text in [
        ({"x": x, "out": out[:4], "count": a_count()}, "expected x of at most 16 by"),
        ({"x": x[:4], "out": out}, "with count=, x may be smaller"),
    ]:
        wrong = lambda g=given: comm.sendrecv(**g, **itself)  # noqa: E731
        refused(world, ns.ArgumentError, wrong, text)

    def too_many():
        with comm.group():
            for _ in range(most_messages(comm.size, True)):
                comm.recv(x, src=left)
            comm.recv(out, src=left, count=a_count())

    refused(world, ns.ArgumentError, too_many, "group: expected at most")
    comm.sendrecv(x, dst=right, out=out, src=left)
    comm.synchronize()
