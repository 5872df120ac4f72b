"""Measure the host's time of a call: of a plan, and of arrays of each library.

    numba-symm run -n 2 -m numba_symm.bench.host

Only enqueueing is timed, of all-reduces so small that the GPU keeps up. The rows are
interleaved, so that drift during a run affects all of them. ``/ plan`` and ``/ call``
are the ratios to a plan and to a plain call on symmetric arrays.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

import numba_symm as ns
from numba_symm.bench import facts, options
from numba_symm.bench.contenders import Missing, attempt, imported, load, need_gpus
from numba_symm.bench.streams import new_stream
from numba_symm.environment import SIMULATED

PLAN, CALL = "plan, symmetric arrays", "call, symmetric arrays"
DEFAULT, ANOTHER = "default stream", "another stream"


@dataclass(frozen=True)
class HostRow:
    """One way to enqueue an all-reduce.

    Attributes:
        name: its words.
        call: enqueues it on the stream of a handle; None: on the one that its arrays
            name, else on the default stream.
        current: returns a context that makes the stream of a handle current.
    """

    name: str
    call: Callable[[int | None], object]
    current: Callable[[int], AbstractContextManager[Any]] = lambda handle: nullcontext()

    def enqueue(self, handle: int | None, count: int) -> float:
        """Enqueue so many on a stream; return the microseconds of each."""
        context = nullcontext() if handle is None else self.current(handle)
        with context:
            start = time.perf_counter()
            for _ in range(count):
                self.call(handle)
            return (time.perf_counter() - start) * 1e6 / count


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print on all ranks, and return the exit code."""
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    asked = options.same_on_all(ranks, lambda: _parser().parse_args(argv))
    os.environ.update(facts.NVLS_OFF)  # before any library that reads them loads
    with ns.Communicator(ranks) as comm:
        others, reasons = load(["torch"], comm, ranks)
        missing = {f"{name}'s kernel": why for name, why in reasons.items()}
        rows = [*_ours(comm, asked.bytes), *_torchs(others, asked.bytes)]
        for library, make in (("torch", _torch), ("CuPy", _cupy)):
            made, reason = attempt(ranks, partial(make, comm, asked.bytes))
            if reason is None:
                rows.append(made)
            else:
                missing[f"{library}'s arrays"] = reason
        times = _measured(rows, comm, ranks, asked)
        for each in others:
            each.close()
        known = facts.facts(comm, ranks)
        if ranks.rank == 0:
            print("#", ", ".join(f"{a} {b}" for a, b in known["versions"].items()))
            print(f"# {ranks.size} ranks, {asked.bytes} bytes, {comm.device.name}")
            for name, why in missing.items():
                print(f"# {name}: missing, {why}")
            for line in _table(rows, times):
                print(line, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m numba_symm.bench.host",
        description="Measure the host's microseconds for an all-reduce of float32.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--bytes",
        metavar="SIZE",
        type=options.float_bytes,
        default="1K",
        help="of each message, such as 64K (default %(default)s)",
    )
    add_samples(parser)
    return parser


def add_samples(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`sampled` reads."""
    calls, samples = (2, 2) if SIMULATED else (50, 40)
    number: dict[str, Any] = {"metavar": "N", "type": options.at_least(1)}
    of = "of each sample (default %(default)s)"
    parser.add_argument("--calls", default=calls, help=of, **number)
    of = "of each row (default %(default)s)"
    parser.add_argument("--samples", default=samples, help=of, **number)


def _ours(comm: ns.Communicator, nbytes: int) -> list[HostRow]:
    """Return a plan, and plain calls on Numba's arrays. Collective."""
    count = nbytes // 4
    x, y = comm.empty(count, np.float32), comm.empty(count, np.float32)
    a, b = cuda.device_array(count, np.float32), cuda.device_array(count, np.float32)
    return [
        HostRow(PLAN, comm.all_reduce_init(x, out=y)),
        HostRow(CALL, partial(_call, comm, x, y)),
        HostRow("call, Numba's arrays", partial(_call, comm, a, b)),
    ]


def _call(comm: ns.Communicator, x: Any, y: Any, handle: int | None) -> None:
    comm.all_reduce(x, out=y, stream=handle)


def _call_on_current(comm: ns.Communicator, x: Any, y: Any, handle: int | None) -> None:
    comm.all_reduce(x, out=y)


def _torch(comm: ns.Communicator, nbytes: int) -> HostRow:
    need_gpus()
    torch = imported("torch", "pip install torch")
    gpu = torch.device("cuda", comm.device.ordinal)
    x, y = (torch.zeros(nbytes // 4, device=gpu) for _ in range(2))

    def current(handle: int) -> Any:
        return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=gpu))

    return HostRow(
        "call, torch's arrays", partial(_call_on_current, comm, x, y), current
    )


class _CudaStream(NamedTuple):
    """A stream as CuPy takes it: by its protocol of version 0."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _cupy(comm: ns.Communicator, nbytes: int) -> HostRow:
    need_gpus()
    cupy = imported("cupy", "pip install cupy-cuda13x")
    x, y = (cupy.zeros(nbytes // 4, np.float32) for _ in range(2))

    def current(handle: int) -> Any:
        return cupy.cuda.Stream.from_external(_CudaStream(handle))

    return HostRow(
        "call, CuPy's arrays", partial(_call_on_current, comm, x, y), current
    )


def _torchs(others: Sequence[Any], nbytes: int) -> Iterator[HostRow]:
    """Yield torch's own one-shot all-reduce, if it is there. Collective."""
    for torch in others:
        x, y = (torch.allocate(nbytes).view(np.float32) for _ in range(2))
        way = torch.all_reduce(x, y, "sum")["one_shot"]
        if isinstance(way, str):
            raise Missing(way)
        yield HostRow("torch's one-shot kernel", way.call, torch.current)


def _measured(
    rows: Sequence[HostRow],
    comm: ns.Communicator,
    ranks: Any,
    asked: argparse.Namespace,
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the median microseconds of each row, by stream. Collective."""
    another = new_stream()
    return {
        name: sampled(rows, comm, ranks, asked, handle)
        for name, handle in ((DEFAULT, None), (ANOTHER, another.handle))
    }


def sampled(
    rows: Sequence[HostRow],
    comm: ns.Communicator,
    ranks: Any,
    asked: argparse.Namespace,
    handle: int | None,
) -> np.ndarray[Any, Any]:
    """Return the median microseconds of each row, of the slowest rank. Collective.

    Args:
        rows: the rows, which are interleaved.
        comm: our communicator.
        ranks: the mpi4py communicator.
        asked: the number of ``samples``, and of ``calls`` in each.
        handle: the stream; see :class:`HostRow`.
    """
    samples = np.empty((len(rows), asked.samples))
    for index in range(-1, asked.samples):  # the first one warms up
        for row, one in zip(rows, samples, strict=True):
            ranks.Barrier()
            one[index] = row.enqueue(handle, asked.calls)
            comm.synchronize(handle)
    medians = ranks.allgather(np.median(samples, axis=1))
    slowest: np.ndarray[Any, Any] = np.max(medians, axis=0)
    return slowest


def _table(
    rows: Sequence[HostRow], times: dict[str, np.ndarray[Any, Any]]
) -> Iterator[str]:
    names = [row.name for row in rows]
    plan, call = names.index(PLAN), names.index(CALL)
    yield f"{'':24}" + "".join(f"{stream:^28}" for stream in times)
    yield f"{'':24}" + f"{'us':>9} {'/ plan':>8} {'/ call':>8} " * len(times)
    for index, name in enumerate(names):
        cells = ""
        for each in times.values():
            time = each[index]
            cells += f"{time:9.2f} {time / each[plan]:8.2f} {time / each[call]:8.2f} "
        yield f"{name:24}{cells}"


if __name__ == "__main__":
    sys.exit(main())
