"""Combine: each rank adds up the results that all ranks have for its tokens.

Each rank has a room for its results, with a place for each token that it has received.
A rank loads the results of its tokens from the rooms of all ranks, and adds them up in
the tree of the ranks, in float32. So a result has the same bits in every run.

If a rank's results are not in its room, a separate kernel first stores them there. This
kernel also adds up the results of several experts, each times its weight, in the order
of the token's choices.

Memory order. A call has two exchanges of flags between the blocks of one index:

1. The first one precedes all loads of other ranks' rooms. A rank's flags follow all
   stores of its stream into its room.
2. The second one follows all loads. So later work of a rank's stream may store other
   results in its room.

Source: the intranode combine of DeepEP.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.tokens import NONE, make_load_result
from numba_symm.collectives.protocols.workspace import THREADS, VECTOR, sync_block_or
from numba_symm.device import intrinsics, lanes, order
from numba_symm.device.intrinsics import (
    device_function,
    ld_u32,
    ld_u64,
    ld_v2_u64,
    st_v2_u64,
    thread_index_x,
    word_of,
)
from numba_symm.dtypes import Element
from numba_symm.gpu.kernels import Kernel, Launch
from numba_symm.launch import failures

DTYPES = "float32", "bfloat16", "float16"
"""The types of results."""

_LOADS = 4  # vectors that a thread loads, of all ranks, before it adds them up


def make_combine(size: int, element: Element) -> Any:
    """Return the kernel for ``size`` ranks and a type of results."""
    region = workspace.layout(size).barrier
    epochs, all_flags = region.epochs, region.flags
    operation = failures.COMBINE
    raise_flags, await_flags = make_flags(size)
    total = order.make_total(size, lanes.make_lanes(element, "sum", False, size))
    batch = max(1, _LOADS // size)
    number = batch * size

    @device_function
    def find(
        rank: int, rooms: Any, places: int, capacity: int, row: Any, found: Any
    ) -> None:
        token, vectors = row
        for r in range(size):
            place = word_of(ld_u32(places + 4 * (token * size + r)))
            found[r] = NONE
            if place != NONE:
                found[r] = (rank * capacity + place) * vectors

    @device_function
    def load(
        rooms: Any,
        found: Any,
        vector: int,
        vectors: int,
        together: int,
        low: Any,
        high: Any,
    ) -> None:
        # All loads of a batch are in transit together.
        for i in range(batch):
            at = vector + i * together
            for r in range(size):
                low[i * size + r] = 0
                high[i * size + r] = 0
                if at < vectors and found[r] != NONE:
                    words = ld_v2_u64(rooms[r] + VECTOR * (word_of(found[r]) + at))
                    low[i * size + r], high[i * size + r] = words

    def combine(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        rooms: Any,
        places: int,
        tokens: int,
        capacity: int,
        vectors: int,
        shift: int,
        target: int,
    ) -> None:
        block, thread = intrinsics.block_index(), thread_index_x()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        low = cuda.local.array(number, types.int64)
        high = cuda.local.array(number, types.int64)
        # Vectors and not addresses, for which registers are few.
        found = cuda.local.array(size, types.uint32)
        last, failed = workspace.resume(own, epochs, block)
        epoch, flags_at = (last + 1) & 0xFFFFFFFF, all_flags + 4 * size * block
        # What the rank's stream has stored in its room precedes the flags.
        failed = raise_flags(ring, flags_at, guard.rank, epoch, failed)
        # explore: await-made
        failed = await_flags(guard, operation, own + flags_at, block, epoch, failed)
        together = 1 << shift
        rows = THREADS >> shift
        token = block * rows + (thread >> shift)
        while token < tokens and not failed:
            find(guard.rank, rooms, places, capacity, (token, vectors), found)
            vector = thread & together - 1
            while vector < vectors:
                load(rooms, found, vector, vectors, together, low, high)
                for i in range(batch):
                    at = vector + i * together
                    words = total(low, high, i * size)
                    if at < vectors:
                        st_v2_u64(target + VECTOR * (token * vectors + at), words)
                vector += batch * together
            token += grid * rows
        epoch = (epoch + 1) & 0xFFFFFFFF
        # What the block has loaded of other ranks' rooms precedes the flags.
        failed = raise_flags(ring, flags_at, guard.rank, epoch, failed)
        # explore: await-read
        failed = await_flags(guard, operation, own + flags_at, block, epoch, failed)
        workspace.keep(own, epochs, block, epoch, failed)

    return combine


def make_stage(size: int, element: Element, weighted: bool) -> Any:
    """Return the kernel that stores a rank's results in its room.

    Args:
        size: the number of ranks.
        element: the type of the results.
        weighted: whether there is a result for each choice of a token; otherwise, there
            is one for each token.
    """
    load = make_load_result(size, element, weighted)

    def stage(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        results: int,
        target: int,
        counts: int,
        ids: int,
        weights: int,
        choices: int,
        capacity: int,
        vectors: int,
        shift: int,
    ) -> None:
        block, thread = intrinsics.block_index(), thread_index_x()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if sync_block_or(workspace.load_failure(own, block) != 0):
            return
        together = 1 << shift
        rows = THREADS >> shift
        for r in range(size):
            count = ld_u64(counts + 8 * r)
            row = block * rows + (thread >> shift)
            while row < count:
                vector = thread & together - 1
                while vector < vectors:
                    at = r * capacity + row
                    given = results, ids, weights, choices
                    words = load(*given, at, vectors, vector)
                    place = at * vectors + vector
                    st_v2_u64(target + VECTOR * place, words)
                    vector += together
                row += grid * rows

    return stage


@functools.cache
def kernel(size: int, element: Element) -> Kernel:
    """Return the kernel that adds up results, compiled when first bound."""
    arguments = types.UniTuple(types.int64, size), *(types.int64,) * 6
    return binding.make_kernel(make_combine, (size, element), arguments)


stage_kernel = binding.kernels_of(make_stage, *9 * (types.int64,))
"""Returns a kernel, compiled when first bound."""


def bind(
    end: binding.Endpoint,
    grid: int,
    element: Element,
    rooms: tuple[int, ...],
    places: int,
    tokens: int,
    capacity: int,
    row: tuple[int, int],
    target: int,
) -> Launch:
    """Return the launch.

    Args:
        end: this rank's end.
        grid: the number of blocks, equal on all ranks.
        element: the type of the results.
        rooms: by rank, at which address this rank sees that rank's results.
        places: where the dispatch has stored the places of this rank's tokens.
        tokens: how many tokens this rank has dispatched.
        capacity: for how many tokens of each rank there is room.
        row: the vectors of a result, and how many threads copy it, as a power of 2.
        target: where the sums are stored.
    """
    arguments = rooms, places, tokens, capacity, *row, target
    return binding.launch(kernel(end.size, element), end, grid, arguments)


def bind_stage(
    end: binding.Endpoint,
    grid: int,
    element: Element,
    results: int,
    target: int,
    received: tuple[int, int, int],
    choices: int,
    capacity: int,
    row: tuple[int, int],
) -> Launch:
    """Return the launch that stores a rank's results in its room.

    Args:
        end: this rank's end.
        grid: the number of blocks.
        element: the type of the results.
        results: their address.
        target: the address of the room.
        received: the addresses of the counts, the expert numbers and the weights of
            what the rank has received.
        choices: results of a token, each with its weight; 0: there is one for a token.
        capacity: for how many tokens of each rank there is room.
        row: the vectors of a result, and how many threads copy it, as a power of 2.
    """
    of_it = stage_kernel(end.size, element, choices > 0)
    arguments = results, target, *received, choices, capacity, *row
    return binding.launch(of_it, end, grid, arguments)
