"""What the tests on GPUs share: slow kernels, patterns, arrays of other libraries."""

import contextlib
import warnings

import numpy as np
import pytest
from numba import cuda

from numba_symm.gpu.streams import handle_or_default
from tests.sharing.work import fill_kernel

MILLISECOND = 1_000_000  # nanoseconds
THREADS = 256


@cuda.jit
def add_kernel(x, amount):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] += amount


@cuda.jit
def pattern_kernel(x, first):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] = i % 1009 + first


def fill(x, value, stream=None, milliseconds=0):
    """Enqueue a kernel that fills ``x`` after some time has passed."""
    grid, numba_stream = _grid(x), numba_view(stream)
    kernel = fill_kernel[grid, THREADS, numba_stream]
    kernel(x, x.dtype.type(value), milliseconds * MILLISECOND)


def add(x, amount, stream=None):
    """Enqueue a kernel that adds ``amount`` to all of ``x``."""
    add_kernel[_grid(x), THREADS, numba_view(stream)](x, x.dtype.type(amount))


def write_pattern(x, first):
    """Write ``pattern(..., first)`` and wait."""
    pattern_kernel[_grid(x), THREADS](x, first)
    cuda.synchronize()


def pattern(indices, first):
    """Return what ``write_pattern`` writes at some indices."""
    return indices % 1009 + first


def _grid(x):
    return max(1, min(64, -(-x.size // THREADS)))


def optional(name):
    """Return a library that the tests do not require, or skip; its warnings aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


def to_device(host):
    """Return a copy on the device, arrived for every stream."""
    array = cuda.to_device(host)
    cuda.synchronize()
    return array


def numba_view(stream):
    """Return a stream of any library as Numba's."""
    handle = 0 if stream is None else handle_or_default(stream)
    return cuda.external_stream(handle) if handle else 0


def of_ranks(comm):
    """Return the sum of what each rank's ``rank + 1`` is."""
    return comm.size * (comm.size + 1) // 2


class Pointer:
    """An array of another library: an address and ``__cuda_array_interface__``."""

    def __init__(self, address, shape, dtype=np.float32, readonly=False, owner=None):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (int(address), readonly),
            "shape": tuple(np.atleast_1d(shape).tolist()),
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }


@contextlib.contextmanager
def capturing(stream, mode="relaxed"):
    """Capture what happens on ``builder.stream``; ``graphs`` gets the graph."""
    graphs = []
    with cuda.defer_cleanup():  # Numba must free nothing meanwhile
        builder = stream.create_graph_builder().begin_building(mode)
        yield builder, graphs
        graphs.append(builder.end_building().complete())
