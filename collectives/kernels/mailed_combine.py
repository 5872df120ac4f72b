"""Combine of few tokens: each rank posts its results to the tokens' senders.

A call takes one latency: the ranks exchange no flags. ``few_tokens.py`` describes the
mailboxes, and the table of places that the dispatch has left. The mailbox follows from
the token's number on its sender. So one thread receives the results of all ranks, and
adds them up as ``expert_combine.py`` does: by the ranks' tree, in float32, with zeros
for all ranks that have none. So the bits are the same.

A rank sends its results from any array, and no other rank loads that array. If there is
a result for each choice of a token, the rank adds these up first, each times its
weight.

Source: the low-latency combine of DeepEP.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, few_tokens, workspace
from numba_symm.collectives.protocols.few_tokens import Share, place_of, slot
from numba_symm.collectives.protocols.tokens import make_load_result, typed
from numba_symm.collectives.protocols.workspace import VECTOR, sync_block
from numba_symm.device import intrinsics, lanes, order
from numba_symm.device.intrinsics import device_function, st_v2_u64, word_of
from numba_symm.dtypes import Element
from numba_symm.gpu.kernels import Kernel, Launch
from numba_symm.launch import failures

_LOADS = 4  # vectors that a thread loads before it posts them


def make_load_of(size: int, element: Element, weighted: bool) -> Callable[..., Any]:
    """Return a device function that loads a vector of this rank's result of a token.

    ``(rank, made, k, place, vector, vectors)``: of a token of the k-th of the ring.
    ``place`` is ``place_of`` it; 0: there is none, and the words are 0. ``made`` is
    ``(results, ids, weights, choices, capacity)``.
    """
    load = make_load_result(size, element, weighted)

    @device_function
    def load_of(
        rank: int, made: Any, k: int, place: int, vector: int, vectors: int
    ) -> Any:
        results, ids, weights, choices, capacity = made
        words = 0, 0
        if place != 0:
            row = (rank + 1 + k) % size * capacity + place - 1
            words = load(results, ids, weights, choices, row, vectors, vector)
        return words

    return load_of


def make_send(size: int, load_of: Any, post: Any) -> Callable[..., None]:
    """Return a device function by which a thread sends its vectors of an epoch.

    ``(rank, ring, epoch, at, made, table, share, low, high, places)``; ``at`` is the
    epoch's number in the call, the grid and the block. The last three are local arrays
    of ``batch_of(size) * size``.
    """
    others, batch = size - 1, batch_of(size)

    @device_function
    def send(
        rank: int,
        ring: Any,
        epoch: int,
        at: Any,
        made: Any,
        table: int,
        share: Any,
        low: Any,
        high: Any,
        places: Any,
    ) -> None:
        number, grid, block = at
        for first in range(0, share.tiles, batch):
            for i in range(batch):
                token, _ = slot(share, number, first + i, grid, block)
                for k in range(others):
                    place = 0
                    if first + i < share.tiles:
                        place = place_of(table, k, share, token)
                    places[i * size + k] = place
            for i in range(batch):
                _, vector = slot(share, number, first + i, grid, block)
                for k in range(others):
                    j = i * size + k
                    given = k, word_of(places[j]), vector, share.vectors
                    low[j], high[j] = load_of(rank, made, *given)
            for i in range(batch):
                if first + i < share.tiles:
                    for k in range(others):
                        j = i * size + k
                        tag = 1 if word_of(places[j]) != 0 else 0
                        what = low[j], high[j], tag
                        post(ring, k, block, epoch, first + i, *what)

    return send


def batch_of(size: int) -> int:
    """Return how many vectors a thread loads of each rank before it posts them."""
    return max(1, _LOADS // size)


def make_take(
    size: int, element: Element, load_of: Any, receive: Any
) -> Callable[..., bool]:
    """Return a device function by which a thread receives vectors and adds them up.

    ``(guard, own, epoch, at, made, table, share, into, low, high, spare, tags)``
    returns whether it gave up. The last four are local arrays.
    """
    in_rank_order, others = order.make_in_rank_order(size), size - 1
    total = order.make_total(size, lanes.make_lanes(element, "sum", False, size))

    @device_function
    def take(
        guard: Any,
        own: int,
        epoch: int,
        at: Any,
        made: Any,
        table: int,
        share: Any,
        into: Any,
        low: Any,
        high: Any,
        spare: Any,
        tags: Any,
    ) -> bool:
        (number, grid, block), (target, tokens) = at, into
        for tile in range(share.tiles):
            token, vector = slot(share, number, tile, grid, block)
            place = place_of(table, others, share, token)
            mine = load_of(guard.rank, made, others, place, vector, share.vectors)
            if not receive(guard, own, block, epoch, tile, low, high, tags):
                return True  # explore: give-up
            if token < tokens:
                low[0], high[0] = mine
                for k in range(others):
                    if word_of(tags[k + 1]) == 0:
                        low[k + 1], high[k + 1] = 0, 0
                in_rank_order(guard.rank, low, high, spare)
                row = target + VECTOR * token * share.vectors
                st_v2_u64(row + VECTOR * vector, total(low, high, 0))
        return False

    return take


def make_mailed_combine(size: int, element: Element, weighted: bool) -> Any:
    """Return the kernel for ``size`` ranks, at least two.

    Args:
        size: the number of ranks.
        element: the type of the results.
        weighted: whether there is a result for each choice of a token; otherwise, there
            is one for each token.
    """
    epochs, mail = few_tokens.make_mail(size, failures.COMBINE)
    next_epoch, between_epochs = mail.next_epoch, mail.between_epochs
    load_of, number_of = make_load_of(size, element, weighted), batch_of(size) * size
    send = make_send(size, load_of, mail.post)
    take = make_take(size, element, load_of, mail.receive)

    def mailed_combine(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        share: Any,
        made: Any,
        table: int,
        into: Any,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        first = cuda.local.array(number_of, types.int64)
        second = cuda.local.array(number_of, types.int64)
        places = cuda.local.array(number_of, types.uint32)
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        tags = cuda.local.array(size, types.uint32)
        epoch, found = workspace.resume(own, epochs, block)
        failed = found != 0
        for number in range(share.epochs):
            epoch = next_epoch(epoch)
            at = number, grid, block
            if not failed:
                given = made, table, share, first, second, places
                send(guard.rank, ring, epoch, at, *given)
            if number == 0:
                # All have read the epoch before it changes.
                sync_block()  # explore: resumed
            if not failed:
                local = low, high, spare, tags
                failed = take(guard, own, epoch, at, made, table, share, into, *local)
            if number + 1 < share.epochs:
                failed = between_epochs(failed)
        workspace.keep(own, epochs, block, epoch, failed)

    return mailed_combine


@functools.cache
def kernel(size: int, element: Element, weighted: bool) -> Kernel:
    """Return the kernel, compiled when first bound."""
    words = types.int64
    arguments = typed(Share), types.UniTuple(words, 5), words, types.UniTuple(words, 2)
    constants, weight = (size, element, weighted), few_tokens.weight_of(size)
    return binding.make_kernel(make_mailed_combine, constants, arguments, weight)


def bind(
    end: binding.Endpoint,
    grid: int,
    share: Share,
    element: Element,
    made: tuple[int, int, int, int, int],
    weighted: bool,
    table: int,
    into: tuple[int, int],
) -> Launch:
    """Return the launch.

    Args:
        end: this rank's end.
        grid: the number of blocks, equal on all ranks.
        share: how they share the results of tokens, equal on all ranks.
        element: the type of the results.
        made: the addresses of this rank's results, and of the expert numbers and
            weights of what it has received; the choices of a token; and for how many
            tokens of each rank there is room.
        weighted: whether there is a result for each choice.
        table: the address of the table of places that the dispatch has left.
        into: where the sums are stored, and of how many tokens.
    """
    arguments = share, made, table, into
    of_call = kernel(end.size, element, weighted)
    return binding.launch(of_call, end, grid, arguments)
