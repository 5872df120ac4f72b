"""Dispatch of few tokens: each vector of a token is posted to a peer's waiting thread.

A call takes one latency: the ranks exchange no flags, and threads do not wait for their
block. ``few_tokens.py`` describes the mailboxes and the tags, which show a receiver
what has been sent to it, and where to store it. A receiver stores tokens with their
experts and weights in its own memory, whereas ``expert_dispatch.py`` stores them at
other ranks. So these stores follow all earlier work of the receiver's stream, and no
sender has to ask whether there is room.

A token's first vectors have two choices each: the number of an expert and its weight,
twice. The token itself follows. A thread loads its first vectors before it knows which
ranks they are for.

If an expert does not exist, or there are too many tokens for a rank, each warp of the
sender detects that, and sends nothing.

Source: the low-latency dispatch of DeepEP.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, few_tokens, workspace
from numba_symm.collectives.protocols.few_tokens import (
    COUNT,
    LOW,
    PLACE,
    Share,
    along,
    keep_place,
    place_for,
    slot,
)
from numba_symm.collectives.protocols.tokens import (
    Routing,
    Rows,
    TokenRoom,
    number_on,
    typed,
    weight_of,
)
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up, sync_block
from numba_symm.device import intrinsics
from numba_symm.device.intrinsics import (
    device_function,
    ld_u32,
    ld_v2_u64,
    st_u32,
    st_u64,
    st_v2_u64,
    thread_index_x,
    word_of,
)
from numba_symm.gpu.kernels import Kernel, Launch
from numba_symm.launch import failures


def vectors_of(choices: int, vectors: int) -> int:
    """Return how many vectors are sent of a token of so many choices and vectors."""
    return divide_up(choices, 2) + vectors


@device_function
def load_choice(routing: Any, choice: int) -> int:
    """Return the number of a choice's expert, and above it its weight."""
    expert = word_of(ld_u32(routing.ids + 4 * choice)) & LOW
    return word_of(expert | weight_of(routing, choice) << 32)


@device_function
def load_words(routing: Any, rows: Any, token: int, vector: int) -> Any:
    """Return a vector of what is sent of a token, with experts as they are given."""
    head, low, high = routing.choices + 1 >> 1, 0, 0
    if token < routing.tokens:
        if vector >= head:
            row = rows.address + VECTOR * token * rows.vectors
            low, high = ld_v2_u64(row + VECTOR * (vector - head))
        else:
            first = token * routing.choices + 2 * vector
            low = load_choice(routing, first)
            if 2 * vector + 1 < routing.choices:
                high = load_choice(routing, first + 1)
    return low, high


@device_function
def store_choice(
    rank: int, routing: Any, here: int, room: Any, at: int, word: int
) -> None:
    """Store a choice as this rank, the receiver, numbers its experts."""
    st_u32(here + room.ids + 4 * at, number_on(routing, rank, word & LOW))
    st_u32(here + room.weights + 4 * at, word >> 32 & LOW)


def make_keep(size: int) -> Callable[..., None]:
    """Return a device function that stores what was sent of a token of a rank.

    ``(rank, k, to, token, vector, tag, words)``: of the k-th of the ring. ``to`` is
    ``(share, routing, vectors, room, here, table)``.
    """

    @device_function
    def keep(
        rank: int, k: int, to: Any, token: int, vector: int, tag: int, words: Any
    ) -> None:
        share, routing, vectors, room, here, table = to
        choices, place = routing.choices, tag & PLACE
        head, source = choices + 1 >> 1, along(rank, k, size)
        keep_place(table, k, share, token, vector, tag)
        if tag >> COUNT != 0:
            st_u64(here + 8 * source, (tag >> COUNT) - 1)
        if place != 0:
            at = source * room.capacity + place - 1 & LOW
            if vector >= head:
                row = here + room.tokens + VECTOR * at * vectors
                st_v2_u64(row + VECTOR * (vector - head), words)
            else:
                if vector == 0:
                    st_u32(here + room.sources + 4 * at, token)
                choice = at * choices + 2 * vector
                store_choice(rank, routing, here, room, choice, words[0])
                if 2 * vector + 1 < choices:
                    store_choice(rank, routing, here, room, choice + 1, words[1])

    return keep


def make_send(size: int, post: Any, keep: Any) -> Callable[..., None]:
    """Return a device function by which a thread sends its vectors of an epoch.

    ``(rank, ring, epoch, at, rows, places, counts, mine, to)``; ``at`` is the epoch's
    number in the call, the grid and the block, and ``mine`` the first vector's token,
    number and words. It stores vectors for this rank itself.
    """

    @device_function
    def send(
        rank: int,
        ring: Any,
        epoch: int,
        at: Any,
        rows: Any,
        places: Any,
        counts: Any,
        mine: Any,
        to: Any,
    ) -> None:
        (number, grid, block), share, routing = at, to[0], to[1]
        tile, (token, vector), words = 0, mine[0], mine[1]
        while tile < share.tiles:
            this, sent = (token, vector), words
            tile += 1
            if tile < share.tiles:
                # Before this one is posted, because a post makes a load wait for it.
                token, vector = slot(share, number, tile, grid, block)
                words = load_words(routing, rows, token, vector)
            first = number + tile - 1 + block + thread_index_x() == 0
            for k in range(size):
                tag = place_for(places, k, this[0], routing.tokens)
                if first:
                    tag |= word_of(counts[k]) + 1 << COUNT
                if k < size - 1:
                    post(ring, k, block, epoch, tile - 1, sent[0], sent[1], tag)
                else:
                    keep(rank, k, to, this[0], this[1], tag, sent)

    return send


def make_take(size: int, receive: Any, keep: Any) -> Callable[..., bool]:
    """Return a device function by which a thread receives and stores its vectors.

    ``(guard, own, epoch, at, to, low, high, tags)`` returns whether it gave up. The
    last three are local arrays of ``size``.
    """

    @device_function
    def take(
        guard: Any,
        own: int,
        epoch: int,
        at: Any,
        to: Any,
        low: Any,
        high: Any,
        tags: Any,
    ) -> bool:
        (number, grid, block), share, tile = at, to[0], 0
        while tile < share.tiles:
            if not receive(guard, own, block, epoch, tile, low, high, tags):
                return True  # explore: give-up
            token, vector = slot(share, number, tile, grid, block)
            for k in range(size - 1):
                words, tag = (low[k + 1], high[k + 1]), word_of(tags[k + 1])
                keep(guard.rank, k, to, token, vector, tag, words)
            tile += 1
        return False

    return take


def make_mailed_dispatch(size: int) -> Any:
    """Return the kernel for ``size`` ranks, at least two."""
    epochs, mail = few_tokens.make_mail(size, failures.DISPATCH)
    route = few_tokens.make_route(size)
    keep, of_all = make_keep(size), size * few_tokens.GROUPS
    send = make_send(size, mail.post, keep)
    take = make_take(size, mail.receive, keep)
    next_epoch, between_epochs = mail.next_epoch, mail.between_epochs

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
        table: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        tags = cuda.local.array(size, types.uint32)
        places = cuda.local.array(of_all, types.int64)
        counts = cuda.local.array(size, types.int64)
        epoch, found = workspace.resume(own, epochs, block)
        first = slot(share, 0, 0, grid, block)
        words = load_words(routing, rows, first[0], first[1])
        wrong = route(guard, routing, room.capacity, places, counts)
        failed = wrong or found != 0
        to = share, routing, rows.vectors, room, here, table
        number = 0
        while number < share.epochs:
            epoch = next_epoch(epoch)
            at = number, grid, block
            if not failed:
                mine = first, words
                send(guard.rank, ring, epoch, at, rows, places, counts, mine, to)
            if number == 0:
                # All have read the epoch before it changes.
                sync_block()  # explore: resumed
            if not failed:
                failed = take(guard, own, epoch, at, to, low, high, tags)
            number += 1
            if number < share.epochs:
                first = slot(share, number, 0, grid, block)
                words = load_words(routing, rows, first[0], first[1])
                failed = between_epochs(failed)
        workspace.keep(own, epochs, block, epoch, failed)

    return mailed_dispatch


@functools.cache
def kernel(size: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    structures = map(typed, (Routing, Rows, TokenRoom, Share))
    arguments, weight = (*structures, *2 * (types.int64,)), few_tokens.weight_of(size)
    return binding.make_kernel(make_mailed_dispatch, (size,), arguments, weight)


def bind(
    end: binding.Endpoint,
    grid: int,
    share: Share,
    routing: Routing,
    rows: Rows,
    room: TokenRoom,
    here: int,
    table: int,
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
        table: that of ``few_tokens.table_words``.
    """
    arguments = routing, rows, room, share, here, table
    return binding.launch(kernel(end.size), end, grid, arguments)
