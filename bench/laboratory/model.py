"""A model of calls over several nodes, from measured times within a node and of a link.

    python -m numba_symm.bench.laboratory.model --plot model.png

It prints tables in Markdown. It has the same chunks and ticks as the library. For each
tick, it adds the time of the exchange or of the work beside it, whichever is longer.
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

from numba_symm.bench.contenders.ours import NAME
from numba_symm.bench.plot import human
from numba_symm.bench.report import best, microseconds
from numba_symm.collectives.islands.moves import chained
from numba_symm.collectives.islands.pipeline import several, ticks
from numba_symm.collectives.islands.sizes import DEFAULT
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

    def combined(self, parts: int, nbytes: float) -> float:
        """Return the microseconds of the reduction of parts of so many bytes."""
        return LAUNCH + (parts + 1) * nbytes / MEMORY

    def packed(self, parts: int, nbytes: float) -> float:
        """Return the microseconds of copies of parts of so many bytes."""
        return parts * (LAUNCH + 2 * nbytes / MEMORY) if self.gpus > 1 else 0.0

    def all_reduce(self, nbytes: int) -> float:
        """Return the microseconds of an all-reduce, by the bytes of its message."""
        m, away = self.number, self.number - 1
        small = nbytes <= DEFAULT.small and m <= DEFAULT.few
        if small or DEFAULT.along_rails(m, nbytes):
            across = self.across(away * nbytes, away)
            if not small:
                across = self.along_rail(nbytes)
            return self.inside("all_reduce", nbytes) + across + self.combined(m, nbytes)
        most = int(DEFAULT.staging / 2 / (2 / self.gpus * WIDTH))
        chunks = divided(nbytes, self.gpus, most)
        works, exchanges = [], []
        for chunk in chunks:
            shard = chunk / self.gpus
            first = self.inside("reduce_scatter", chunk)
            last = self.inside("all_gather", chunk)
            if m > 2 and m * shard > DEFAULT.one_step:
                works.append([first, self.combined(m, shard / m), last])
                exchanges.append([away / m * shard] * 2)
            else:
                works.append([first, self.combined(m, shard) + last])
                exchanges.append([away * shard])
        return self.overlapped(exchanges, works, away)

    def reduce_scatter(self, nbytes: int) -> float:
        """Return the microseconds of a reduce-scatter, by the bytes of its input."""
        m, size = self.number, self.number * self.gpus
        shard = nbytes / size
        if m <= DEFAULT.few and (2 * m - 1) * shard <= DEFAULT.staging:
            each = self.inside("reduce_scatter", nbytes / m)
            last = [each, self.combined(m, shard)]
            if shard < DEFAULT.chunk:
                works = [[m * each, last[1]]]
                return self.overlapped([[(m - 1) * shard]], works, m - 1)
            works = [*[[each, 0.0]] * (m - 1), last]
            return self.overlapped([*[[shard]] * (m - 1), [0.0]], works)
        together = DEFAULT.half // 8
        most = min((DEFAULT.half - together) / (2 * m), together / self.gpus) / WIDTH
        works, exchanges = [], []
        for chunk in divided(shard, 1, max(1, int(most))):
            whole = m * self.gpus * chunk
            launches = math.ceil(whole / together)
            each = whole / launches
            packed = self.packed(1, each) + self.inside("reduce_scatter", each)
            works.append([launches * packed, self.combined(m, chunk)])
            exchanges.append([(m - 1) * chunk])
        return self.overlapped(exchanges, works, m - 1)

    def all_gather(self, nbytes: int) -> float:
        """Return the microseconds of an all-gather, by the bytes of its output."""
        m, each = self.number, nbytes / (self.number * self.gpus)
        slots = (2 * m - 1 + m * self.gpus) * each
        if DEFAULT.along_rails(m, int(each)) and slots <= DEFAULT.half:
            spread = self.packed(1, nbytes) + self.inside("all_gather", nbytes)
            return self.along_rail(each) + spread
        island = self.inside("all_gather", nbytes / m)
        times = m - 1 if each >= DEFAULT.chunk and m > 2 else 1  # exchanges
        exchanges = [[(m - 1) / times * each]] * times
        works = [[0.0, (m - 1) / times * island]] * times
        messages = (m - 1) // times
        return self.overlapped([*exchanges, []], [*works, [island]], messages)

    def broadcast(self, nbytes: int) -> float:
        """Return the microseconds of a broadcast, by the bytes of its message."""
        m, away = self.number, self.number - 1
        rails = m > DEFAULT.few
        steps = away.bit_length()
        if away * nbytes <= DEFAULT.one_rail or (rails and nbytes <= DEFAULT.small):
            across = self.across(away * nbytes, away)
            if rails:
                across = steps * self.link(nbytes)
            return across + self.inside("broadcast", nbytes)
        chunks = divided(nbytes, self.gpus, nbytes, 2 * m)
        chain = chained(len(chunks), m)
        if rails:
            each = nbytes // (self.gpus * len(chunks))
            chain = DEFAULT.shorter_as_chain(m, len(chunks), each)
        if self.gpus == 1 and not chain and not rails:
            return self.across(away * nbytes, away)
        works = [
            [self.inside(n, c) for n in ("broadcast", "all_gather")] for c in chunks
        ]
        if chain:  # each hop of the last chunk is a tick
            tick = max(self.link(chunks[0] / self.gpus), max(works[0]))
            return works[0][0] + (len(chunks) + away) * tick + works[0][1]
        if rails:
            shard = nbytes / self.gpus
            scattered = steps * self.link(0) + self.link(shard) - self.link(0)
            first = self.inside("broadcast", nbytes)
            last = self.inside("all_gather", nbytes)
            return first + scattered + self.across(shard, away) + last
        exchanges = [[away * each / self.gpus] for each in chunks]
        return self.overlapped(exchanges, works, away)

    def across(self, nbytes: float, messages: int) -> float:
        """Return the microseconds of an exchange of several messages."""
        return self.link(nbytes) + (messages - 1) * MESSAGE

    def along_rail(self, nbytes: float) -> float:
        """Return the microseconds of the steps by which all get so much of each."""
        distances = [1 << step for step in range((self.number - 1).bit_length())]
        sent = [min(each, self.number - each) * nbytes for each in distances]
        return sum(map(self.link, sent))

    def overlapped(
        self,
        exchanges: Sequence[Sequence[float]],
        works: Sequence[Sequence[float]],
        messages: int = 1,
    ) -> float:
        """Return the microseconds of chunks.

        Args:
            exchanges: of each chunk, the bytes of its exchanges.
            works: of each chunk, the microseconds of its work.
            messages: how many an exchange has.
        """
        total = 0.0
        for exchanged, work in ticks([len(each) for each in exchanges]):
            nbytes = sum(exchanges[c][n] for c, n in exchanged)
            across = self.across(nbytes, messages) if nbytes else 0.0
            total += max(across, sum(works[c][n] for c, n in work))
        return total


def divided(nbytes: float, shards: int, most: int, number: int = 0) -> list[float]:
    """Return the bytes of each chunk, as :func:`several` divides them."""
    count = max(1, int(nbytes / WIDTH))
    each = several(count, shards, WIDTH, most, DEFAULT.chunk, number) * WIDTH
    full, rest = divmod(count * WIDTH, each)
    return [float(each)] * full + [float(rest)] * (rest > 0)


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


NUMBERS = (2, 4, 8, 16, 32, 64)
SIZES = tuple(1 << power for power in (10, 14, 18, 20, 22, 24, 26, 28, 30))


def of_eight() -> list[Nodes]:
    """Return nodes of 8 GPUs, as many as in each column of the tables."""
    names = [*BOUNDS, "reduce"]
    within = {name: measured(name) for name in names}
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


def checks() -> dict[str, dict[int, float]]:
    """Return by operation and bytes the model's time ÷ the recorded one."""
    alone, found = recorded("bare"), {}
    for operation, times in recorded("steps").items():
        if operation not in BOUNDS:
            continue
        curve = interpolated(alone[operation if operation == "broadcast" else BOTH])
        link = partial(marked, curve)
        model = getattr(Nodes(2, 1, {}, link), operation)
        found[operation] = {n: model(n) / time for n, time in times.items()}
    return found


BOTH = "all_reduce"
"""In whose calls a rank sends a message's bytes, and receives as many."""


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
            time = getattr(each, operation)(nbytes)
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
                100 * bound(operation, each, n) / getattr(each, operation)(n)
                for n in SIZES
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
