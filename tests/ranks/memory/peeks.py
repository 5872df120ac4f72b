"""What the tests of memory write, and reading it back."""

import numpy as np


def read(comm, address, nbytes):
    """Return the bytes at a device address, once all work is done."""
    comm.synchronize()
    return comm._calls.members.backend.read(address, nbytes)


def pad_of(comm, memory):
    """Return the slots of this rank's signal pad, a row a channel."""
    data = read(comm, memory.signal_pad_ptrs[comm.rank], memory.signal_pad_size)
    rows = np.frombuffer(data, np.uint32).reshape(memory.channels, -1)
    first = 4 + 2 * comm.size  # after two words for grids, and a word for each rank
    return rows[:, first : first + comm.size]


def pattern(rank, count=40):
    return np.arange(count, dtype=np.float32) + 100 * rank
