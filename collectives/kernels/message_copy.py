"""A copy of a message between memory of two ranks, whose end a word of the host tells.

A sender's host launches it to copy a message into memory that its peers map. The
receiver's host launches a copy from there, after whose word the sender uses that memory
again. So a kernel must see what its host has seen, as it sees what its stream did
before.

If the receiver's host has not seen the sender's word, its kernel looks for that a few
times, because the sender's kernel runs at about the same time. Block 0 looks, and tells
the others through the count: a GPU makes such loads of the host's memory one after
another. A block that is not told in time copies nothing. If there is one, the last
block stores another word, after which the host waits itself, and launches the kernel
again. So no kernel waits for a rank that is late.

Memory order. Thread 0 loads the sender's word with acquire, or what block 0 has
released after that, and then all threads of a block meet. They meet again after their
loads and stores. Then thread 0 adds to the count with release, or if it is the only
block, its fence orders them before the word. The thread that counts the last block has
read what all others released.
"""

import ctypes
import functools
from typing import Any

from numba.cuda import types

from numba_symm.device import intrinsics, lanes
from numba_symm.environment import SIMULATED
from numba_symm.gpu.compiled import Config
from numba_symm.gpu.kernels import Kernel, simulate

THREADS = 8 if SIMULATED else 512
MOST_BLOCKS = 2 if SIMULATED else 64
LOOKS = 16
"""For the sender's word; on PCI Express, in some 20 microseconds."""

_TIMES = 4  # as often do other blocks look for block 0

ARGUMENTS = 9

VECTOR = 16
"""Bytes that a thread copies at a time, where addresses permit it."""

_LATE, _FOUND = 1 << 16, 1 << 32  # what blocks add to the count, besides 1


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
        looks: int,
        word_at: int,
        word: int,
    ) -> None:
        thread, block = intrinsics.thread_index_x(), intrinsics.block_index()
        late = 0
        if looks > 0:
            if thread == 0 and block == 0:
                # The sender's word is before this copy's.
                # explore: await
                while looks > 0 and intrinsics.ld_acquire_sys_u64(word_at - 8) < word:
                    looks -= 1
                told = _FOUND if looks > 0 else _LATE
                if grid > 1:
                    intrinsics.atom_add_release_sys_u64(count_at, told)  # explore: tell
            elif thread == 0:
                told, looks = 0, looks * _TIMES
                while looks > 0 and told < _LATE:
                    told = intrinsics.ld_acquire_sys_u64(count_at)  # explore: listen
                    looks -= 1
                looks = told // _FOUND
            # After thread 0's loads, and before all other ones.
            # explore: meet
            if intrinsics.syncthreads_or(thread == 0 and looks == 0):
                late, nbytes = 1, 0
        first, step = block * THREADS + thread, grid * THREADS
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
            mine = 1 + late * _LATE  # explore: late
            # explore: count
            blocks = mine + intrinsics.atom_add_release_sys_u64(count_at, mine)
            if blocks % _LATE != grid:
                return
            late = min(1, blocks % _FOUND // _LATE)
            intrinsics.st_relaxed_sys_u64(count_at, 0)  # for the next copy
        intrinsics.fence_acq_rel_sys()  # explore: fence
        intrinsics.st_relaxed_sys_u64(word_at + 8 * late, word)

    return message_copy


@functools.cache
def kernel() -> Kernel:
    """Return the kernel, compiled when first bound."""
    return Kernel(make_message_copy, (), (types.int64,) * ARGUMENTS, THREADS)


_MOST = 512


class Simulated:
    """What the simulator runs instead of the kernel.

    Args:
        values: the memory of its arguments.
        config: the address of its launch's configuration.
    """

    def __init__(self, values: Any, config: int):
        self._values, self._config = values, Config.from_address(config)

    def simulate(self) -> None:
        """Run the kernel, which copies no more bytes than take a short time."""
        target, source, nbytes, *others = self._values
        if nbytes > _MOST:
            ctypes.memmove(target, source, nbytes)
            nbytes = 0
        values = target, source, nbytes, *others
        simulate(kernel(), self._config.grid[0], 1, values)
