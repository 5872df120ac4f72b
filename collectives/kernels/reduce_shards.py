"""The reduction of several shards or leaves in this rank's memory.

In calls over several islands, ranks receive the shards from other islands, and reduce
them by the tree of the islands. Each thread reads and writes vectors of its own. No
other rank takes part.

A thread reduces ``MOST`` shards at a time, and stores the results of more than these in
the first shard of each group, until the last group is all of them.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.workspace import THREADS, VECTOR
from numba_symm.device import intrinsics, lanes, order
from numba_symm.dtypes import Element, Op
from numba_symm.kernels import Kernel, Launch

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
    pack, of_first = access.pack, order.make_of_first(number, access)

    @intrinsics.device_function
    def reduced(at: int, apart: int, taken: int, low: Any, high: Any) -> Any:
        for i in range(number):
            if i < taken:
                low[i], high[i] = intrinsics.ld_v2_u64(at + i * apart)
        return pack(of_first(low, high, 0, taken))

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
    pack, of_first = access.pack, order.make_of_first(number, access)
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
                words = pack(of_first(low, high, 0, taken))
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


def kernel(number: int, element: Element, op: Op) -> Kernel:
    """Return the kernel for a number of shards, compiled when first bound."""
    return _kernel(min(number, MOST), number > MOST, element, op)


@functools.cache
def _kernel(number: int, more: bool, element: Element, op: Op) -> Kernel:
    signature = types.int64, *(binding.ADDRESS,) * 2, *(types.int64,) * 2
    constants = number, more, element, op
    return Kernel(make_reduce_shards, constants, signature, THREADS, workspace.HELD)


def bind(
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
    of_call = kernel(number, element, op)
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
        steps.append(bind(end, result, vectors, 0, groups, carried, call.op))
    return binding.Series(*steps)


def leaves_room(call: binding.Carried, number: int, count: int) -> int:
    """Return the bytes that ``bind_leaves`` needs for its result."""
    vectors = workspace.divide_up(count, call.element.lanes)
    return workspace.divide_up(number, MOST) * vectors * VECTOR
