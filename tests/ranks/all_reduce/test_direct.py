"""all_reduce and reduce_scatter between the ranks' own arrays: when, and what then."""

import numpy as np
import pytest

from numba_symm.collectives.protocols.workspace import MAX_BLOCKS, VECTOR, layout
from tests import operators
from tests.ranks.helpers import (
    Window,
    get,
    needs_peers,
    of_one_island,
    ordinary,
    same,
    values,
    wait_for_all,
)

F4 = np.dtype(np.float32)
WHOLE = 4  # elements of a vector

each_operation = pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])


def refused(comm):
    """Return whether the last call went through the workspace, as a rank refused."""
    comm.synchronize()
    words = layout(comm.size).direct.slots + 4 * VECTOR * (comm.size - 1) * MAX_BLOCKS
    place = comm._calls.end.workspaces[comm.rank] + words
    kept = comm._calls.members.backend.read(place, VECTOR * (comm.size - 1))
    return bool((np.frombuffer(kept, np.int64)[::2] == 0).any())


class Case:
    """A call's arrays on this rank, with room on all sides, and what is wanted."""

    def __init__(self, comm, name, count, seed, dtype=F4):
        self.comm, self.name = comm, name
        parts = comm.size if name == "reduce_scatter" else 1
        self.count, self.whole = count, count * parts
        self.inputs = [values([seed, r], self.whole, dtype) for r in range(comm.size)]
        self.mine = slice(0, count)
        if name == "reduce_scatter":
            self.mine = slice(comm.rank * count, (comm.rank + 1) * count)
        self.read_from(self.window(self.whole, dtype))

    def read_from(self, window):
        """Take a window as the input."""
        self.x, self.in_place = window, window.array[self.mine]
        window.fill(self.inputs[self.comm.rank])

    def window(self, count, dtype=F4, symmetric=True, offset=0):
        # Of one length on all ranks: allocations agree.
        length = count + 2 * WHOLE + Window.MARGIN
        buffer = self.comm.empty(length, dtype)
        if not symmetric:
            buffer = ordinary(length, dtype)
        return Window(buffer[: offset + count + Window.MARGIN], offset, count)

    def call(self, out, op="sum"):
        result = getattr(self.comm, self.name)(
            self.x.array, op=op, out=out, algorithm="direct"
        )
        assert result is out

    def wanted(self, op="sum"):
        return operators.wanted([each[self.mine] for each in self.inputs], op)

    def check(self, out, op="sum"):
        assert same(get(out), self.wanted(op)), (self.name, self.count, op)
        left = get(self.x.array)
        if out is self.in_place:
            left[self.mine] = self.inputs[self.comm.rank][self.mine]
        assert same(left, self.inputs[self.comm.rank])
        self.x.read()


# What an output may be, on one rank while all others are in place: whether it is
# symmetric, its offset in elements, and who refuses it.
OUTPUTS = {
    "in place": (None, 0, ()),
    "apart": (True, 0, ()),
    "another vector on": (True, WHOLE, ()),
    "off a boundary": (True, 1, ("all_reduce",)),
    "ordinary": (False, 0, ("all_reduce",)),
    "ordinary and off a boundary": (False, 3, ("all_reduce",)),
}


@of_one_island
@needs_peers
@pytest.mark.parametrize("what", OUTPUTS)
@pytest.mark.parametrize("count", [200, 203])
@each_operation
def test_any_rank_may_have_any_output(comm, world, name, count, what):
    symmetric, offset, refusing = OUTPUTS[what]
    case = Case(comm, name, count, 7)
    windows = [
        case.window(count, F4, symmetric is not False, offset) for _ in range(comm.size)
    ]
    for one, window in enumerate(windows):
        case.read_from(case.x)
        out = case.in_place
        if comm.rank == one and symmetric is not None:
            window.fill(np.zeros(count, F4))
            out = window.array
        wait_for_all(comm, world)
        case.call(out)
        assert refused(comm) == (name in refusing)
        case.check(out)
        if out is window.array:
            window.read()
        wait_for_all(comm, world)


@of_one_island
@needs_peers
@pytest.mark.parametrize("what", ["elsewhere", "off a boundary", "ordinary"])
@each_operation
def test_any_rank_may_have_any_input(comm, world, name, what):
    case = Case(comm, name, 100, 8)
    out = case.window(100).array
    for one in range(comm.size):
        offset = {"elsewhere": WHOLE, "off a boundary": 1}.get(what, 0)
        # On one rank only; all ranks allocate it.
        there = case.window(case.whole, F4, what != "ordinary", offset)
        alike = case.window(case.whole)
        case.read_from(there if comm.rank == one else alike)
        wait_for_all(comm, world)
        case.call(out)
        assert refused(comm) == (what != "elsewhere")
        case.check(out)
        wait_for_all(comm, world)
