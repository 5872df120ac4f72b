"""What calls between many islands cost, by their schedules and the model's constants.

    python -m numba_symm.bench.laboratory.scale --plot scale.png

It prints a table in Markdown. Each call is beside two others:

    one to all   the schedule in which each island exchanges with every other one, which
                 up to ``Sizes.few`` islands use
    least        a bound: the messages, the bytes and the time without which no call
                 could have this result
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from numba_symm.bench.laboratory.model import (
    MEASURED,
    MESSAGE,
    NETWORK,
    Cost,
    Nodes,
    measured,
)
from numba_symm.bench.plot import human
from numba_symm.collectives.islands.sizes import DEFAULT
from numba_symm.environment import SIMULATED

GPUS = 8  # of a node

CROSSING = {
    "barrier": 0.0,
    "all_reduce": 2.0,
    "reduce": 1.0,
    "broadcast": 1.0,
    "scan": 1.0,
    "reduce_scatter": 1.0,
    "all_gather": 1.0,
    "all_to_all": float(GPUS),
}
"""By operation, how often a node of many sends or receives a message's bytes at least.

Each rank of an ``all_to_all`` has a message of its own.
"""

LARGEST = {"scan": 1 << 20, "barrier": 0}
"""By operation, the largest message; a larger scan has too many parcels to list."""

SIZES = (1 << 10, 1 << 20, 1 << 30)
NUMBERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 5000, 10_000)
FLAT = replace(DEFAULT, few=1 << 30)


def nodes(number: int) -> Nodes:
    """Return nodes of 8 GPUs."""
    return Nodes(number, GPUS, {name: measured(name) for name in MEASURED}, NETWORK)


def flat(name: str, of: Nodes, nbytes: int) -> Cost | None:
    """Return the cost if each island exchanges with every other one.

    None: such a call does not fit into the staging memory.
    """
    try:
        return of.cost(name, nbytes, FLAT)
    except AssertionError:
        return None


def least(name: str, of: Nodes, nbytes: int) -> Cost:
    """Return a bound of the cost.

    A link has to carry the bytes that must cross. What one island has reaches all
    others in ⌈log₂ islands⌉ exchanges, or in one exchange of a message for each.
    """
    steps = (of.number - 1).bit_length()
    sends = 1 if name == "reduce" else steps
    crossing = CROSSING[name] * nbytes * (of.number - 1) / of.number / of.gpus
    start = of.link(0)
    time = min(steps * start, start + (of.number - 1) * MESSAGE)
    time = max(time, of.link(crossing))
    return Cost(sends, round(crossing), 1, time)


def sizes(name: str) -> list[int]:
    """Return the sizes of an operation's messages."""
    most = LARGEST.get(name, SIZES[-1])
    return [each for each in SIZES if each <= most] or [0]


STEPS = 11, 2
"""Steps of a construction between all ranks, and between those of a node."""

PAUSE = 1e3
"""Microseconds for which a rank sleeps at most before it looks for a message."""

PER_RANK, PACKED, UNPACKED, MERGED, VALUE = 1.0, 0.9, 0.7, 0.4, 27
"""Microseconds of a step for each rank, and for each value to pack, unpack or merge it;
and its bytes. Measured with 8000 ranks and 1000 values: see bench/README.md."""

OF_NODES = 2
"""Steps in which every node has a value of its own; in the others, all are equal."""


def construction(of: Nodes) -> float:
    """Return the microseconds of the library's own steps of a construction.

    Each step goes up a binomial tree of ranks, and down again. On the way up, a rank
    has half of the values of the rank above it. On the way down, it forwards a message.
    The set-up of MPI, of NCCL and of a GPU's memory is not included.
    """
    ranks = of.number * of.gpus
    depth, within = (ranks - 1).bit_length(), (of.gpus - 1).bit_length()
    hops = 2 * (STEPS[0] * depth + STEPS[1] * within)
    sends = depth * (depth + 1) // 2  # one after another, to the rank that is last
    handled = 2 * (PACKED + UNPACKED + MERGED) + UNPACKED
    values = OF_NODES * of.number * (handled + sends * VALUE / NETWORK.bandwidth)
    return hops * (of.link(0) + PAUSE) + STEPS[0] * ranks * PER_RANK + values


def table(of: Nodes) -> list[str]:
    """Return the lines of a table of each cost: the library's, flat, and the least."""
    lines = [
        "| call | message | messages | bytes | launches | µs |",
        "|---|---|---|---|---|---|",
    ]
    for name in CROSSING:
        for nbytes in sizes(name):
            each = (
                of.cost(name, nbytes),
                flat(name, of, nbytes),
                least(name, of, nbytes),
            )
            cells = [f"`{name}`", human(nbytes) if nbytes else ""]
            for field in Cost._fields:
                found = [c and getattr(c, field) for c in each]
                if field == "nbytes":
                    words = [_bytes(n) for n in found]
                else:
                    words = ["-" if n is None else f"{n:.0f}" for n in found]
                cells.append(" / ".join(words[: 2 if field == "launches" else 3]))
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _bytes(number: int | None) -> str:
    """Return a number of bytes with up to four digits and a unit."""
    if number is None:
        return "-"
    for power, unit in ((30, "G"), (20, "M"), (10, "K")):
        if number >= 1 << power:
            amount = number / (1 << power)
            return f"{amount:.0f}{unit}" if amount >= 1000 else f"{amount:.3g}{unit}"
    return str(number)


def draw(image: Path) -> None:
    """Draw by the number of nodes what small and large calls take."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    words = "nodes of 8 GPUs, a 400 Gb/s NIC each; time by the number of nodes"
    figure.suptitle(f"A model, not a measurement: {words}")
    for axes, name in zip(figure.subplots(2, 4).flat, CROSSING, strict=True):
        for nbytes, color in zip(sizes(name)[:2], ("C0", "C1"), strict=False):
            many = [nodes(number) for number in NUMBERS]
            words = f", {human(nbytes)}" if nbytes else ""
            axes.plot(
                NUMBERS,
                [each.time(name, nbytes) for each in many],
                color=color,
                marker=".",
                label=f"numba_symm{words}",
            )
            others = [flat(name, each, nbytes) for each in many]
            there = [(n, c.time) for n, c in zip(NUMBERS, others, strict=True) if c]
            label = f"one to all{words}"
            axes.plot(*zip(*there, strict=True), color=color, ls=":", label=label)
            bounds = [least(name, each, nbytes).time for each in many]
            axes.plot(NUMBERS, bounds, color=color, lw=0.7, label=f"least{words}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(name)
        axes.grid(alpha=0.3)
    figure.supylabel("µs")
    handles = figure.axes[1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6)
    figure.savefig(image)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; draw the plot, if one is asked for."""
    parser = argparse.ArgumentParser(
        "python -m numba_symm.bench.laboratory.scale",
        description="Compute what calls between many islands cost.",
    )
    words = "draw the times by the number of nodes, into a file such as r.png"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=words)
    words = "nodes of the table (default %(default)s)"
    parser.add_argument("--nodes", type=int, default=1000, help=words)
    asked = parser.parse_args(argv)
    if SIMULATED:
        parser.error("the simulator has chunks of its own; unset NUMBA_ENABLE_CUDASIM")
    of = nodes(asked.nodes)
    print("\n".join(table(of)))
    print(f"\nconstruction: {construction(of) / 1e6:.2f} s")
    if asked.plot:
        draw(asked.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
