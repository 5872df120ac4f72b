"""All-gather, all-to-all and partial reductions in chunks, for larger messages.

As ``one_shot.py``, but a block moves a chunk of rows at a time through the workspace,
and shows each with one flag for every rank. In turn t each rank

    sends     chunk t to all others
    waits     for all ranks' flags of turn t-1
    takes     what the others sent of chunk t-1
    raises    its flags of turn t, at all others

so a block's next chunk is in flight while it waits for one and reads it. In a reduction
to one of two ranks, the other rank sends and the root takes.

Memory order. ``flags.py`` orders a block's accesses of a turn before its flags, and the
other ranks' accesses of the turn before theirs. Chunks have four parts of the slots in
turn (``slots.py``). A rank stores chunk t where chunk t-4 was. It does so after all
ranks' flags of turn t-2, which they raised after they had read chunk t-4.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding
from numba_symm.collectives.protocols.binding import ADDRESS, Call, Endpoint
from numba_symm.collectives.protocols.exchanges import (
    Exchange,
    Output,
    make_total_for,
    of_none,
)
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.handshake import make_left
from numba_symm.collectives.protocols.order import make_mirror
from numba_symm.collectives.protocols.partition import chunks_of, is_ragged, moved_as
from numba_symm.collectives.protocols.slots import after, make_place
from numba_symm.collectives.protocols.workspace import (
    CHUNKED,
    LOADS,
    ROW,
    THREADS,
    VECTOR,
    follow_previous_grid,
    keep,
    layout,
    resume,
)
from numba_symm.device.intrinsics import ld_v2_u64, row_index, st_v2_u64
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch


def make_chunked_exchange(
    size: int, element: Element, op: Op, ragged: bool, kind: Exchange, left_over: int
) -> Any:
    """Return the kernel for ``size`` ranks, an element type and a reduction."""
    left = make_left(size, left_over)
    lanes = make_lanes(element, op, ragged, size)
    load, store = lanes.load, lanes.store
    total = make_total_for(size, lanes, kind.output)
    none_stored, none_low, none_high = of_none(element, op, kind.output)
    raise_flags, await_flags = make_flags(size, kind.operation)
    at = layout(size).chunked
    epochs, flags = at.epochs, at.flags
    place = make_place(size)
    rows = CHUNKED.steps(size)
    rank_stride = rows * ROW
    others = size - 1
    mirror = make_mirror(size)
    parts_in, parts_out = kind.parts_in, kind.output is Output.PARTS
    at_root = kind.output is Output.AT_ROOT
    # What a row of a thread is made of, as it is sent and as it is received: of the
    # parts of others, or one for all; and the own one, which comes last.
    sent = max(1, others * parts_in + (parts_out or not parts_in))
    mine = sent - 1
    received = max(1, others if parts_out else size)
    batch_out = min(rows, max(1, LOADS // sent))
    batch_in = min(rows, max(1, LOADS // received))
    held = max(batch_out * sent, batch_in * received)

    def chunked_exchange(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        part: int,
        count: int,
        vectors: int,
        taken: int,
        height: int,
        chunks: int,
    ) -> None:
        thread = cuda.threadIdx.x
        block = row_index()
        if block >= grid:
            return
        follow_previous_grid(early)
        if left_over != 0 and not left(guard, ring, own, block):  # explore: left
            return
        low = cuda.local.array(held, types.int64)
        high = cuda.local.array(held, types.int64)
        own_low = cuda.local.array(batch_in, types.int64)
        own_high = cuda.local.array(batch_in, types.int64)
        rank = guard.rank
        stride = grid * height * THREADS
        before, failed = resume(own, epochs, block)
        first = block * height * THREADS + thread
        here = source + rank * part if parts_in else source
        there = target + rank * part if parts_out else target
        flag = flags + 4 * size * block
        for turn in range(chunks + 1):
            epoch = (before + turn + 1) & 0xFFFFFFFF
            if turn < chunks and not failed and not (at_root and taken > 0):
                slot = place(block, before, turn) + VECTOR * thread
                vector = first + turn * stride
                for row in range(0, height, batch_out):
                    for i in range(batch_out * sent):
                        step, k = row + i // sent, i % sent
                        at = vector + step * THREADS
                        if step < height and at < vectors:
                            r = (rank + 1 + k) % size
                            array = source + r * part if parts_in else source
                            low[i], high[i] = load(array, at, count)
                    for i in range(batch_out):
                        step = row + i
                        at = vector + step * THREADS
                        if step < height and at < vectors:
                            for k in range(others):
                                j = i * sent + (k if parts_in else 0)
                                to = ring[k] + slot + mirror(k) * rank_stride
                                st_v2_u64(to + step * ROW, (low[j], high[j]))
                            if parts_out:
                                j = i * sent + mine
                                store(there, at, count, low[j], high[j])
            if turn >= 1:  # explore: wait
                last = (before + turn) & 0xFFFFFFFF
                failed = await_flags(guard, own + flag, block, last, failed)
                if failed:
                    break
            if turn >= 1 and not (at_root and taken == 0):
                slot = own + place(block, before, turn - 1) + VECTOR * thread
                vector = first + (turn - 1) * stride
                for row in range(0, height, batch_in):
                    if not parts_out:
                        for i in range(batch_in):
                            at = vector + (row + i) * THREADS
                            if row + i < height and at < vectors:
                                own_low[i], own_high[i] = load(here, at, count)
                    for i in range(batch_in * received):
                        step, j = row + i // received, i % received
                        at = vector + step * THREADS
                        if step < height and at < vectors:
                            # Along the ring, or by rank where the order matters.
                            k = j if parts_out else (j + others - rank) % size
                            if k < others:
                                words = ld_v2_u64(slot + k * rank_stride + step * ROW)
                                low[i], high[i] = words
                            else:
                                low[i] = own_low[i // received]
                                high[i] = own_high[i // received]
                    for i in range(batch_in):
                        at = vector + (row + i) * THREADS
                        if row + i < height and at < vectors:
                            j = i * received
                            if parts_out:
                                for k in range(others):
                                    to = target + (rank + 1 + k) % size * part
                                    store(to, at, count, low[j + k], high[j + k])
                            elif taken > 0:
                                words = total(taken, low, high, j)
                                store(target, at, count, words[0], words[1])
                            elif none_stored:
                                store(target, at, count, none_low, none_high)
            if turn < chunks:  # explore: tell
                failed = raise_flags(ring, flag, rank, epoch, failed)
                if failed:
                    break
        keep(own, epochs, block, after(before, chunks, 1), failed)

    return chunked_exchange


@functools.cache
def kernel(
    size: int,
    element: Element,
    op: Op,
    ragged: bool,
    kind: Exchange,
    left_over: int = 0,
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = (size, element, op, ragged, kind, left_over)
    arguments = (ADDRESS, ADDRESS, *6 * (types.int64,))
    return binding.make_kernel(make_chunked_exchange, constants, *arguments)


def bind(kind: Exchange, end: Endpoint, call: Call, left_over: int = 0) -> Launch:
    """Return the packed launch; see ``chunked_all_reduce.bind``.

    A reduction to a root is for two ranks at most.
    """
    grid, height, chunks = chunks_of(call.vectors, end.size, end.max_blocks)
    ragged = is_ragged(call)
    element = call.element if kind.output.reduces else moved_as(call, ragged)
    return binding.launch(
        kernel(end.size, element, call.op, ragged, kind, left_over),
        *(end, grid, call.source, call.target, call.nbytes, call.count, call.vectors),
        *(kind.output.taken(end.rank, end.size, call.root), height, chunks),
    )
