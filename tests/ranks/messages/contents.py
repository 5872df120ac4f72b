"""What the tests of messages send, and between whom."""

import numpy as np

from numba_symm.environment import SIMULATED
from tests.ranks.helpers import Window, ordinary

TWELVE = np.dtype([("a", np.int32), ("b", np.float64)], align=False)
DTYPES = [np.dtype(kind) for kind in (np.uint8, np.int16, np.float32, np.float64)]
DTYPES += [np.dtype(np.complex128), TWELVE]


def content(count, dtype, *seed):
    """Return elements of any bits, which all ranks can compute."""
    random = np.random.default_rng([*seed, count])
    return random.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)


class Part:
    """Elements in the middle of device memory. Calls must not change the rest of it."""

    def __init__(self, comm, count, dtype, host=None, symmetric=False, offset=0):
        self.dtype = dtype
        self.nbytes = count * dtype.itemsize
        offset *= dtype.itemsize
        size = offset + self.nbytes + Window.MARGIN
        # Every rank allocates, whichever it uses: allocating is collective.
        shared = comm.empty(1 << 12 if SIMULATED else 1 << 22, np.uint8)
        whole = shared[:size] if symmetric and size <= shared.size else None
        whole = ordinary(size, np.uint8) if whole is None else whole
        self.window = Window(whole, offset, self.nbytes)
        filled = np.zeros(self.nbytes, np.uint8) if host is None else host
        self.window.fill(filled.view(np.uint8))
        self.array = self.window.array.view(dtype) if count else ordinary(0, dtype)

    def read(self):
        return self.window.read().view(self.dtype)


def right_and_left(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def same(found, wanted):
    return found.tobytes() == wanted.tobytes()


def added(a, b):
    return a + b
