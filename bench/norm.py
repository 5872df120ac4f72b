"""What inference adds to an all-reduce: a residual and an RMS norm.

They are an epilogue of the call, or a kernel of the benchmark's after a plain call.
Residuals are zeros and weights ones, so that results are exact for inputs of ±1.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from numba_symm.bench import calls
from numba_symm.bench.calls import EnqueueOn
from numba_symm.collectives.communicator import Communicator
from numba_symm.environment import SIMULATED

THREADS = 8 if SIMULATED else 512
MOST_ROW = 8 << 10
"""The most bytes of a row, if the message can be divided."""
EPSILON = np.float32(1e-12)  # 1 + EPSILON is 1


def squared(value: Any, residual: Any, weight: Any, width: Any) -> Any:
    """Return what is summed over a row."""
    return (value + residual) * (value + residual)


def normalized(value: Any, total: Any, residual: Any, weight: Any, width: Any) -> Any:
    """Return an element of the result, and one of the updated residual."""
    kept = value + residual
    mean = total / np.float32(width) + EPSILON
    return kept * weight * (np.float32(1) / np.float32(math.sqrt(mean))), kept


@cuda.jit  # type: ignore[untyped-decorator]
def normalize_rows(out: Any, residual: Any, weight: Any, kept: Any) -> None:
    """Do the same to a sum, in its place. A block takes a row."""
    partial = cuda.shared.array(THREADS, np.float32)
    row, thread, width = cuda.blockIdx.x, cuda.threadIdx.x, out.shape[1]
    total = np.float32(0)
    for at in range(thread, width, THREADS):
        value = np.float32(out[row, at]) + np.float32(residual[row, at])
        total += value * value
    partial[thread] = total
    cuda.syncthreads()
    distance = THREADS // 2
    while distance > 0:
        if thread < distance:
            partial[thread] += partial[thread + distance]
        cuda.syncthreads()
        distance //= 2
    mean = partial[0] / np.float32(width) + EPSILON
    scale = np.float32(1) / np.float32(math.sqrt(mean))
    for at in range(thread, width, THREADS):
        value = np.float32(out[row, at]) + np.float32(residual[row, at])
        kept[row, at] = value
        out[row, at] = value * scale * np.float32(weight[at])


def rms_norm(*, prepared: bool) -> Callable[..., EnqueueOn]:
    """Return a factory of calls; its algorithm "two_calls" has no epilogue."""

    def make(
        comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
    ) -> EnqueueOn:
        width = x.size
        while width * x.dtype.itemsize > MOST_ROW and width % 2 == 0:
            width //= 2
        rows = x.size // width, width
        x, out = x.reshape(rows), out.reshape(rows)
        residual, weight, kept = (
            _filled(shape, x.dtype, value)
            for shape, value in ((rows, 0), ((width,), 1), (rows, 0))
        )
        given: dict[str, Any] = {"x": x, "out": out}
        if algorithm != "two_calls":
            given |= {"out": (out, kept), "epilogue": normalized, "row_sum": squared}
            given["args"] = residual, weight, width
        reduce = calls.made(comm, "all_reduce", given, prepared)
        if algorithm != "two_calls":
            return reduce

        def both(handle: int) -> None:
            reduce(handle)
            stream = 0 if SIMULATED else cuda.external_stream(handle)
            normalize_rows[rows[0], THREADS, stream](out, residual, weight, kept)

        return both

    return make


def _filled(shape: tuple[int, ...], dtype: Any, value: int) -> Any:
    """Return a new array of ordinary memory."""
    host = np.full(math.prod(shape), value, dtype)
    return cuda.to_device(host.view(np.uint8)).view(dtype).reshape(shape)
