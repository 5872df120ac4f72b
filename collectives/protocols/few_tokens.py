"""Mailboxes, tags and places: what dispatches and combines of few tokens share.

Each vector of a rank's tokens belongs to one thread, which has a mailbox for it at
every other rank. The thread posts the vector to the ranks that need the token. To the
other ranks, it posts a message without a vector. So every thread exchanges with every
rank in every epoch, in both directions, as ``mailboxes.py`` requires. No thread waits
for messages to another thread.

The mailboxes are the marked ones. Above its two marks, the word of marks contains a
*tag*. In a message without a vector, the tag is 0, and the sender leaves the mailbox's
vector empty. Otherwise, a dispatch's tag contains two numbers: the token's place among
the sender's tokens for this receiver, and the count of these tokens. From the place,
the receiver computes where it stores the vector.

Places: each warp determines the ranks of all tokens of its rank by itself. Each lane
has one token of each group of tokens, and the lanes vote. So no thread waits for its
block.

The receiver of a dispatch keeps the places in a *table*, by which ``combine`` finds the
results: for each rank and token, the place + 1, or 0. Ranks are numbered along the ring
(``order.py``), and this rank itself is the last one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.collectives.protocols import binding, mailboxes, workspace
from numba_symm.collectives.protocols.mailboxes import EMPTY, UNMARKED, marks_of
from numba_symm.collectives.protocols.tokens import (
    LANES,
    NONE,
    inverse_of,
    ranks_of,
    refuse,
    report_above,
)
from numba_symm.collectives.protocols.workspace import (
    HELD,
    THREADS,
    VECTOR,
    divide_up,
)
from numba_symm.device.intrinsics import (
    device_function,
    ld_relaxed_sys_u32,
    ld_relaxed_sys_v2_u64,
    ld_u32,
    ones_of,
    st_relaxed_sys_u32,
    st_relaxed_sys_v2_u64,
    st_u32,
    thread_index_x,
    votes,
    word_of,
)
from numba_symm.device.order import make_mirror
from numba_symm.device.polling import (
    is_time_to_check,
    must_give_up,
    pause,
    since,
    wait_record,
)
from numba_symm.environment import SIMULATED

TRANSPORT = "marked"
"""That of the mailboxes (``mailboxes.py``): tokens keep all their bits."""


MOST = 16 if SIMULATED else 128
"""Most tokens of a rank."""

MOST_RANKS = 32
MOST_EPOCHS = 4
"""Most epochs of a call."""

MOST_BYTES = 768 << 10
"""Most bytes of a rank's tokens. With more, the form for many tokens is faster.

On an H200 that 2 ranks shared, a dispatch and a combine of 256 KiB took 12.5 us in this
form and 20.5 us in the other one; of 1 MiB, 25.4 us and 21.0 us.
"""

_MOST_VECTORS = 4096  # so that numbers of vectors are divided exactly

GROUPS = divide_up(MOST, LANES)
"""Groups of tokens: a lane of a warp has one of each."""

LOW = 0xFFFFFFFF
"""The bits of a number of 32 bits."""

_LANES = LANES.bit_length() - 1

PLACE = 0xFF
"""The bits of a tag that have a place + 1. A number of tokens is above them."""

COUNT = 8
"""By how many bits that number is shifted."""


class Share(NamedTuple):
    """How the vectors of tokens are shared among threads; equal on all ranks.

    Attributes:
        tokens: the most tokens of a rank.
        vectors: those of a token, with what else is sent of it.
        inverse: ``inverse_of`` them.
        tiles: vectors of a thread in an epoch.
        epochs: how many epochs there are.
    """

    tokens: int
    vectors: int
    inverse: int
    tiles: int
    epochs: int


def weight_of(size: int) -> int:
    """Return the weight of the kernels (``binding.make_kernel``).

    With more than two ranks, they need many registers. The simulator's may nevertheless
    share a thread block.
    """
    return 1 if size == 2 or HELD <= 2 else 2


def share_of(
    end: binding.Endpoint, tokens: int, vectors: int
) -> tuple[int, Share] | None:
    """Return the grid and the share of calls of that size; None: too large.

    Args:
        end: this rank's end.
        tokens: the most tokens of a rank, equal on all ranks.
        vectors: those that are sent of a token.
    """
    if not 1 < end.size <= MOST_RANKS or tokens > MOST or vectors > _MOST_VECTORS:
        return None
    if tokens * vectors * VECTOR > MOST_BYTES:
        return None
    protocol = workspace.ONE_SHOT[TRANSPORT]
    given = TRANSPORT, protocol, tokens * vectors, weight_of(end.size)
    grid, most = mailboxes.mailed_grid(end, *given)
    all_tiles = divide_up(tokens * vectors, THREADS)
    epochs = divide_up(all_tiles, grid * most)
    if epochs > MOST_EPOCHS:
        return None
    tiles = divide_up(all_tiles, grid * epochs)  # as many in each epoch
    return grid, Share(tokens, vectors, inverse_of(vectors), tiles, epochs)


def table_words(size: int) -> int:
    """Return how many words of 4 bytes the table has."""
    return MOST * size


class Mail(NamedTuple):
    """Device functions for the mailboxes of few tokens.

    ``at`` is the epoch's number in the call, the grid and the block.

    Attributes:
        next_epoch: ``mailboxes.Mailboxes.next_epoch``.
        post: ``(ring, k, block, epoch, tile, low, high, tag)`` sends a vector to the
            k-th of the ring; with the tag 0, that there is none.
        receive: ``(guard, own, block, epoch, tile, low, high, tags)`` waits for what
            all others send. It fills three local arrays from index 1 on, and makes the
            mailboxes ready for the next vectors. It returns False if it gave up.
        between_epochs: ``mailboxes.Mailboxes.between_epochs``.
    """

    next_epoch: Callable[[int], int]
    post: Callable[..., None]
    receive: Callable[..., bool]
    between_epochs: Callable[[bool], bool]


@device_function
def _peek(box: int) -> Any:
    # Returns a vector's words, its tag, and what is not 0 if anything is missing.
    first, second = ld_relaxed_sys_v2_u64(box)
    marks = ld_relaxed_sys_u32(marks_of(box)) & UNMARKED
    tag = marks >> 2
    empty = (first == EMPTY) | (second == EMPTY)
    # explore: missing
    missing = word_of((marks == UNMARKED) | ((tag & PLACE != 0) & empty))
    if marks & 1 != 0:
        first = EMPTY
    if marks & 2 != 0:
        second = EMPTY
    return first, second, tag, missing


@functools.cache
def make_mail(size: int, operation: int) -> tuple[int, Mail]:
    """Return where the epochs are, and the device functions for ``size`` ranks."""
    region = workspace.layout(size).one_shot_marked
    epochs = workspace.layout(size).one_shot_marked.epochs  # explore: epochs
    protocol = workspace.ONE_SHOT[TRANSPORT]
    given = size, TRANSPORT, region, protocol, 1, operation
    made = mailboxes.make_mailboxes(*given)
    box, mirror, others = made.box, make_mirror(size), size - 1

    @device_function
    def post(
        ring: Any,
        k: int,
        block: int,
        epoch: int,
        tile: int,
        low: int,
        high: int,
        tag: int,
    ) -> None:
        there = ring[k] + box(block, epoch, 0, mirror(k), tile, thread_index_x())
        marks = tag << 2
        if tag & PLACE != 0:
            if low == EMPTY:
                low = 0
                marks |= 1
            if high == EMPTY:
                high = 0
                marks |= 2
            st_relaxed_sys_v2_u64(there, (low, high))
        st_relaxed_sys_u32(marks_of(there), marks)

    @device_function
    def receive(
        guard: Any,
        own: int,
        block: int,
        epoch: int,
        tile: int,
        low: Any,
        high: Any,
        tags: Any,
    ) -> bool:
        polls, started = 0, 0
        arrived, given_up = False, False
        thread = thread_index_x()
        while not arrived and not given_up:
            # All are loaded before any is compared, as in ``packets.py``.
            missing = 0
            for k in range(others):
                there = own + box(block, epoch, 0, k, tile, thread)
                low[k + 1], high[k + 1], tags[k + 1], gap = _peek(there)
                missing |= gap
            arrived = missing == 0
            if not arrived:
                polls = pause(polls)
                if is_time_to_check(polls):
                    started = since(started)
                    late = 0
                    for k in range(others):
                        there = own + box(block, epoch, 0, k, tile, thread)
                        _, _, _, gap = _peek(there)
                        if gap != 0:
                            late = (guard.rank + 1 + k) % size
                    record = wait_record(operation, guard.rank, late, block, epoch)
                    given_up = must_give_up(guard, started, record)
        if arrived:
            for k in range(others):
                there = own + box(block, epoch, 0, k, tile, thread)
                if word_of(tags[k + 1]) & PLACE != 0:
                    st_relaxed_sys_v2_u64(there, (EMPTY, EMPTY))  # explore: clear
                st_relaxed_sys_u32(marks_of(there), UNMARKED)  # explore: unmark
        return arrived

    mail = Mail(made.next_epoch, post, receive, made.between_epochs)
    return epochs, mail


@device_function
def slot(share: Any, epoch: int, tile: int, grid: int, block: int) -> Any:
    """Return which token's vector a thread exchanges, and the vector's number.

    Args:
        share: a :class:`Share`.
        epoch: the number of the epoch in the call, from 0 on.
        tile: that of the tile.
        grid: the number of blocks.
        block: this one.
    """
    row = (epoch * share.tiles + tile) * grid + block  # explore: row
    # Numbers of 32 bits: of longer ones, every product takes four instructions.
    number = row * THREADS + thread_index_x() & LOW
    token = number * share.inverse >> 32 & LOW
    return token, number - token * share.vectors & LOW


@device_function
def along(rank: int, k: int, size: int) -> int:
    """Return the k-th of a rank's ring, without a division."""
    found = rank + 1 + k
    return found if found < size else found - size


@device_function
def keep_place(
    table: int, k: int, share: Any, token: int, vector: int, tag: int
) -> None:
    """Store in the table where a token of the k-th of the ring is."""
    if vector == 0 and token < share.tokens:
        st_u32(table + 4 * (MOST * k + token), tag & PLACE)


@device_function
def place_of(table: int, k: int, share: Any, token: int) -> int:
    """Return the place + 1 of a token of the k-th of the ring; 0: it is not here."""
    place = 0
    if token < share.tokens:
        place = word_of(ld_u32(table + 4 * (MOST * k + token)))
    return place


@device_function
def place_for(places: Any, k: int, token: int, tokens: int) -> int:
    """Return the place + 1 of a token at the k-th of the ring, or 0.

    Args:
        places: what a route has filled.
        k: the k-th of the ring.
        token: the token.
        tokens: how many this rank has.
    """
    place = 0
    if token < tokens:
        word = word_of(places[k * GROUPS + (token >> _LANES)])
        lane = token & LANES - 1
        if word >> lane & 1 != 0:
            place = (word >> 32) + word_of(ones_of(word & (1 << lane) - 1)) + 1
    return place


@functools.cache
def make_route(size: int) -> Callable[..., bool]:
    """Return a device function by which a warp finds the places of its rank's tokens.

    ``(guard, routing, capacity, places, counts)`` fills two local arrays. The first has
    a word for each rank and group, in which the upper half is how many tokens of
    earlier groups are for that rank, and the lower half has a bit for each lane's. The
    second has how many are for it. It returns True if an expert does not exist, or more
    tokens than ``capacity`` are for a rank. Then it does so in all warps of the rank,
    each of which reports that, because the others may end as soon as one has marked the
    failure. The whole warp calls it.
    """

    @device_function
    def route(
        guard: Any, routing: Any, capacity: int, places: Any, counts: Any
    ) -> bool:
        lane, failed, group = thread_index_x() & LANES - 1, False, 0
        for k in range(size):
            counts[k] = 0
        while group << _LANES < routing.tokens:
            token = group << _LANES | lane
            bits, wrong = 0, NONE
            if token < routing.tokens:
                bits, wrong = ranks_of(routing, token)
            for k in range(size):
                here = word_of(votes(bits >> along(guard.rank, k, size) & 1 != 0))
                places[k * GROUPS + group] = here | word_of(counts[k]) << 32
                counts[k] = word_of(counts[k]) + word_of(ones_of(here))
            if votes(wrong != NONE) != 0:
                failed = True
                if wrong != NONE:
                    refuse(guard, token, wrong)
            group += 1
        above, count = -1, 0
        for k in range(size):
            if word_of(counts[k]) > capacity:  # explore: above
                above, count = k, word_of(counts[k])
        if above >= 0:
            failed = True
            if lane == 0:
                rank = along(guard.rank, above, size)
                report_above(guard, rank, capacity, count)
        return failed

    return route
