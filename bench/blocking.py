"""Measure blocking calls: ours, in mpi4py's spelling, and through the host.

    numba-symm run -n 2 -m numba_symm.bench.blocking --bytes 8192 1048576

It times an all-reduce, and a message to the next rank with one from the rank before.
The messages are by Sendrecv, by Irecv, Isend and Waitall, and by persistent requests.
Each call returns when its result may be used. The last rows are what a message costs
without the host's other work: a copy on this GPU with the host's wait for it, an
exchange of 500 bytes by MPI, and a copy from the peer's GPU with the wait. The rows are
interleaved. ``/ ours`` is the ratio to a call of the communicator and its
synchronization.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import mpi
from numba_symm.bench import options, report
from numba_symm.environment import SIMULATED

OURS, SPELLED, STAGED = "ours", "mpi4py's spelling", "through the host"
REQUESTS, PREPARED = "with requests", "with persistent ones"


class BlockingWay(NamedTuple):
    """One way to make a call, and its words."""

    name: str
    call: Callable[[], object]

    def time(self, count: int) -> float:
        """Make so many calls; return the microseconds of each."""
        start = time.perf_counter()
        for _ in range(count):
            self.call()
        return (time.perf_counter() - start) * 1e6 / count


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print on all ranks, and return the exit code."""
    parse = _parser().parse_args
    asked = options.same_on_all(MPI.COMM_WORLD, lambda: parse(argv))
    spelled = mpi.Comm(MPI.COMM_WORLD)
    comm = spelled.communicator
    known = report.facts(comm, spelled.host)
    if comm.rank == 0:
        print("#", ", ".join(f"{a} {b}" for a, b in known["versions"].items()))
        print(f"# {comm.size} ranks, {comm.device.name}")
        print(f"{'':12}{'bytes':>10} {'':20}{'us':>9} {'/ ours':>8}", flush=True)
    for nbytes in asked.bytes:
        for name, ways in (("all_reduce", _reduced), ("sendrecv", _passed)):
            rows = ways(spelled, nbytes)
            times = _sampled(rows, spelled, asked)
            for row, took in zip(rows, times, strict=True):
                words = f"{name:12}{nbytes:10} {row.name:20}{took:9.2f}"
                if comm.rank == 0:
                    print(f"{words} {took / times[0]:8.2f}", flush=True)
    spelled.Free()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m numba_symm.bench.blocking",
        description="Measure the microseconds of blocking calls with float32.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--bytes",
        metavar="SIZE",
        type=options.float_bytes,
        nargs="+",
        default=[8192, 1 << 20],
        help="of the messages (default 8K 1M)",
    )
    calls, samples = (2, 2) if SIMULATED else (50, 40)
    number: dict[str, Any] = {"metavar": "N", "type": options.at_least(1)}
    of = "of each sample (default %(default)s)"
    parser.add_argument("--calls", default=calls, help=of, **number)
    of = "of each row (default %(default)s)"
    parser.add_argument("--samples", default=samples, help=of, **number)
    return parser


def _sampled(
    ways: Sequence[BlockingWay], spelled: Any, asked: argparse.Namespace
) -> np.ndarray[Any, Any]:
    """Return the median microseconds of each way, of the slowest rank. Collective."""
    samples = np.empty((len(ways), asked.samples))
    for index in range(-1, asked.samples):  # the first one warms up
        for way, one in zip(ways, samples, strict=True):
            spelled.host.Barrier()
            one[index] = way.time(asked.calls)
            spelled.communicator.synchronize()
    medians = spelled.host.allgather(np.median(samples, axis=1))
    slowest: np.ndarray[Any, Any] = np.max(medians, axis=0)
    return slowest


def _arrays(comm: ns.Communicator, nbytes: int) -> tuple[Any, ...]:
    """Return symmetric arrays for input and output, and such in pinned host memory."""
    count = nbytes // 4
    x, y = comm.zeros(count, np.float32), comm.zeros(count, np.float32)
    return x, y, *(cuda.pinned_array(count, np.float32) for _ in range(2))


def _reduced(spelled: Any, nbytes: int) -> list[BlockingWay]:
    """Return the ways of an all-reduce. Collective."""
    comm: ns.Communicator = spelled.communicator
    x, y, sent, received = _arrays(comm, nbytes)

    def ours() -> None:
        comm.all_reduce(x, out=y)
        comm.synchronize()

    def called() -> None:
        spelled.Allreduce(x, y)

    def staged() -> None:
        x.copy_to_host(sent)
        spelled.host.Allreduce(sent, received)
        y.copy_to_device(received)

    return [
        BlockingWay(OURS, ours),
        BlockingWay(SPELLED, called),
        BlockingWay(STAGED, staged),
    ]


def _passed(spelled: Any, nbytes: int) -> list[BlockingWay]:
    """Return the ways of a message around all ranks. Collective."""
    comm: ns.Communicator = spelled.communicator
    x, y, sent, received = _arrays(comm, nbytes)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def ours() -> None:
        comm.sendrecv(x, dst=right, src=left, out=y)
        comm.synchronize()

    def called() -> None:
        spelled.Sendrecv(x, right, 0, y, left)

    def staged() -> None:
        x.copy_to_host(sent)
        spelled.host.Sendrecv(sent, right, 0, received, left)
        y.copy_to_device(received)

    def requested() -> None:
        requests = [spelled.Irecv(y, left, 1), spelled.Isend(x, right, 1)]
        mpi.Request.Waitall(requests)

    prepared = [spelled.Recv_init(y, left, 2), spelled.Send_init(x, right, 2)]

    def started() -> None:
        mpi.Prequest.Startall(prepared)
        mpi.Request.Waitall(prepared)

    return [
        BlockingWay(OURS, ours),
        BlockingWay(SPELLED, called),
        BlockingWay(REQUESTS, requested),
        BlockingWay(PREPARED, started),
        BlockingWay(STAGED, staged),
    ]


if __name__ == "__main__":
    sys.exit(main())
