"""Epochs and mailboxes of all_reduce, and of the barrier, over many calls."""

import time

import numpy as np
import pytest

from numba_symm.collectives.operations import ALL_REDUCE
from numba_symm.collectives.protocols.mailboxes import LAST_EPOCH, TRANSPORTS
from numba_symm.collectives.protocols.workspace import (
    ONE_SHOT,
    THREADS,
    layout,
)
from numba_symm.environment import SIMULATED
from tests.algorithms import those
from tests.drivers.calls import Call, run
from tests.ranks.helpers import (
    get,
    needs_peers,
    of_one_island,
    put,
)

pytestmark = of_one_island

ALGORITHMS = ALL_REDUCE.algorithms


def a_call(algorithm, count, step, op="sum"):
    """Return a call, whose arrays and elements depend on the step."""
    kind = ("int64", "float64")[ALGORITHMS[algorithm].floats]
    given = kind, op, algorithm, count, 0, "out", False, (step, count)
    return Call("all_reduce", *given)


class Workspace:
    """A communicator's workspace on this rank, changed while nothing runs."""

    REGIONS = ("barrier", *{made.region for made in ALGORITHMS.values()})

    def __init__(self, comm, world):
        self.comm, self.world = comm, world
        self.at = layout(comm.size)
        self.base = comm._calls.end.workspaces[comm.rank]
        self.memory = comm._calls.members.backend

    def region(self, algorithm):
        name = ALGORITHMS[algorithm].region if algorithm else "barrier"
        return getattr(self.at, name)

    def quiet(self):
        """Wait until no rank has a running kernel."""
        self.comm.synchronize()
        self.world.barrier()

    def epoch(self, algorithm=None):
        """Return the first block's epoch; None: of the barrier."""
        place = self.base + self.region(algorithm).epochs
        return int.from_bytes(self.memory.read(place, 4), "little")

    def reset(self):
        """Reset the workspace to its initial state."""
        self.quiet()
        self.memory.fill(self.base, self.at.nbytes)
        for region in self.at.sentinels:
            length = region.end - region.slots
            self.memory.fill(self.base + region.slots, length, 0xFF)
        self.quiet()

    def set_epochs(self, value):
        """Make all protocols continue after epoch ``value``."""
        self.quiet()
        for name in self.REGIONS:
            region = getattr(self.at, name)
            words = (region.slots - region.epochs) // 4  # epochs, then flags
            data = value.to_bytes(4, "little") * words
            self.memory.write(self.base + region.epochs, data)
        self.quiet()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_epochs_wrap_around(comm, world, algorithm):
    if not ALGORITHMS[algorithm].suits(comm.size):
        pytest.skip("for other numbers of ranks")
    workspace = Workspace(comm, world)

    def be_late(step):
        if step % (comm.size + 2) == comm.rank:
            time.sleep(0.01)

    largest = 70 if SIMULATED else 1 << 17
    # Epochs in the odd half and in the even one.
    for before in (1, 2) if SIMULATED else (1, 2, 3):
        workspace.set_epochs(LAST_EPOCH - before)
        counts = (
            (1, largest, 2, largest) if SIMULATED else (1, largest, 2, largest, 1, 3)
        )
        run(comm, [a_call(algorithm, n, i) for i, n in enumerate(counts)], be_late)
        assert workspace.epoch(algorithm) < 1000, "the epochs did not wrap around"


@needs_peers
def test_packets_of_before_the_wrap_are_not_taken(comm, world):
    workspace = Workspace(comm, world)
    algorithm, protocol = "one_shot_ll", ONE_SHOT["ll"]
    blocks = min(comm._calls.end.max_blocks // TRANSPORTS["ll"].weight, protocol.blocks)

    def calls(vectors, *steps):
        return [a_call(algorithm, 2 * vectors, step, "max") for step in steps]

    def be_late(step):
        if step % comm.size == comm.rank:
            time.sleep(0.1)  # time enough for the others to take a stale packet

    # Every mailbox of all blocks and threads, in one epoch.
    all_of_them = blocks * THREADS * protocol.tiles(comm.size)
    for block in {0, blocks - 1}:
        workspace.reset()
        run(comm, calls(all_of_them, 1, 2))  # epochs 1 and 2
        workspace.set_epochs(LAST_EPOCH - 2)
        # In the last epoch, only few threads of the block send data.
        run(comm, calls(block * THREADS + 1, 3, 4))
        assert workspace.epoch(algorithm) == LAST_EPOCH
        # All threads again, in epochs 1 and 2 after the wrap.
        run(comm, calls(all_of_them, 5, 6), be_late)
        assert workspace.epoch(algorithm) == 2


@pytest.mark.parametrize(
    "algorithm", those("all_reduce", lambda m: m.transport and m.transport != "ll")
)
def test_a_mailbox_that_was_read_is_empty_again(comm, world, algorithm):
    workspace = Workspace(comm, world)
    region = workspace.region(algorithm)
    run(comm, [a_call(algorithm, count, 1) for count in (1, 70, 3)])
    workspace.quiet()
    slots = workspace.memory.read(
        workspace.base + region.slots, region.end - region.slots
    )
    assert set(slots) <= {0xFF}


def test_barriers_hold_when_their_epochs_wrap_around(comm, world):
    workspace = Workspace(comm, world)
    mine = comm.zeros(comm.size, np.int64)
    memory = comm.rendezvous(mine)
    peers = range(comm.size)
    slots = [memory.get_buffer(peer, 1, np.int64, comm.rank) for peer in peers]
    workspace.set_epochs(2**32 - 4)
    for step in range(1, 9):
        if step % comm.size == comm.rank:
            time.sleep(0.01)
        for slot in slots:
            put(slot, np.array([step]))
        comm.barrier()
        assert get(mine).tolist() == [step] * comm.size, f"step {step}"
        comm.barrier()
    assert workspace.epoch() == 12
