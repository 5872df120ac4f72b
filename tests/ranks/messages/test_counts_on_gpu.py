"""The v forms whose counts are on the GPU."""

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import (
    check_works,
    get,
    needs_peers,
    of_one_island,
    on_few_numbers,
    ordinary,
    refused,
    wait_for_all,
)

pytestmark = on_few_numbers

PAIR = np.dtype([("key", np.int32), ("value", np.int64)], align=False)  # 12 bytes
PAD = 90


def counts_of(world, seed, capacity):
    """Return what each rank sends to each, some nothing, some the capacity."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, capacity + 1, (world.size, world.size))
    counts[random.random(counts.shape) < 0.2] = 0
    counts[random.random(counts.shape) < 0.2] = capacity
    return counts


def elements(sender, first, count, dtype):
    """Return some elements of a sender's x."""
    numbers = 1000 * sender + np.arange(first, first + count)
    return (
        np.stack([numbers] * 3, 1).astype(np.int32).view(PAIR)[:, 0]
        if (dtype is PAIR)
        else numbers.astype(dtype)
    )


def on_gpu(numbers):
    return cuda.to_device(np.asarray(numbers, np.int64))


def same_elements(found, wanted):
    return found.tobytes() == np.ascontiguousarray(wanted).tobytes()


class Exchange:
    """A call of all_to_all_v whose counts change between calls."""

    def __init__(self, comm, capacity, dtype, placed):
        self.comm, self.capacity = comm, capacity
        self.dtype, self.placed = dtype, placed
        self.limit = comm.size * capacity + 5
        self.x = ordinary(self.limit, dtype)
        put_any(self.x, elements(comm.rank, 0, self.limit, dtype))
        self.sent, self.received = on_gpu([0] * comm.size), on_gpu([-1] * comm.size)
        self.displs = on_gpu([0] * comm.size) if placed else None
        self.into = (
            [PAD + r * (capacity + 3) for r in range(comm.size)] if placed else None
        )
        room = (self.into or [0])[-1] + capacity if placed else comm.size * capacity
        self.out = ordinary(room + PAD, dtype)

    def arguments(self):
        return {
            "send_counts": self.sent,
            "recv_counts": self.received,
            "send_displs": self.displs,
            "recv_displs": self.into,
            "capacity": self.capacity,
            "out": self.out,
        }

    def give(self, counts):
        """Set the counts of the next call, and clear its outputs."""
        rank = self.comm.rank
        self.counts = counts
        self.firsts = np.cumsum(counts, 1) - counts
        if self.placed:  # from the end of x on
            self.firsts = self.limit - counts - self.firsts
            self.displs.copy_to_device(self.firsts[rank])
        self.sent.copy_to_device(counts[rank])
        self.received.copy_to_device(np.full(self.comm.size, -1))
        put_any(self.out, elements(77, 0, self.out.size, self.dtype))

    def check(self):
        """Check what arrived, and that nothing else was stored."""
        rank = self.comm.rank
        assert get(self.received).tolist() == self.counts[:, rank].tolist()
        wanted = elements(77, 0, self.out.size, self.dtype)
        for sender in range(self.comm.size):
            count, first = self.counts[sender, rank], self.firsts[sender, rank]
            at = self.into[sender] if self.placed else sender * self.capacity
            wanted[at : at + count] = elements(sender, first, count, self.dtype)
        assert same_elements(self.out.copy_to_host(), wanted)


def put_any(array, host):
    array.copy_to_device(np.ascontiguousarray(host))


@of_one_island
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, PAIR, np.complex128], ids=str)
def test_exchanges_with_new_counts_each_time(comm, world, dtype, placed):
    for capacity in (1, 37, 700 if SIMULATED else 70_000):
        call = Exchange(comm, capacity, dtype, placed)
        plan = comm.all_to_all_v_init(call.x, **call.arguments())
        for step in range(3):
            call.give(counts_of(world, [capacity, step], capacity))
            found = plan() if step else comm.all_to_all_v(call.x, **call.arguments())
            assert found is call.out
            comm.synchronize()
            call.check()
    new = comm.all_to_all_v(
        call.x,
        send_counts=call.sent,
        recv_counts=call.received,
        send_displs=call.displs,
        capacity=capacity,
    )
    assert new.shape == (comm.size * capacity,)
    wait_for_all(comm, world)


@of_one_island
def test_gathers_with_new_counts_each_time(comm, world):
    capacity, rank = 300, comm.rank
    x = cuda.to_device(elements(rank, 0, capacity, np.int16))
    counts = on_gpu([0] * comm.size)
    plan = comm.all_gather_v_init(x, counts=counts, capacity=capacity)
    for step, call in enumerate(
        [
            plan,
            lambda: comm.all_gather_v(x, counts=counts, capacity=capacity),
            plan,
        ]
    ):
        all_counts = counts_of(world, [9, step], capacity)[0]
        mine = np.full(comm.size, -5)
        mine[rank] = all_counts[rank]
        counts.copy_to_device(mine)
        found = call()
        comm.synchronize()
        assert get(counts).tolist() == all_counts.tolist()
        for sender, count in enumerate(all_counts):
            part = get(found)[sender * capacity :][:count]
            assert same_elements(part, elements(sender, 0, count, np.int16))
    wait_for_all(comm, world)


@of_one_island
def test_a_group_of_messages_with_counts_on_both_sides(comm, world):
    """Some counts are on the GPU, and other messages are beside them."""
    size, rank, capacity = comm.size, comm.rank, 40
    first = Exchange(comm, capacity, np.int64, False)
    second = Exchange(comm, capacity, np.int64, True)
    first.give(counts_of(world, [1], capacity))
    second.give(counts_of(world, [2], capacity))
    x = cuda.to_device(np.full(9, rank))
    out = ordinary(9, np.int64)
    with comm.group():
        comm.all_to_all_v(first.x, **first.arguments())
        comm.send(x, dst=(rank + 1) % size)
        comm.recv(out=out, src=(rank - 1) % size)
        comm.all_to_all_v(second.x, **second.arguments())
    comm.synchronize()
    first.check()
    second.check()
    assert (get(out) == (rank - 1) % size).all()
    wait_for_all(comm, world)


def fails(world, wrong, placed=False):
    """Make a call that fails, after ``wrong(call)``; return every rank's text."""
    comm = ns.Communicator(world, timeout=60)
    call = Exchange(comm, 8, np.int32, placed)
    call.give(np.zeros((comm.size, comm.size), np.int64))
    wrong(call)

    def until_it_has_failed():
        comm.all_to_all_v(call.x, **call.arguments())
        while True:  # the ranks fail one after another
            comm.synchronize()

    texts = refused(world, ns.CollectiveError, until_it_has_failed)
    comm.close()
    wanted = elements(77, 0, call.out.size, np.int32)
    assert same_elements(get(call.out), wanted)
    return texts


@of_one_island
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("count", [9, -1, 1 << 40])
def test_a_count_above_the_capacity_stores_nothing(world, own, count):
    peer = 0 if own or world.size == 1 else 1

    def wrong(call):
        if world.rank == 0:
            counts = np.zeros(world.size, np.int64)
            counts[peer] = count
            call.sent.copy_to_device(counts)

    shown = count if count == 9 else 16777215
    for text in fails(world, wrong):
        assert f"rank 0 has {shown} elements for rank {peer}" in text
        assert "the capacity, 8" in text


@of_one_island
def test_a_range_that_is_not_within_x(world):
    def wrong(call):
        if world.rank == world.size - 1:
            call.sent.copy_to_device(np.eye(world.size, dtype=np.int64)[0] * 8)
            call.displs.copy_to_device(np.full(world.size, call.limit - 7))

    for text in fails(world, wrong, placed=True):
        assert f"rank {world.size - 1} has 8 elements for rank 0" in text


def test_wrong_arguments(comm, world):
    size = comm.size
    x, sent, received = ordinary(8, np.int32), on_gpu([0] * size), on_gpu([0] * size)

    def call(**changed):
        given = {"send_counts": sent, "recv_counts": received, "capacity": 2} | changed
        return lambda: comm.all_to_all_v(given.pop("x", x), **given)

    kind = ns.ArgumentError
    if len(comm.islands) > 1:
        refused(world, kind, call(), "expected ranks of one island for counts on")
        return
    for capacity in (0, -1, 1.5, "a"):
        refused(world, kind, call(capacity=capacity), "expected capacity to be an int")
    host = np.zeros(size, np.int64)
    refused(world, kind, call(send_counts=host), "send_counts", "copy it to the dev")
    refused(world, kind, call(recv_counts=[0] * size), "recv_counts", "device array")
    refused(world, kind, call(recv_counts=sent), "apart from send_counts")
    both = on_gpu([0] * 4 * size)
    if size > 1:
        shifted = {"send_counts": both[:size], "recv_counts": both[1 : size + 1]}
        refused(world, kind, call(**shifted), "apart from send_counts")
    within = {"out": both, "recv_counts": both[:size], "x": on_gpu([0] * 2 * size)}
    refused(world, kind, call(**within), "counts apart from x and out")
    short = on_gpu([0] * (size + 1))
    refused(world, kind, call(send_counts=short), "the number of ranks")
    other = cuda.to_device(np.zeros(size, np.int32))
    refused(world, kind, call(send_displs=other), "send_displs", "expected a device")
    if size > 1:
        refused(world, kind, call(recv_displs=[0] * size), "do not overlap")
    refused(world, kind, call(out=ordinary(1, np.int32)), "out: expected at least")
    refused(world, kind, call(out=x), "expected out")
    refused(
        world,
        kind,
        lambda: comm.all_gather_v(x, counts=sent, capacity=7),
        "expected 7 elements, which is capacity",
    )
    check_works(comm)
    wait_for_all(comm, world)


@needs_peers
@of_one_island
@pytest.mark.skipif(SIMULATED, reason="graphs need a GPU")
def test_a_graph_replays_with_other_counts(comm, world):
    from cuda.core import Device

    from tests.gpu.helpers import capturing

    call = Exchange(comm, 1000, np.float32, True)
    stream = Device().create_stream()
    call.give(counts_of(world, [0], 1000))
    comm.all_to_all_v(call.x, stream=stream, **call.arguments())
    comm.synchronize(stream)
    with capturing(stream) as (builder, graphs):
        comm.all_to_all_v(call.x, stream=builder.stream, **call.arguments())
    for step in range(5):
        call.give(counts_of(world, [1, step], 1000))
        cuda.synchronize()
        graphs[0].launch(stream)
        comm.synchronize(stream)
        call.check()
    wait_for_all(comm, world)
