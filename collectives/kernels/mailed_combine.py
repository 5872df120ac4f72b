"""Combine of few tokens: each rank posts its results to the tokens' senders.

A call takes one latency: the ranks exchange no flags. ``few_tokens.py`` describes the
mailboxes, and the masks that the dispatch has left. A token's sender waits for the
ranks to which it sent the token, and adds up their results as ``expert_combine.py``
does: in rank order, in float32, with zeros for all other ranks. So the bits are the
same.

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

from numba_symm import waits
from numba_symm.collectives.protocols import binding, few_tokens, workspace
from numba_symm.collectives.protocols.exchanges import EVERYONE
from numba_symm.collectives.protocols.few_tokens import (
    Share,
    has,
    place_in,
    ranks_of,
    slot,
)
from numba_symm.collectives.protocols.tokens import make_load_result, typed
from numba_symm.collectives.protocols.workspace import VECTOR, sync_block
from numba_symm.device import intrinsics, lanes, order
from numba_symm.device.intrinsics import device_function, st_v2_u64, thread_index_x
from numba_symm.dtypes import Element
from numba_symm.kernels import Kernel, Launch


def make_load_of(size: int, element: Element, weighted: bool) -> Callable[..., Any]:
    """Return a device function that loads a vector of the result of a rank's token.

    ``(rank, made, area, k, token, vector, vectors)``: of a token of the k-th of the
    ring. It returns whether this rank has a result of it, and two words. ``made`` is
    ``(results, ids, weights, choices, capacity)``.
    """
    load = make_load_result(size, element, weighted)
    _, mask_from = few_tokens.make_masks(size)

    @device_function
    def load_of(
        rank: int,
        made: Any,
        area: int,
        k: int,
        token: int,
        vector: int,
        vectors: int,
    ) -> Any:
        results, ids, weights, choices, capacity = made
        mask, words = mask_from(area, k), (0, 0)
        found = has(mask, token)
        if found:
            place = place_in(mask, token)
            row = (rank + 1 + k) % size * capacity + place
            words = load(results, ids, weights, choices, row, vectors, vector)
        return found, words[0], words[1]

    return load_of


def make_send(size: int, load_of: Any, post_one: Any, box: Any) -> Callable[..., None]:
    """Return a device function by which a thread sends its vectors of an epoch.

    ``(rank, ring, epoch, at, made, area, share)``; ``at`` is the epoch's number in the
    call, the grid and the block.
    """
    others = size - 1

    @device_function
    def send(
        rank: int, ring: Any, epoch: int, at: Any, made: Any, area: int, share: Any
    ) -> None:
        number, grid, block = at
        for tile in range(share.tiles):
            token, vector = slot(share, number, tile, grid, block)
            boxes = box(block, epoch, 0, 0, tile, thread_index_x())
            for k in range(others):
                given = area, k, token, vector, share.vectors
                found, low, high = load_of(rank, made, *given)
                if found:
                    post_one(ring, k, boxes, low, high, epoch)

    return send


def make_take(
    size: int, element: Element, load_of: Any, receive: Any, box: Any
) -> Callable[..., bool]:
    """Return a device function by which a thread receives vectors and adds them up.

    ``(guard, own, epoch, at, made, area, share, into, low, high, spare)`` returns
    whether it gave up. The last three are local arrays of ``size``.
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
        area: int,
        share: Any,
        into: Any,
        low: Any,
        high: Any,
        spare: Any,
    ) -> bool:
        (number, grid, block), (target, tokens) = at, into
        for tile in range(share.tiles):
            token, vector = slot(share, number, tile, grid, block)
            if token < tokens:
                wanted = ranks_of(area, token) & (1 << others) - 1
                if wanted != 0:
                    boxes = own + box(block, epoch, 0, 0, tile, thread_index_x())
                    if not receive(guard, boxes, epoch, block, low, high, wanted):
                        return True  # explore: give-up
                given = area, others, token, vector, share.vectors
                _, low[0], high[0] = load_of(guard.rank, made, *given)
                for k in range(others):
                    if wanted >> k & 1 == 0:
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
    epochs, mail = few_tokens.make_mail(size, waits.COMBINE)
    next_epoch, box, _, post_one, receive, _, between_epochs = mail
    load_of, others = make_load_of(size, element, weighted), size - 1
    send = make_send(size, load_of, post_one, box)
    take = make_take(size, element, load_of, receive, box)

    def mailed_combine(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        share: Any,
        made: Any,
        area: int,
        into: Any,
    ) -> None:
        block, thread = intrinsics.block_index(), thread_index_x()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        epoch, found = workspace.resume(own, epochs, block)
        failed = found != 0
        for number in range(share.epochs):
            epoch = next_epoch(epoch)
            at = number, grid, block
            boxes = box(block, epoch, 0, 0, 0, 0)
            if thread == 0 and not failed:
                for k in range(others):
                    post_one(ring, k, boxes, 0, 0, epoch)
            if thread != 0 and not failed:
                send(guard.rank, ring, epoch, at, made, area, share)
            # A warp's threads may follow one another, so all send before one waits.
            if thread == 0 and not failed:
                boxes += own
                failed = not receive(guard, boxes, epoch, block, low, high, EVERYONE)
            if thread != 0 and not failed:
                given = made, area, share, into, low, high, spare
                failed = take(guard, own, epoch, at, *given)
            if number + 1 < share.epochs:
                if thread == 0:  # explore: fence
                    # Orders what thread 0 has received before the synchronization: the
                    # other threads may post to ranks from which they receive nothing.
                    intrinsics.fence_acq_rel_sys()
                failed = between_epochs(failed)
        # All have read the epoch before it changes.
        sync_block()  # explore: resumed
        workspace.keep(own, epochs, block, epoch, failed)

    return mailed_combine


@functools.cache
def kernel(size: int, element: Element, weighted: bool) -> Kernel:
    """Return the kernel, compiled when first bound."""
    words = types.int64
    arguments = typed(Share), types.UniTuple(words, 5), words, types.UniTuple(words, 2)
    constants, weight = (size, element, weighted), few_tokens.WEIGHT
    return binding.make_kernel(make_mailed_combine, constants, arguments, weight)


def bind(
    end: binding.Endpoint,
    grid: int,
    share: Share,
    element: Element,
    made: tuple[int, int, int, int, int],
    weighted: bool,
    area: int,
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
        area: the address of what the dispatch has left.
        into: where the sums are stored, and of how many tokens.
    """
    arguments = share, made, area, into
    of_call = kernel(end.size, element, weighted)
    return binding.launch(of_call, end, grid, arguments)
