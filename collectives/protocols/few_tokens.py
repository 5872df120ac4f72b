"""Code that dispatches and combines of few tokens share: mailboxes and masks.

For each vector of each token of a rank, a thread has a mailbox at every other rank,
which is used only if the token is for that rank. The block's first thread has none. It
exchanges a *mask* with every rank instead: a bit for each token that is for that rank.
The mask shows the receiver for which mailboxes to wait, and where to store a token: the
place is the number of ones before the token's bit.

``mailboxes.py`` states the order of memory accesses. As it requires, the first threads
of the blocks of an index exchange in every epoch, in both directions.

Every block finds the masks of all tokens of its rank itself, so no block needs another
one's. It keeps them in an *area* of its own:

1. for each token, the ranks that it is for, as bits;
2. for each rank, the mask of this rank's tokens for it;
3. for each rank, the mask of its tokens for this one.

Ranks are numbered along the ring (``order.py``), and this rank itself is the last one.

``combine`` reads the area of the first block, too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.collectives.protocols import binding, mailboxes, workspace
from numba_symm.collectives.protocols.tokens import (
    NONE,
    inverse_of,
    refuse,
    report_above,
)
from numba_symm.collectives.protocols.workspace import (
    HELD,
    THREADS,
    sync_block,
    sync_block_or,
)
from numba_symm.device.intrinsics import (
    device_function,
    ld_u32,
    ones_of,
    st_u32,
    thread_index_x,
    word_of,
)

TRANSPORT = "marked"
"""That of the mailboxes (``mailboxes.py``): tokens keep all their bits."""

WEIGHT = 2 if HELD > 2 else 1
"""That of the kernels (``binding.make_kernel``): they need many registers. The
simulator's may nevertheless share a thread block."""

MOST = 128
"""Most tokens of a rank: the bits of a mask, which is a vector."""

MOST_RANKS = 32
MOST_EPOCHS = 4
"""Most epochs of a dispatch. With more, its bytes take most of the time, and mailboxes
move a quarter more of them than stores do."""

_MOST_VECTORS = 4096  # so that numbers of vectors are divided exactly
_WORDS = MOST // 32  # of a mask

BATCH = 8
"""Words that a thread loads before it uses them."""


class Share(NamedTuple):
    """How the vectors of tokens are shared among threads; equal on all ranks.

    Attributes:
        vectors: those of a token, with what else is sent of it.
        inverse: ``inverse_of`` them.
        tiles: vectors of a thread in an epoch.
        epochs: how many epochs there are.
    """

    vectors: int
    inverse: int
    tiles: int
    epochs: int


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
    protocol = workspace.ONE_SHOT[TRANSPORT]
    slots = workspace.divide_up(tokens * vectors, THREADS - 1) * THREADS
    grid, tiles = mailboxes.mailed_grid(end, TRANSPORT, protocol, slots, WEIGHT)
    epochs = workspace.divide_up(slots, grid * THREADS * tiles)
    if epochs > MOST_EPOCHS:
        return None
    return grid, Share(vectors, inverse_of(vectors), tiles, epochs)


def area_words(size: int) -> int:
    """Return how many words of 4 bytes a block's area has."""
    return MOST + 2 * _WORDS * size


def make_mail(size: int, operation: int) -> tuple[int, mailboxes.Mailboxes]:
    """Return where the epochs are, and the device functions of the mailboxes."""
    region = workspace.layout(size).one_shot_marked
    epochs = workspace.layout(size).one_shot_marked.epochs  # explore: epochs
    protocol = workspace.ONE_SHOT[TRANSPORT]
    given = size, TRANSPORT, region, protocol, 1, operation
    return epochs, mailboxes.make_mailboxes(*given)


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
    number = row * (THREADS - 1) + thread_index_x() - 1
    token = number * share.inverse >> 32
    return token, number - token * share.vectors


@device_function
def ranks_of(area: int, token: int) -> int:
    """Return the ranks that a token of this rank is for, as bits along the ring."""
    return word_of(ld_u32(area + 4 * token))


@functools.cache
def make_masks(
    size: int,
) -> tuple[Callable[[int, int], int], Callable[[int, int], int]]:
    """Return device functions for ``size`` ranks.

    ``(area, k)`` returns the address of the mask for the k-th of the ring, or from it.
    """

    @device_function
    def mask_for(area: int, k: int) -> int:
        return area + 4 * (MOST + _WORDS * k)

    @device_function
    def mask_from(area: int, k: int) -> int:
        return area + 4 * (MOST + _WORDS * (size + k))

    return mask_for, mask_from


@device_function
def load_mask(mask: int) -> Any:
    """Return a mask as a vector's two words."""
    low, more = word_of(ld_u32(mask)), word_of(ld_u32(mask + 4))
    high, most = word_of(ld_u32(mask + 8)), word_of(ld_u32(mask + 12))
    return word_of(low | more << 32), word_of(high | most << 32)


@device_function
def store_mask(mask: int, low: int, high: int) -> None:
    """Store a vector's two words as a mask."""
    st_u32(mask, low & 0xFFFFFFFF)
    st_u32(mask + 4, low >> 32 & 0xFFFFFFFF)
    st_u32(mask + 8, high & 0xFFFFFFFF)
    st_u32(mask + 12, high >> 32 & 0xFFFFFFFF)


@device_function
def has(mask: int, token: int) -> bool:
    """Return whether a mask has a token."""
    word = ld_u32(mask + 4 * min(token >> 5, _WORDS - 1))
    return token < MOST and word_of(word) >> (token & 31) & 1 != 0


@device_function
def place_in(mask: int, token: int) -> int:
    """Return the place of a token of a mask among its tokens."""
    found = 0
    for w in range(_WORDS):
        word = word_of(ld_u32(mask + 4 * w))
        before = min(max(token - 32 * w, 0), 32)
        found += word_of(ones_of(word & (1 << before) - 1))
    return found


@device_function
def count_in(mask: int) -> int:
    """Return how many tokens a mask has."""
    found = 0
    for w in range(_WORDS):
        found += word_of(ones_of(word_of(ld_u32(mask + 4 * w))))
    return found


@functools.cache
def make_route(size: int) -> Callable[..., bool]:
    """Return a device function by which a block finds the masks of its rank's tokens.

    ``(guard, routing, capacity, area, words, failed)`` stores the first two parts of
    the block's area; ``words`` is a local array of ``BATCH``. The whole block calls it.
    It returns True in all its threads if one passes ``failed``, or an expert does not
    exist, or more tokens than ``capacity`` are for a rank. Every block reports the
    latter two, because the others may end as soon as one has marked the failure.
    """
    mask_for, _ = make_masks(size)

    @device_function
    def mark(guard: Any, routing: Any, token: int, words: Any) -> Any:
        # Returns the ranks of a token, and whether an expert does not exist.
        ranks, wrong, first = 0, NONE, routing.ids + 4 * token * routing.choices
        for start in range(0, routing.choices, BATCH):
            for i in range(BATCH):
                choice = min(start + i, routing.choices - 1)
                words[i] = word_of(ld_u32(first + 4 * choice))
            for i in range(BATCH):  # a choice that is looked at twice changes nothing
                expert = word_of(words[i])
                if expert < routing.experts:
                    k = (expert * routing.inverse >> 32) - guard.rank - 1
                    ranks |= 1 << (k + size if k < 0 else k)
                elif expert != NONE:
                    wrong = expert
        if wrong != NONE:
            refuse(guard, token, wrong)
        return ranks, wrong != NONE

    @device_function
    def bits_for(area: int, k: int, start: int, tokens: int, words: Any) -> int:
        # Returns a word of a mask: of 32 tokens.
        bits = 0
        for first in range(start, min(start + 32, tokens), BATCH):
            for i in range(BATCH):
                words[i] = ranks_of(area, min(first + i, tokens - 1))
            for i in range(BATCH):
                if first + i < tokens:
                    bits |= (word_of(words[i]) >> k & 1) << (first - start + i)
        return bits

    @device_function
    def route(
        guard: Any,
        routing: Any,
        capacity: int,
        area: int,
        words: Any,
        failed: bool,
    ) -> bool:
        token = thread_index_x()
        while token < routing.tokens:
            ranks, wrong = mark(guard, routing, token, words)
            failed |= wrong
            st_u32(area + 4 * token, ranks)
            token += THREADS
        # The ranks of all tokens are stored before they are put together.
        if sync_block_or(failed):  # explore: marked
            return True
        i = thread_index_x()
        while i < _WORDS * size:
            k, start = i // _WORDS, 32 * (i % _WORDS)
            bits = bits_for(area, k, start, routing.tokens, words)
            st_u32(mask_for(area, k) + start // 8, bits)
            i += THREADS
        # All masks are stored before any is sent.
        sync_block()  # explore: masked
        if capacity < routing.tokens:  # explore: above
            for k in range(size):
                if thread_index_x() == k % THREADS:
                    count = count_in(mask_for(area, k))
                    if count > capacity:
                        failed = True
                        rank = (guard.rank + 1 + k) % size
                        report_above(guard, rank, capacity, count)
            failed = sync_block_or(failed)
        return failed

    return route
