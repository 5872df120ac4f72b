"""Times an all-reduce that a kernel repeats, beside calls from the host.

    numba-symm run -n 2 -m numba_symm.bench.in_kernel 4K 16K 64K --json r.json

In the kernel, each of 128 threads a block has one vector of 16 bytes in registers, as
in the library's own kernels. Its time is the difference between a long launch and a
short one, divided by the difference of their calls. The host's calls are captured in a
graph: as they are, and without early launches.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.bench.contenders import no_context
from numba_symm.bench.measure import Summary, new_stream
from numba_symm.bench.options import nbytes
from numba_symm.bench.report import facts
from numba_symm.environment import SIMULATED
from numba_symm.gpu import compiled

THREADS, ITEMS = 8 if SIMULATED else 128, 4
CALLS = (2, 4) if SIMULATED else (200, 1200)
"""Calls of a short launch and of a long one."""


@cuda.jit  # type: ignore[untyped-decorator]
def repeat(ws: Any, x: Any, out: Any, times: int) -> None:
    """Replace each element by the mean of all ranks', again and again."""
    held = cuda.local.array(ITEMS, np.float32)
    first = ITEMS * cuda.grid(1)
    for i in range(ITEMS):
        held[i] = x[first + i]
    good = True
    for _ in range(times):
        good = symm.all_reduce(ws, held, "avg", items=True)
        if not good:
            break
    if good:
        for i in range(ITEMS):
            out[first + i] = held[i]


@contextmanager
def without_early_launches() -> Iterator[None]:
    """Let no launch that is packed meanwhile start before the one before it ends."""
    config = compiled.launch_config
    compiled.launch_config = lambda blocks, threads, held, early: config(
        blocks, threads, held, False
    )
    try:
        yield
    finally:
        compiled.launch_config = config


class InKernel:
    """Measures one size after another. Its methods are collective.

    Args:
        comm: the communicator.
        ranks: the mpi4py communicator.
        samples: samples of each time.
    """

    def __init__(self, comm: ns.Communicator, ranks: Any, samples: int):
        self._comm, self._ranks, self._samples = comm, ranks, samples
        self._stream = new_stream()

    def measure(self, size: int) -> dict[str, Any]:
        """Return the record of messages of so many bytes; check the results."""
        count = size // 4
        blocks = -(-count // (ITEMS * THREADS))
        padded = blocks * ITEMS * THREADS
        given = np.arange(padded, dtype=np.float32) + self._comm.rank
        x, out = cuda.to_device(given), cuda.to_device(np.zeros(padded, np.float32))
        ws = self._comm.device_workspace(blocks, THREADS, 16 * THREADS)

        def launched(times: int) -> Callable[[int], None]:
            def launch(handle: int) -> None:
                stream = 0 if SIMULATED else cuda.external_stream(handle)
                repeat[blocks, THREADS, stream](ws.ctx, x, out, times)

            return launch

        short, long = (self._time([launched(times)]) for times in CALLS)
        self._check(out.copy_to_host()[:count], count, "the kernel")
        y = cuda.to_device(given[:count])
        found = {"call": self._calls(y)}
        with without_early_launches():
            found["call_not_early"] = self._calls(y)
        between = CALLS[1] - CALLS[0]
        inside = [(b - a) / between for a, b in zip(short, long, strict=True)]
        found["in_kernel"] = Summary.of(inside)
        return {"bytes": size, "blocks": blocks, "threads": THREADS} | {
            name: vars(summary) for name, summary in found.items()
        }

    def _check(self, result: Any, count: int, what: str) -> None:
        mean = (self._comm.size - 1) / 2
        wanted = np.arange(count, dtype=np.float32) + np.float32(mean)
        assert np.allclose(result, wanted, rtol=1e-5), f"{what}: a wrong result"

    def _calls(self, x: Any) -> Summary:
        """Return the time of a call of the host, in a graph of many.

        The output is new, so that nothing is remembered of an earlier call.
        """
        out = cuda.device_array_like(x)
        plan = self._comm.all_reduce_init(x, out=out, op="avg")
        times = self._time([plan] * CALLS[0])
        self._check(out.copy_to_host(), x.size, "the calls")
        return Summary.of([each / CALLS[0] for each in times])

    def _time(self, calls: Sequence[Any]) -> list[float]:
        """Return the slowest rank's microseconds of each sample of a graph."""
        calls[0](self._stream.handle)  # compiles
        self._stream.synchronize()
        graph = self._stream.capture(calls, no_context)
        self._stream.replay(graph)
        mine = []
        for _ in range(self._samples):
            self._ranks.Barrier()
            both = [(self._stream, graph)]
            mine.append(self._stream.time_together(both, self._comm.barrier))
        graph.close()
        return [
            float(max(each)) for each in zip(*self._ranks.allgather(mine), strict=True)
        ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table and what the sizes' ratios are."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", type=nbytes, help="bytes, such as 16K")
    parser.add_argument("--samples", type=int, default=3 if SIMULATED else 21)
    parser.add_argument("--json", type=Path, help="write the records to a file")
    asked = parser.parse_args(argv)
    ranks = MPI.COMM_WORLD
    with ns.Communicator(ranks) as comm:
        bench = InKernel(comm, ranks, asked.samples)
        records = [bench.measure(size) for size in asked.sizes or [16 << 10]]
        run = facts(comm, ranks)
    if ranks.rank > 0:
        return
    print("bytes  in a kernel  a call  a call, not early  factor to that   (µs)")
    for each in records:
        inside, call, plain = (
            each[name]["median"] for name in ("in_kernel", "call", "call_not_early")
        )
        print(
            f"{each['bytes']:5}  {inside:11.2f}  {call:6.2f}  {plain:17.2f}  "
            f"{inside / plain:14.2f}"
        )
    if asked.json:
        asked.json.write_text(json.dumps({"facts": run, "rows": records}, indent=1))


if __name__ == "__main__":
    main()
