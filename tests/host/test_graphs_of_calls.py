"""The graphs of calls that repeat, with a driver that only counts them."""

import gc
import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from numba_symm.collectives import enqueueing
from numba_symm.collectives.enqueueing import Graphs, PackedCall
from numba_symm.errors import DriverError
from numba_symm.gpu import compiled, driver, entry, streams
from numba_symm.launch.call_records import Description
from tests.gates import gate

PLACES = ((1, False, 3), (4, False, 1))


class Driver:
    """Makes graphs of the launches between the beginning and the end of a capture."""

    def __init__(self):
        self.numbers = itertools.count(1)
        self.alive, self.nodes, self.launched = {}, {}, 0
        self.capturing, self.forks = False, False

    def launch(self, *args):
        assert self.capturing
        self.launched += 1

    def call(self, name, *args):
        if name == "cuStreamBeginCapture":
            self.capturing, self.launched = True, 0
        if name == "cuStreamEndCapture":
            self.capturing = False
            made = next(self.numbers)
            self.nodes[made] = self.launched
            return made
        if name == "cuGraphGetNodes":
            return [], self.nodes[args[0]]
        if name == "cuGraphGetEdges":
            return [], [], [], self.nodes[args[0]] - 1 + self.forks
        if name == "cuGraphInstantiate":
            made = next(self.numbers)
            self.alive[made] = self.nodes[args[0]]
            return made
        if name == "cuGraphDestroy":
            del self.nodes[args[0]]
        if name == "cuGraphExecDestroy":
            del self.alive[args[0]]
        return next(self.numbers)


@pytest.fixture
def cuda(monkeypatch):
    made = Driver()
    monkeypatch.setattr(driver, "call", made.call)
    monkeypatch.setattr(compiled, "launch", lambda: made.launch)
    monkeypatch.setattr(enqueueing, "PLACES", PLACES)
    monkeypatch.setattr(streams, "relaxed", contextmanager(lambda: (yield)))
    return made


@pytest.fixture
def pack(monkeypatch, cuda):
    """Return what packs a call of so many launches, and the communicator's graphs."""
    made = gate(monkeypatch)
    monkeypatch.setattr(enqueueing, "places", enqueueing._Places)
    apart = contextmanager(lambda: (yield))
    order = SimpleNamespace(done=True, closed=False, apart=apart, gate=made.gate)
    order.is_done = lambda: order.done
    order.close = lambda: setattr(order, "closed", True)
    found = Graphs(order, possible=True)

    def packed(launches):
        call = PackedCall(made.gate, Description("a call"), None, found.countdown)
        found.make(call, lambda stream: [cuda.launch() for _ in range(launches)])
        return call

    packed.graphs, packed.order = found, order
    return packed


def graph_of(call):
    return entry.Head.from_buffer(call.block).graph


def test_each_graph_replaces_one_that_is_at_least_as_large(cuda, pack):
    assert sorted(cuda.alive.values()) == [1, 1, 1, 4]
    calls = [pack(1), pack(2), pack(1)]
    assert sorted(cuda.alive.values()) == [1, 1, 1, 2]
    assert [cuda.alive[graph_of(call)] for call in calls] == [1, 2, 1]
    assert not cuda.nodes  # what was captured is destroyed
    without = pack(2)
    assert graph_of(without) == 0
    assert entry.Head.from_buffer(without.block).countdown == enqueueing.AGAIN
    last = pack(1)
    assert graph_of(last)
    assert not graph_of(pack(1))


def test_a_graph_that_forks_replaces_only_one_that_does(cuda, pack, monkeypatch):
    cuda.forks = True
    assert not graph_of(pack(1))
    assert sorted(cuda.alive.values()) == [1, 1, 1, 4]


def test_the_graph_of_a_dropped_call_is_replaced_when_its_calls_are_done(cuda, pack):
    calls = [pack(1) for _ in range(4)]
    dropped = graph_of(calls.pop())
    gc.collect()
    pack.order.done = False
    assert not graph_of(pack(1))
    assert dropped in cuda.alive
    pack.order.done = True
    assert graph_of(pack(1))
    assert dropped not in cuda.alive
    assert len(cuda.alive) == 4


def test_a_failed_capture_ends_and_leaves_no_graph(cuda, pack):
    def fail(stream):
        raise DriverError("out of resources")

    call = PackedCall(pack.order.gate, Description("a call"), None, 0)
    pack.graphs.make(call, fail)
    assert not cuda.capturing
    assert not cuda.nodes
    assert graph_of(call) == 0


def test_closed_graphs_are_those_of_other_communicators(cuda, pack):
    kept = [pack(1), pack(1)]
    pack.graphs.close()
    pack.graphs.close()
    assert pack.order.closed
    assert len(pack.graphs._places._unused) == len(cuda.alive) == 4
    assert kept
