"""Copies of messages between memory of two ranks, whose ends words of the host tell.

A sender's host launches the kernel to copy a message into memory that its peers map.
The receiver's host launches a copy from there, after whose word the sender uses that
memory again. So a kernel must see what its host has seen, as it sees what its stream
did before.

One launch may have both: a copy that sends, and blocks behind it that receive another
message, for which a peer's kernel does the same. These blocks look a few times for the
message's number before its room, in GPU memory, because a look at the host's memory
takes longer. A block that does not find it copies nothing. If there is one, the last
block stores another word, after which the host waits itself, and launches the copy
alone. So no kernel waits for a rank that is late, and a copy that sends waits for
nothing.

Memory order. Thread 0 loads the number with acquire, and then all threads of a block
meet. They meet again after their loads and stores. Then thread 0 adds to the count with
release, or if it is the only block, its fence orders them before the number and the
word. The thread that counts the last block has read what all others released. A message
to oneself has a count for each of its copies, because both may run at once.
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
"""For a message's number, in some 15 microseconds over NVLink."""

MORE = 19
"""There is a look more for ``1 << MORE`` bytes of the message."""

HEAD = 128
"""Bytes before a room, of which the first word is the message's number."""

ARGUMENTS = 17
"""Of a copy that sends, as many of one that receives, and how often that looks."""

VECTOR = 16
"""Bytes that a thread copies at a time, where addresses permit it."""

_LATE = 1 << 16  # what a block that is late adds to the count, besides 1


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
        other_target: int,
        other_source: int,
        other_nbytes: int,
        other_width: int,
        other_grid: int,
        other_count_at: int,
        other_word_at: int,
        other_word: int,
        looks: int,
    ) -> None:
        thread, block = intrinsics.thread_index_x(), intrinsics.block_index()
        number_at, receives, late = target - HEAD, block >= grid, 0
        if receives:
            block -= grid
            target, source, nbytes = other_target, other_source, other_nbytes
            width, grid, count_at = other_width, other_grid, other_count_at
            word_at, word, number_at = other_word_at, other_word, source - HEAD
            if looks > 0:
                # explore: await
                while (
                    thread == 0
                    and looks > 0
                    and intrinsics.ld_acquire_sys_u64(number_at) < word
                ):
                    looks -= 1
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
            late = min(1, blocks // _LATE)
            intrinsics.st_relaxed_sys_u64(count_at, 0)  # for the next copy
        intrinsics.fence_acq_rel_sys()  # explore: fence
        if not receives:
            intrinsics.st_relaxed_sys_u64(number_at, word)
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
        for first in (0, 8):
            values = list(self._values)
            target, source, nbytes, _, blocks, _, word_at, word = values[first:][:8]
            values[12 - first] = 0  # blocks of the other copy
            if blocks and nbytes > _MOST:
                number = _Word.from_address(source - HEAD).value if first else word
                if values[16] and number < word:
                    _Word.from_address(word_at + 8).value = word  # it is late
                    continue
                ctypes.memmove(target, source, nbytes)
                values[first + 2] = values[16] = 0
            if blocks:
                simulate(kernel(), blocks, 1, tuple(values))


_Word = ctypes.c_int64
