"""``--overlap`` on stand-ins: which times it takes, and what it checks."""

import numpy as np
import pytest

from numba_symm.bench import bench_operations, options
from numba_symm.bench.bench_operations import OPERATIONS
from numba_symm.bench.measure import Timer
from numba_symm.bench.overlap import Overlap
from numba_symm.bench.report import OverlapReport, wrong_elements
from tests.host.test_bench_measure import Alone, Library, Stream

EACH = {"product": 100.0, "collective": 30.0}
"""Microseconds of a product, and of a call."""


class Streams:
    """The two streams; both together take as long as one after the other."""

    def __init__(self):
        self.order = []
        self.collective, self.product = self._stream(), self._stream()

    def _stream(self):
        stream = Stream()
        stream.time_together = self.time_together
        return stream

    def time_together(self, graphs, before):
        before(0)
        names = ["product" if on is self.product else "collective" for on, _ in graphs]
        self.order.append(tuple(names))
        for on, graph in graphs:
            on.replay(graph)
        pairs = zip(names, graphs, strict=True)
        return sum(EACH[name] * len(graph.calls) for name, (_, graph) in pairs)


class Product:
    name = "a product"

    def __init__(self, spoiled=()):
        self.bits = np.zeros(4, np.uint32)
        self.made = 0
        self.spoiled = spoiled

    def call(self, stream):
        self.made += 1
        self.bits[:] = 7
        self.bits[list(self.spoiled) if self.made > 1 else []] = 8

    current = staticmethod(Library.current)

    def clear(self):
        self.bits[:] = 0

    def result(self):
        return self.bits.copy()


def overlapped(monkeypatch, *contenders, product=None, ranks=None, more=""):
    """Return the records of one message, out of place, and the streams."""
    monkeypatch.setattr(bench_operations, "arrived", lambda: None)  # no GPU here
    line = f"all_reduce -b 256K -e 256K -n 20 -G 3 --overlap {more}"
    ranks, streams = ranks or Alone(), Streams()
    timer = Timer(ranks, streams.collective, lambda handle: None)
    overlap = Overlap(
        OPERATIONS["all_reduce"],
        options.parse(line.split()),
        timer,
        ranks,
        contenders,
        product or Product(),
        (streams.collective, streams.product),
        lambda handle: None,
    )
    (row,) = overlap.rows
    records = overlap.measure(row)
    return [each for each in records if not each["in_place"]], streams


def test_the_products_take_three_times_as_long_as_the_calls(monkeypatch):
    (record,), _ = overlapped(monkeypatch, Library())
    calls = record["calls"]
    assert calls >= 2
    assert record["collective"]["median"] == 30 * calls
    assert record["products"] == round(3 * 30 * calls / 100)
    assert record["product"]["median"] == 100 * record["products"]


def test_each_is_timed_alone_and_both_together_in_both_orders(monkeypatch):
    (record,), streams = overlapped(monkeypatch, Library(), more="-c 0")
    both = record["collective"]["median"] + record["product"]["median"]
    assert record["calls_first"]["median"] == both
    assert record["products_first"]["median"] == both
    ratio = both / record["product"]["median"]
    assert record["by_products"] == pytest.approx(ratio)
    assert record["wrong"] is None
    sample = [("collective",), ("product",)]
    sample += [("collective", "product"), ("product", "collective")]
    assert streams.order[-12:] == sample * 3


@pytest.mark.parametrize("in_place", [False, True])
def test_a_wrong_element_of_the_collective_is_counted(monkeypatch, in_place):
    def spoil(out, handle):
        out.view(np.uint32)[3] ^= 1 << 31

    library = Library(spoil=spoil, in_place=in_place)
    (record,), _ = overlapped(monkeypatch, library)
    assert record["wrong"] == record["buffers"]


def test_calls_that_cannot_be_captured_are_skipped(monkeypatch):
    class Eager(Library):
        captures = False

    monkeypatch.setattr("numba_symm.bench.overlap.SIMULATED", False)
    records, _ = overlapped(monkeypatch, Library(), Eager("eager"))
    skipped, measured = records
    assert (skipped["column"], skipped["way"]) == ("eager", "")
    assert skipped["skipped"] == "its calls cannot be captured"
    assert (measured["column"], measured["wrong"]) == ("library", 0)


def test_the_table_has_a_line_for_each_way():
    times = {"collective": {"median": 2000.0}, "product": {"median": 2100.5}}
    times |= {"calls_first": {"median": 2520.6}, "products_first": {"median": 2310.5}}
    times |= {"by_products": 1.2}
    head = {"bytes": 1024, "count": 256, "type": "float", "op": "sum", "wrong": 0}
    head |= {"calls": 500, "products": 10, "in_place": False} | times
    ours = head | {"column": "numba_symm", "way": "plan"}
    again = ours | {"in_place": True, "by_products": 1.8, "wrong": 3}
    mpi = {"column": "mpi", "way": "", "type": "float", "op": "sum", "skipped": "why"}
    report = OverlapReport("a product")
    assert "products of a product" in report.header()[0]
    assert [line.split() for line in report.row([ours, again, mpi]).splitlines()] == [
        (
            f"1024 256 float sum numba_symm plan{place} 500 10 2000.0 2100.5 2520.6 "
            f"2310.5 {ratio} {wrong}"
        ).split()
        for place, ratio, wrong in (("", "1.200", 0), (", in place", "1.800", 3))
    ]
    footer = report.footer([[ours, again], [ours, mpi]])
    assert footer == [
        "# Out of bounds values : 3 FAILED",
        "# Both / the products alone, geometric mean, numba_symm plan: 1.200",
        "# Both / the products alone, geometric mean, numba_symm plan, in place: 1.800",
        "# Skipped mpi, float sum: why",
    ]
    assert wrong_elements([[ours, again]]) == 3
