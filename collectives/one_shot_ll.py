"""All-reduce in one flight: every rank pushes its whole input to every rank.

Data travels in LL packets, which carry a flag beside each 4 bytes of data, so a
receiver needs no barrier: when the flag is this round's epoch, so is the data.
Only 8-byte accesses are assumed atomic.

Memory order. A packet's slot belongs to (block, parity, source, thread), its parity
being the epoch's. A rank sends round k+2 into the slots of round k only after it has
received round k+1 from every peer, and a peer sends round k+1 only after all threads
of its block have read round k (``syncthreads``, or the end of a kernel): two halves
suffice. In every round of a block its thread 0 exchanges with every peer, so this
holds however few of the other threads had anything to send.

Epochs are 32 bits wide and come round again. A slot that only large messages use
could then hold a packet of the same epoch from 2**32 rounds ago, so the last two
epochs each clear their half of the slots.

Source: the LL protocol of NCCL and of MSCCL++ (``LLPacket``).
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.workspace import (
    PACKET,
    THREADS,
    Layout,
    divide_up,
    layout,
    reduction_arguments,
    reduction_types,
)
from numba_symm.device.intrinsics import (
    fence_acq_rel_sys,
    globaltimer,
    ld_relaxed_sys_v4_u32,
    ld_u32,
    poll_pause,
    st_relaxed_sys_v4_u32,
    st_u32,
    word_of,
)
from numba_symm.device.lanes import make_lanes
from numba_symm.device.signals import (
    ALL_REDUCE_LL,
    POLLS_PER_CHECK,
    must_give_up,
    wait_record,
)
from numba_symm.dtypes import Element
from numba_symm.kernels import Kernel, Launch

LAST_EPOCH = 2**32 - 2
"""The epoch after which 1 follows: even, so that halves go on alternating."""


def make_kernel(size: int, element: Element, op: str) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    unpack, pack, combine, load_word, store_word = make_lanes(element, op)
    at: Layout = layout(size)
    epochs, slots = at.ll_epochs, at.ll_slots
    source_stride = THREADS * PACKET
    half_stride = size * source_stride
    block_stride = 2 * half_stride

    def one_shot_ll(
        guard: Any,
        peers: Any,
        own: int,
        source: int,
        source_aligned: bool,
        target: int,
        target_aligned: bool,
        count: int,
        words: int,
    ) -> None:
        thread = cuda.threadIdx.x
        block = cuda.blockIdx.x
        received = cuda.local.array(size, types.int64)
        stale = cuda.local.array(size, types.int64)
        epoch_at = own + epochs + 4 * block
        epoch = word_of(ld_u32(epoch_at))
        first = slots + block * block_stride + thread * PACKET
        start = block * THREADS
        failed = False
        while start < words:
            epoch = epoch + 1 if epoch < LAST_EPOCH else 1
            half = first + (epoch & 1) * half_stride
            word = start + thread
            if word < words:
                data = load_word(source, word, count, source_aligned)
                packet = (data & 0xFFFFFFFF, epoch, data >> 32 & 0xFFFFFFFF, epoch)
                slot = half + guard.rank * source_stride
                for r in range(size):
                    st_relaxed_sys_v4_u32(peers[r] + slot, packet)
                polls = 0
                started = 0
                waiting = True
                while waiting and not failed:
                    # All slots are loaded before any flag is looked at: a branch
                    # on one would make the next load wait for it.
                    for r in range(size):
                        low, flag, high, flag2 = ld_relaxed_sys_v4_u32(
                            own + half + r * source_stride
                        )
                        received[r] = word_of(word_of(low) | word_of(high) << 32)
                        stale[r] = (word_of(flag) ^ epoch) | (word_of(flag2) ^ epoch)
                    any_stale = stale[0]
                    for r in range(1, size):
                        any_stale |= stale[r]
                    waiting = any_stale != 0
                    if waiting:
                        poll_pause()
                        polls += 1
                        if polls % POLLS_PER_CHECK == 0:
                            if started == 0:
                                started = globaltimer()
                            late = 0
                            for r in range(size):
                                if stale[r] != 0:
                                    late = r
                            record = wait_record(
                                ALL_REDUCE_LL, guard.rank, late, block, epoch
                            )
                            failed = must_give_up(guard, started, record)
                # In rank order on every rank: all get the same bits.
                total = unpack(received[0])
                for r in range(1, size):
                    total = combine(total, unpack(received[r]))
                store_word(target, word, count, target_aligned, pack(total))
            # The whole block has read this round before any of its threads sends
            # the next one, which lets the peers overwrite what was read.
            cuda.syncthreads()
            if epoch >= LAST_EPOCH - 1:
                for r in range(size):
                    st_relaxed_sys_v4_u32(own + half + r * source_stride, (0, 0, 0, 0))
                # The half is clear before a peer can be told of the next round.
                fence_acq_rel_sys()
                cuda.syncthreads()
            start += cuda.gridDim.x * THREADS
        if thread == 0:
            st_u32(epoch_at, epoch)

    return one_shot_ll


@functools.cache
def kernel(size: int, element: Element, op: str) -> Kernel:
    """Return the kernel, compiled when first bound."""
    signature = (*reduction_types(size), types.int64)
    return Kernel(make_kernel, (size, element, op), signature, THREADS)


def bind(
    comm: Any, source: int, target: int, count: int, element: Element, op: str
) -> Launch:
    """Return the packed launch; see ``AllReduce.bind`` in ``select.py``."""
    words = divide_up(count, element.lanes)
    grid = min(divide_up(words, THREADS), comm.max_blocks)
    arguments = reduction_arguments(comm, source, target, count, alignment=8)
    return kernel(comm.size, element, op).bind(grid, *arguments, words)
