"""``numba-symm tune``: measure from which size on which algorithm is the fastest.

    numba-symm run -n 8 -m numba_symm.bench.tune

The limits are written where every communicator of as many ranks finds them
(``collectives/tuned.py``), except those of the simulator.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numba_symm as ns
from numba_symm.bench import options
from numba_symm.bench.bench_operations import OPERATIONS, TYPES, BenchOperation
from numba_symm.bench.contenders import Ways
from numba_symm.bench.contenders.ours import Ours
from numba_symm.bench.measure import Timer, new_stream
from numba_symm.bench.report import best, microseconds, written
from numba_symm.bench.sweep import Row, Sweep, rows
from numba_symm.collectives import kernel_set, operations, select, tuned
from numba_symm.collectives.communicator import inside
from numba_symm.collectives.protocols.binding import Call
from numba_symm.collectives.select import ALL, CHOICES, Choice, Step
from numba_symm.dtypes import Element, element, moved
from numba_symm.environment import NO_TIMES, SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import loads
from numba_symm.gpu.kernels import Kernel, bound
from numba_symm.launch import devices

LARGEST = "4K" if SIMULATED else "256M"
SMALLEST = "1K"
REPEATS = "5"  # calls in a graph, and its replays

LASTING = math.log(1.02)
"""The least saving for which a range of sizes gets an algorithm of its own.

A saving is the logarithm of the ratio of two times. Those of all sizes are added.
"""

SURE = 1.5
"""How many times as long as necessary an algorithm must take to be left out."""

Times = Mapping[str, Sequence[float]]
"""Microseconds of a call by algorithm, for each size."""


class Case(NamedTuple):
    """What is measured together: an operation on a kind of elements.

    Attributes:
        operation: of the table.
        kinds: the fields of ``Choice`` that the times are of.
        type: the elements' type, by its name in nccl-tests.
        algorithms: those that can do it on this number of ranks.
    """

    operation: operations.Operation
    kinds: tuple[str, ...]
    type: str
    algorithms: tuple[str, ...]

    @property
    def element(self) -> Element:
        """The element type."""
        return element(TYPES[self.type], self.operation.name)

    def nbytes(self, row: Row, ranks: int) -> int:
        """Return the bytes that limits count: a message's, or a shard's."""
        shards = self.operation.shards(ranks)
        return row.counts[0] * row.dtype.itemsize // shards


def cases(ranks: int) -> list[Case]:
    """Return everything that has limits of its own."""
    found = []
    for name in CHOICES:
        operation = operations.OPERATIONS[name]
        usable = {
            algorithm: made
            for algorithm, made in operation.algorithms.items()
            if made.suits(ranks)
        }
        others = tuple(each for each, made in usable.items() if not made.floats)
        if operation.reduces:
            found.append(Case(operation, ("floats",), "float", tuple(usable)))
            found.append(Case(operation, ("others",), "int32", others))
        else:
            found.append(Case(operation, Choice._fields, "int32", others))
    return found


def fastest(sizes: Sequence[int], times: Times) -> tuple[Step, ...]:
    """Return the algorithms to take, from small messages to large ones.

    Args:
        sizes: in bytes, rising.
        times: of every algorithm, for each size.
    """
    # By the algorithm of the latest size: the least cost, and the algorithms so far.
    paths: dict[str, tuple[float, tuple[str, ...]]] = {"": (0.0, ())}
    for index in range(len(sizes)):
        cheapest = min(paths.values())
        paths = {
            name: _longer(paths.get(name, cheapest), cheapest, name, row[index])
            for name, row in times.items()
        }
    _, chosen = min(paths.values())
    steps = []
    for index, (one, following) in enumerate(itertools.pairwise(chosen)):
        if one != following:
            at = _crossing(
                sizes[index : index + 2], times[one], times[following], index
            )
            steps.append(Step(one, (at, at, at)))
    return (*steps, Step(chosen[-1], (ALL, ALL, ALL)))


def _longer(
    same: tuple[float, tuple[str, ...]],
    cheapest: tuple[float, tuple[str, ...]],
    name: str,
    microseconds: float,
) -> tuple[float, tuple[str, ...]]:
    """Return the cheaper way to take an algorithm for one size more."""
    changed = cheapest[0] + LASTING, cheapest[1]
    cost, path = min(same, changed)
    return cost + math.log(microseconds), (*path, name)


def _crossing(
    between: Sequence[int], one: Sequence[float], following: Sequence[float], index: int
) -> int:
    """Return the size from which on the following algorithm is faster."""
    low, high = (
        math.log(following[at] / one[at]) for at in (index, index + 1)
    )  # falls from above 0 to below
    part = min(1.0, max(0.0, low / (low - high))) if low > high else 0.5
    a, b = map(math.log, between)
    return int(math.exp(a + part * (b - a)))


def is_out(times: Times, name: str) -> bool:
    """Return whether an algorithm cannot be the fastest for twice the latest size.

    For twice the size, it takes at least as long. The algorithm that is the fastest
    for the latest size then takes about twice as long at most.
    """
    latest = {each: row[-1] for each, row in times.items() if row}
    return name in latest and latest[name] > SURE * 2 * min(latest.values())


class _Some(Ours):
    """Some of our algorithms, without the plain call."""

    def take(self, names: Sequence[str]) -> None:
        """Take these algorithms from now on."""
        self._others = tuple(names)

    def ways(self, operation: BenchOperation, x: Any, out: Any, op: str) -> Ways:
        """Return the plans of the algorithms."""
        found = super().ways(operation, x, out, op)
        return {name: found[name] for name in self._others}


class Run:
    """One run. Its methods are collective.

    Args:
        comm: the communicator.
        ranks: the mpi4py communicator.
        largest: the largest size, as the benchmark takes it.
    """

    def __init__(self, comm: ns.Communicator, ranks: Any, largest: str):
        self._comm = comm
        self._ranks = ranks
        self._stream = new_stream()
        self._timer = Timer(ranks, self._stream, comm.barrier)
        self._largest = largest
        self.cases = cases(comm.size)
        self.measured: list[tuple[Case, list[int], dict[str, list[float]]]] = []

    def measure(self) -> None:
        """Compile and load the kernels, then measure every case."""
        asked = [self._asked(case) for case in self.cases]
        rank, size = self._comm.rank, self._comm.size
        kernel_set.load(self._kernels(asked), rank, size, "tune")
        for case, words in zip(self.cases, asked, strict=True):
            if rank == 0:
                print(f"# {case.operation.name} of {case.type}", flush=True)
            self._measure(case, words)

    def _asked(self, case: Case) -> argparse.Namespace:
        words = [case.operation.name, "-b", SMALLEST, "-e", self._largest]
        words += ["-f", "2", "-d", case.type, "-c", "0", "-n", REPEATS, "-w", "1"]
        return options.parse([*words, "-G", REPEATS, "--seed", "1"])

    def _kernels(self, asked: Sequence[argparse.Namespace]) -> list[Kernel]:
        """Return the kernels that will be needed; none in the simulator."""
        if SIMULATED:
            return []
        size = self._comm.size
        end = kernel_set.endpoint(size, self._comm.multiprocessors)
        with bound() as found:
            for case, words in zip(self.cases, asked, strict=True):
                for row in rows(OPERATIONS[case.operation.name], words, size):
                    kind, count = case.element, case.nbytes(row, size)
                    count //= kind.itemsize
                    if not case.operation.reduces:
                        kind, count = moved(TYPES[case.type], count)
                    source = target = 1 << 20
                    if not case.operation.in_place:
                        target = 1 << 40
                    call = Call(source, target, count, kind, "sum", 0)
                    for algorithm in case.algorithms:
                        case.operation.bind(algorithm, end, call)
        return list(dict.fromkeys(each.kernel for each in found))

    def _measure(self, case: Case, asked: argparse.Namespace) -> None:
        operation = replace(OPERATIONS[case.operation.name], apart=True)
        ours = _Some(self._comm, case.algorithms)
        sweep = Sweep(operation, asked, self._timer, self._ranks, [ours])
        sizes: list[int] = []
        times: dict[str, list[float]] = {name: [] for name in case.algorithms}
        for row in sweep.rows:
            taken = [name for name in times if not is_out(times, name)]
            ours.take(taken)
            records = sweep.measure(row)
            sizes.append(case.nbytes(row, self._comm.size))
            for name, row_times in times.items():
                if name not in taken:
                    row_times.append(row_times[-1])  # it takes at least that
                    continue
                record = best(records, name)
                assert record is not None, f"{case.operation.name} by {name}"
                row_times.append(microseconds(record))
        self.measured.append((case, sizes, times))

    def choices(self) -> dict[str, Choice]:
        """Return the limits, by operation."""
        found: dict[str, dict[str, tuple[Step, ...]]] = {}
        for case, sizes, times in self.measured:
            steps = fastest(sizes, times)
            kinds = found.setdefault(case.operation.name, {})
            kinds.update(dict.fromkeys(case.kinds, steps))
        return {name: Choice(**kinds) for name, kinds in found.items()}

    def report(self, choices: Mapping[str, Choice]) -> list[str]:
        """Return the text: what is taken for which sizes, and what that gains."""
        lines = []
        for case, sizes, times in self.measured:
            steps = getattr(choices[case.operation.name], case.kinds[0])
            ends = [each.most[0] for each in steps]
            words = [
                each.algorithm + (f" up to {most:,.0f} bytes" if most < ALL else "")
                for each, most in zip(steps, ends, strict=True)
            ]
            gain = self._gain(case, sizes, times, choices)
            kinds = " and ".join(case.kinds)
            lines.append(f"{case.operation.name}, {kinds}: {', '.join(words)}")
            lines.append(
                f"    {gain:.3f} x as fast as by the built-in limits (geometric mean)"
            )
        return lines

    def _gain(
        self,
        case: Case,
        sizes: Sequence[int],
        times: Times,
        choices: Mapping[str, Choice],
    ) -> float:
        total = 0.0
        for index, nbytes in enumerate(sizes):
            before, now = (
                select.fastest(
                    case.operation.name, nbytes, self._comm.size, case.element, each
                )
                for each in (CHOICES, choices)
            )
            total += math.log(times[before][index] / times[now][index])
        return math.exp(total / len(sizes))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(
        prog="numba-symm tune",
        description="Measure the sizes from which on each algorithm is the fastest on "
        "this node. Communicators of as many ranks use these limits from then on, "
        "until the GPUs or the library's version change.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--largest",
        metavar="SIZE",
        type=_size,
        default=LARGEST,
        help="the largest message, such as 64M (default %(default)s)",
    )
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or show help or usage and raise SystemExit."""
    made = parser()
    asked = made.parse_args(argv)
    place = tuned.file()
    if place.is_dir() or not loads.is_writable(place.parent):
        made.error(
            f"expected a file that you can write, got {place}; set XDG_DATA_HOME to a "
            "folder that you can write"
        )
    return asked


def _size(text: str) -> str:
    if options.nbytes(text) < options.nbytes(SMALLEST):
        raise argparse.ArgumentTypeError(f"expected {SMALLEST} or more, got {text!r}")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on all ranks, write the limits, and return the exit code."""
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    if ranks.size < 2:
        raise ArgumentError("tune: expected 2 ranks or more, got 1; pass -n 2 or more")
    asked = options.same_on_all(ranks, lambda: parse(argv))
    with ns.Communicator(ranks) as comm:
        islands = len(comm.islands)
        gpus = _gpus(comm)
        if islands == 1 and gpus == ranks.size:
            _tune(comm, ranks, asked)
    if islands > 1:
        raise ArgumentError(
            f"tune: expected ranks of one island, got {islands} islands; start as many "
            "ranks as one island has, on one node"
        )
    if gpus < ranks.size:  # bytes within a GPU cross no link
        raise ArgumentError(
            f"tune: expected a GPU for each rank, got {gpus} for {ranks.size} ranks; "
            "start as many ranks as there are GPUs"
        )
    return 0


def _gpus(comm: ns.Communicator) -> int:
    """Return how many GPUs the ranks have."""
    return len(devices.sharers(inside(comm).ranks.gpus))


def _tune(comm: ns.Communicator, ranks: Any, asked: argparse.Namespace) -> None:
    run = Run(comm, ranks, asked.largest)
    run.measure()
    choices = run.choices()
    if comm.rank == 0:
        stored = f"# not stored: {NO_TIMES}"
        if not SIMULATED:
            tuned.write(comm.device.name, comm.size, choices)
            stored = written(tuned.file())
        print(*run.report(choices), stored, sep="\n")
    ranks.Barrier()  # until then, another communicator would read the old limits


if __name__ == "__main__":
    sys.exit(main())
