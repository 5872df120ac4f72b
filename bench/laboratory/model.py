"""A model of calls over several nodes, from measured times within a node and of a link.

    python -m numba_symm.bench.laboratory.model --plot model.png

It prints tables in Markdown. The schedules are the library's own. For each step, it
adds the time of the exchange or of the work beside it, whichever is longer.
"""

import argparse
import bisect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from numba_symm.bench.contenders.ours import NAME
from numba_symm.bench.laboratory.schedules import (
    Combine,
    Convert,
    CopyStep,
    ExchangeStep,
    Pack,
    ScheduledJob,
    Within,
    even,
    exchanges,
    launches,
)
from numba_symm.bench.plot import human
from numba_symm.bench.report import best, microseconds
from numba_symm.collectives.islands.sizes import DEFAULT, Sizes
from numba_symm.environment import SIMULATED

RESULTS = Path(__file__).parents[1] / "results"

WIDTH = 4  # bytes of an element

MEMORY = 3.0e6
"""Bytes a microsecond that a kernel reads and writes on one GPU, as on an H200."""

MESSAGE = 2.8
"""Microseconds of each further message of an exchange. An assumption, as is the
library's own ``Sizes.message``."""

LAUNCH = 2.5
"""Microseconds of a kernel that combines what has arrived, without its bytes."""

Curve = Callable[[float], float]
"""Microseconds for a number of bytes."""


@dataclass(frozen=True)
class Link:
    """What a GPU exchanges with others, beyond its island.

    Attributes:
        latency: microseconds of an exchange without its bytes.
        bandwidth: bytes a microsecond, in each direction.
    """

    latency: float
    bandwidth: float

    def __call__(self, nbytes: float) -> float:
        """Return the microseconds of an exchange."""
        return self.latency + nbytes / self.bandwidth


NETWORK = Link(15.0, 46e3)
"""A NIC of 400 Gb/s for each GPU, of which 92 % are reached. Both are assumptions: a
grouped send and receive by NCCL takes 8 µs over NVLink, with this library's marks."""


def interpolated(points: Mapping[int, float]) -> Curve:
    """Return a curve through points, straight between the logarithms of both."""
    known = sorted(points.items())

    def curve(nbytes: float) -> float:
        if nbytes <= known[0][0]:
            return known[0][1]
        if nbytes >= known[-1][0]:  # as fast as the largest
            return known[-1][1] * nbytes / known[-1][0]
        above = bisect.bisect(known, (nbytes, 0.0))
        (a, s), (b, t) = known[above - 1 : above + 1]
        slope = math.log(t / s) / math.log(b / a)
        return float(s * (nbytes / a) ** slope)

    return curve


@dataclass(frozen=True)
class Nodes:
    """Equal nodes.

    Attributes:
        number: how many.
        gpus: of each.
        within: by operation, the curve within a node; none is needed for one GPU.
        link: of each GPU.
    """

    number: int
    gpus: int
    within: Mapping[str, Curve]
    link: Callable[[float], float]

    def inside(self, operation: str, nbytes: float) -> float:
        """Return the microseconds of an operation within a node."""
        return self.within[operation](nbytes) if self.gpus > 1 else 0.0

    def step(self, step: Any) -> float:
        """Return the microseconds of a step of a schedule."""
        match step:
            case ExchangeStep(island=True):
                return self.inside("broadcast", _most(step)[1])
            case ExchangeStep():
                messages, nbytes = _most(step)
                across = self.link(nbytes) + (messages - 1) * MESSAGE
                return max(across, sum(map(self.step, step.beside)))
            case Within():
                name, call = step.operation.name, step.call
                number = step.operation.shards(self.gpus)
                number = self.gpus if name == "all_gather" else number
                return self.inside(_LIKE.get(name, name), number * call.nbytes)
            case CopyStep():
                moved = 2 * step.nbytes
            case Pack():
                moved = 2 * math.prod(step.shape)
            case Combine():
                moved = (step.number + 1) * step.stride
            case Convert():
                moved = step.count * sum(kind.itemsize for kind in step.kinds)
            case _:
                moved = 0
        return LAUNCH + moved / MEMORY

    def cost(self, name: str, nbytes: int, sizes: Sizes = DEFAULT) -> "Cost":
        """Return what a call costs the rank that it costs most.

        It is the root, which is the first rank, the last one of its island or of all,
        or one between them. A step of one rank is taken to begin when that of the
        others begins.

        Args:
            name: the operation.
            nbytes: the bytes of the message, for all ranks together if each has a
                shard.
            sizes: the limits of the calls.
        """
        job = ScheduledJob(even(self.number, self.gpus), sizes)
        shards = job.size if name in SHARDED else 1
        count = max(1, nbytes // WIDTH // shards)
        found, chain = [], False
        if name == "broadcast" and self.number > 2:
            steps = job.schedule(2 * self.gpus, name, count, "float32")
            froms = {p.peer for each in exchanges(steps) for p in each.receives}
            chain = froms == {self.gpus}  # in a tree, the first island sends to it
        ranks = 0, self.gpus - 1, self.gpus * (self.number // 2), job.size - 1
        for rank in {*ranks}:
            steps = job.schedule(rank, name, count, "float32")
            across = exchanges(steps)
            sent = [parcel.nbytes for each in across for parcel in each.sends]
            time = sum(map(self.step, steps))
            if chain and rank:  # the first chunk has crossed the islands before
                waited = job.places.of[rank][0] - 1
                time += waited * max(map(self.step, across))
            found.append(Cost(len(sent), sum(sent), launches(steps), time))
        return Cost(*map(max, zip(*found, strict=True)))

    def time(self, name: str, nbytes: int) -> float:
        """Return the microseconds of a call."""
        return self.cost(name, nbytes).time


class Cost(NamedTuple):
    """What a call costs a rank.

    Attributes:
        messages: that it sends to other islands.
        nbytes: of these messages.
        launches: kernels and copies, without the engine's.
        time: microseconds.
    """

    messages: int
    nbytes: int
    launches: int
    time: float


def _most(exchange: ExchangeStep) -> tuple[int, int]:
    """Return how many messages a rank sends or receives, and their bytes."""
    each = exchange.sends, exchange.receives
    numbers, nbytes = zip(
        *((len(ps), sum(p.nbytes for p in ps)) for ps in each), strict=True
    )
    return max(numbers), max(nbytes)


SHARDED = ("reduce_scatter", "all_gather", "all_to_all")

_LIKE = {"scan": "reduce", "all_to_all": "all_gather"}
"""By operation without a recorded run, another one, of about as many bytes."""


BOUNDS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda m: 2 * (m - 1) / m,
    "reduce_scatter": lambda m: (m - 1) / m,
    "all_gather": lambda m: (m - 1) / m,
    "broadcast": lambda m: 1.0,
}
"""By operation, how often a node sends or receives a message's bytes at least."""


def bound(operation: str, nodes: Nodes, nbytes: int) -> float:
    """Return the microseconds that the slower link needs.

    They are the longer of two times: that of the NICs for the bytes that must cross,
    and that of the operation within a node.
    """
    crossing = BOUNDS[operation](nodes.number) * nbytes / nodes.gpus
    return max(nodes.link(crossing), nodes.inside(operation, nbytes))


def measured(operation: str, name: str = "2026-11-22-h200-8") -> Curve:
    """Return the curve of a recorded run, out of place in graphs."""
    run = json.loads((RESULTS / f"{name}-{operation}.json").read_text())
    found = {row[0]["bytes"]: best(row, NAME) for row in run["rows"]}
    return interpolated({b: microseconds(each) for b, each in found.items() if each})


MEASURED = (*BOUNDS, "reduce")
"""The operations with a recorded run."""

NUMBERS = (2, 4, 8, 16, 32, 64)
SIZES = tuple(1 << power for power in (10, 14, 18, 20, 22, 24, 26, 28, 30))


def of_eight() -> list[Nodes]:
    """Return nodes of 8 GPUs, as many as in each column of the tables."""
    within = {name: measured(name) for name in MEASURED}
    return [Nodes(number, 8, within, NETWORK) for number in NUMBERS]


MARKS = 2.0
"""Microseconds that the marks of an exchange take."""


def recorded(column: str) -> dict[str, dict[int, float]]:
    """Return by operation and bytes what calls over two islands of one GPU took.

    Microseconds, over sockets of the loopback interface, the mean of two runs.

    Args:
        column: ``steps``, by exchanges; ``bare``, sends and receives of the same bytes
            by NCCL alone.
    """
    found: dict[str, dict[int, list[float]]] = {}
    sockets = False
    path = RESULTS / "2026-11-23-h200-2-islands-own.txt"
    for line in path.read_text().splitlines():
        words = line.split()
        if line.startswith("## "):
            sockets = "over sockets" in line
        elif sockets and words[2:3] == ["K"]:
            time = float(words[words.index(column) + 1])
            times = found.setdefault(words[0], {})
            times.setdefault(int(words[1]), []).append(time)
    return {
        operation: {nbytes: sum(each) / len(each) for nbytes, each in times.items()}
        for operation, times in found.items()
    }


def alone() -> dict[str, Curve]:
    """Return the curves of exchanges by NCCL alone: ``both`` ranks send, or ``one``.

    Each recorded call of ``CROSSES`` is a point of ``both``, each broadcast of ``one``.
    """
    bare = recorded("bare")
    both: dict[int, list[float]] = {}
    for operation, calls in CROSSES.items():
        for nbytes, time in bare[operation].items():
            both.setdefault(nbytes // calls, []).append(time)
    means = {nbytes: sum(each) / len(each) for nbytes, each in both.items()}
    return {"both": interpolated(means), "one": interpolated(bare["broadcast"])}


CROSSES = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}
"""By operation, a message's bytes ÷ those that each of two ranks sends and receives."""


def checks() -> dict[str, dict[int, float]]:
    """Return by operation and bytes the model's time ÷ the recorded one."""
    curves, found = alone(), {}
    for operation, times in recorded("steps").items():
        if operation not in BOUNDS:
            continue
        curve = curves["both" if operation in CROSSES else "one"]
        link = partial(marked, curve)
        model = Nodes(2, 1, {}, link)
        found[operation] = {n: model.time(operation, n) / t for n, t in times.items()}
    return found


def marked(curve: Curve, nbytes: float) -> float:
    """Return the microseconds of an exchange with its marks."""
    return curve(nbytes) + MARKS


def table(operation: str, nodes: Sequence[Nodes]) -> list[str]:
    """Return the lines of a table: microseconds, and those of :func:`bound` ÷ them."""
    head = [f"{each.number} nodes" for each in nodes]
    lines = ["| message | " + " | ".join(head) + " |", "|---|" + "---|" * len(nodes)]
    for nbytes in SIZES:
        cells = []
        for each in nodes:
            time = each.time(operation, nbytes)
            share = 100 * bound(operation, each, nbytes) / time
            cells.append(f"{time:.0f} ({share:.0f} %)")
        lines.append(f"| {human(nbytes)} | " + " | ".join(cells) + " |")
    return lines


def check_table() -> list[str]:
    """Return the lines of the table of :func:`checks`."""
    found = checks()
    sizes = sorted({nbytes for times in found.values() for nbytes in times})
    head = " | ".join(human(nbytes) for nbytes in sizes)
    lines = [f"| message | {head} |", "|---|" + "---|" * len(sizes)]
    for operation, ratios in found.items():
        cells = [f"{ratios[n]:.2f}" if n in ratios else "" for n in sizes]
        lines.append(f"| `{operation}` | " + " | ".join(cells) + " |")
    return lines


def draw(nodes: Sequence[Nodes], image: Path) -> None:
    """Draw by message size how close each operation is to its bound."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle("A model, not a measurement: nodes of 8 GPUs, a 400 Gb/s NIC each")
    for axes, operation in zip(figure.subplots(2, 2).flat, BOUNDS, strict=True):
        for each in nodes:
            shares = [
                100 * bound(operation, each, n) / each.time(operation, n) for n in SIZES
            ]
            axes.plot(SIZES, shares, marker="o", label=f"{each.number} nodes")
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES[::2], [human(n) for n in SIZES[::2]])
        axes.set_ylim(0, 105)
        axes.set_title(operation)
        axes.set_ylabel("slower link's time ÷ the model's, %")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(image)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; draw the plot, if one is asked for."""
    parser = argparse.ArgumentParser(
        "python -m numba_symm.bench.laboratory.model",
        description="Compute what calls over several nodes should take.",
    )
    words = "draw how close each operation is to its bound, into a file such as r.png"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=words)
    asked = parser.parse_args(argv)
    if SIMULATED:
        parser.error("the simulator has chunks of its own; unset NUMBA_ENABLE_CUDASIM")
    nodes = of_eight()
    for operation in BOUNDS:
        print(f"\n{operation}: microseconds (the slower link's ÷ them)\n")
        print("\n".join(table(operation, nodes)))
    print("\nThe model's time ÷ that of two islands of one GPU over sockets\n")
    print("\n".join(check_table()))
    if asked.plot:
        draw(nodes, asked.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
