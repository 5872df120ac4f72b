"""Arrays of bfloat16 and 8-bit floats in a user's own kernels."""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

from numba_symm import device as symm
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import get, of_one_island

pytestmark = of_one_island

DTYPES = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
OLDEST = {"bfloat16": (8, 0)}  # compute capability; of 8-bit floats 8.9


def storing(dtype):
    """Return a kernel that stores floats at the right neighbour, and loads its own."""

    @cuda.jit
    def kernel(ctx, source, out, count):
        right = (ctx.rank + 1) % ctx.size
        there = symm.peer_array(ctx, right, (count, 2), dtype)
        here = symm.peer_array(ctx, ctx.rank, (count, 2), dtype)
        for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
            there[i, 0] = source[i]
        symm.barrier(ctx, 0)
        for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
            here[i, 1] = here[i, 0]
            out[i] = np.float32(here[i, 1])
            out[count + i] = np.float32(here[i, 0]) * np.float32(0.5)

    return kernel


def values(dtype):
    """Return ties, subnormal numbers, and numbers about the largest one."""
    limits = ml_dtypes.finfo(dtype)
    most, least = float(limits.max), float(limits.smallest_subnormal)
    near = [most, most * (1 + 1 / 64), most * 1.04, most * 1.1, 3 * least, least / 2]
    some = [0.0, 1.0, 1.0625, 1.1875, -2.75, np.inf, np.nan, *near]
    with np.errstate(over="ignore"):
        return np.array([*some, *(-each for each in some)], np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_elements_are_rounded_as_by_numpy(comm, world, dtype):
    if not SIMULATED:
        needed = OLDEST.get(dtype.__name__, (8, 9))
        if comm.device.compute_capability < needed:
            pytest.skip(f"needs compute capability {needed}")
    given = values(dtype)
    x = comm.zeros((len(given), 2), dtype)
    source = cuda.to_device(given)
    out = cuda.to_device(np.zeros(2 * len(given), np.float32))
    with np.errstate(all="ignore"):
        storing(dtype)[1, 4](comm.rendezvous(x).ctx, source, out, len(given))
        comm.synchronize()
        wanted = given.astype(dtype).astype(np.float32)
    found = get(out)
    np.testing.assert_array_equal(found[: len(given)], wanted)
    np.testing.assert_array_equal(found[len(given) :], wanted / 2)
    world.barrier()
