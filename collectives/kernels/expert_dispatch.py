"""Dispatch: each token is stored once at each rank that has one of its experts.

Tokens are the rows of an array. Each rank has memory for the tokens that it receives,
with room for ``capacity`` tokens of each rank, which are there in their order.

A block of each rank has a range of that rank's tokens. For each receiver, it counts the
tokens before its range, which determine the places of its own tokens. The blocks need
no counts of each other, because each reads all expert numbers before its range.

Memory order. A call has two exchanges of flags between the blocks of one index:

1. The first one precedes all stores into other ranks' memory. A rank's flags follow all
   earlier work of its stream. So no rank stores a token while an earlier kernel of the
   receiver still loads tokens of the previous call.
2. The second one follows all stores. So later work of a rank's stream follows all
   ranks' stores into the rank's memory.

After a thread fails, neither it nor its block stores at other ranks. If there are more
tokens for a rank than it has room for, the last block detects that, and the call fails.
No block stores a token beyond the room.

Source: the intranode dispatch of DeepEP.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.flags import make_flags
from numba_symm.collectives.protocols.tokens import (
    LANES,
    NONE,
    Routing,
    Rows,
    TokenRoom,
    number_there,
    ranks_of,
    refuse,
    report_above,
    typed,
    weight_of,
)
from numba_symm.collectives.protocols.workspace import HELD, THREADS, VECTOR, sync_block
from numba_symm.device import intrinsics
from numba_symm.device.intrinsics import (
    device_function,
    ld_u32,
    ld_v2_u64,
    ones_of,
    st_u32,
    st_u64,
    st_v2_u64,
    thread_index_x,
    votes,
    word_of,
)
from numba_symm.gpu.kernels import Kernel, Launch
from numba_symm.launch import failures

_LOADS = 4  # vectors that a thread loads before it stores them
_WARPS = workspace.divide_up(THREADS, LANES)


class Counting(NamedTuple):
    """How the blocks of a rank find the places of its tokens.

    Attributes:
        places: the address of an uint32 for each token and rank, which the kernel
            stores: the token's place among those for that rank.
        scratch: that of ``scratch_nbytes``.
        share: how many tokens a block has.
    """

    places: int
    scratch: int
    share: int


def scratch_nbytes(size: int, blocks: int) -> int:
    """Return the bytes by which the warps of each block exchange their counts."""
    return workspace.divide_up(2 * 4 * size * _WARPS * blocks, VECTOR) * VECTOR


def shift_of(vectors: int) -> int:
    """Return by how many threads, as a power of 2, a row of vectors is copied."""
    return min(max(vectors - 1, 0).bit_length(), THREADS.bit_length() - 1)


def grid_of(end: binding.Endpoint, tokens: int, vectors: int) -> int:
    """Return the grid of calls of at most so many tokens; equal on all ranks."""
    tiles = workspace.divide_up(tokens * vectors, THREADS)
    most = binding.most_blocks(end, end.max_blocks, HELD, tiles)
    return max(1, min(most, tokens, tiles))


def make_route(size: int) -> Callable[..., bool]:
    """Return a device function by which a block finds the places of its tokens.

    ``(guard, routing, counting, block, first, end, base, own)`` stores the places of
    the tokens from ``first`` on, and leaves in ``base`` how many tokens before ``end``
    are for each rank. The last two are local arrays of ``size``. It returns whether
    this thread has found an expert that does not exist. The whole block calls it.

    Each warp votes which of its lanes' tokens are for a rank, and the warps exchange
    how many these are.
    """
    stride = 4 * size * _WARPS

    @device_function
    def share(at: int, counts: Any) -> None:
        thread = thread_index_x()
        if thread % LANES == 0:
            for r in range(size):
                place = size * (thread // LANES) + r
                st_u32(at + 4 * place, word_of(counts[r]))

    @device_function
    def before(at: int, r: int, warps: int) -> int:
        # Returns what the first warps have shared for a rank.
        found = 0
        for w in range(_WARPS):
            if w < warps:
                found += word_of(ld_u32(at + 4 * (size * w + r)))
        return found

    @device_function
    def count_earlier(routing: Any, first: int, counts: Any) -> None:
        # Counts this warp's share of the tokens before the first one.
        thread = thread_index_x()
        lane = thread % LANES
        start = thread - lane
        for r in range(size):
            counts[r] = 0
        while start < first:
            bits = 0
            if start + lane < first:
                bits, _ = ranks_of(routing, start + lane)
            for r in range(size):
                here = word_of(ones_of(votes(bits >> r & 1 != 0)))
                counts[r] = word_of(counts[r]) + here
            start += THREADS

    @device_function
    def route(
        guard: Any,
        routing: Any,
        counting: Any,
        block: int,
        first: int,
        end: int,
        base: Any,
        own: Any,
    ) -> bool:
        thread, found = thread_index_x(), False
        warp, below = thread // LANES, (1 << thread % LANES) - 1
        earlier = counting.scratch + 2 * stride * block
        here = earlier + stride
        count_earlier(routing, first, base)
        share(earlier, base)
        # All warps' counts are stored before they are added up.
        sync_block()  # explore: counted
        for r in range(size):
            base[r] = before(earlier, r, _WARPS)
        start = first
        while start < end:
            token, bits, wrong = start + thread, 0, NONE
            if token < end:
                bits, wrong = ranks_of(routing, token)
            if wrong != NONE:
                found = True
                refuse(guard, token, wrong)
            for r in range(size):
                mask = votes(bits >> r & 1 != 0)
                own[r] = word_of(ones_of(mask))
                place = word_of(ones_of(mask & below))
                if token < end:
                    none = bits >> r & 1 == 0
                    kept = NONE if none else word_of(base[r]) + place
                    st_u32(counting.places + 4 * (token * size + r), kept)
            share(here, own)
            # All warps' counts are stored before they are added up.
            sync_block()  # explore: marked
            for r in range(size):
                if token < end and warp > 0 and bits >> r & 1 != 0:
                    at = counting.places + 4 * (token * size + r)
                    st_u32(at, word_of(ld_u32(at)) + before(here, r, warp))
                base[r] = word_of(base[r]) + before(here, r, _WARPS)
            start += THREADS
            # All threads have loaded the counts before the next ones replace them.
            sync_block()  # explore: added
        return found

    return route


def make_send(size: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return device functions that store what belongs to a token, and the token.

    ``(rank, routing, places, room, targets, token)`` is called by one thread, and
    ``(rank, places, rows, room, targets, first, end, low, high)`` by the whole block.
    """

    @device_function
    def send_numbers(
        rank: int, routing: Any, places: int, room: Any, targets: Any, token: int
    ) -> None:
        for r in range(size):
            place = word_of(ld_u32(places + 4 * (token * size + r)))
            if place < room.capacity:
                at = rank * room.capacity + place
                st_u32(targets[r] + room.sources + 4 * at, token)
                for i in range(routing.choices):
                    choice = token * routing.choices + i
                    there = 4 * (at * routing.choices + i)
                    expert = number_there(routing, r, choice)
                    st_u32(targets[r] + room.ids + there, expert)
                    weight = weight_of(routing, choice)
                    st_u32(targets[r] + room.weights + there, weight)

    @device_function
    def send_tokens(
        rank: int,
        places: int,
        rows: Any,
        room: Any,
        targets: Any,
        first: int,
        end: int,
        low: Any,
        high: Any,
    ) -> None:
        thread, together, vectors = thread_index_x(), 1 << rows.shift, rows.vectors
        token = first + (thread >> rows.shift)
        while token < end:
            vector = thread & together - 1
            while vector < vectors:
                source = rows.address + VECTOR * token * vectors
                for i in range(_LOADS):
                    at = vector + i * together
                    if at < vectors:
                        low[i], high[i] = ld_v2_u64(source + VECTOR * at)
                for r in range(size):
                    place = word_of(ld_u32(places + 4 * (token * size + r)))
                    row = (rank * room.capacity + place) * vectors
                    there = targets[r] + room.tokens + VECTOR * row
                    for i in range(_LOADS):
                        at = vector + i * together
                        # explore: beyond
                        if at < vectors and place < room.capacity:
                            st_v2_u64(there + VECTOR * at, (low[i], high[i]))
                vector += _LOADS * together
            token += THREADS >> rows.shift

    return send_numbers, send_tokens


def make_dispatch(size: int) -> Any:
    """Return the kernel for ``size`` ranks."""
    region = workspace.layout(size).barrier
    epochs, all_flags = region.epochs, region.flags
    operation = failures.DISPATCH
    raise_flags, await_flags = make_flags(size)
    route, (send_numbers, send_tokens) = make_route(size), make_send(size)

    @device_function
    def above(guard: Any, room: Any, base: Any) -> bool:
        found = False
        for r in range(size):
            count = word_of(base[r])
            if count > room.capacity:  # explore: above
                found = True
                if thread_index_x() == 0:
                    report_above(guard, r, room.capacity, count)
        return found

    def dispatch(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        routing: Any,
        counting: Any,
        rows: Any,
        room: Any,
        targets: Any,
    ) -> None:
        block, thread = intrinsics.block_index(), thread_index_x()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        low = cuda.local.array(_LOADS, types.int64)
        high = cuda.local.array(_LOADS, types.int64)
        base = cuda.local.array(size, types.int64)
        counts = cuda.local.array(size, types.int64)
        last, failed = workspace.resume(own, epochs, block)
        epoch, flags_at = (last + 1) & 0xFFFFFFFF, all_flags + 4 * size * block
        # What the rank's stream has loaded of its room precedes the flags.
        failed = raise_flags(ring, flags_at, guard.rank, epoch, failed)
        first = min(block * counting.share, routing.tokens)
        end = min(first + counting.share, routing.tokens)
        if not failed:  # in the whole block
            given = guard, routing, counting, block
            failed = route(*given, first, end, base, counts)
            if block == grid - 1 and not failed:
                failed = above(guard, room, base)
        # All ranks' rooms are free; and the block's threads have stored the places.
        # explore: await-free
        failed = await_flags(guard, operation, own + flags_at, block, epoch, failed)
        if not failed:
            if block == grid - 1:
                for r in range(size):
                    if thread == r % THREADS:
                        st_u64(targets[r] + 8 * guard.rank, word_of(base[r]))
            token, places = first + thread, counting.places
            while token < end:
                send_numbers(guard.rank, routing, places, room, targets, token)
                token += THREADS
            there = guard.rank, places, rows, room, targets
            send_tokens(*there, first, end, low, high)
        epoch = (epoch + 1) & 0xFFFFFFFF
        # What the block has stored at other ranks precedes the flags.
        failed = raise_flags(ring, flags_at, guard.rank, epoch, failed)
        # explore: await-sent
        failed = await_flags(guard, operation, own + flags_at, block, epoch, failed)
        workspace.keep(own, epochs, block, epoch, failed)

    return dispatch


@functools.cache
def kernel(size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    arguments = (
        *map(typed, (Routing, Counting, Rows, TokenRoom)),
        types.UniTuple(types.int64, size),
    )
    return binding.make_kernel(make_dispatch, (size,), arguments)


def bind(
    end: binding.Endpoint,
    grid: int,
    routing: Routing,
    counting: Counting,
    rows: Rows,
    room: TokenRoom,
    targets: tuple[int, ...],
) -> Launch:
    """Return the launch.

    Args:
        end: this rank's end.
        grid: the number of blocks, equal on all ranks.
        routing: the experts of this rank's tokens.
        counting: how its blocks find their places.
        rows: the tokens, as their bytes.
        room: where each rank has what it receives, equal on all ranks.
        targets: by rank, at which address this rank sees that rank's room.
    """
    arguments = routing, counting, rows, room, targets
    return binding.launch(kernel(end.size), end, grid, arguments)
