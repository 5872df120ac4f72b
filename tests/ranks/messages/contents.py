"""What the tests of messages send, and between whom."""

import numpy as np


def content(count, dtype, *seed):
    """Return elements of any bits, which all ranks can compute."""
    random = np.random.default_rng([*seed, count])
    return random.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)


def right_and_left(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def same(found, wanted):
    return found.tobytes() == wanted.tobytes()


def added(a, b):
    return a + b
