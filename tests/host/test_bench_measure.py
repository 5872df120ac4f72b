import itertools

import numpy as np
import pytest

from numba_symm.bench import bench_operations, measure, options
from numba_symm.bench.bench_operations import OPERATIONS
from numba_symm.bench.contenders import Way, no_context
from numba_symm.bench.measure import Lane, Summary, Timer
from numba_symm.bench.sweep import Sweep

MIB = 1 << 20


class Alone:
    """The communicator of a single rank."""

    rank, size = 0, 1

    def allgather(self, value):
        return [value]

    def Barrier(self):
        pass


class Slow(Alone):
    """Two ranks; the other one takes three times as long."""

    size = 2

    def allgather(self, value):
        return [value, 3 * value]


class Graph:
    def __init__(self, calls):
        self.calls = calls
        self.closed = False

    def close(self):
        self.closed = True


class Stream:
    """Runs calls immediately; a graph takes one microsecond for each of its calls."""

    handle = 77

    def __init__(self):
        self.graphs = []

    def synchronize(self):
        pass

    def capture(self, calls, current):
        self.graphs.append(Graph(calls))
        return self.graphs[-1]

    def replay(self, graph):
        for call in graph.calls:
            call(self.handle)

    def time(self, graph, before):
        before(self.handle)
        self.replay(graph)
        return float(len(graph.calls))


def lane(calls, **more):
    facts = {"column": "x", "way": "", "in_place": False, "output_only": False}
    facts |= {"eager": False, "inputs": [], "outputs": [], "current": no_context}
    return Lane(calls=calls, **facts | more)


def test_buffers_exceed_the_cache_and_a_large_message_has_one():
    assert measure.buffers(1024) == 16
    assert measure.buffers(32 * MIB) * 32 * MIB >= 100e6
    assert measure.buffers(64 * MIB) * 64 * MIB >= 100e6
    assert measure.buffers(256 * MIB) == measure.buffers(1 << 30) == 1


@pytest.mark.parametrize("nbytes", [1 << n for n in range(10, 31, 2)])
def test_a_graph_takes_milliseconds_and_uses_every_buffer_equally(nbytes):
    of = measure.buffers(nbytes)
    count = measure.calls_per_graph(nbytes, 20, of, eager=15 + nbytes / 100e3)
    assert count % of == 0
    assert count >= (20 if nbytes <= 16 * MIB else 2)
    assert 1e3 <= count * (4 + nbytes / 170e3) <= 14e3


def test_slow_calls_are_fewer():
    assert measure.eager_calls(10, 20) == 20
    assert measure.eager_calls(1000, 20) == 4
    assert measure.eager_calls(1e6, 20) == 1
    assert measure.calls_per_graph(1024, 20, 16, eager=5000) == 32
    assert measure.calls_per_graph(1024, 20, 16, eager=1e6) == 16


def test_graphs_are_interleaved_and_the_slowest_rank_counts():
    order, stream = [], Stream()
    timer = Timer(Slow(), stream, lambda handle: order.append("barrier"))
    lanes = [lane([lambda handle, name=name: order.append(name)]) for name in "ab"]
    graphs = [timer.capture(each, 2) for each in lanes]
    order.clear()
    found = timer.graphs(graphs, 2, replays=2)
    assert order == ["barrier", "a", "a", "barrier", "b", "b"] * 2
    assert found == [Summary(3.0, 3.0, 3.0)] * 2  # 1 a call, 3 on the other rank


def test_eager_calls_of_lanes_are_interleaved(monkeypatch):
    order = []
    now = iter(range(10_000))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(now) * 1e-6)
    timer = Timer(Alone(), Stream(), lambda handle: None)
    lanes = [
        lane([lambda handle, name=name: order.append((name, handle))]) for name in "ab"
    ]
    for alone in (False, True):
        found = timer.eager(lanes, calls=3, warmups=0, alone=alone)
        timed = ([("a", 77)] * 3, [("b", 77)] * 3)
        wanted = [each for each in timed for _ in range(1 + alone)] * measure.ROUNDS
        wanted = list(itertools.chain(*wanted))
        assert order[-len(wanted) :] == wanted
        for times in found:  # each reading of the clock advances it by 1
            assert times["issue"].median == pytest.approx(1 / 3)
            assert times["done"].median == pytest.approx(2 / 3)
            assert ("alone" in times) == alone


class Library:
    """A contender on host arrays that reduces over one rank: it copies."""

    version = "1"
    captures = True

    def __init__(self, name="library", spoil=lambda out, handle: None, in_place=False):
        self.name = name
        self.spoil = spoil
        self.in_place = in_place

    def allocate(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    current = staticmethod(no_context)

    def all_reduce(self, x, out, op):
        def call(handle):
            if not self.in_place:
                out[:] = x
            self.spoil(out, handle)

        return {"": Way(call, in_place=self.in_place)}


def swept(monkeypatch, *contenders, line="-b 64 -e 1K -n 2 -w 1 -G 2"):
    """Return the records of a sweep by row, and its stream."""
    monkeypatch.setattr(bench_operations, "arrived", lambda: None)  # no GPU here
    asked = options.parse(["all_reduce", *line.split()])
    stream = Stream()
    timer = Timer(Alone(), stream, lambda handle: None)
    sweep = Sweep(OPERATIONS["all_reduce"], asked, timer, Alone(), contenders)
    return [sweep.measure(row) for row in sweep.rows], stream


def test_a_sweep_measures_every_size_eager_and_in_graphs(monkeypatch):
    rows, stream = swept(monkeypatch, Library(), Library("other", in_place=True))
    assert [row[0]["bytes"] for row in rows] == [64, 256, 1024]
    for row in rows:
        assert [(record["column"], record["in_place"]) for record in row] == [
            (name, place) for name in ("library", "other") for place in (False, True)
        ]
        for record in row:
            assert record["count"] == record["bytes"] // 4
            assert record["wrong"] == 0
            assert record["graph"]["median"] == 1.0
            assert record["calls"] >= 20
            assert record["done"]["median"] >= record["issue"]["median"] > 0
    assert all(graph.closed for graph in stream.graphs)


@pytest.mark.parametrize("in_place", [False, True])
def test_one_wrong_element_is_counted_in_every_check(monkeypatch, in_place):
    def spoil(out, handle):
        out.view(np.uint32)[3] ^= 1 << 31

    rows, _ = swept(monkeypatch, Library(spoil=spoil, in_place=in_place))
    buffers = measure.buffers(64)
    assert [row[0]["wrong"] for row in rows] == [2 * buffers] * 3  # eager, and graph


def test_a_way_that_cannot_run_is_skipped_with_its_reason(monkeypatch):
    class Refusing(Library):
        def all_reduce(self, x, out, op):
            return (
                {"": f"no {x.dtype.name}"}
                if x.itemsize == 8
                else super().all_reduce(x, out, op)
            )

    class Ignorant(Library):
        @property
        def all_reduce(self):
            raise AttributeError("all_reduce")

    class Failing(Library):
        def all_reduce(self, x, out, op):
            raise OSError("broken pipe")

    rows, _ = swept(
        monkeypatch,
        Library(),
        Refusing("refusing"),
        Failing("failing"),
        Ignorant("ignorant"),
        line="-b 64 -e 64 -d float,double",
    )
    by_type = {row[0]["type"]: row for row in rows}
    skipped = {
        name: {each["column"]: each["skipped"] for each in row if "skipped" in each}
        for name, row in by_type.items()
    }
    failing = {"failing": "OSError: broken pipe"}
    failing |= {"ignorant": "ignorant has no all_reduce"}
    assert skipped == {
        "float": failing,
        "double": failing | {"refusing": "no float64"},
    }


def test_buffers_have_different_contents_and_do_not_overlap(monkeypatch):
    seen = {}

    class Spying(Library):
        def all_reduce(self, x, out, op):
            def call(handle):
                out[:] = x
                if x is not out:
                    seen[x.ctypes.data] = (x.nbytes, bytes(x))

            return {"": Way(call)}

    swept(monkeypatch, Spying(), line="-b 1000 -e 1000 -G 0")
    starts = sorted(seen)
    assert len(starts) == measure.buffers(1000)
    assert all(b - a >= 1000 for a, b in itertools.pairwise(starts))
    assert len({contents for _, contents in seen.values()}) == len(starts)
