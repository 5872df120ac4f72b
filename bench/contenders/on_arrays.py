"""Our plain calls on arrays of torch and of CuPy, which most programs pass.

Their times, less those of calls on symmetric arrays, are what it costs to read arrays
and streams of these libraries.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numba import cuda

from numba_symm.bench.bench_operations import BenchOperation
from numba_symm.bench.contenders import OfEveryOperation, Way, Ways


class OnArrays(OfEveryOperation):
    """Our plain calls on another library's arrays and on its current stream.

    Args:
        comm: our communicator.
        version: of the library.
        empty: returns a new array of bytes of the library.
        shown: returns the library's view of Numba's array of bytes, for a dtype.
        current: returns a context that makes a stream the library's current one.
    """

    captures = False

    def __init__(
        self,
        name: str,
        comm: Any,
        version: str,
        empty: Callable[[int], Any],
        shown: Callable[[Any, np.dtype[Any]], Any],
        current: Callable[[int], AbstractContextManager[Any]],
    ):
        self.name, self.version = name, version
        self._comm = comm
        self._empty = empty
        self._shown = shown
        self.current = current

    def allocate(self, nbytes: int) -> Any:
        """Return a new array of bytes, which keeps the library's array."""
        return cuda.as_cuda_array(self._empty(nbytes))

    def ways(self, operation: BenchOperation, x: Any, out: Any, op: str) -> Ways:
        """Return the plain call, which finds the stream by its arrays."""
        x, out = (self._shown(each.view(np.uint8), each.dtype) for each in (x, out))
        call: Callable[[Any], object] = operation.call(self._comm, x, out, op, None)
        return {"": Way(lambda stream: call(None), in_place=operation.in_place)}
