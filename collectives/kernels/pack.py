"""Kernels on the arrays of one rank: pack, convert, copy, digest and reduce.

Copies between a strided array and contiguous memory of this rank.

The kernel waits for no rank, and stores only in its own rank's memory. It moves words
of the largest size that divides all addresses and strides. Axes whose elements follow
one another are treated as one axis. One kernel moves words of all sizes, in both
directions, so few kernels have to be loaded.

Conversion of an array to another type, and the division of an average.

Between islands, elements have the type in which they accumulate. So they are widened
before the first reduction. After the last one, they are divided by the number of ranks
for an average, and converted back. Each thread reads and writes elements of its own; no
other rank takes part.

A rank's message to itself, whose number of elements is on the rank's GPU.

No other rank takes part. If the count is above the capacity, the kernel stores nothing,
and the communicator fails, as in ``transfer.py``.

The digest of an array on this rank's GPU. The kernel waits for no rank.

Each block adds the hashes of one range, so ranges can be compared between ranks.

The reduction of several shards or leaves in this rank's memory.

In calls over several islands, ranks receive the shards from other islands, and reduce
them by the tree of the islands. Each thread reads and writes vectors of its own. No
other rank takes part.

A thread reduces ``MOST`` shards at a time, and stores the results of more than these in
the first shard of each group, until the last group is all of them.
"""

import functools
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.credit import ABSENT, Message, read_span
from numba_symm.collectives.protocols.workspace import THREADS, VECTOR, sync_block_or
from numba_symm.device import groups, intrinsics, lanes, order
from numba_symm.device.lanes import make_access, make_conversion, make_lanes
from numba_symm.dtypes import Element, Op
from numba_symm.gpu.kernels import Kernel, Launch

MOST_AXES = 4
"""The most axes of a launch."""


def make_pack(axes: int) -> Any:
    """Return the kernel.

    Args:
        axes: the number of axes.
    """
    load_1, store_1 = _access(1)
    load_2, store_2 = _access(2)
    load_4, store_4 = _access(4)
    load_8, store_8 = _access(8)

    def pack(
        packed: int,
        spread: int,
        word: int,
        packing: int,
        count: int,
        grid: int,
        lengths: Any,
        strides: Any,
    ) -> None:
        index = intrinsics.block_index() * THREADS + intrinsics.thread_index_x()
        while index < count:
            rest, source = index, spread
            for step in range(axes):
                axis = axes - 1 - step
                above = rest // lengths[axis]
                source += (rest - above * lengths[axis]) * strides[axis]
                rest = above
            target = packed + word * index
            if not packing:
                source, target = target, source
            if word == 8:
                store_8(target, load_8(source))
            elif word == 4:
                store_4(target, load_4(source))
            elif word == 2:
                store_2(target, load_2(source))
            else:
                store_1(target, load_1(source))
            index += grid * THREADS

    return pack


def _access(word: int) -> Any:
    """Return device functions that load and store a word."""
    return lanes.make_access(word)


@functools.cache
def kernel(axes: int) -> Kernel:
    """Return the kernel, compiled when first bound."""
    listed = types.UniTuple(types.int64, axes)
    signature = *(types.int64,) * 6, listed, listed
    return Kernel(make_pack, (axes,), signature, THREADS, workspace.HELD)


def bind(
    packed: int,
    spread: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    packing: bool,
) -> binding.Enqueue:
    """Return the packed launch of a copy of at least one element.

    For more than ``MOST_AXES`` axes, there is a launch for each index of the others.

    Args:
        packed: the address of the contiguous memory.
        spread: the address of the array's first element.
        shape: the array's shape.
        strides: its strides, in bytes.
        itemsize: the bytes of an element.
        packing: whether to copy to the contiguous memory; else from there.
    """
    axes = _joined([*zip(shape, strides, strict=True), (itemsize, 1)])
    run = axes[-1][0]
    word = math.gcd(8, packed, spread, run, *(stride for _, stride in axes[:-1]))
    axes[-1] = run // word, word
    outer, axes = axes[:-MOST_AXES], axes[-MOST_AXES:]
    count = math.prod(length for length, _ in axes)
    grid = min(workspace.divide_up(count, THREADS), workspace.MAX_BLOCKS)
    lengths, steps = zip(*axes, strict=True)
    launches = []
    for number, indices in enumerate(product(*(range(n) for n, _ in outer))):
        first = sum(i * stride for i, (_, stride) in zip(indices, outer, strict=True))
        launch = kernel(len(axes)).bind(
            grid,
            packed + number * count * word,
            spread + first,
            word,
            int(packing),
            count,
            grid,
            lengths,
            steps,
            held=workspace.HELD,
        )
        launches.append(launch)
    return launches[0] if len(launches) == 1 else binding.Series(*launches)


def _joined(axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return as few axes, as lengths and strides, for elements in the same order."""
    found = [axes[-1]]
    for length, stride in reversed(axes[:-1]):
        inner, step = found[0]
        if length == 1:
            continue
        if stride == inner * step:
            found[0] = length * inner, step
        else:
            found.insert(0, (length, stride))
    return found


def make_convert(
    size: int, source: Element, target: Element, op: Op, terms: int
) -> Any:
    """Return the kernel, which stores nothing after a failure.

    Args:
        size: the number of ranks of the island.
        source: as for ``lanes.make_conversion``.
        target: as there.
        op: as there.
        terms: by how many an average divides.
    """
    if source == target:  # whole vectors
        vectors = make_lanes(source, op, True, terms)
        unpack, pack = vectors.unpack, vectors.pack
        load, store = vectors.load, vectors.store
        lanes = source.lanes

        def finish(
            guard: Any,
            early: bool,
            ring: Any,
            own: int,
            grid: int,
            given: int,
            result: int,
            count: int,
        ) -> None:
            block = intrinsics.block_index()
            if block >= grid:
                return
            workspace.follow_previous_grid(early)
            if workspace.load_failure(own, block) != 0:  # explore: finish-failed
                return  # what was reduced may be wrong
            vector = block * THREADS + cuda.threadIdx.x
            while vector * lanes < count:
                low, high = load(given, vector, count)
                words = pack(unpack(low, high))
                store(result, vector, count, words[0], words[1])
                vector += grid * THREADS

        return finish

    one = make_conversion(source, target, op, terms)
    load_one, _ = make_access(source.itemsize)
    _, store_one = make_access(target.itemsize)
    read, written = source.itemsize, target.itemsize

    def convert(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        given: int,
        result: int,
        count: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if workspace.load_failure(own, block) != 0:  # explore: convert-failed
            return  # what was reduced may be wrong
        i = block * THREADS + cuda.threadIdx.x
        while i < count:
            store_one(result + written * i, one(load_one(given + read * i)))
            i += grid * THREADS

    return convert


convert_kernel = binding.kernels_of(
    make_convert, binding.ADDRESS, binding.ADDRESS, types.int64
)
"""Returns a kernel, compiled when first bound."""


def bind_convert(
    end: binding.Endpoint,
    kinds: tuple[Element, Element],
    given: int,
    result: int,
    count: int,
    op: Op = "sum",
    terms: int = 1,
) -> Launch:
    """Return the launch for an array of ``count`` elements.

    Args:
        end: this rank's end.
        kinds: the types of the array and of the result.
        given: address of the array.
        result: address of the result.
        count: number of elements.
        op: the operator that is finished; "sum" only converts.
        terms: by how many an average divides.
    """
    source, target = kinds
    lanes = source.lanes if source == target else 1
    grid = min(
        workspace.divide_up(workspace.divide_up(count, lanes), THREADS), end.max_blocks
    )
    if op != "avg":
        terms = 1  # one kernel for all numbers of them
    found = convert_kernel(end.size, source, target, op, terms)
    return binding.launch(found, end, grid, (given, result, count), waits=False)


def make_counted_copy(size: int, width: int) -> Any:
    """Return the kernel for words of ``width`` bytes."""
    load, store = lanes.make_access(width)

    def counted_copy(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        capacity: int,
        words: int,
        count_at: int,
        span: Any,
        stored_at: int,
    ) -> None:
        block, thread = intrinsics.block_index(), intrinsics.thread_index_x()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        count, first = read_span(guard, guard.rank, capacity, count_at, span, False)
        failed = workspace.load_failure(own, block) != 0 or count == ABSENT
        if sync_block_or(failed):
            workspace.keep_failure(own, True)
            return
        if stored_at != 0 and block == 0 and thread == 0:
            intrinsics.st_u64(stored_at, count)
        start = source + width * words * first
        i = block * THREADS + thread
        while i < count * words:
            store(target + width * i, load(start + width * i))
            i += grid * THREADS

    return counted_copy


counted_copy_kernel = binding.kernels_of(
    make_counted_copy, *5 * (types.int64,), types.UniTuple(types.int64, 3), types.int64
)
"""Returns a kernel, compiled when first bound."""


def bind_counted_copy(
    end: binding.Endpoint, sent: Message, received: Message
) -> Launch:
    """Return the launch for both ends of a message with a count.

    Args:
        end: this rank's end.
        sent: what it sends itself.
        received: where it is stored; its ``count_at`` may be 0.
    """
    bits = sent.address | received.address | sent.itemsize
    width = min(8, bits & -bits)
    words, capacity = sent.itemsize // width, sent.nbytes // sent.itemsize
    grid = min(
        max(1, workspace.divide_up(capacity * words, 4 * THREADS)), end.max_blocks
    )
    places = sent.address, received.address, capacity, words
    arguments = *places, sent.count_at, sent.span, received.count_at
    return binding.launch(counted_copy_kernel(end.size, width), end, grid, arguments)


def make_digest() -> Any:
    """Return the kernel, whose threads store sums of the hashes of vectors."""
    sum_of_hashes, st_u64 = groups.sum_of_hashes, intrinsics.st_u64

    def digest(
        address: int, nbytes: int, first: int, end: int, span: int, sums: int
    ) -> None:
        block, thread = intrinsics.block_index(), cuda.threadIdx.x
        start = first + block * span
        stop = min(start + span, end)
        total = sum_of_hashes(address, nbytes, start + thread, stop, THREADS)
        st_u64(sums + 8 * (block * THREADS + thread), total)

    return digest


@functools.cache
def digest_kernel() -> Kernel:
    """Return the kernel, compiled when first bound."""
    signature = binding.ADDRESS, *(types.int64,) * 4, binding.ADDRESS
    return Kernel(make_digest, (), signature, THREADS)


def bind_digest(
    address: int, nbytes: int, first: int, end: int, span: int, sums: int
) -> Launch:
    """Return the launch for the digests of ranges of an array.

    Args:
        address: the array's address.
        nbytes: its size.
        first: the vector of 16 bytes at which the first range begins.
        end: the vector at which the last range ends, more than ``first``.
        span: the vectors of each range but the last, which may have fewer.
        sums: the address of one 8-byte word for each thread. A range's digest is the
            sum, modulo 2**64, of its block's words.
    """
    blocks = workspace.divide_up(end - first, span)
    return digest_kernel().bind(blocks, address, nbytes, first, end, span, sums)


MOST = 8
"""The most shards of which a thread has a vector at a time."""


def make_reduce_shards(number: int, more: bool, element: Element, op: Op) -> Any:
    """Return the kernel.

    Args:
        number: of how many shards a thread loads a vector at a time.
        more: whether there are more shards.
        element: their type.
        op: the operator.
    """
    access = lanes.make_lanes(element, op, False, number)
    of_first = order.make_of_first(number, access)

    @intrinsics.device_function
    def reduced(at: int, apart: int, taken: int, low: Any, high: Any) -> Any:
        for i in range(number):
            if i < taken:
                low[i], high[i] = intrinsics.ld_v2_u64(at + i * apart)
        return of_first(low, high, 0, taken)

    def reduce_shards(
        grid: int, shards: int, result: int, vectors: int, total: int
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        low = cuda.local.array(number, types.int64)
        high = cuda.local.array(number, types.int64)
        vector = block * THREADS + cuda.threadIdx.x
        while vector < vectors:
            begin, apart, taken = shards + VECTOR * vector, VECTOR * vectors, number
            if more:
                left = total  # shards at a distance of ``apart``
                while left > number:
                    for first in range(0, left, number):
                        taken, at = min(number, left - first), begin + first * apart
                        words = reduced(at, apart, taken, low, high)
                        intrinsics.st_v2_u64(at, words)
                    left, apart = (left + number - 1) // number, number * apart
                taken = left
            words = reduced(begin, apart, taken, low, high)
            intrinsics.st_v2_u64(result + VECTOR * vector, words)
            vector += grid * THREADS

    return reduce_shards


def make_reduce_leaves(
    number: int, more: bool, element: Element, carried: Element, op: Op
) -> Any:
    """Return the kernel; of more than ``number`` leaves, each group has a result.

    Args:
        number: of how many leaves a thread loads a vector at a time.
        more: whether there are more leaves.
        element: their type.
        carried: the type of results.
        op: the operator.
    """
    access = lanes.make_lanes(carried, op, True, number)
    of_first = order.make_of_first(number, access)
    load = access.load if element == carried else _make_widening(element, carried)
    itemsize, in_vector = element.itemsize, carried.lanes

    def reduce_leaves(
        grid: int, leaves: int, result: int, count: int, total: int
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        low = cuda.local.array(number, types.int64)
        high = cuda.local.array(number, types.int64)
        vectors, taken = (count + in_vector - 1) // in_vector, number
        vector = block * THREADS + cuda.threadIdx.x
        while vector < vectors:
            at = result + VECTOR * vector
            for first in range(0, total, number):
                if more:
                    taken = min(number, total - first)
                for i in range(number):
                    if i < taken:
                        leaf = leaves + (first + i) * count * itemsize
                        low[i], high[i] = load(leaf, vector, count)
                words = of_first(low, high, 0, taken)
                intrinsics.st_v2_u64(at, words)
                at += VECTOR * vectors
            vector += grid * THREADS

    return reduce_leaves


def _make_widening(element: Element, carried: Element) -> Any:
    """Return ``Lanes.load`` for narrower elements, whose vectors become wide ones."""
    widen = lanes.make_conversion(element, carried, "sum", 1)
    load_one, _ = lanes.make_access(element.itemsize)
    in_word, width, itemsize = (
        carried.lanes // 2,
        8 * carried.itemsize,
        element.itemsize,
    )

    @intrinsics.device_function
    def load(array: int, vector: int, count: int) -> Any:
        low, high, first = 0, 0, 2 * in_word * vector
        for i in range(in_word):
            if first + i < count:
                bits = load_one(array + (first + i) * itemsize)
                low |= intrinsics.word_of(widen(bits)) << width * i
            if first + in_word + i < count:
                bits = load_one(array + (first + in_word + i) * itemsize)
                high |= intrinsics.word_of(widen(bits)) << width * i
        return intrinsics.word_of(low), intrinsics.word_of(high)

    return load


def reduce_shards_kernel(number: int, element: Element, op: Op) -> Kernel:
    """Return the kernel for a number of shards, compiled when first bound."""
    return _kernel(min(number, MOST), number > MOST, element, op)


@functools.cache
def _kernel(number: int, more: bool, element: Element, op: Op) -> Kernel:
    signature = types.int64, *(binding.ADDRESS,) * 2, *(types.int64,) * 2
    constants = number, more, element, op
    return Kernel(make_reduce_shards, constants, signature, THREADS, workspace.HELD)


def bind_reduce_shards(
    end: binding.Endpoint,
    shards: int,
    vectors: int,
    own: int,
    number: int,
    element: Element,
    op: Op,
) -> Launch:
    """Return the packed launch.

    Args:
        end: this rank's end of its island.
        shards: address of the first shard, on a 16-byte boundary; the others follow.
        vectors: whole vectors of each shard.
        own: the number of the shard that gets the result.
        number: how many shards there are.
        element: their type.
        op: the operator.
    """
    grid = min(workspace.divide_up(vectors, THREADS), end.max_blocks)
    held = workspace.divide_up(grid, end.multiprocessors)
    result = shards + own * VECTOR * vectors
    of_call = reduce_shards_kernel(number, element, op)
    return of_call.bind(grid, grid, shards, result, vectors, number, held=held)


@functools.cache
def leaves_kernel(number: int, element: Element, carried: Element, op: Op) -> Kernel:
    """Return the kernel for a number of leaves, compiled when first bound."""
    signature = types.int64, *(binding.ADDRESS,) * 2, *(types.int64,) * 2
    constants = min(number, MOST), number > MOST, element, carried, op
    return Kernel(make_reduce_leaves, constants, signature, THREADS, workspace.HELD)


def bind_leaves(
    end: binding.Endpoint,
    call: binding.Carried,
    number: int,
    leaves: int,
    result: int,
    count: int,
) -> binding.Series:
    """Return the launches that reduce leaves to carried elements.

    Args:
        end: this rank's end of its island.
        call: has the types and the operator.
        number: how many leaves there are.
        leaves: address of the first one; the others follow, without gaps.
        result: address of the result, on a 16-byte boundary; ``leaves_room`` bytes.
        count: the elements of a leaf.
    """
    carried, groups = call.element, workspace.divide_up(number, MOST)
    vectors = workspace.divide_up(count, carried.lanes)
    grid = min(workspace.divide_up(vectors, THREADS), end.max_blocks)
    held = workspace.divide_up(grid, end.multiprocessors)
    found = leaves_kernel(number, call.call.element, carried, call.op)
    steps = [found.bind(grid, grid, leaves, result, count, number, held=held)]
    if groups > 1:
        steps.append(
            bind_reduce_shards(end, result, vectors, 0, groups, carried, call.op)
        )
    return binding.Series(*steps)


def leaves_room(call: binding.Carried, number: int, count: int) -> int:
    """Return the bytes that ``bind_leaves`` needs for its result."""
    vectors = workspace.divide_up(count, call.element.lanes)
    return workspace.divide_up(number, MOST) * vectors * VECTOR
