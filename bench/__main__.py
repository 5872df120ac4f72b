"""Time every all-reduce algorithm by message size, and check its results.

    mpirun -n 4 python -m numba_symm.bench -b 1K -e 16M -f 4 --json out.json

Rank 0 prints a table: microseconds a call in a captured graph and eager, and the bus
bandwidth of the fastest. Needs GPUs. Exits with 1 if an element is wrong.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

import numba_symm as ns
from numba_symm.bench.measure import Timing, time_plan
from numba_symm.collectives.select import ALL_REDUCE, all_reduce
from numba_symm.environment import SIMULATED
from numba_symm.launch.devices import visible_gpus

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def nbytes(text: str) -> int:
    """Parse a size such as ``64K``; suffixes are binary, as in nccl-tests."""
    unit = UNITS.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def sizes(first: int, last: int, factor: int) -> Iterator[int]:
    """Yield message sizes in bytes."""
    while first <= last:
        yield first
        first *= factor


def measure(comm: ns.Communicator, size: int, algorithm: str) -> tuple[Timing, int]:
    """Return the timing of float32 sums of ``size`` bytes and wrong elements."""
    count = size // 4
    mine = np.random.default_rng(comm.rank).integers(-99, 99, count)
    expected = np.empty(count, np.int64)
    MPI.COMM_WORLD.Allreduce(mine.astype(np.int64), expected)
    x, y = comm.empty(count), comm.empty(count)
    x.copy_to_device(mine.astype(np.float32))
    y.copy_to_device(np.full(count, np.nan, np.float32))
    plan = comm.all_reduce_init(x, out=y, algorithm=algorithm)
    plan()
    comm.synchronize()
    wrong = int(np.count_nonzero(y.copy_to_host() != expected))
    exchange = ns.StoreExchange(MPI.COMM_WORLD, "bench")
    return time_plan(comm, exchange, plan), sum(exchange.all_gather(wrong, "wrong"))


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser("python -m numba_symm.bench", description=__doc__)
    parser.add_argument("-b", type=nbytes, default="1K", help="smallest message")
    parser.add_argument("-e", type=nbytes, default="16M", help="largest message")
    parser.add_argument("-f", type=int, default=4, help="factor between sizes")
    parser.add_argument("--json", type=Path, help="write the timings to a file")
    options = parser.parse_args()
    if not visible_gpus() or SIMULATED:
        parser.error("the benchmark needs a GPU, and none is visible")
    rows, wrong = [], 0
    with ns.Communicator(MPI.COMM_WORLD) as comm:
        for size in sizes(options.b, options.e, options.f):
            for algorithm in ALL_REDUCE:
                timing, errors = measure(comm, size, algorithm)
                wrong += errors
                chosen = algorithm == all_reduce(size, comm.size)
                row = {"bytes": size, "algorithm": algorithm, "chosen": chosen}
                rows.append(row | vars(timing) | {"wrong": errors})
        if comm.rank == 0:
            show(comm, rows)
            if options.json:
                facts = {"ranks": comm.size, "device": comm.device.name}
                facts |= {"backend": comm.backend, "blocks": comm.max_blocks}
                options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1))
    return 1 if wrong else 0


def show(comm: ns.Communicator, rows: list[dict[str, object]]) -> None:
    """Print the rows; ``*`` marks the algorithm that all_reduce chooses."""
    title = f"all_reduce float32 sum, {comm.size} ranks, {comm.device.name}, "
    table = Table(title=title + comm.backend)
    columns = ("bytes", "algorithm", "graph", "spread", "issue", "done", "wrong")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()]
        del cells[2]
        cells[1] += "*" if row["chosen"] else " "
        table.add_row(*cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
