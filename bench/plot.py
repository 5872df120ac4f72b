"""Draws a recorded run, with matplotlib.

python -m numba_symm.bench.plot r.json r.png
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numba_symm.bench.bench_operations import NO_REDUCTION, OPERATIONS
from numba_symm.bench.contenders.ours import NAME
from numba_symm.bench.report import algorithm_bandwidth, best, microseconds

OURS: dict[str, Any] = {"color": "#d62728", "linewidth": 2.6, "zorder": 10}
COLORS = ("#1f77b4", "#76b900", "#7f7f7f", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
DASHES = ("-", "--", ":", "-.")
"""The dashes of the lines that have one color."""

Points = list[tuple[int, float, float]]


def main(argv: Sequence[str] | None = None) -> None:
    """Draw a run, or exit with an error of the arguments.

    Args:
        argv: the arguments; None: those of this process.
    """
    parser = argparse.ArgumentParser("python -m numba_symm.bench.plot")
    parser.add_argument("json", type=Path, help="a file written by --json")
    parser.add_argument("image", type=Path, help="such as r.png or r.svg")
    asked = parser.parse_args(argv)
    try:
        run = json.loads(asked.json.read_text())
        found, named = lines(run), title(run)
    except OSError as error:
        parser.error(f"{asked.json}: {error.strerror}")
    except (ValueError, LookupError, TypeError, AttributeError):
        found, named = {}, ""
    if not found:
        parser.error(
            f"{asked.json} contains no run; pass a file that --json has written "
            "without --overlap"
        )
    try:
        draw(found, named, asked.image)
    except (ImportError, OSError, ValueError) as error:
        parser.error(f"{asked.image}: {error}")


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


def draw(found: Mapping[str, Points], named: str, image: Path) -> None:
    """Draw the times and the bandwidths, beside each other.

    Args:
        found: what :func:`lines` returned.
        named: the title.
        image: the file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    latency, bandwidth = figure.subplots(1, 2)
    for number, (label, points) in enumerate(found.items()):
        turn, at = divmod(number, len(COLORS))
        theirs = {"color": COLORS[at], "linestyle": DASHES[turn % len(DASHES)]}
        style = OURS if label.split(",")[0] == NAME else theirs
        sizes, times, busbws = zip(*points, strict=True)
        latency.loglog(sizes, times, label=label, marker=".", **style)
        bandwidth.loglog(sizes, busbws, marker=".", **style)
    latency.set_ylabel("time of a call (µs)")
    bandwidth.set_ylabel("bus bandwidth (GB/s)")
    for panel in (latency, bandwidth):
        panel.set_xlabel("message size (bytes)")
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.35)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.suptitle(named)
    figure.savefig(image, dpi=150)


def title(run: Mapping[str, Any]) -> str:
    """Return the operation, type, reduction and devices of a run.

    Args:
        run: a run that ``--json`` has written.
    """
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


if __name__ == "__main__":
    main()
