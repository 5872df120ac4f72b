"""A copy of a message between memory of two ranks, whose end a word of the host tells.

The kernel waits for no rank. A sender's host launches it to copy a message into memory
that its peers map. When the receiver's host sees the word, it launches a copy from
there, after whose word the sender uses that memory again. So a kernel must see what its
host has seen, as it sees what its stream did before.

Memory order. All threads of a block meet after their loads and stores. Then thread 0
adds to the count with release, or if it is the only block, its fence orders them before
the word. The thread that counts the last block has read what all others released.
"""

import functools
from typing import Any

from numba.cuda import types

from numba_symm.device import intrinsics, lanes
from numba_symm.environment import SIMULATED
from numba_symm.gpu.compiled import Config
from numba_symm.gpu.kernels import Kernel, simulate

THREADS = 8 if SIMULATED else 512
MOST_BLOCKS = 2 if SIMULATED else 32
MOST = 512 if SIMULATED else 1 << 20
"""Bytes that the kernel copies at most. Copy engines copy more in the same time."""

VECTOR = 16
"""Bytes that a thread copies at a time, where addresses permit it."""


def make_message_copy() -> Any:
    """Return the kernel."""
    load_8, store_8 = lanes.make_access(8)

    def message_copy(
        target: int,
        source: int,
        nbytes: int,
        width: int,
        grid: int,
        count_at: int,
        word_at: int,
        word: int,
    ) -> None:
        thread = intrinsics.thread_index_x()
        first, step = intrinsics.block_index() * THREADS + thread, grid * THREADS
        i, count = first, 0
        if width == VECTOR:
            count = nbytes // VECTOR
            while i + 3 * step < count:  # loads first, because links are long
                here, there = source + VECTOR * i, target + VECTOR * i
                a = intrinsics.ld_v2_u64(here)
                b = intrinsics.ld_v2_u64(here + VECTOR * step)
                c = intrinsics.ld_v2_u64(here + 2 * VECTOR * step)
                d = intrinsics.ld_v2_u64(here + 3 * VECTOR * step)
                intrinsics.st_v2_u64(there, a)
                intrinsics.st_v2_u64(there + VECTOR * step, b)
                intrinsics.st_v2_u64(there + 2 * VECTOR * step, c)
                intrinsics.st_v2_u64(there + 3 * VECTOR * step, d)
                i += 4 * step
            while i < count:
                word_pair = intrinsics.ld_v2_u64(source + VECTOR * i)
                intrinsics.st_v2_u64(target + VECTOR * i, word_pair)
                i += step
        elif width == 8:
            count = nbytes // 8
            while i < count:
                store_8(target + 8 * i, load_8(source + 8 * i))
                i += step
        i = count * width + first
        while i < nbytes:
            intrinsics.st_u8(target + i, intrinsics.ld_u8(source + i))
            i += step
        # Before thread 0 tells of the other threads' accesses.
        intrinsics.syncthreads()  # explore: synchronize
        if thread != 0:
            return
        if grid > 1:
            # explore: count
            others = intrinsics.atom_add_release_sys_u64(count_at, 1)
            if others != grid - 1:
                return
            intrinsics.st_relaxed_sys_u64(count_at, 0)  # for the next copy
        intrinsics.fence_acq_rel_sys()  # explore: fence
        intrinsics.st_relaxed_sys_u64(word_at, word)

    return message_copy


@functools.cache
def kernel() -> Kernel:
    """Return the kernel, compiled when first bound."""
    return Kernel(make_message_copy, (), (types.int64,) * 8, THREADS)


class Simulated:
    """What the simulator runs instead of the kernel.

    Args:
        values: the memory of its arguments.
        config: the address of its launch's configuration.
    """

    def __init__(self, values: Any, config: int):
        self._values, self._config = values, Config.from_address(config)

    def simulate(self) -> None:
        """Run the kernel."""
        simulate(kernel(), self._config.grid[0], 1, tuple(self._values))
