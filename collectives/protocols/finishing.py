"""Epilogues on the GPU: a user's functions, applied to a run of reduced elements.

All kernels that apply an epilogue use these functions, and Numba compiles them without
contracting products and sums (``Kernel.rounds_each``). So all these kernels give
results with the same bits.

A run is of a vector of the reduced array (``device/puts.py``). A row begins with a run.
The order of a row's sum: thread *t* of a block adds the terms of the runs *t*, *t* +
``THREADS`` and so on, element by element. Then each thread adds the sums of all threads
in ``CHAINS`` chains, and those pairwise.

The order of memory accesses: each thread stores its sum in its rank's own workspace,
and the block synchronizes. Then all threads load all sums. Two such rooms are used
alternately. So a thread stores into a room again only after a synchronization that
follows all loads from that room. No other block or rank accesses a block's rooms.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.workspace import THREADS, VECTOR, partial_bytes
from numba_symm.device import puts
from numba_symm.device.intrinsics import (
    device_function,
    ld_u32,
    ld_v2_u64,
    ld_v4_u32,
    st_u32,
    st_u64,
    word_of,
)
from numba_symm.device.lanes import make_bits, number_of
from numba_symm.device.puts import EACH, PLACES, Operand
from numba_symm.dtypes import Element, UserEpilogue, converted
from numba_symm.environment import SIMULATED

CHAINS = 4
"""Chains of additions of the sums of a block's threads."""


class Finish(NamedTuple):
    """The device functions of an epilogue.

    ``held`` is a local array of ``words`` words. ``here`` is how many elements of the
    run exist, if it may be ragged.

    Attributes:
        words: of a run of the reduced array, and of the operands.
        written: words of a run of the results.
        load: ``(held, address, index, here)`` loads the reduced elements.
        gather: ``(held, operands, place, here)`` loads what the operands have for a
            run. ``operands`` are their addresses or bits, and ``place`` is ``(index,
            row, column, 0)`` of its first element.
        add_terms: ``(held, total, here)`` returns the total plus the run's terms.
        apply: ``(held, total, out, here)`` computes the results of a run.
        store: ``(out, addresses, index, here)`` stores them into each output.
    """

    words: int
    written: int
    load: Callable[..., None]
    gather: Callable[..., None]
    add_terms: Callable[..., Any]
    apply: Callable[..., None]
    store: Callable[..., None]


class Work(NamedTuple):
    """What an epilogue is to do.

    Attributes:
        epilogue: the user's functions.
        source: the type of reduced elements.
        targets: those of results, for each output.
        operands: what the functions take besides.
        words: their addresses, or the bits of numbers.
        rows: the number of rows; 1, if nothing depends on rows.
        columns: elements of a row.
        more: the addresses of the outputs after the first one.
    """

    epilogue: UserEpilogue
    source: Element
    targets: tuple[Element, ...]
    operands: tuple[Operand, ...]
    words: tuple[int, ...]
    rows: int
    columns: int
    more: tuple[int, ...] = ()

    @property
    def runs(self) -> int:
        """The number of runs of a row."""
        return workspace.divide_up(self.columns, self.source.lanes)

    def is_ragged(self, given: int, result: int) -> bool:
        """Return whether runs may be off multiples of their bytes, or not be whole.

        Args:
            given: the address of the reduced elements.
            result: that of the first output.
        """
        lanes = self.source.lanes
        if self.columns % lanes:
            return True
        elements, addresses = (self.source, *self.targets), (given, result, *self.more)
        found = list(zip(of_each(elements), addresses, strict=True))
        found += zip(self.operands, self.words, strict=True)
        return any(
            word % min(VECTOR, operand.nbytes(lanes))
            for operand, word in found
            if operand.has_runs
        )


def arguments_of(
    targets: tuple[Element, ...], numbers: int, operands: tuple[Operand, ...]
) -> tuple[Any, ...]:
    """Return the types of a kernel's arguments after those of all kernels.

    They are the reduced array, the outputs, ``numbers`` integers, and the operands.
    """
    outputs = types.UniTuple(binding.ADDRESS, len(targets))
    words = types.UniTuple(types.int64, max(1, len(operands)))
    return binding.ADDRESS, outputs, *numbers * (types.int64,), words


def of_each(elements: tuple[Element, ...]) -> tuple[Operand, ...]:
    """Return arrays of these types, with an element for each of the result."""
    return tuple(Operand(each, EACH) for each in elements)


def offsets(operands: tuple[Operand, ...], lanes: int) -> list[int]:
    """Return where the words of each begin in a local array, and where all end."""
    words = (operand.words(lanes) for operand in operands)
    return list(itertools.accumulate(words, initial=0))


def make_gather(
    operands: tuple[Operand, ...], lanes: int, ragged: bool, at: list[int], k: int = 0
) -> Callable[..., None]:
    """Return ``Finish.gather`` for the operands from ``k`` on."""
    if k == len(operands):

        @device_function
        def nothing(held: Any, given: Any, place: Any, here: int) -> None:
            pass

        return nothing
    fill = puts.make_fill(operands[k], lanes, ragged, at[k])
    which = PLACES[operands[k].along]
    others = make_gather(operands, lanes, ragged, at, k + 1)

    @device_function
    def gather(held: Any, given: Any, place: Any, here: int) -> None:
        fill(held, given[k], place[which], here)
        others(held, given, place, here)

    return gather


def make_values(
    operands: tuple[Operand, ...], at: list[int], k: int = 0
) -> Callable[[Any, int], Any]:
    """Return a device function: ``(held, i)`` returns the operands of an element."""
    if k == len(operands):

        @device_function
        def nothing(held: Any, i: int) -> Any:
            return ()

        return nothing
    fetch = puts.make_fetch(operands[k], at[k])
    others = make_values(operands, at, k + 1)

    @device_function
    def values(held: Any, i: int) -> Any:
        return (fetch(held, i), *others(held, i))

    return values


def make_cast(kind: Any) -> Callable[[Any], Any]:
    """Return a device function: ``(value)`` converts what a user's returns."""
    if SIMULATED:

        def simulated(value: Any) -> Any:
            return converted(value, kind)

        return simulated

    @device_function
    def cast(value: Any) -> Any:
        return kind(value)

    return cast


def make_numbers(function: Any, kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Return a device function: ``(arguments)`` calls the user's with a tuple.

    It returns a tuple of the results, converted to ``kinds``. There are one or two.
    """
    inlined = function if SIMULATED else device_function(function)
    casts = [make_cast(kind) for kind in kinds]
    if len(casts) == 1:
        cast = casts[0]

        @device_function
        def one(arguments: Any) -> Any:
            return (cast(inlined(*arguments)),)

        return one
    to_first, to_second = casts

    @device_function
    def both(arguments: Any) -> Any:
        first, second = inlined(*arguments)
        return to_first(first), to_second(second)

    return both


@functools.cache
def make_finish(
    epilogue: UserEpilogue,
    source: Element,
    targets: tuple[Element, ...],
    operands: tuple[Operand, ...],
    ragged: bool,
) -> Finish:
    """Return the device functions.

    Args:
        epilogue: the user's functions.
        source: the type of reduced elements.
        targets: those of results, for each output.
        operands: what the functions take besides.
        ragged: whether arrays may be off 16-byte boundaries, or rows end within a run.
    """
    lanes, (own,) = source.lanes, of_each((source,))
    _, *at, words = offsets((own, *operands), lanes)
    *out_at, written = offsets(of_each(targets), lanes)
    fetch = puts.make_fetch(own, 0)
    values = make_values(operands, at)
    results = tuple(
        puts.make_result(target, lanes, ragged, first)
        for target, first in zip(targets, out_at, strict=True)
    )
    kinds = tuple(target.accumulate.type for target in targets)
    numbers = make_numbers(epilogue.function, kinds)
    by_row = epilogue.row_sum is not None
    put = make_put(results)
    return Finish(
        words,
        written,
        puts.make_fill(own, lanes, ragged, 0),
        make_gather(operands, lanes, ragged, at),
        make_add_terms(epilogue, source, ragged, fetch, values),
        make_apply(numbers, by_row, lanes, ragged, fetch, values, put),
        make_store(results),
    )


def make_add_terms(
    epilogue: UserEpilogue, source: Element, ragged: bool, fetch: Any, values: Any
) -> Callable[..., Any]:
    """Return ``Finish.add_terms``."""
    lanes, kind = source.lanes, source.accumulate.type
    if epilogue.row_sum is None:

        @device_function
        def without(held: Any, total: Any, here: int) -> Any:
            return total

        return without
    terms = make_numbers(epilogue.row_sum, (kind,))

    @device_function
    def add_terms(held: Any, total: Any, here: int) -> Any:
        for i in range(lanes):
            if not ragged or i < here:
                total = kind(total + terms((fetch(held, i), *values(held, i)))[0])
        return total

    return add_terms


def make_apply(
    numbers: Any,
    by_row: bool,
    lanes: int,
    ragged: bool,
    fetch: Any,
    values: Any,
    put: Any,
) -> Callable[..., None]:
    """Return ``Finish.apply``."""
    if by_row:

        @device_function
        def found(held: Any, total: Any, i: int) -> Any:
            return numbers((fetch(held, i), total, *values(held, i)))

    else:

        @device_function
        def found(held: Any, total: Any, i: int) -> Any:
            return numbers((fetch(held, i), *values(held, i)))

    @device_function
    def apply(held: Any, total: Any, out: Any, here: int) -> None:
        for i in range(lanes):
            if not ragged or i < here:
                put(out, found(held, total, i), i)

    return apply


def make_put(results: tuple[puts.Result, ...], k: int = 0) -> Callable[..., None]:
    """Return a device function: ``(out, numbers, i)`` packs the results ``i``."""
    if k == len(results):

        @device_function
        def nothing(out: Any, numbers: Any, i: int) -> None:
            pass

        return nothing
    put_one, others = results[k].put, make_put(results, k + 1)

    @device_function
    def put(out: Any, numbers: Any, i: int) -> None:
        put_one(out, numbers[k], i)
        others(out, numbers, i)

    return put


def make_store(results: tuple[puts.Result, ...], k: int = 0) -> Callable[..., None]:
    """Return ``Finish.store`` for the outputs from ``k`` on."""
    if k == len(results):

        @device_function
        def nothing(out: Any, addresses: Any, index: int, here: int) -> None:
            pass

        return nothing
    store_one, others = results[k].store, make_store(results, k + 1)

    @device_function
    def store(out: Any, addresses: Any, index: int, here: int) -> None:
        store_one(out, addresses[k], index, here)
        others(out, addresses, index, here)

    return store


@functools.cache
def make_row_sum(
    source: Element, partials: int
) -> Callable[[int, int, int, int, Any, bool], Any]:
    """Return a device function that adds the sums of a block's threads.

    All threads of the block call it together: ``(own, block, parity, thread, mine,
    failed)``, with the room ``parity``, 0 or 1, in turn. It returns the sum, and
    whether any thread has failed.

    Args:
        source: the type of reduced elements, whose accumulation type the sums have.
        partials: where the rooms begin in the workspace.
    """
    kind, room = source.accumulate.type, partial_bytes()
    of_sums = Element(source.accumulate, source.accumulate)
    bits, number = make_bits(of_sums, "sum", 1), number_of(of_sums)
    width = 4 if of_sums.itemsize == 4 else 8  # narrow integers have sums of 8 bytes
    store = st_u32 if width == 4 else st_u64

    if width == 4:

        @device_function
        def load_four(at: int, all_four: bool) -> Any:
            if all_four:
                return ld_v4_u32(at)
            a, b = ld_u32(at), ld_u32(at + 4)
            return a, b, a, b

    else:

        @device_function
        def load_four(at: int, all_four: bool) -> Any:
            a, b = ld_v2_u64(at)
            c, d = ld_v2_u64(at + VECTOR) if all_four else (a, b)
            return a, b, c, d

    @device_function
    def row_sum(
        own: int, block: int, parity: int, thread: int, mine: Any, failed: bool
    ) -> Any:
        at = own + partials + (2 * block + parity) * room
        store(at + width * thread, word_of(bits(mine)))
        # Orders the sums of all threads before the loads. It also orders the loads from
        # the other room before the next row's sums, which are stored there.
        failed = workspace.sync_block_or(failed)  # explore: partials
        a, b, c, d = kind(0), kind(0), kind(0), kind(0)
        for first in range(0, THREADS, CHAINS):
            s = load_four(at + width * first, first + 2 < THREADS)
            a, b = kind(a + number(s[0])), kind(b + number(s[1]))
            if first + 2 < THREADS:  # a constant; the explorer's blocks are smaller
                c, d = kind(c + number(s[2])), kind(d + number(s[3]))
        return kind(kind(a + b) + kind(c + d)), failed

    return row_sum
