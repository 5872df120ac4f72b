"""Measure a collective against other libraries, and check every result.

    mpirun -n 4 python -m numba_symm.bench all_reduce -b 1K -e 1G --json r.json

Rank 0 prints rows in the format of nccl-tests. The exit code is 1 if an element is
wrong.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from mpi4py.run import set_abort_status

import numba_symm as ns
from numba_symm.bench import measure, options, report
from numba_symm.bench.bench_operations import OPERATIONS
from numba_symm.bench.contenders import Contender, load
from numba_symm.bench.contenders.ours import Ours
from numba_symm.bench.measure import Timer, new_stream
from numba_symm.bench.overlap import Overlap, Product, new_product
from numba_symm.bench.report import (
    EagerReport,
    OverlapReport,
    Report,
    WaysReport,
    written,
    wrong_elements,
)
from numba_symm.bench.sweep import Sweep
from numba_symm.environment import NO_TIMES, SIMULATED
from numba_symm.errors import SymmError


def program(argv: Sequence[str] | None = None, name: str = options.MODULE) -> int:
    """Run :func:`main`; an error ends the job, because other ranks may be waiting."""
    try:
        return main(argv, name)
    except Exception as error:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.COMM_WORLD.size > 1:
            set_abort_status(error)  # mpi4py aborts after Python has shown the error
        raise


def main(argv: Sequence[str] | None = None, name: str = options.MODULE) -> int:
    """Run the benchmark on all ranks, and return the exit code.

    Args:
        argv: the arguments; None: those of this process.
        name: the command's name in its usage.
    """
    argv = sys.argv[1:] if argv is None else argv
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    asked = options.same_on_all(ranks, lambda: options.parse(argv, name))
    os.environ.update(report.NVLS_OFF)  # before any library that reads them loads
    if asked.islands:
        measure.pretend(asked.islands, ranks)
    try:
        comm = ns.Communicator(ranks)
    except SymmError as error:  # on all ranks
        _say(ranks, f"numba_symm.bench: {error}", file=sys.stderr)
        return 1
    with comm:
        wrong = _Benchmark(asked, comm, ranks, shlex.join(argv)).sweep()
    return 1 if wrong else 0


def _say(ranks: Any, *lines: str, file: Any = None) -> None:
    if ranks.rank == 0:
        for line in lines:
            print(line, file=file, flush=True)


class _Benchmark:
    """One run, from its header to its verdict. Its methods are collective."""

    def __init__(
        self, asked: argparse.Namespace, comm: ns.Communicator, ranks: Any, command: str
    ):
        self._asked = asked
        self._comm = comm
        self._ranks = ranks
        self._command = command
        self._operation = OPERATIONS[asked.command]
        self._stream = new_stream()
        self._ours = Ours(comm, asked.algorithms, asked.plain)
        self._facts = report.facts(comm, ranks)

    def sweep(self) -> int:
        """Measure all rows, show them, and return the number of wrong elements."""
        asked, ranks = self._asked, self._ranks
        others, missing = load(asked.against, self._comm, ranks)
        self._header(others, missing)
        contenders = [self._ours, *others]
        facts: dict[str, Any] = {}
        if asked.overlap:
            side = asked.side or options.SIDE
            product = new_product(self._comm.device.ordinal, side)
            facts["product"] = product.name
            rows = self._overlap(contenders, product)
        else:
            rows = self._by_size(contenders)
        versions = {each.name: each.version for each in contenders}
        if ranks.rank == 0:
            run = {
                "operation": self._operation.name,
                "command": self._command,
                "facts": self._facts | facts,
                "contenders": versions,
                "missing": missing,
                "rows": rows,
            }
            if asked.json:
                asked.json.write_text(json.dumps(run, indent=1) + "\n")
                print(written(asked.json))
        for each in others:  # not after an error, as close waits for all ranks
            each.close()
        return wrong_elements(rows)

    def _by_size(self, contenders: Sequence[Contender]) -> list[Any]:
        """Return the records of all rows, after showing them."""
        asked, ranks = self._asked, self._ranks
        timer = Timer(ranks, self._stream, self._comm.barrier)
        sweep = Sweep(self._operation, asked, timer, ranks, contenders)
        eager = EagerReport()
        if asked.eager:
            return self._rows(sweep, eager)
        several = asked.algorithms if len(asked.algorithms) > 1 else ()
        names = [each.name for each in contenders[1:]]
        table = Report(self._operation, ranks.size, several, names)
        rows = self._rows(sweep, table)
        if self._operation.windowed:
            _say(ranks, *table.messages(rows))
        _say(ranks, *eager.header(), *map(eager.row, rows))
        return rows

    def _overlap(self, contenders: Sequence[Contender], product: Product) -> list[Any]:
        """Return the records of all rows beside a product, after showing them."""
        barrier = self._comm.barrier
        streams = new_stream(), new_stream()
        timer = Timer(self._ranks, streams[0], barrier)
        overlap = Overlap(
            self._operation,
            self._asked,
            timer,
            self._ranks,
            contenders,
            product,
            streams,
            barrier,
        )
        return self._rows(overlap, OverlapReport(product.name))

    def _rows(self, sweep: Sweep, table: Report | WaysReport) -> list[Any]:
        rows = []
        _say(self._ranks, *table.header())
        for row in sweep.rows:
            rows.append(sweep.measure(row))
            _say(self._ranks, table.row(rows[-1]))
        _say(self._ranks, *table.footer(rows))
        return rows

    def _header(self, others: Sequence[Contender], missing: dict[str, str]) -> None:
        known = self._facts
        versions = ", ".join(f"{a} {b}" for a, b in known["versions"].items())
        captures = self._ours.captures and not self._asked.eager
        graphs = self._asked.replays if captures else 0
        mode = f"CUDA graphs, {graphs} replays" if graphs else "eager"
        if graphs and not self._asked.overlap:
            mode += ", and eager"
        times = f"{mode}; median of the slowest rank's times"
        lines = [
            f"numba_symm.bench {self._command}",
            f"commit {known['commit']}, seed {self._asked.seed}",
            versions,
            f"{known['ranks']} ranks, driver {known['driver']}, NVLS {known['nvls']}",
            times,
        ]
        if SIMULATED:
            lines.append(NO_TIMES)
        if known["multiprocessors"] is not None:
            lines.append(f"at most {known['multiprocessors']} multiprocessors")
        if known["engine"] is not None:
            sizes = " + ".join(str(len(part)) for part in known["islands"])
            lines.append(f"islands of {sizes} ranks, engine {known['engine']}")
            settings = [f"{name}={value}" for name, value in known["nccl"][0].items()]
            lines.append(f"rank 0 has {' '.join(settings)}")
        if self._comm.size == 1:
            lines.append("1 rank sends nothing; numba-symm run -n 4 -m ... starts 4")
        for rank, device in enumerate(known["devices"]):
            lines.append(f"rank {rank}: {device}")
        lines += [f"{each.name}: {each.version}" for each in (self._ours, *others)]
        lines += [f"{name}: missing, {reason}" for name, reason in missing.items()]
        _say(self._ranks, *(f"# {line}" for line in lines))


if __name__ == "__main__":
    sys.exit(program())
