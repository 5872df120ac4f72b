"""The kernels of exact sums (``device/arithmetic.py``), which wait for no other rank.

``collectives/composed.py`` contains the calls. Each block reduces the terms of its
threads to a record. A rank that has failed stores no result.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from numba_symm import dtypes
from numba_symm.collectives.protocols import binding, finishing, workspace
from numba_symm.collectives.protocols.workspace import THREADS, VECTOR
from numba_symm.device import arithmetic, intrinsics, lanes, puts
from numba_symm.dtypes import Element
from numba_symm.gpu.kernels import Kernel, Launch

BATCH = 8
"""The most vectors of an array that a thread loads before it uses them.

As few threads as those of a call must each wait for many bytes, to use the memory.
"""

ELEMENTS = 32
"""The most elements that a thread loads before it uses them."""

LARGEST, TOTAL = VECTOR, 2 * VECTOR
"""Bytes of a record: of the largest exponent, and of the digits of a sum."""

FOLDED = 16
"""Blocks whose records are reduced together, if there are several blocks."""

WORD = dtypes.element("int64", "exact")
"""The type of the numbers of a record."""

_WORDS = 2 * BATCH
_EXPONENTS = (1 << arithmetic.EXPONENT_BITS) - 1


@intrinsics.device_function
def keep_largest(own: int, block: int, record: int, thread: int, found: Any) -> None:
    """Store the maximum of what a block's threads have found, which call it together.

    In each of two words, the exponent is below a bit for one kind of infinity.
    """
    largest, is_largest = 0, True
    for i in range(arithmetic.EXPONENT_BITS):
        bit = 1 << arithmetic.EXPONENT_BITS - 1 - i
        has_it = is_largest and found[0] & bit != 0
        if workspace.sync_block_or(has_it):
            largest |= bit
            is_largest = has_it
    plus = workspace.sync_block_or(found[1] != 0)
    minus = workspace.sync_block_or(found[2] != 0)
    if thread == 0:
        above = _EXPONENTS + 1
        low, high = largest + (above if plus else 0), largest + (above if minus else 0)
        intrinsics.st_v2_u64(record + LARGEST * block, (low, high))


def make_keep_total(size: int) -> Any:
    """Return a device function that stores the sum of a block's threads' integers.

    Its arguments are those of :func:`keep_largest`.
    """
    partials = workspace.layout(size).partials.slots
    block_sum = finishing.make_row_sum(WORD, partials)

    @intrinsics.device_function
    def keep_total(own: int, block: int, record: int, thread: int, total: Any) -> None:
        a, b, c, d = arithmetic.carried(0, total[0], total[1], total[2])
        # One after another, as registers are few.
        for i in range(4):
            digit, _ = block_sum(own, block, i & 1, thread, a, False)
            if thread == 0:
                intrinsics.st_u64(record + TOTAL * block + 8 * i, digit)
            a, b, c = b, c, d

    return keep_total


def make_reduce(
    size: int, name: str, element: Element, ragged: bool, adding: bool
) -> Any:
    """Return the kernel that reduces this rank's terms.

    Args:
        size: the number of ranks of the island.
        name: which sum, as for ``arithmetic.make_terms``.
        element: the type of the arrays.
        ragged: as for ``lanes.make_lanes``.
        adding: whether it adds the terms, or finds the largest exponent.
    """
    load = lanes.make_lanes(element, "sum", ragged, 1).load
    fetch = puts.make_fetch(puts.Operand(element, puts.EACH), 0)
    weigh, add, state_of = arithmetic.make_terms(name, width_of(element))
    one, keep = (add, make_keep_total(size)) if adding else (weigh, keep_largest)
    two, width, batch = name == arithmetic.DOT, element.lanes, batch_of(name, element)
    # Their sums are exact in float64: of 40 bits, and five more for so many elements.
    first_sums = adding and (name, element.name) == (arithmetic.SUM, "float16")
    zero = np.int64(0) if adding else np.int32(0)

    def reduce_terms(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        x: int,
        y: int,
        count: int,
        found: int,
        records: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        first = cuda.local.array(_WORDS, types.int64)
        second = cuda.local.array(_WORDS, types.int64)
        thread, step = cuda.threadIdx.x, grid * THREADS
        total, state = (zero, zero, zero), (0, 1.0)
        if adding:
            low, high = intrinsics.ld_v2_u64(found)
            state = state_of(low & _EXPONENTS)
            if max(low, high) > _EXPONENTS:
                count = 0  # the result follows from what was found
        vector = block * THREADS + thread
        while vector * width < count:
            for i in range(batch):
                at = vector + i * step
                inside = at * width < count
                first[2 * i], first[2 * i + 1] = (
                    load(x, at, count) if inside else (0, 0)
                )
                if two:
                    second[2 * i], second[2 * i + 1] = (
                        load(y, at, count) if inside else (0, 0)
                    )
            part = 0.0
            for i in range(batch * width):
                a = fetch(first, i)
                if first_sums:
                    part += np.float64(a)
                else:
                    total = one(total, a, fetch(second, i) if two else a, state)
            if first_sums:
                total = one(total, part, part, state)
            vector += batch * step
        keep(own, block, records, thread, total)

    return reduce_terms


def make_round(size: int, name: str, width: int) -> Any:
    """Return the kernel of one thread that makes the result.

    Args:
        size: the number of ranks of the island.
        name: which sum, as for ``arithmetic.make_terms``.
        width: the bits of the result.
    """
    result_of = arithmetic.make_result(name, width)
    _, store = lanes.make_access(width // 8)

    def round_once(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        found: int,
        total: int,
        out: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if workspace.load_failure(own, block) != 0:  # explore: failed
            return  # what the ranks have exchanged may be wrong
        if cuda.threadIdx.x == 0:
            first, second = intrinsics.ld_v2_u64(found)
            a, b = intrinsics.ld_v2_u64(total)
            c, d = intrinsics.ld_v2_u64(total + VECTOR)
            top, plus, minus = first & _EXPONENTS, first, second
            bits = result_of(top, plus > _EXPONENTS, minus > _EXPONENTS, a, b, c, d)
            store(out, bits)

    return round_once


def batch_of(name: str, element: Element) -> int:
    """Return how many vectors of an array a thread loads before it uses them."""
    arrays = 2 if name == arithmetic.DOT else 1
    return min(BATCH, ELEMENTS // element.lanes) // arrays


def width_of(element: Element) -> int:
    """Return the bits of a number in the type in which elements accumulate."""
    return 8 * element.accumulate.itemsize


reduce_kernel = binding.kernels_of(
    make_reduce, *(binding.ADDRESS,) * 2, types.int64, *(binding.ADDRESS,) * 2
)
"""Returns a kernel, compiled when first bound."""

round_kernel = binding.kernels_of(make_round, *(binding.ADDRESS,) * 3)
"""Returns a kernel, compiled when first bound."""


def grid_of(end: binding.Endpoint, name: str, element: Element, count: int) -> int:
    """Return the number of blocks for so many elements: 1, a few, or many."""
    each = element.lanes * batch_of(name, element) * THREADS
    needed = workspace.divide_up(count, each)
    if needed <= 1:
        return 1
    few = min(FOLDED, end.max_blocks)
    return few if needed <= few else end.max_blocks // few * few


def bind(of_call: Kernel, end: binding.Endpoint, grid: int, *arguments: int) -> Launch:
    """Return the packed launch of one of the kernels.

    Args:
        of_call: the kernel.
        end: this rank's end of its island.
        grid: the number of blocks.
        arguments: what the kernel takes after the grid.
    """
    return binding.launch(of_call, end, grid, arguments, waits=False)
