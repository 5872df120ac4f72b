"""A run's facts, and its text."""

import itertools
import math
import platform
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numba_symm as ns
from numba_symm.bench import measure
from numba_symm.bench.bench_operations import BenchOperation
from numba_symm.bench.contenders import PARTS
from numba_symm.bench.contenders.ours import NAME
from numba_symm.environment import SIMULATED
from numba_symm.launch import info

Record = Mapping[str, Any]

SMALL = 4 << 20
"""Largest message, in bytes, of the summary's mean of small messages."""

NOTHING = "-"


def aligned(first: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of a table whose cells end in columns."""
    pairs = zip(cells, widths, strict=True)
    return (first + "".join(cell.rjust(width) for cell, width in pairs)).rstrip()


def table(title: str, names: Sequence[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table with a title and the names of its columns."""
    columns = zip(names, *rows, strict=True)
    widths = [2 + max(map(len, column)) for column in columns]
    lines = [aligned(" ", cells, widths) for cells in rows]
    return [title, aligned("#", names, widths), *lines]


def written(file: Path) -> str:
    """Return the line for a file that the run has written."""
    return f"# written to {file}"


def microseconds(record: Record) -> float:
    """Return a call's median time: in a graph if it was captured, otherwise eager."""
    timed = record.get("graph") or record["done"]
    return float(timed["median"])


def algorithm_bandwidth(record: Record) -> float:
    """Return GB/s: the message's bytes divided by the time."""
    return float(record["bytes"]) / microseconds(record) / 1e3


def label(column: str, way: str) -> str:
    """Return the name of one way of a column."""
    return column if way in ("", column) else f"{column} {way}"


def best(
    records: Iterable[Record], column: str, in_place: bool = False
) -> Record | None:
    """Return a column's fastest record, or None; our plain call is left out."""
    found = [
        each
        for each in records
        if each["column"] == column
        and each["in_place"] == in_place
        and "skipped" not in each
        and not (column == NAME and each["way"] == "call")
    ]
    return min(found, key=microseconds, default=None)


def ratio(
    records: Sequence[Record], contenders: Sequence[str], in_place: bool = False
) -> float | None:
    """Return the fastest contender's time divided by ours; above 1, ours is faster."""
    ours = best(records, NAME, in_place)
    found = [best(records, name, in_place) for name in contenders]
    others = [microseconds(each) for each in found if each is not None]
    if ours is None or not others:
        return None
    return min(others) / microseconds(ours)


class Report:
    """Formats a run as text.

    Args:
        operation: the measured operation.
        ranks: the number of ranks.
        algorithms: our algorithms that have their own column.
        contenders: names, in the order of their columns.
    """

    def __init__(
        self,
        operation: BenchOperation,
        ranks: int,
        algorithms: Sequence[str],
        contenders: Sequence[str],
    ):
        self._name = operation.name
        self._bus = operation.bus(ranks)
        self._algorithms = list(algorithms)
        self._contenders = list(contenders)
        self._rivals = [name for name in contenders if name not in PARTS]
        self._places = (False, True) if operation.in_place_too else (False,)
        widths = [10, 9, 9, 7, *(max(9, len(name) + 2) for name in algorithms)]
        for name in contenders:
            widths += [max(9, len(name) + 2), 9]
        self._block = [*widths, 8]

    def header(self) -> list[str]:
        """Return the lines above the rows."""
        names, under = ["size", "count", "type", "redop"], ["(B)", "(elements)", "", ""]
        for _ in self._places:
            names += ["time", "algbw", "busbw", "#wrong", *self._algorithms]
            under += ["(us)", "(GB/s)", "(GB/s)", "", *["(us)"] * len(self._algorithms)]
            for name in self._contenders:
                names += [name, "busbw"]
                under += ["(us)", "(GB/s)"]
            names.append("ratio")
            under.append("")
        width = sum(self._block)
        titles = ("out-of-place", "in-place")[: len(self._places)]
        over = " " * 40 + "".join(title.center(width) for title in titles)
        return [f"# {over}".rstrip(), self._line("#", names), self._line("#", under)]

    def row(self, records: Sequence[Record]) -> str:
        """Return the line of one message."""
        head = records[0]
        cells = [*_message(head), head["type"], head["op"]]
        for in_place in self._places:
            cells += self._placed(best(records, NAME, in_place))
            for column in self._algorithms:
                cells += self._timed(best(records, column, in_place))[:1]
            for column in self._contenders:
                cells += self._timed(best(records, column, in_place))
            found = ratio(records, self._rivals, in_place)
            cells.append(NOTHING if found is None else f"{found:.2f}")
        return self._line(" ", cells)

    def _placed(self, record: Record | None) -> list[str]:
        """Return our time, both bandwidths and the wrong elements."""
        if record is None:
            return [NOTHING] * 4
        time, busbw = self._timed(record)
        wrong = "N/A" if record["wrong"] is None else str(record["wrong"])
        return [time, f"{algorithm_bandwidth(record):.2f}", busbw, wrong]

    def _timed(self, record: Record | None) -> list[str]:
        """Return a time and a bus bandwidth."""
        if record is None:
            return [NOTHING] * 2
        bandwidth = algorithm_bandwidth(record) * self._bus
        return [_number(microseconds(record)), f"{bandwidth:.2f}"]

    def _line(self, first: str, cells: Sequence[str]) -> str:
        widths = [12, 12, 9, 7, *self._block * len(self._places)]
        return aligned(first, cells, widths)

    def messages(self, rows: Sequence[Sequence[Record]]) -> list[str]:
        """Return the table of each rank's messages: rate, and both directions."""
        columns = [NAME, *self._contenders]
        lines = []
        for records in rows:
            head = records[0]
            found = (best(records, column) for column in columns)
            rates = [NOTHING if each is None else _rate(each) for each in found]
            lines.append([_message(head)[0], str(head["messages"]), *rates])
        title = (
            "# Messages that each rank sends, in millions a second / GB/s of both "
            "directions"
        )
        return table(title, ["size", "window", *columns], lines)

    def footer(self, rows: Sequence[Sequence[Record]]) -> list[str]:
        """Return the lines below the rows: wrong elements, means, spread, skipped."""
        return [
            *self._verdict(rows),
            *self._means(rows),
            *_spread(rows),
            *_skipped(rows),
        ]

    def _verdict(self, rows: Sequence[Sequence[Record]]) -> Iterator[str]:
        yield verdict(rows)
        for records in rows:
            for each in records:
                if each.get("wrong"):
                    name = label(each["column"], each["way"])
                    place = "in place" if each["in_place"] else "out of place"
                    yield (
                        f"#   {name}, {each['bytes']} bytes of {each['type']} "
                        f"{each['op']} {place}: {each['wrong']} wrong"
                    )
        ours = [
            algorithm_bandwidth(found) * self._bus
            for records in rows
            for place in (False, True)
            if (found := best(records, NAME, place)) is not None
        ]
        if ours:
            yield f"# Avg bus bandwidth    : {statistics.mean(ours):.4f}"

    def _means(self, rows: Sequence[Sequence[Record]]) -> Iterator[str]:
        """Yield geometric means of the contenders' times divided by ours."""
        groups = {"all sizes": rows}
        small = [records for records in rows if records[0]["bytes"] <= SMALL]
        if 0 < len(small) < len(rows):
            groups["up to 4M"] = small
        choices = {name: [name] for name in self._rivals}
        if len(choices) > 1:
            choices["the best"] = self._rivals
        for in_place, (title, group) in itertools.product(self._places, groups.items()):
            found = {
                name: _mean_ratio(group, chosen, in_place)
                for name, chosen in choices.items()
            }
            means = [f"{name} {mean:.3g}" for name, mean in found.items() if mean]
            if means:
                what = f"{title}{', in place' * in_place}: {', '.join(means)}"
                yield f"# Contender's time / ours, geometric mean, {what}"


class WaysReport:
    """Formats a run in which each way of a contender has a line of its own."""

    _WIDTHS: tuple[int, ...]
    _TIMED: str
    """A time that the records of measured ways have."""

    def header(self) -> list[str]:
        """Return the lines above the rows."""
        raise NotImplementedError

    def row(self, records: Sequence[Record]) -> str:
        """Return the lines of one message, one for each way of a contender."""
        return "\n".join(self._one(each) for each in records if self._TIMED in each)

    def _one(self, record: Record) -> str:
        name = label(record["column"], record["way"])
        name += ", in place" * record["in_place"]
        head = [*_message(record), record["type"], record["op"], name]
        wrong = "N/A" if record["wrong"] is None else str(record["wrong"])
        return self._line(" ", [*head, *self._times(record), wrong])

    def _times(self, record: Record) -> list[str]:
        """Return the cells between a way's name and its wrong elements."""
        raise NotImplementedError

    def _line(self, first: str, cells: Sequence[str]) -> str:
        return aligned(first, cells, self._WIDTHS)

    def footer(self, rows: Sequence[Sequence[Record]]) -> list[str]:
        """Return the lines below the rows: wrong elements, and what was skipped."""
        return [verdict(rows), *_skipped(rows)]


class EagerReport(WaysReport):
    """Formats eager calls as text; only those of ``--eager`` are made alone, too."""

    _WIDTHS = (12, 12, 9, 7, 30, 12, 12, 12, 8)
    _TIMED = "issue"

    def header(self) -> list[str]:
        """Return the lines above the rows."""
        names = ["size", "count", "type", "redop", "contender", "enqueued"]
        under = ["(B)", "(elements)", "", "", "", *["(us)"] * 3, ""]
        return [
            "# Eager calls, microseconds each: many until they are enqueued, many",
            "# until all are done, and one at a time, with a wait for each",
            self._line("#", [*names, "done", "alone", "#wrong"]),
            self._line("#", under),
        ]

    def _times(self, record: Record) -> list[str]:
        kinds = (record.get(each) for each in ("issue", "done", "alone"))
        return [NOTHING if each is None else _number(each["median"]) for each in kinds]


class OverlapReport(WaysReport):
    """Formats a run of ``--overlap`` as text.

    Args:
        product: the product's name.
    """

    _WIDTHS = (12, 12, 9, 7, 30, 7, 10, 12, 12, 13, 16, 9, 8)
    _TIMED = "by_products"

    def __init__(self, product: str):
        self._product = product

    def header(self) -> list[str]:
        """Return the lines above the rows."""
        names = ["size", "count", "type", "redop", "contender", "calls", "products"]
        names += ["calls", "products", "calls first", "products first"]
        names += ["ratio", "#wrong"]
        under = ["(B)", "(elements)", "", "", "", "", "", *["(us)"] * 4, "", ""]
        return [
            f"# Calls of a collective beside products of {self._product}",
            "# Each alone, and both together, enqueued in both orders, until the last "
            "is done; ratio: the longer of these to the products alone",
            self._line("#", names),
            self._line("#", under),
        ]

    def _times(self, record: Record) -> list[str]:
        kinds = ("collective", "product", "calls_first", "products_first")
        times = [f"{record[each]['median']:.1f}" for each in kinds]
        counts = [str(record["calls"]), str(record["products"])]
        return [*counts, *times, f"{record['by_products']:.3f}"]

    def footer(self, rows: Sequence[Sequence[Record]]) -> list[str]:
        """Return the lines below the rows: wrong elements, means, skipped."""
        head, *skipped = super().footer(rows)
        ratios: dict[str, list[float]] = defaultdict(list)
        for each in itertools.chain(*rows):
            if self._TIMED in each:
                name = label(each["column"], each["way"])
                place = ", in place" * each["in_place"]
                ratios[name + place].append(each[self._TIMED])
        means = [
            f"# Both / the products alone, geometric mean, {name}: {_mean(found):.3f}"
            for name, found in ratios.items()
        ]
        return [head, *means, *skipped]


def wrong_elements(rows: Iterable[Iterable[Record]]) -> int:
    """Return the number of wrong elements, those of contenders included."""
    return sum(each.get("wrong") or 0 for records in rows for each in records)


def verdict(rows: Iterable[Iterable[Record]]) -> str:
    """Return the line with the number of wrong elements."""
    total = wrong_elements(rows)
    return f"# Out of bounds values : {total} {'FAILED' if total else 'OK'}"


def _mean_ratio(
    rows: Sequence[Sequence[Record]], contenders: Sequence[str], in_place: bool
) -> float | None:
    found = [ratio(records, contenders, in_place) for records in rows]
    ratios = [each for each in found if each is not None]
    if not ratios:
        return None
    return _mean(ratios)


def _mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.mean(math.log(each) for each in ratios))


def _spread(rows: Sequence[Sequence[Record]]) -> Iterator[str]:
    """Yield the relative range of the samples of a row, by column."""
    spreads: dict[str, list[float]] = defaultdict(list)
    for records in rows:
        for column in _unique(each["column"] for each in records):
            found = best(records, column)
            if found is not None:
                timed = found.get("graph") or found["done"]
                spread = (timed["max"] - timed["min"]) / timed["median"]
                spreads[column].append(100 * spread)
    shown = [
        f"{column} {statistics.median(each):.0f} % (at most {max(each):.0f})"
        for column, each in spreads.items()
    ]
    if shown:
        yield "# Spread, (max - min) / median of the samples: " + ", ".join(shown)


def _skipped(rows: Sequence[Sequence[Record]]) -> Iterator[str]:
    found = _unique(
        (each["column"], each["type"], each["op"], each["skipped"])
        for records in rows
        for each in records
        if "skipped" in each
    )
    for column, type_, op, reason in found:
        yield f"# Skipped {column}, {type_} {op}: {reason}"


def _message(record: Record) -> list[str]:
    """Return the bytes and the elements of one message."""
    messages = record.get("messages", 1)  # recorded runs may have none
    return [str(record[name] // messages) for name in ("bytes", "count")]


def _rate(record: Record) -> str:
    rate = record["messages"] / microseconds(record)
    return f"{rate:.4g} / {2 * algorithm_bandwidth(record):.2f}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}"


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


NVLS_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Environment variables that disable NVLink multicast in contenders. numba_symm does
not use it."""

PACKAGES = (
    "numba",
    "numba-cuda",
    "cuda-core",
    "cuda-bindings",
    "numpy",
    "mpi4py",
)


def facts(comm: ns.Communicator, ranks: Any) -> dict[str, Any]:
    """Return the facts of a run. Collective."""
    device = f"{comm.device.name}, PCI {comm.device.pci_bus_id}"
    versions = {"numba-symm": ns.__version__, "Python": platform.python_version()}
    versions |= {name: info.installed(name) or "none" for name in PACKAGES}
    return {
        "ranks": comm.size,
        "devices": ranks.allgather("simulated" if SIMULATED else device),
        "driver": "none" if SIMULATED else info.driver(),
        "memory": comm.backend,
        "multiprocessors": comm.multiprocessors,
        "islands": comm.islands,
        "engine": measure.engine(comm),
        "nccl": ranks.allgather(measure.transports()),
        "nvls": "off",
        "commit": commit(Path(__file__).resolve().parent),
        "versions": versions,
    }


def commit(folder: Path) -> str:
    """Return the checked-out commit of a folder, or ``unknown``."""
    found = _git(folder, "rev-parse", "--short", "HEAD")
    if found is None:
        return "unknown"
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{found} with changes" if changed else found


def _git(folder: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
