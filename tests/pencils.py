"""Transposes and transforms of mpi4py-fft, compared with NumPy, on each rank of a job.

The pencils are those of the package's own test, for one shape of each dimension.
"""

import itertools

import numpy as np
from mpi4py import MPI
from mpi4py_fft import PFFT, newDistArray
from mpi4py_fft.pencil import Pencil, Subcomm

from numba_symm import mpi

WORLD = MPI.COMM_WORLD
assert isinstance(WORLD, mpi.Comm)


def check_transposes(shape, dtype, divided):
    """Transpose between pencils of two axes, forth and back."""
    whole = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    first, second = Subcomm(WORLD, divided), Subcomm(WORLD, divided)
    for one, other in itertools.permutations(range(len(shape)), 2):
        a = Pencil(first, shape).pencil(one)
        b = a.pencil(other)
        transfer = Pencil.transfer(a, b, dtype)
        x, y = (np.full(each.subshape, -1, dtype) for each in (a, b))
        mine, theirs = (
            whole[
                tuple(map(slice, each.substart, np.add(each.substart, each.subshape)))
            ]
            for each in (a, b)
        )
        x[...] = mine
        transfer.forward(x, y)
        np.testing.assert_array_equal(y, theirs)
        x[...] = -1
        transfer.backward(y, x)
        np.testing.assert_array_equal(x, mine)
        transfer.destroy()
    first.destroy()
    second.destroy()


def check_transform(dtype):
    """Transform an array forth and back."""
    shape = 12, 14, 16
    whole = np.random.default_rng(7).random(shape).astype(dtype)
    transform = PFFT(WORLD, shape, dtype=dtype)
    given, found = newDistArray(transform, False), newDistArray(transform, True)
    given[:] = whole[given.local_slice()]
    transform.forward(given, found)
    numpys = np.fft.rfftn if dtype == "d" else np.fft.fftn
    expected = numpys(whole) / whole.size
    mine = expected[found.local_slice()]
    np.testing.assert_allclose(np.asarray(found), mine, atol=1e-15)
    back = newDistArray(transform, False)
    transform.backward(found, back)
    np.testing.assert_allclose(np.asarray(back), np.asarray(given), rtol=1e-12)
    transform.destroy()


check_transposes((7, 9), "f", None)
check_transposes((7, 8, 9), "D", None)
check_transposes((7, 8, 9), "d", 1)
check_transform("d")
check_transform("D")
