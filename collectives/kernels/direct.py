"""All operations between the ranks' own arrays, without slots: for larger messages.

A rank loads its shard of the other ranks' arrays, uses it and stores the result, vector
by vector. So no thread waits between the first vector and the last:

    all_reduce       each rank owns a shard: it reduces this shard of all inputs, and
                     stores the result in all outputs
    reduce_scatter   stores the result in its own output, at any address
    reduce           each rank but the root owns a shard; of two ranks, the root owns
                     everything. An owner stores the result in the root's output
    broadcast        each rank but the root owns a shard, of three ranks or more: it
                     loads this shard of the root's array, and stores it in its own and
                     the other owners'. Of two ranks, the root stores its array in the
                     other rank's
    all_gather       stores its input, or the other ranks' shards of it, in their
    all_to_all       outputs. If an output is not symmetric, it loads the other ranks'
                     inputs, or its shards of them, and stores them in its own output

Stores to another GPU are faster than loads. In each direction, a link transfers two
shards in an all-reduce, and the message at most once in a reduce or a broadcast. All
arrays of other ranks that a rank accesses must be symmetric: ``handshake.py`` explains
how the ranks exchange their addresses, and what happens otherwise.

Memory order: that of ``handshake.py``, which orders the streams' earlier work before a
block's loads and stores, and these before what follows on any rank's stream. Between
the two, no thread depends on another one, not even in place:

- In an all-reduce or a reduce, one thread of one rank loads a vector of all inputs, and
  then stores that vector of the outputs. No other thread accesses this vector, so any
  ranks may be in place.
- In a reduce-scatter or an all-gather in place, no rank stores what another one loads:
  a rank's output is its own shard of its input, or contains its input, which is this
  rank's shard in all outputs. Any other element of an output has one writer.
- An all-to-all in place is refused, because it would overwrite what is still loaded.
- In a broadcast of two ranks, the root loads, and the other rank does neither.

After a refusal, the last launch may be in place, as any call through the workspace.

Each element is reduced by one rank, by their tree, so all ranks get the same bits.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import (
    binding,
    handshake,
    partition,
    workspace,
)
from numba_symm.collectives.protocols.exchanges import Exchange, Output
from numba_symm.collectives.protocols.workspace import VECTOR, WIDE
from numba_symm.device import intrinsics, order
from numba_symm.device.lanes import Lanes, make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.kernels import Kernel

LOADS = 8  # vectors that a thread loads before it reduces them

MOVES = 6  # those that it loads before it stores them, of all ranks

BLOCKS = min(32, workspace.MAX_BLOCKS)
"""Most blocks. More simultaneous loads only congest the links."""

ALL_REDUCE_BLOCKS = min(14, workspace.MAX_BLOCKS)
"""Most blocks of an all-reduce of two ranks: as fast as 32 and faster than 16, and
products beside it lose less."""

EARLY_VECTORS = 32
"""The most vectors of a thread in a grid that has fewer blocks in order to be early."""


def is_everywhere(kind: Exchange) -> bool:
    """Return whether a rank stores its shard in other ranks' arrays, too."""
    reduced = kind.output is Output.REDUCED and not kind.sends_shards
    return reduced or kind.output is Output.OF_ROOT


def batch_of(size: int, output: Output) -> int:
    """Return how many vectors of each array a thread loads before it stores any."""
    if output is Output.OF_ROOT:
        return 2
    return max(1, (LOADS if output.reduces else MOVES) // size)


def make_move(size: int, lanes: Lanes, kind: Exchange) -> Callable[..., None]:
    """Return a device function that moves or reduces a thread's vectors of a shard.

    ``(sent, inputs, outputs, places, at, count, low, high)``: ``sent`` is the address
    of what the other ranks have sent. ``inputs`` is a local array of the shard's
    addresses. ``places`` are ``(into, offset, to_root)``. It stores the result at
    ``into``, and everywhere ``offset`` bytes from what each other rank has sent; but a
    broadcast's not in the root, which has the index ``to_root`` in the ring. What it
    gathers, it stores at ``outputs``, unless it is there. ``at`` is ``(start, stride,
    vectors)``: the vectors at ``start``, ``start + stride`` …, before ``vectors``. The
    others are local arrays.
    """
    output = kind.output
    reduces, gathers = output.reduces, output is Output.SHARDS
    everywhere = is_everywhere(kind) and (reduces or size > 2)
    loaded = 1 if output is Output.OF_ROOT else size
    store, total = lanes.store, order.make_total(size, lanes)
    others, batch = size - 1, batch_of(size, output)
    load_batch = handshake.make_load_batch(loaded, batch, lanes.load)
    write = lanes.slices.write

    def move_slices(
        sent: int,
        inputs: Any,
        outputs: Any,
        places: Any,
        at: Any,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        into, offset, to_root = places
        start, stride, vectors = at
        mine = range(start, vectors, stride)
        words = lanes.slices.read_each(inputs, mine, count)
        for k in range(size if gathers else 0):
            if outputs[k] != inputs[k]:
                write(int(outputs[k]), mine, count, words[k])
        if not gathers:
            result = lanes.fold(words) if reduces else words[0]
            write(into, mine, count, result)
            for k in range(others if everywhere else 0):
                _, there = handshake.words_of(sent, k)
                if reduces or k != to_root:
                    write(there + offset, mine, count, result)

    @intrinsics.sliced(move_slices)
    def move(
        sent: int,
        inputs: Any,
        outputs: Any,
        places: Any,
        at: Any,
        count: int,
        low: Any,
        high: Any,
    ) -> None:
        into, offset, to_root = places
        start, stride, vectors = at
        while start < vectors:
            load_batch(inputs, start, stride, vectors, count, low, high)
            for i in range(batch * size if gathers else 0):
                vector = start + i // size * stride
                there = intrinsics.word_of(outputs[i % size])
                if vector < vectors and there != inputs[i % size]:
                    store(there, vector, count, low[i], high[i])
            for i in range(batch if reduces else 0):
                if start + i * stride < vectors:
                    # What was loaded there is reduced by now.
                    low[i], high[i] = total(low, high, i * size)
            for i in range(0 if gathers else batch):
                vector = start + i * stride
                if vector < vectors:
                    store(into, vector, count, low[i], high[i])
            for k in range(others if everywhere else 0):
                # Loaded again, because the registers cannot hold all addresses beside a
                # vector of each of eight ranks.
                _, there = handshake.words_of(sent, k)  # explore: everywhere
                outputs[k] = there + offset  # explore: whose
            # Along the ring, so that the ranks do not all store at the same one.
            for k in range(others if everywhere else 0):
                for i in range(batch):
                    vector = start + i * stride
                    if vector < vectors and (reduces or k != to_root):
                        there = intrinsics.word_of(outputs[k])
                        store(there, vector, count, low[i], high[i])
            start += batch * stride

    return move


def make_find_shards(size: int, sends_shards: bool) -> Callable[..., None]:
    """Return a device function for ``size`` ranks, of an all-gather or all-to-all.

    ``(sent, rank, places, inputs, outputs)`` fills the local arrays ``inputs`` and
    ``outputs`` with where this rank loads and stores: for each other rank, either its
    own shard for that one and a place in that one's output, if it has sent that, or a
    place in that one's input and in its own output. The last ones are for itself.
    ``places`` are ``(source, target, offset, shard_bytes)``.
    """
    others = size - 1

    @intrinsics.device_function
    def find_shards(
        sent: int, rank: int, places: Any, inputs: Any, outputs: Any
    ) -> None:
        source, target, offset, shard_bytes = places
        inputs[others] = source + offset
        outputs[others] = target + rank * shard_bytes
        for k in range(others):
            whose = (rank + 1 + k) % size
            theirs, written = handshake.words_of(sent, k)
            inputs[k] = theirs + offset
            outputs[k] = target + whose * shard_bytes
            if written != 0:  # explore: stores
                inputs[k] = source + (whose * shard_bytes if sends_shards else 0)
                outputs[k] = written + rank * shard_bytes  # explore: shard-there

    return find_shards


def make_direct(
    size: int, element: Element, op: Op, ragged: bool, kind: Exchange
) -> Any:
    """Return the kernel for ``size`` ranks, an element type and an operation."""
    output = kind.output
    move = make_move(size, make_lanes(element, op, ragged, size), kind)
    refused, place_of = handshake.make_refused(size), handshake.make_place(size)
    meet, part = handshake.make_meet(size, WIDE), handshake.make_part(size, WIDE)
    epochs, operation = workspace.layout(size).direct.epochs, kind.operation
    find_inputs = handshake.make_find_inputs(size)
    find_shards = make_find_shards(size, kind.sends_shards)
    gathers, of_root = output is Output.SHARDS, output is Output.OF_ROOT
    from_root = of_root and size > 2
    to_other = output.rooted and of_root != (size > 2)
    held = batch_of(size, output) * (1 if of_root else size)

    def direct(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        offset: int,
        shard_bytes: int,
        count: int,
        vectors: int,
        to_root: int,
        digest: int,
        read: Any,
        written: Any,
    ) -> None:
        # ``source`` and ``target`` are this rank's shard of its own arrays; of the
        # other ranks' arrays, it begins after ``offset`` bytes.
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(False)  # the last launch begins at the end
        before, failed = workspace.resume(own, epochs, block)
        epoch = (before + 1) & 0xFFFFFFFF
        failed = meet(
            *(guard, operation, ring, own, block, epoch),
            *(digest, read, written, failed != 0),
        )
        sent = place_of(own, block)
        found = refused(sent)
        if vectors > 0 and not found and not failed:  # explore: refused
            low = cuda.local.array(held, types.int64)
            high = cuda.local.array(held, types.int64)
            inputs = cuda.local.array(1 if of_root else size, types.int64)
            outputs = cuda.local.array(size, types.int64)
            into = target
            if to_other:
                _, there = handshake.words_of(sent, to_root)  # explore: into
                into = there + offset
            if from_root:
                there, _ = handshake.words_of(sent, to_root)
                inputs[0] = there + offset
            elif of_root:
                inputs[0] = source
            elif gathers:
                whole = source - offset, target, offset, shard_bytes
                find_shards(sent, guard.rank, whole, inputs, outputs)
            else:
                find_inputs(sent, guard.rank, source, offset, inputs)  # explore: shard
            places = into, offset, to_root
            at = block * WIDE + cuda.threadIdx.x, grid * WIDE, vectors
            move(sent, inputs, outputs, places, at, count, low, high)
        # The last launch may begin when one block of each thread block is here. Others
        # may still wait, but for thread blocks that are running on all ranks.
        intrinsics.griddepcontrol_launch_dependents()
        part(guard, operation, ring, own, block, found, failed)

    return direct


@functools.cache
def kernel(size: int, element: Element, op: Op, ragged: bool, kind: Exchange) -> Kernel:
    """Return the kernel, compiled when first bound.

    Beside its vectors, a thread holds an address for each rank. So those of many ranks
    need more registers.
    """
    constants = size, element, op, ragged, kind
    arguments = *2 * (binding.ADDRESS,), *6 * (types.int64,), *2 * (binding.RING,)
    weight = 1 if size <= 4 else 2
    return binding.make_kernel(make_direct, constants, arguments, weight, WIDE)


def bind(
    kind: Exchange,
    bind_fallback: binding.BindFallback,
    end: binding.Endpoint,
    call: binding.Call,
) -> binding.Enqueue:
    """Return what enqueues a call, for two ranks or more.

    Args:
        kind: the operation's exchange, with the number of what the ranks wait for.
        bind_fallback: binds the operation through the workspace.
        end: this rank's end.
        call: the call. A broadcast's source and target are one.
    """
    rank, size, output, root = end.rank, end.size, kind.output, call.root
    source, target, lanes = call.source, call.target, call.element.lanes
    share, vectors, count = call.vectors, call.vectors, call.count
    offset = rank * call.nbytes if kind.sends_shards else 0
    number = rank
    if output.rooted or is_everywhere(kind):
        # Owners are numbered from the one after the root on, or from the root.
        if output.rooted:
            number = (rank - root - (size > 2)) % size
        owners = size - output.rooted
        share = partition.shard(call.vectors, owners)
        first = number * share
        vectors = max(0, min(share, call.vectors - first)) if number < owners else 0
        offset, count = VECTOR * first, min(share * lanes, call.count - first * lanes)
        target += offset
    shards = size if kind.sends_shards else 1
    inputs = outputs = handshake.offered(end, source, call.nbytes * shards)
    if output is Output.SHARDS:
        into = handshake.offered(end, target, call.nbytes * size)
        if kind.sends_shards and source == target:
            inputs = into = handshake.refusal(size)
        # Stores are faster than loads. All ranks do the same, or the call is refused.
        inputs = inputs if into[0] == handshake.REFUSED else into
        outputs = into
    elif (is_everywhere(kind) and output.reduces) or (
        output is Output.AT_ROOT and rank == root
    ):
        outputs = handshake.offered(end, call.target, call.nbytes)
        if outputs[0] == handshake.REFUSED:  # explore: both
            inputs = outputs
    ragged = partition.is_ragged(call)
    element = call.element if output.reduces else partition.moved_as(call, ragged)
    # Of two ranks, each is the other one's first neighbour.
    to_root = (root - rank - 1) % size if size > 2 else 0
    sizes = call.nbytes, count, vectors, to_root
    of_call = kernel(size, element, call.op, ragged, kind)
    room = of_call.held * end.multiprocessors
    most, tiles = BLOCKS, workspace.divide_up(share, WIDE)
    if size == 2 and is_everywhere(kind) and output.reduces:
        most = ALL_REDUCE_BLOCKS
    grid = binding.most_blocks(end, min(room, most), 1, tiles, EARLY_VECTORS)
    grid = min(tiles, grid)
    words = f"{kind} of {call.count} {call.element.name} by {call.op!r} at {root}"
    sent = binding.digest_of(words), inputs, outputs
    arguments = (source + offset, target, offset, *sizes, *sent)
    move = binding.launch(of_call, end, grid, arguments, long=grid == BLOCKS)
    return binding.Series(move, bind_fallback(end, call, handshake.MOVED))
