"""Draws a run: latency and bus bandwidth by message size, a line for each contender."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from numba_symm.bench.contenders.ours import NAME
from numba_symm.bench.operations import NO_REDUCTION, OPERATIONS
from numba_symm.bench.report import algorithm_bandwidth, best, microseconds

OURS: dict[str, Any] = {"color": "#d62728", "linewidth": 2.6, "zorder": 10}
THEIRS: dict[str, Any] = {"linewidth": 1.4, "markersize": 4}
COLORS = ("#1f77b4", "#76b900", "#7f7f7f", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
SHAPES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))
"""The markers and dashes of the lines that have one color."""

MOST_WITHIN = 8
"""The most lines whose legend is within a panel."""

Points = list[tuple[int, float, float]]


class NoRun(Exception):
    """A file does not contain a run that can be drawn; the text has the reason."""


def load(file: Path) -> dict[str, Any]:
    """Return a run that ``--json`` has written.

    Raises:
        NoRun: the file is something else.
    """
    try:
        run: dict[str, Any] = json.loads(file.read_text())
    except OSError as error:
        raise NoRun(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise NoRun(f"{file} is not JSON: {error}") from error
    try:
        title(run)
        drawable = bool(lines(run))
    except Exception:  # a key is missing, or a value has another type
        drawable = False
    if not drawable:
        raise NoRun(
            f"{file} contains no run; pass a file that --json has written without "
            "--cold and --overlap"
        )
    return run


def lines(run: Mapping[str, Any]) -> dict[str, Points]:
    """Return the lines of a plot by label, ours first.

    Args:
        run: a run that ``--json`` has written.

    Returns:
        Points of (bytes, microseconds, bus bandwidth in GB/s), out of place.
    """
    bus = OPERATIONS[run["operation"]].bus(run["facts"]["ranks"])
    several = len({_kind(row[0]) for row in run["rows"]}) > 1
    columns = dict.fromkeys(each["column"] for row in run["rows"] for each in row)
    found: dict[str, Points] = {}
    for column in sorted(columns, key=lambda name: name != NAME):
        for row in run["rows"]:
            record = best(row, column)
            if record is None:
                continue
            kind = f", {_kind(record)}" if several else ""
            bandwidth = algorithm_bandwidth(record) * bus
            nbytes = record["bytes"] // record.get("messages", 1)
            point = (nbytes, microseconds(record), bandwidth)
            found.setdefault(column + kind, []).append(point)
    return found


def draw(run: Mapping[str, Any], image: Path) -> None:
    """Draw a run.

    Args:
        run: a run that ``--json`` has written.
        image: the file to write; its suffix selects the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = lines(run)
    figure = Figure(
        figsize=(11 if len(found) <= MOST_WITHIN else 13.5, 4.6), layout="constrained"
    )
    FigureCanvasAgg(figure)
    latency, bandwidth = figure.subplots(1, 2)
    for (label, points), style in zip(found.items(), styles(found), strict=True):
        sizes, times, busbws = zip(*points, strict=True)
        latency.loglog(sizes, times, label=label, **style)
        bandwidth.loglog(sizes, busbws, label=label, **style)
    latency.set_ylabel("time of a call (µs)")
    bandwidth.set_ylabel("bus bandwidth (GB/s)")
    for panel in (latency, bandwidth):
        panel.set_xlabel("message size (bytes)")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda size, _: human(size))
        panel.grid(which="major", alpha=0.35)
        panel.grid(which="minor", axis="y", alpha=0.12)
    if len(found) <= MOST_WITHIN:
        latency.legend()
    else:  # they would hide the lines
        handles = latency.get_lines()
        figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    figure.suptitle(title(run))
    figure.savefig(image, dpi=150)


def styles(labels: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield how each line is drawn, in order; no two of the first 28 look the same.

    Args:
        labels: of the lines.
    """
    ours, theirs = itertools.count(), itertools.count()
    for label in labels:
        if label == NAME or label.startswith(f"{NAME}, "):
            turn, look = next(ours), OURS
        else:
            number = next(theirs)
            turn, at = divmod(number, len(COLORS))
            look = THEIRS | {"color": COLORS[at]}
        marker, dashes = SHAPES[turn % len(SHAPES)]
        yield look | {"marker": marker, "linestyle": dashes}


def title(run: Mapping[str, Any]) -> str:
    """Return the operation, type, reduction and devices of a run."""
    facts = run["facts"]
    devices = list(dict.fromkeys(name.split(",")[0] for name in facts["devices"]))
    kinds = {_kind(row[0]) for row in run["rows"]}
    kind = kinds.pop() if len(kinds) == 1 else "several types"
    where = " and ".join(devices)
    return f"{run['operation']}, {kind}, {facts['ranks']} x {where}"


def _kind(record: Mapping[str, Any]) -> str:
    """Return the elements' type, and the reduction if there is one."""
    kind, op = str(record["type"]), record["op"]
    return kind if op == NO_REDUCTION else f"{kind} {op}"


def human(size: float) -> str:
    """Return a size with a binary suffix, such as 64K."""
    for suffix, unit in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= unit:
            return f"{size / unit:g}{suffix}"
    return f"{size:g}"
