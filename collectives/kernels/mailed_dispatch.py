"""Dispatch of few tokens: each vector of a token is posted to a peer's waiting thread.

A call takes one latency: the ranks exchange no flags. ``few_tokens.py`` describes the
mailboxes and the masks, which show a receiver what has been sent to it. A receiver
stores tokens with their experts and weights in its own memory, whereas
``expert_dispatch.py`` stores them at other ranks. So these stores follow all earlier
work of the receiver's stream, and no sender has to ask whether there is room.

After the masks, a token's first vectors have two choices each: the number of an expert
on the receiver and its weight, twice. The token itself follows.

If an expert does not exist, or there are too many tokens for a rank, each block of the
sender detects that, and sends nothing.

Source: the low-latency dispatch of DeepEP.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm import waits
from numba_symm.collectives.protocols import binding, few_tokens, workspace
from numba_symm.collectives.protocols.exchanges import EVERYONE
from numba_symm.collectives.protocols.few_tokens import (
    Share,
    count_in,
    has,
    load_mask,
    place_in,
    ranks_of,
    slot,
    store_mask,
)
from numba_symm.collectives.protocols.tokens import (
    Routing,
    Rows,
    TokenRoom,
    number_there,
    typed,
    weight_of,
)
from numba_symm.collectives.protocols.workspace import (
    THREADS,
    VECTOR,
    divide_up,
    sync_block_or,
)
from numba_symm.device import intrinsics
from numba_symm.device.intrinsics import (
    device_function,
    ld_v2_u64,
    st_u32,
    st_u64,
    st_v2_u64,
    thread_index_x,
    word_of,
)
from numba_symm.kernels import Kernel, Launch

_LOW = 0xFFFFFFFF


def vectors_of(choices: int, vectors: int) -> int:
    """Return how many vectors are sent of a token of so many choices and vectors."""
    return divide_up(choices, 2) + vectors


@device_function
def numbers_of(routing: Any, rank: int, token: int, pair: int) -> Any:
    """Return the words of two of a token's choices, as a rank receives them."""
    first = token * routing.choices + 2 * pair
    low = number_there(routing, rank, first) | weight_of(routing, first) << 32
    high = 0
    if 2 * pair + 1 < routing.choices:
        expert = number_there(routing, rank, first + 1)
        high = expert | weight_of(routing, first + 1) << 32
    return word_of(low), word_of(high)


@device_function
def store_numbers(
    here: int, room: Any, choices: int, at: int, token: int, pair: int, words: Any
) -> None:
    """Store two choices of a token, and with the first ones the token's number."""
    if pair == 0:
        st_u32(here + room.sources + 4 * at, token)
    there = 4 * (at * choices + 2 * pair)
    low, high = words
    st_u32(here + room.ids + there, low & _LOW)
    st_u32(here + room.weights + there, low >> 32 & _LOW)
    if 2 * pair + 1 < choices:
        st_u32(here + room.ids + there + 4, high & _LOW)
        st_u32(here + room.weights + there + 4, high >> 32 & _LOW)


@device_function
def keep_vector(
    here: int,
    room: Any,
    choices: int,
    vectors: int,
    at: int,
    token: int,
    vector: int,
    words: Any,
) -> None:
    """Store a vector of what a rank receives of a token, whose row is ``at``."""
    head = choices + 1 >> 1
    if vector < head:
        store_numbers(here, room, choices, at, token, vector, words)
    else:
        row = here + room.tokens + VECTOR * at * vectors
        st_v2_u64(row + VECTOR * (vector - head), words)


def make_send(size: int, post_one: Any, box: Any) -> Callable[..., None]:
    """Return a device function by which a thread sends its vectors of an epoch.

    ``(rank, ring, epoch, at, routing, rows, room, here, area, share)``; ``at`` is the
    epoch's number in the call, the grid and the block. Vectors for this rank itself are
    stored in its room.
    """
    mask_for, _ = few_tokens.make_masks(size)

    @device_function
    def send(
        rank: int,
        ring: Any,
        epoch: int,
        at: Any,
        routing: Any,
        rows: Any,
        room: Any,
        here: int,
        area: int,
        share: Any,
    ) -> None:
        number, grid, block = at
        head = routing.choices + 1 >> 1
        for tile in range(share.tiles):
            token, vector = slot(share, number, tile, grid, block)
            ranks = 0
            if token < routing.tokens:
                ranks = ranks_of(area, token)
            words = 0, 0
            if ranks != 0 and vector >= head:
                row = rows.address + VECTOR * token * rows.vectors
                words = ld_v2_u64(row + VECTOR * (vector - head))
            boxes = box(block, epoch, 0, 0, tile, thread_index_x())
            for k in range(size):
                if ranks >> k & 1 != 0:
                    if vector < head:
                        there = (rank + 1 + k) % size
                        words = numbers_of(routing, there, token, vector)
                    if k < size - 1:
                        post_one(ring, k, boxes, words[0], words[1], epoch)
                    else:
                        place = place_in(mask_for(area, k), token)
                        row = rank * room.capacity + place
                        given = here, room, routing.choices, rows.vectors
                        keep_vector(*given, row, token, vector, words)

    return send


def make_take(size: int, receive: Any, box: Any) -> Callable[..., bool]:
    """Return a device function by which a thread receives and stores its vectors.

    ``(guard, own, epoch, at, choices, vectors, room, here, area, share, low, high)``
    returns whether it gave up. The last two are local arrays of ``size``.
    """
    _, mask_from = few_tokens.make_masks(size)

    @device_function
    def take(
        guard: Any,
        own: int,
        epoch: int,
        at: Any,
        choices: int,
        vectors: int,
        room: Any,
        here: int,
        area: int,
        share: Any,
        low: Any,
        high: Any,
    ) -> bool:
        number, grid, block = at
        for tile in range(share.tiles):
            token, vector = slot(share, number, tile, grid, block)
            wanted = 0
            for k in range(size - 1):
                if has(mask_from(area, k), token):
                    wanted |= 1 << k
            if wanted != 0:
                boxes = own + box(block, epoch, 0, 0, tile, thread_index_x())
                if not receive(guard, boxes, epoch, block, low, high, wanted):
                    return True  # explore: give-up
                for k in range(size - 1):
                    if wanted >> k & 1 != 0:
                        source = (guard.rank + 1 + k) % size
                        place = place_in(mask_from(area, k), token)
                        row = source * room.capacity + place
                        given = here, room, choices, vectors, row, token, vector
                        keep_vector(*given, (low[k + 1], high[k + 1]))
        return False

    return take


def make_mailed_dispatch(size: int) -> Any:
    """Return the kernel for ``size`` ranks, at least two."""
    epochs, mail = few_tokens.make_mail(size, waits.DISPATCH)
    next_epoch, box, _, post_one, receive, _, between_epochs = mail
    mask_for, mask_from = few_tokens.make_masks(size)
    route, others = few_tokens.make_route(size), size - 1
    words, batch = few_tokens.area_words(size), few_tokens.BATCH
    send, take = make_send(size, post_one, box), make_take(size, receive, box)

    @device_function
    def send_masks(
        ring: Any, epoch: int, block: int, area: int, low: Any, high: Any
    ) -> None:
        boxes = box(block, epoch, 0, 0, 0, 0)
        for k in range(others):
            low[k], high[k] = load_mask(mask_for(area, k))
        for k in range(others):
            post_one(ring, k, boxes, low[k], high[k], epoch)

    @device_function
    def keep_masks(area: int, low: Any, high: Any) -> None:
        for k in range(others):
            store_mask(mask_from(area, k), low[k + 1], high[k + 1])
        mine = load_mask(mask_for(area, others))
        store_mask(mask_from(area, others), mine[0], mine[1])

    def mailed_dispatch(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        routing: Any,
        rows: Any,
        room: Any,
        share: Any,
        here: int,
        areas: int,
    ) -> None:
        block, thread = intrinsics.block_index(), thread_index_x()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        held = cuda.local.array(batch, types.uint32)
        epoch, found = workspace.resume(own, epochs, block)
        rank, area = guard.rank, areas + 4 * words * block
        # The whole block agrees, after all its threads have read the epoch.
        failed = found != 0
        failed = route(guard, routing, room.capacity, area, held, failed)
        for number in range(share.epochs):
            epoch = next_epoch(epoch)
            at = number, grid, block
            if thread == 0 and not failed:
                send_masks(ring, epoch, block, area, low, high)
            if thread != 0 and not failed:
                sent = routing, rows, room, here, area, share
                send(rank, ring, epoch, at, *sent)
            # A warp's threads may follow one another, so all send before one waits.
            if thread == 0 and not failed:
                boxes = own + box(block, epoch, 0, 0, 0, 0)
                failed = not receive(guard, boxes, epoch, block, low, high, EVERYONE)
                if number == 0 and not failed:
                    keep_masks(area, low, high)
            if number == 0:
                # All masks are stored before other threads load them.
                failed = sync_block_or(failed)  # explore: known
            if number == 0 and block == 0 and not failed:
                for k in range(size):
                    if thread == k % THREADS:
                        source = (rank + 1 + k) % size
                        st_u64(here + 8 * source, count_in(mask_from(area, k)))
            if thread != 0 and not failed:
                taken = routing.choices, rows.vectors, room, here, area, share
                failed = take(guard, own, epoch, at, *taken, low, high)
            if number + 1 < share.epochs:
                if thread == 0:  # explore: fence
                    # Orders what thread 0 has received before the synchronization: the
                    # other threads may post to ranks from which they receive nothing.
                    intrinsics.fence_acq_rel_sys()
                failed = between_epochs(failed)
        workspace.keep(own, epochs, block, epoch, failed)

    return mailed_dispatch


@functools.cache
def kernel(size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    structures = map(typed, (Routing, Rows, TokenRoom, Share))
    arguments, weight = (*structures, types.int64, types.int64), few_tokens.WEIGHT
    return binding.make_kernel(make_mailed_dispatch, (size,), arguments, weight)


def bind(
    end: binding.Endpoint,
    grid: int,
    share: Share,
    routing: Routing,
    rows: Rows,
    room: TokenRoom,
    here: int,
    areas: int,
) -> Launch:
    """Return the launch.

    Args:
        end: this rank's end.
        grid: the number of blocks, equal on all ranks.
        share: how they share what is sent, equal on all ranks.
        routing: the experts of this rank's tokens.
        rows: the tokens, as their bytes.
        room: where a rank has what it receives.
        here: the address of this rank's room.
        areas: that of ``few_tokens.area_words`` for each block.
    """
    arguments = routing, rows, room, share, here, areas
    return binding.launch(kernel(end.size), end, grid, arguments)
