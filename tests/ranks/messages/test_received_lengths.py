"""Messages that are shorter than the room for them, and longer ones."""

import contextlib
import random

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives.protocols.workspace import most_messages
from tests.ranks.helpers import needs_peers, of_one_island, ordinary, put, refused
from tests.ranks.messages.contents import (
    DTYPES,
    Part,
    content,
    right_and_left,
    same,
)
from tests.ranks.messages.test_messages import edges

pytestmark = of_one_island


def a_count(value=-1):
    count = ordinary(1, np.int64)
    put(count, np.full(1, value))
    return count


@pytest.mark.parametrize("together", [False, True])
def test_messages_of_any_length_in_rooms_of_any_length(comm, world, together):
    """They have any type and alignment, and run among others of known length."""
    right, left = right_and_left(comm)
    lot = random.Random(7 + together)
    sizes, calls = edges(comm.size), []
    for step in range(16):
        dtype = DTYPES[step % len(DTYPES)]
        lengths = [lot.choice(sizes) // dtype.itemsize for _ in range(comm.size)]
        room = max(lengths) + lot.choice([0, 1, 7])
        mine = lengths[comm.rank]
        places = [{"offset": lot.choice([0, 1, 3])} for _ in range(2)]
        x = Part(comm, mine, dtype, content(mine, dtype, comm.rank, step), **places[0])
        out = Part(comm, room, dtype, **places[1])
        count = a_count() if step % 3 else None
        if count is None:
            out = Part(comm, lengths[left], dtype, **places[1])
        calls.append((lengths[left], dtype, step, x, out, count))
    for first in range(0, 16, 4):
        with comm.group() if together and comm.size > 1 else contextlib.nullcontext():
            for _, _, _, x, out, count in calls[first : first + 4]:
                comm.sendrecv(x.array, dst=right, out=out.array, src=left, count=count)
    comm.synchronize()
    for length, dtype, step, _, out, count in calls:
        found = out.read()
        assert same(found[:length], content(length, dtype, left, step)), step
        assert not found[length:].view(np.uint8).any(), step
        assert count is None or count.copy_to_host()[0] == length, step
    world.barrier()


@needs_peers
def test_plans_count_what_arrives_in_each_call(comm, world):
    """Each message has another length than the one before."""
    right, left = right_and_left(comm)
    x, out, count = comm.zeros(5000), comm.zeros(5000), a_count()
    plan = comm.recv_init(out, src=left, count=count)
    for length in (5000, 1, 0, 4097, 3):
        put(x, np.full(5000, comm.rank + length, np.float32))
        put(out, np.full(5000, -1, np.float32))
        sends = lambda n=length: comm.send(x[:n], dst=right)  # noqa: E731
        for call in (sends, plan) if comm.rank else (plan, sends):
            call()
        comm.synchronize()
        assert count.copy_to_host()[0] == length
        assert (out.copy_to_host()[:length] == left + length).all()
        assert (out.copy_to_host()[length:] == -1).all()
    world.barrier()


def test_lengths_of_messages_of_no_rank_and_of_this_rank(comm, world):
    x, out, count, other = comm.zeros(3), comm.zeros(8), a_count(), a_count()
    put(x, np.full(3, 5, np.float32))
    comm.sendrecv(x, dst=comm.rank, out=out, src=comm.rank, count=count)
    comm.recv(out[4:], src=None, count=other)
    comm.synchronize()
    assert out.copy_to_host().tolist() == 3 * [5] + 5 * [0]
    assert count.copy_to_host()[0] == 3
    assert other.copy_to_host()[0] == 0
    comm.sendrecv(x, dst=None, out=out, src=None, count=count)
    comm.synchronize()
    assert count.copy_to_host()[0] == 0
    world.barrier()


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
