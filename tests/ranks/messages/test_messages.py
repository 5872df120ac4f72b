"""Sends and receives, and their groups."""

import contextlib
import time
import weakref

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives.protocols.workspace import (
    most_messages,
)
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import needs_peers, ordinary, put, refused, wait_for
from tests.ranks.messages.contents import (
    added,
    content,
    right_and_left,
    same,
)


@needs_peers
def test_a_sender_far_ahead_of_its_receivers(comm, world):
    """Messages wait until they are received, and none is lost."""
    calls = 40 if SIMULATED else 1000
    dtype, sizes = np.dtype(np.float32), (3, 700, 40)
    arrays = [ordinary(sizes[call % 3], dtype) for call in range(calls)]
    wanted = [content(each.size, dtype, call) for call, each in enumerate(arrays)]
    if comm.rank == 0:
        for x, host in zip(arrays, wanted, strict=True):
            put(x, host)
        world.barrier()
        for x in arrays:
            for peer in range(1, comm.size):
                comm.send(x, dst=peer)
        comm.synchronize()
    else:
        world.barrier()
        time.sleep(0.3 * comm.rank)
        for out in arrays:
            comm.recv(out, src=0)
        comm.synchronize()
        for call, (out, host) in enumerate(zip(arrays, wanted, strict=True)):
            assert same(out.copy_to_host(), host), call
    world.barrier()


@needs_peers
def test_the_messages_of_a_pair_in_a_group_have_a_limit(comm, world):
    right, left = right_and_left(comm)
    most = most_messages(comm.size)
    x, outs = comm.zeros(1), [comm.zeros(1) for _ in range(most)]
    put(x, np.full(1, comm.rank, np.float32))
    with comm.group():
        for out in outs:
            comm.send(x, dst=right)
            comm.recv(out, src=left)
        with pytest.raises(ns.ArgumentError, match="expected at most"):
            comm.send(x, dst=right)  # and is not among them
    comm.synchronize()
    assert all(out.copy_to_host()[0] == left for out in outs)

    def one_more():
        with comm.group():
            for _ in range(most + 1):
                comm.send(x, dst=right)

    refused(world, ns.ArgumentError, one_more, f"expected at most {most} messages")


def test_what_an_open_group_refuses(comm, world):
    for what in ("close", "synchronize", "group"):
        with contextlib.ExitStack() as open_group:
            open_group.enter_context(comm.group())
            calls = {
                "close": comm.close,
                "synchronize": comm.synchronize,
                "group": comm.group().__enter__,
            }
            refused(world, ns.ArgumentError, calls[what], f"{what}: a group is open")
    comm.barrier()
    comm.synchronize()


@needs_peers
def test_a_group_keeps_nothing_after_its_block(comm):
    """Neither an array, nor a message of a block that an exception has left."""
    right, left = right_and_left(comm)
    y, z, kept = comm.zeros(1), comm.zeros(1), []
    for number in range(4):
        x = ordinary(1, np.dtype(np.float32))
        put(x, np.full(1, number, np.float32))
        kept.append(weakref.ref(x))
        with contextlib.suppress(KeyError), comm.group():
            comm.send(y, dst=right)
            comm.recv(x, src=left)
            raise KeyError
        with comm.group():
            comm.send(x, dst=right)
            comm.recv(y, src=left)
            if number % 2:
                comm.all_reduce(z, out=z)
        del x
        assert kept[-1]() is None
        comm.synchronize()
        assert y.copy_to_host()[0] == number


@needs_peers
def test_debug_mode_reports_one_ranks_mistake(world):
    """All ranks raise, for any mistake and for calls that differ."""
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        size, last = comm.size, comm.rank == comm.size - 1
        x, odd = comm.zeros(2 * size), comm.zeros(3 * size + 1)
        root, even = size - 1, [2 * size] * size
        plan = comm.all_reduce_init(x)

        def scatter():
            comm.scatter(odd if last else None, root=root, out=x[:3])

        def reduce_scatter_v():
            comm.reduce_scatter_v(x, counts=[2] * size, out=x[1:3] if last else None)

        def too_many():
            with comm.group():
                for _ in range(most_messages(size) * last):
                    comm.send(x[:1], dst=0)
                comm.gather(x[:2])

        for root_of_all in range(size):
            comm.gather(
                x, root=root_of_all
            )  # remembered; the following calls differ from it
        mistakes = [
            (lambda: comm.gather(x[::2] if last else x), "root 0"),
            (scatter, "expected x with a multiple of"),
            (lambda: comm.all_gather_v(x, counts=8 if last else even), "for each"),
            (reduce_scatter_v, "arrays that overlap"),
            (lambda: comm.gather(x, root=int(last)), "root 0"),
            (too_many, f"rank {size - 1}: group: expected at most"),
            (
                lambda: comm.barrier("no" if last else 0),
                f"{size - 1}: expected a stream, got 'no'",
            ),
            (
                lambda: plan("no" if last else 0),
                f"{size - 1}: all_reduce: expected a stream, got 'no'",
            ),
            *mistaken_counts(comm, x, last),
        ]
        for call, text in 2 * mistakes:
            refused(world, ns.ArgumentError, call, text)
        counts = np.full(size, 2) if last else [2] * size
        comm.all_gather_v(x[:2], counts=counts)
        comm.reduce_scatter_v(x, counts=counts, op=added)


def mistaken_counts(comm, x, last):
    """Return calls in which the last rank passes a wrong count, and what they say."""
    size, r = comm.size, comm.size - 1
    two, three = [2] * size, x[: 3 if last else 2]
    out = ordinary(three.size, np.float32)  # apart from x
    ints = ordinary(2, np.int32 if last else np.float32)
    ones, taken = [1] * size, [2 if last else 1] + [1] * (size - 1)
    return [
        (
            lambda: comm.gather_v(three, counts=two),
            f"gather_v: rank {r} sends 3 elements (x.size) to rank 0, which expects 2 "
            f"(counts[{r}]); pass counts that agree",
        ),
        (
            lambda: comm.scatter(x, root=0, out=out),
            f"scatter: rank 0 sends 2 elements (x.size // size) to rank {r}, which "
            "expects 3 (out.size)",
        ),
        (
            lambda: comm.scatter_v(x, counts=two, out=out),
            f"scatter_v: rank 0 sends 2 elements (counts[{r}]) to rank {r}, which "
            "expects 3 (out.size)",
        ),
        (
            lambda: comm.all_to_all_v(x[:size], send_counts=ones, recv_counts=taken),
            f"all_to_all_v: rank 0 sends 1 elements (send_counts[{r}]) to rank {r}, "
            "which expects 2 (recv_counts[0])",
        ),
        (lambda: comm.scatter(x, root=0, out=ints), "int32, root 0"),
    ]


def test_nothing_of_a_group_is_started_after_an_error(comm, world):
    right, left = right_and_left(comm)
    x, out = comm.zeros(10), comm.zeros(10)
    with contextlib.suppress(KeyError), comm.group():
        comm.sendrecv(x, dst=right, out=out, src=left)
        raise KeyError("a user's")
    put(x, np.full(10, comm.rank, np.float32))
    comm.sendrecv(x, dst=right, out=out, src=left)
    comm.synchronize()
    assert (out.copy_to_host() == left).all()
    world.barrier()


@needs_peers
def test_bad_messages(comm, world):
    x, out = comm.zeros(8), comm.zeros(8)
    for call, texts in [
        (
            lambda: comm.send(x, dst=comm.rank),
            ("send: expected this rank to receive from itself", "sendrecv"),
        ),
        (
            lambda: comm.send(x, dst=comm.size),
            ("send: dst: expected a rank", f"got {comm.size}"),
        ),
        (lambda: comm.recv(x, src=-9), ("recv: src: expected a rank", "got -9")),
        (lambda: comm.recv(x, src=1.0), ("got 1.0",)),
        (
            lambda: comm.sendrecv(x, dst=comm.rank, out=x, src=comm.rank),
            ("arrays that overlap",),
        ),
        (
            lambda: comm.sendrecv(x, dst=comm.rank, out=out, src=None),
            ("sendrecv: expected this rank to receive from itself", "1 sent and 0"),
        ),
        (lambda: comm.send(np.zeros(3), dst=(comm.rank + 1) % comm.size), ("host",)),
        (lambda: comm.gather(x, root=9), ("got 9",)),
        (
            lambda: comm.gather(x, root=comm.rank, out=out),
            (f"gather: expected out of {8 * comm.size} elements", "got 8"),
        ),
        (
            lambda: comm.scatter(comm.zeros(2 * comm.size), root=comm.rank, out=out),
            ("scatter: expected out of 2 elements", "got 8"),
        ),
        (
            lambda: comm.sendrecv(x, dst=0, out=out, src=-9),
            ("or None or MPI.PROC_NULL for no rank", "got -9"),
        ),
        (
            lambda: comm.reduce_scatter_v(
                x, counts=[8] + [0] * (comm.size - 1), op="mean"
            ),
            ("reduce_scatter_v: expected an operator, got op='mean'",),
        ),
        (lambda: comm.scatter_v(x, counts=[1], root=comm.rank), ("one for each rank",)),
        (
            lambda: comm.scatter_v(x, root=comm.rank),
            ("scatter_v: counts: expected", "got None"),
        ),
        (
            lambda: comm.all_gather_v(x, counts=[7] * comm.size),
            ("expected 7 elements, which is counts[rank]", "got 8"),
        ),
        (lambda: comm.all_gather_v(x, counts=[-8] * comm.size), ("integers from 0",)),
        (lambda: comm.all_gather_v(x, counts=8), ("integers from 0",)),
        (
            lambda: comm.all_gather_v(
                x, counts=[8] * comm.size, displs=[1] * comm.size
            ),
            ("expected ranges of out that do not overlap",),
        ),
        (
            lambda: comm.all_gather_v(x, counts=[8] * comm.size, out=out),
            (f"expected at least {8 * comm.size} elements", "got 8"),
        ),
        (
            lambda: comm.all_to_all_v(
                x, send_counts=[1] * comm.size, recv_counts=[2] * comm.size
            ),
            ("got 1 in send_counts and 2 in recv_counts",),
        ),
        (
            lambda: comm.all_to_all_v(
                x, send_counts=[1] * comm.size, recv_counts=[1] * comm.size, out=x[1:]
            ),
            ("arrays that overlap",),
        ),
    ]:
        refused(world, ns.ArgumentError, call, *texts)
    comm.barrier()
    comm.synchronize()


@needs_peers
def test_another_number_of_bytes_is_an_error(world):
    """It is an error on all ranks, also on those that were not in the message."""
    comm = ns.Communicator(world, timeout=60)
    engine = getattr(comm._calls.members, "engine", None)
    if engine is not None and engine.name == "nccl":
        comm.close()
        pytest.skip("NCCL does not compare the numbers of bytes")
    x = comm.zeros(10)
    with contextlib.suppress(ns.CallMismatch):  # between islands, recv raises it
        if comm.rank == 0:
            comm.send(x, dst=1)
        elif comm.rank == 1:
            comm.recv(x[:4], src=0)
        if comm.rank < 2:
            comm.synchronize()
    world.barrier()
    wait_for(lambda: comm._calls.members.failed)  # later on other islands
    text = "rank 1 receives another number of bytes than rank 0 sends"
    refused(world, ns.CallMismatch, comm.synchronize, text)
    comm.close()  # every rank has raised the failure


def test_a_group_that_is_open_keeps_its_calls_if_it_is_entered_again(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = comm.zeros(4, np.int32), comm.zeros(4, np.int32)
    x.copy_to_device(np.full(4, comm.rank + 1, np.int32))
    group = comm.group()
    with group:
        comm.recv(y, src=left)
        with pytest.raises(ns.ArgumentError, match="a group is open"), group:
            pass
        comm.send(x, dst=right)
    assert y.copy_to_host().tolist() == [left + 1] * 4
