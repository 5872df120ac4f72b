"""After a failure, work that other ranks have enqueued changes no array of a rank.

Nor does it change memory that the rank has taken since it closed its communicator. For
every algorithm by copies, or that accesses the ranks' own arrays: a rank is absent,
leaves, is late, or its copies are late.
"""

import re

import numpy as np
import pytest
from spawned import attempt, run_ranks

import numba_symm as ns
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols.binding import Series
from numba_symm.collectives.protocols.workspace import layout
from numba_symm.gpu import streams
from tests.algorithms import entry

AWAY, COUNT, REUSED = 1, 96, 77
CALLS = {2: [], 3: []}
"""By number of ranks: for three, unless an algorithm is for two only."""
for _name, _operation in OPERATIONS.items():
    for _algorithm, _made in _operation.algorithms.items():
        if _made.copies or _made.handshake:
            CALLS[3 if _made.suits(3) else 2].append((_name, _algorithm))


def prepared(comm, name, algorithm):
    """Return a plan and the arrays of this rank that it works on."""
    x = comm.zeros(COUNT * (1 if name == "all_gather" else comm.size), np.float32)
    y = comm.zeros(COUNT * comm.size, np.float32)
    fill([x], 1 + comm.rank)
    out = {"out": y[:COUNT] if name == "reduce_scatter" else y}
    if name == "broadcast" or (name == "reduce" and comm.rank != 0):
        out = {}
    return getattr(comm, f"{name}_init")(x, algorithm=algorithm, **out), [x, y]


def fill(arrays, value):
    for array in arrays:
        array.copy_to_device(np.full(array.size, value, np.float32))


def holds(arrays, expected):
    found = [array.copy_to_host() for array in arrays]
    return all(map(np.array_equal, found, expected))


def enqueue(comm, plan):
    """Return the error of a call that was enqueued in time and starts now."""
    launch = Series(*plan.call.parts)
    return attempt(lambda: (launch(0), comm.synchronize()))[0]


class Taken:
    """Memory as large as a workspace, taken after that was released."""

    def __init__(self, comm):
        self.allocator, self.memory = comm.allocator, comm._calls.members.backend
        self.nbytes = layout(comm.size).nbytes
        self.wanted = REUSED.to_bytes() * self.nbytes

    def take(self):
        self.address = self.allocator.alloc(self.nbytes)
        self.memory.write(self.address, self.wanted)

    def give_back(self):
        kept = self.memory.read(self.address, self.nbytes) == self.wanted
        self.allocator.free(self.address)
        return kept


def give_up(world, comm, plan, arrays):
    """Enqueue a call that another rank fails; then use all memory otherwise.

    Returns:
        The call's error, after the other rank has enqueued its call, too.
    """
    taken = Taken(comm)
    error = enqueue(comm, plan)
    attempt(comm.close)
    fill(arrays, REUSED)
    taken.take()
    world.barrier()
    world.barrier()
    assert taken.give_back()
    return error


# The ranks' work after a first call. Each function returns this rank's error, and the
# expected contents of its arrays: those after the first call (True), those that the
# rank stored later (False), or any, because its own call writes them (None).


def stays_away(world, comm, plan, arrays):
    """It reads its arrays, longer than the others wait for it."""
    if world.rank != AWAY:
        return enqueue(comm, plan), None
    return "", True


def leaves(world, comm, plan, arrays):
    if world.rank == AWAY:
        with pytest.raises(ZeroDivisionError), comm:
            raise ZeroDivisionError
    world.barrier()
    return stays_away(world, comm, plan, arrays)


def comes_late(world, comm, plan, arrays):
    if world.rank != AWAY:
        return give_up(world, comm, plan, arrays), False
    world.barrier()
    error = enqueue(comm, plan)
    world.barrier()
    return error, None


def copies_late(world, comm, plan, arrays):
    """The others give up while its copies run, which nothing stops."""
    copy, begun = streams.copy, []

    def late(*args):
        if not begun:
            begun.append(True)
            world.barrier()
        copy(*args)

    if world.rank != AWAY:
        return give_up(world, comm, plan, arrays), False
    streams.copy = late
    try:
        error = enqueue(comm, plan)
    finally:
        streams.copy = copy
    world.barrier()
    return error, None


def left_alone(world, calls):
    facts = []
    for name, algorithm in calls:
        for how in (stays_away, leaves, comes_late, copies_late):
            if how is copies_late and not entry(name, algorithm).copies:
                continue
            comm = ns.Communicator(world, timeout=1)
            plan, arrays = prepared(comm, name, algorithm)
            world.barrier()  # all have compiled
            plan()
            comm.synchronize()
            expected = [array.copy_to_host() for array in arrays]
            world.barrier()
            error, unchanged = how(world, comm, plan, arrays)
            world.barrier()
            if unchanged is False:
                expected = [np.full_like(each, REUSED) for each in expected]
            kept = unchanged is None or holds(arrays, expected)
            world.barrier()
            attempt(comm.close)
            facts.append((name, algorithm, how.__name__, unchanged, error, kept))
    return facts


@pytest.mark.parametrize("size", CALLS)
def test_no_rank_s_array_changes_under_it(size):
    for rank, facts in enumerate(run_ranks(size, left_alone, CALLS[size])):
        for name, algorithm, how, unchanged, error, kept in facts:
            case = (rank, name, algorithm, how, error)
            assert kept, case
            wanted = "RankLeft: " if how == "leaves" else "CollectiveTimeout: "
            assert re.match("$" if unchanged else wanted, error), case
