"""broadcast from every root, and reduce_scatter_v, against NumPy."""

import numpy as np

import numba_symm as ns
from numba_symm.collectives import operations, select
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import (
    array_of,
    get,
    ordinary,
    put,
    refused,
    wait_for_all,
)

F4 = np.dtype(np.float32)


def content(count, dtype, *seed):
    """Return elements of any bits, also those of a NaN that means "empty" elsewhere."""
    random = np.random.default_rng([*seed, count])
    found = random.integers(0, 256, count * dtype.itemsize, np.uint8)
    found[random.integers(0, 2, found.size // 16 + 1).repeat(16)[: found.size] > 0] = (
        255
    )
    return found.view(dtype)


def test_any_rank_may_have_any_memory(comm, world):
    """Between the ranks' own arrays, one that is not symmetric makes all refuse."""
    calls = []
    for step in range(2 * comm.size + 4):
        root, other = step % comm.size, step // 2
        symmetric = comm.empty(400, np.float32)
        # Symmetric on all ranks first; on the other ranks elsewhere, now and then off
        # 16-byte boundaries; then on one rank ordinary.
        x = symmetric[12 * comm.rank + step // 3 :][:300]
        if comm.rank == other - 2:
            x = ordinary(300, np.float32)
        put(x, content(300, F4, comm.rank, step))
        comm.broadcast(x, root=root, algorithm="direct")
        calls.append((x, content(300, F4, root, step)))
    comm.synchronize()
    for x, wanted in calls:
        assert get(x).tobytes() == wanted.tobytes()
    wait_for_all(comm, world)


def test_the_algorithm_follows_from_the_size(world, monkeypatch):
    if SIMULATED:  # there, chunks are for up to MiB, which take seconds
        steps = select.CHOICES["broadcast"].floats
        few = [s._replace(most=tuple(min(m, 16 << 10) for m in s.most)) for s in steps]
        steps = (*few[:-2], *steps[-2:])  # the last two are for all that is larger
        monkeypatch.setitem(select.CHOICES, "broadcast", select.Choice(steps, steps))
    bound, bind = [], operations.Operation.bind

    def noting(operation, algorithm, *given):
        bound.append(algorithm)
        return bind(operation, algorithm, *given)

    monkeypatch.setattr(operations.Operation, "bind", noting)
    with ns.Communicator(world, timeout=60) as comm:
        for symmetric in (True, False):
            for kilobytes in (0, 1, 8, 20) if SIMULATED else (0, 768, 49152):
                count, root = 256 * kilobytes + 1, comm.size - 1
                x = array_of(comm, content(count, F4, comm.rank, 3), symmetric)
                comm.broadcast(x, root=root)
                comm.synchronize()
                assert get(x).tobytes() == content(count, F4, root, 3).tobytes()
        wait_for_all(comm, world)
    assert len(set(bound)) >= (3 if SIMULATED else 2) or comm.size == 1


def test_plans_and_empty_arrays(comm, world):
    x = array_of(comm, np.full(100, comm.rank, np.int16), True)
    plan = comm.broadcast_init(x, root=comm.size - 1)
    for _ in range(3):
        assert plan() is x
    comm.broadcast(comm.zeros((0, 3)))
    comm.synchronize()
    assert (get(x) == comm.size - 1).all()
    wait_for_all(comm, world)


def test_bad_calls(comm, world):
    x = comm.zeros(4)
    for root in (-1, comm.size, 0.0, None):
        refused(
            world,
            ns.ArgumentError,
            lambda r=root: comm.broadcast(x, root=r),
            f"got {root}",
        )
    refused(
        world,
        ns.ArgumentError,
        lambda: comm.broadcast(x, algorithm="one_shot_sentinel"),
        "got 'one_shot_sentinel'",
    )
    refused(world, ns.ArgumentError, lambda: comm.broadcast(np.zeros(3)), "host")
    wait_for_all(comm, world)


def test_wrong_counts_of_reduce_scatter_v(comm, world):
    for counts, text in (
        ([1], "one for each rank"),
        ([7] * comm.size, "the sum of counts"),
    ):
        refused(
            world,
            ns.ArgumentError,
            lambda c=counts: comm.reduce_scatter_v(comm.zeros(5), counts=c),
            text if comm.size > 1 or counts == [7] else "",
        )
    wait_for_all(comm, world)
