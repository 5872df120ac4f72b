"""The kernels that apply an epilogue to an array that has been reduced.

They serve calls whose own kernel does not apply the epilogue. Each thread loads the
runs of elements that it then stores, and no other rank takes part. So the array, a
result and an operand may be the same memory. The threads of a block exchange the sums
of a row through their rank's workspace (``finishing.py``). A rank that has failed
stores no result.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, finishing, workspace
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import intrinsics
from numba_symm.device.puts import Operand
from numba_symm.dtypes import Element, UserEpilogue
from numba_symm.gpu.kernels import Kernel, Launch


def make_apply(
    size: int,
    epilogue: UserEpilogue,
    source: Element,
    targets: tuple[Element, ...],
    operands: tuple[Operand, ...],
    ragged: bool,
    one_row: bool,
) -> Any:
    """Return the kernel of an epilogue without a row's sum.

    Args:
        size: the number of ranks of the island.
        epilogue: the user's functions.
        source: the type of reduced elements.
        targets: those of results, for each output.
        operands: what the functions take besides.
        ragged: as for ``finishing.make_finish``.
        one_row: whether there is one row.
    """
    finish = finishing.make_finish(epilogue, source, targets, operands, ragged)
    words, written, load, gather, _, apply_to, store = finish
    lanes, none = source.lanes, source.accumulate.type(0)

    def apply(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        given: int,
        results: Any,
        rows: int,
        columns: int,
        runs: int,
        others: Any,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if workspace.load_failure(own, block) != 0:  # explore: failed
            return  # what was reduced may be wrong
        held = cuda.local.array(words, types.int64)
        out = cuda.local.array(written, types.int64)
        at = block * THREADS + cuda.threadIdx.x
        while at < rows * runs:
            row = 0 if one_row else at // runs
            column = (at - row * runs) * lanes
            place = row * columns + column, row, column, 0
            here = columns - column
            load(held, given, place[0], here)
            gather(held, others, place, here)
            apply_to(held, none, out, here)
            store(out, results, place[0], here)
            at += grid * THREADS

    return apply


def make_apply_to_rows(
    size: int,
    epilogue: UserEpilogue,
    source: Element,
    targets: tuple[Element, ...],
    operands: tuple[Operand, ...],
    ragged: bool,
) -> Any:
    """Return the kernel of an epilogue with a row's sum; see :func:`make_apply`."""
    finish = finishing.make_finish(epilogue, source, targets, operands, ragged)
    words, written, load, gather, add_terms, apply_to, store = finish
    partials = workspace.layout(size).partials.slots
    row_sum = finishing.make_row_sum(source, partials)
    lanes, none = source.lanes, source.accumulate.type(0)

    def apply_to_rows(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        given: int,
        results: Any,
        rows: int,
        columns: int,
        runs: int,
        others: Any,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        # Threads may see different marks; they agree when they synchronize.
        failed = workspace.load_failure(own, block) != 0  # explore: failed-rows
        held = cuda.local.array(words, types.int64)
        out = cuda.local.array(written, types.int64)
        thread, parity = cuda.threadIdx.x, 0
        row = block
        while row < rows:
            total = none
            at = thread
            while at < runs:
                column = at * lanes
                place = row * columns + column, row, column, 0
                here = columns - column
                load(held, given, place[0], here)
                gather(held, others, place, here)
                total = add_terms(held, total, here)
                at += THREADS
            total, failed = row_sum(own, block, parity, thread, total, failed)
            at = thread
            while at < runs and not failed:
                column = at * lanes
                place = row * columns + column, row, column, 0
                here = columns - column
                load(held, given, place[0], here)
                gather(held, others, place, here)
                apply_to(held, total, out, here)
                store(out, results, place[0], here)
                at += THREADS
            parity = 1 - parity  # explore: parity
            row += grid

    return apply_to_rows


@functools.cache
def kernel(
    size: int,
    epilogue: UserEpilogue,
    source: Element,
    targets: tuple[Element, ...],
    operands: tuple[Operand, ...],
    ragged: bool,
    one_row: bool,
) -> Kernel:
    """Return the kernel, compiled when first bound."""
    constants = size, epilogue, source, targets, operands, ragged
    arguments = finishing.arguments_of(targets, 3, operands)
    if epilogue.row_sum is None:
        return binding.make_kernel(make_apply, (*constants, one_row), arguments)
    return binding.make_kernel(make_apply_to_rows, constants, arguments)


def bind(
    end: binding.Endpoint,
    work: finishing.Work,
    given: int,
    result: int,
) -> Launch:
    """Return the packed launch.

    Args:
        end: this rank's end of its island.
        work: what is to be done.
        given: the address of the reduced elements.
        result: that of the first output.
    """
    of_call = kernel(
        *(end.size, work.epilogue, work.source, work.targets, work.operands),
        ragged=work.is_ragged(given, result),
        one_row=work.rows == 1,
    )
    needed = work.rows
    if work.epilogue.row_sum is None:
        needed = workspace.divide_up(work.rows * work.runs, THREADS)
    grid = min(needed, end.max_blocks)
    shape = work.rows, work.columns, work.runs
    arguments = given, (result, *work.more), *shape, work.words or (0,)
    return binding.launch(of_call, end, grid, arguments, waits=False)
