"""Reductions of small messages that apply an epilogue themselves.

An all-reduce or a reduce-scatter exchanges vectors as ``one_shot.py`` does, through the
same mailboxes, whose epochs it continues. ``mailboxes.py`` states the order of memory
accesses. A block takes *pieces* of the message, or of its shards: one row, or one after
another as many vectors as its threads exchange in an epoch. Each thread keeps its
reduced elements in registers, applies the epilogue to them, and stores the results.

In every epoch, thread 0 has a vector. So thread 0 exchanges with all ranks, both ways,
as the mailboxes require.

Calls may be in place, and an operand may be the output: a thread has loaded whatever it
overwrites, and other threads load other elements of these arrays.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import (
    binding,
    exchanges,
    finishing,
    mailboxes,
    workspace,
)
from numba_symm.collectives.protocols.exchanges import EVERYONE
from numba_symm.collectives.protocols.workspace import ONE_SHOT, THREADS
from numba_symm.device import intrinsics
from numba_symm.device.lanes import make_lanes
from numba_symm.device.puts import Operand
from numba_symm.dtypes import Element, Op, UserEpilogue
from numba_symm.gpu.kernels import Kernel, Launch


def make_exchange(
    size: int,
    op: Op,
    source: Element,
    ragged: bool,
    transport: str,
    tiles: int,
    kind: exchanges.Exchange,
    by_row: bool,
) -> Any:
    """Return a device function that exchanges and reduces what is due in an epoch.

    ``(guard, ring, own, block, epoch, piece, failed, kept_low, kept_high, low, high,
    spare)`` returns whether the thread, or an earlier epoch, has failed.
    ``piece`` is ``(array, shard_bytes, first, length, count)``: ``first`` and
    ``length`` in vectors, ``count`` in elements, of a shard if the ranks send shards.
    The thread keeps the reduced vectors. The last three are local arrays of ``size``
    words.
    """
    lanes, others = make_lanes(source, op, ragged, size), size - 1
    load, sends_shards = lanes.load, kind.sends_shards
    reduce = exchanges.make_reduced(size, lanes, exchanges.Output.REDUCED)
    mail = mailboxes_of(size, transport, kind.operation)
    _, box, sent, post_one, receive, wipe, _ = mail

    @intrinsics.device_function
    def exchange(
        guard: Any,
        ring: Any,
        own: int,
        block: int,
        epoch: int,
        piece: Any,
        failed: bool,
        kept_low: Any,
        kept_high: Any,
        low: Any,
        high: Any,
        spare: Any,
    ) -> bool:
        array, shard_bytes, first, length, count = piece
        mine = array + guard.rank * shard_bytes if sends_shards else array
        thread = cuda.threadIdx.x
        for tile in range(tiles):
            at = tile * THREADS + thread
            if at < length and not failed:
                pair = load(mine, first + at, count)
                if not sends_shards:
                    pair = sent(pair[0], pair[1])
                kept_low[tile], kept_high[tile] = pair
                for k in range(others):
                    if sends_shards:
                        r = (guard.rank + 1 + k) % size
                        pair = load(array + r * shard_bytes, first + at, count)
                    low[k], high[k] = pair
                boxes = box(block, epoch, 0, 0, tile, thread)
                for k in range(others):
                    post_one(ring, k, boxes, low[k], high[k], epoch)
        if not by_row:  # for rows, they synchronize for the sum
            # All have read the epoch before it changes.
            workspace.sync_block()  # explore: resumed
        for tile in range(tiles):
            at = tile * THREADS + thread
            if at < length and not failed:
                boxes = own + box(block, epoch, 0, 0, tile, thread)
                if receive(guard, boxes, epoch, block, low, high, EVERYONE):
                    low[0], high[0] = kept_low[tile], kept_high[tile]
                    pair = reduce(guard.rank, size, low, high, spare)
                    kept_low[tile], kept_high[tile] = pair
                else:
                    failed = True
        if not failed:
            wipe(own, block, epoch, thread)
        return failed

    return exchange


def mailboxes_of(size: int, transport: str, operation: int) -> mailboxes.Mailboxes:
    """Return the device functions of the mailboxes of ``one_shot.py``."""
    region = getattr(workspace.layout(size), f"one_shot_{transport}")
    protocol = ONE_SHOT[transport]
    return mailboxes.make_mailboxes(size, transport, region, protocol, 1, operation)


def make_mailed_epilogue(
    size: int,
    op: Op,
    epilogue: UserEpilogue,
    source: Element,
    targets: tuple[Element, ...],
    operands: tuple[Operand, ...],
    ragged: bool,
    one_row: bool,
    transport: str,
    tiles: int,
    kind: exchanges.Exchange,
) -> Any:
    """Return the kernel; a thread has ``tiles`` vectors of a piece.

    Its other arguments are those of ``epilogue.make_apply`` and ``make_exchange``.
    """
    layout, in_vector = workspace.layout(size), source.lanes
    epochs = getattr(layout, f"one_shot_{transport}").epochs
    by_row, none = epilogue.row_sum is not None, source.accumulate.type(0)
    next_epoch, *_, between_epochs = mailboxes_of(size, transport, kind.operation)
    constants = size, op, source, ragged, transport, tiles, kind, by_row
    exchange = make_exchange(*constants)
    finish = finishing.make_finish(epilogue, source, targets, operands, ragged)
    words, written, _, gather, add_terms, apply_to, store = finish
    row_sum = finishing.make_row_sum(source, layout.partials.slots)

    def mailed_epilogue(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        given: int,
        results: Any,
        shard_bytes: int,
        count: int,
        columns: int,
        runs: int,
        pieces: int,
        span: int,
        extra: Any,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        kept_low = cuda.local.array(tiles, types.int64)
        kept_high = cuda.local.array(tiles, types.int64)
        low = cuda.local.array(size, types.int64)
        high = cuda.local.array(size, types.int64)
        spare = cuda.local.array(size, types.int64)
        held = cuda.local.array(words, types.int64)
        out = cuda.local.array(written, types.int64)
        thread = cuda.threadIdx.x
        epoch, mark = workspace.resume(own, epochs, block)
        failed, piece = mark != 0, block
        while piece < pieces:
            first = piece * span
            length = min(span, -(-count // in_vector) - first)
            of_piece = given, shard_bytes, first, length, count
            if piece > block:
                failed = between_epochs(failed)
            epoch = next_epoch(epoch)
            failed = exchange(
                *(guard, ring, own, block, epoch, of_piece, failed),
                *(kept_low, kept_high, low, high, spare),
            )
            total = none
            if by_row:  # a thread has one vector, and a block one row
                if thread < length and not failed:
                    column = thread * in_vector
                    place = piece * columns + column, piece, column, 0
                    held[0], held[1] = kept_low[0], kept_high[0]
                    gather(held, extra, place, columns - column)
                    total = add_terms(held, total, columns - column)
                # Threads agree on a failure here: the sum may lack another's terms.
                total, failed = row_sum(own, block, 0, thread, total, failed)
            for tile in range(tiles):
                at = tile * THREADS + thread
                if at < length and not failed:
                    row = 0 if one_row else piece if by_row else (first + at) // runs
                    column = (first + at - row * runs) * in_vector
                    place = row * columns + column, row, column, 0
                    held[0], held[1] = kept_low[tile], kept_high[tile]
                    gather(held, extra, place, columns - column)
                    apply_to(held, total, out, columns - column)
                    store(out, results, place[0], columns - column)
            piece += grid
        workspace.keep(own, epochs, block, epoch, failed)

    return mailed_epilogue


def weight_of(transport: str, epilogue: UserEpilogue) -> int:
    """Return the weight of the kernel: with a sum of rows, it has more registers."""
    by_row = epilogue.row_sum is not None
    return max(2 if by_row else 1, mailboxes.TRANSPORTS[transport].weight)


@functools.cache
def kernel(
    size: int,
    op: Op,
    epilogue: UserEpilogue,
    source: Element,
    targets: tuple[Element, ...],
    operands: tuple[Operand, ...],
    ragged: bool,
    one_row: bool,
    transport: str,
    tiles: int,
    kind: exchanges.Exchange,
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = size, op, epilogue, source, targets, operands, ragged, one_row
    arguments = finishing.arguments_of(targets, 6, operands)
    weight = weight_of(transport, epilogue)
    return binding.make_kernel(
        make_mailed_epilogue,
        (*constants, transport, tiles, kind),
        arguments,
        weight=weight,
    )


def fits(end: binding.Endpoint, work: finishing.Work, op: Op, transport: str) -> bool:
    """Return whether the kernel does a call: it follows from what ranks agree on.

    A vector has elements of one row. The operator is not a user's function, whose
    operations other kernels may contract. For sums of rows, each thread has one vector,
    and each block one row: with more, the exchange takes longer than a second kernel.
    """
    if not isinstance(op, str) or work.source.itemsize == 16:
        return False
    if work.rows > 1 and work.columns % work.source.lanes:
        return False
    if work.epilogue.row_sum is None:
        return True
    return work.runs <= THREADS and work.rows <= most_rows(
        end, work.epilogue, transport
    )


def most_rows(end: binding.Endpoint, epilogue: UserEpilogue, transport: str) -> int:
    """Return the most rows of a call that adds up rows, each in a block of its own."""
    weight = weight_of(transport, epilogue)
    return max(1, min(end.max_blocks // weight, ONE_SHOT[transport].most(end.size)))


def bind(
    end: binding.Endpoint,
    work: finishing.Work,
    call: binding.Call,
    transport: str,
    kind: exchanges.Exchange,
) -> Launch:
    """Return the packed launch.

    Args:
        end: this rank's end.
        work: what is to be done, which fits.
        call: the call.
        transport: how mailboxes are filled.
        kind: of the operation.
    """
    protocol, vectors = ONE_SHOT[transport], call.vectors
    weight = weight_of(transport, work.epilogue)
    heavier = weight // mailboxes.TRANSPORTS[transport].weight
    grid, tiles = mailboxes.mailed_grid(end, transport, protocol, vectors, heavier)
    span = tiles * THREADS
    if work.epilogue.row_sum is not None:
        grid, tiles, span = work.rows, 1, work.runs
    pieces = workspace.divide_up(vectors, span)
    of_call = kernel(
        *(end.size, call.op, work.epilogue, work.source, work.targets, work.operands),
        ragged=work.is_ragged(call.source, call.target),
        one_row=work.rows == 1,
        transport=transport,
        tiles=tiles,
        kind=kind,
    )
    shape = call.nbytes, call.count, work.columns, work.runs, pieces, span
    results = call.target, *work.more
    arguments = call.source, results, *shape, work.words or (0,)
    return binding.launch(of_call, end, min(grid, pieces), arguments)
