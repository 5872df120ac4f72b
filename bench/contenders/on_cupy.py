"""Our plain calls on CuPy's arrays and CuPy's current stream."""

from typing import Any, NamedTuple

import numpy as np

from numba_symm.bench.contenders import imported, need_gpus
from numba_symm.bench.contenders.on_arrays import OnArrays

check = need_gpus


class _CudaStream(NamedTuple):
    """A stream as CuPy takes it: by its protocol of version 0."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def make(comm: Any, ranks: Any) -> OnArrays:
    """Return the contender."""
    cupy = imported("cupy", "pip install cupy-cuda13x")
    cupy.cuda.Device(comm.device.ordinal).use()
    return OnArrays(
        "on-cupy",
        comm,
        f"numba_symm on arrays of CuPy {cupy.__version__}",
        lambda nbytes: cupy.empty(nbytes, np.uint8),
        lambda array, dtype: cupy.asarray(array).view(dtype),
        lambda handle: cupy.cuda.Stream.from_external(_CudaStream(handle)),
    )
