"""Contenders of eager calls: NCCL through CuPy, and ours on others' arrays."""

import ctypes

import numpy as np

from numba_symm.bench.contenders import no_context
from numba_symm.bench.contenders.on_arrays import OnArrays
from tests.host.test_bench_contenders import Comm


class Elements(np.ndarray):
    """A host array in the place of Numba's device array."""

    @property
    def device_ctypes_pointer(self):
        return self.ctypes.data_as(ctypes.c_void_p)


def test_ours_on_other_arrays_finds_the_stream_by_them():
    made = OnArrays(
        *("on-np", Comm(), "1"),
        empty=lambda nbytes: np.empty(nbytes, np.uint8),
        shown=lambda array, dtype: array.view(dtype).view(Elements),
        current=no_context,
    )
    x, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    way = made.all_reduce(x, out, "sum")[""]
    seen, op, given, stream, algorithm = way.call(7)
    assert (type(seen), type(given), op) == (Elements, Elements, "sum")
    assert stream is algorithm is None
    assert np.shares_memory(seen, x)
    assert np.shares_memory(given, out)
    assert not hasattr(made, "all_reduced")
