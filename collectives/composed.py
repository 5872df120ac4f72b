"""Calls of several steps: quantized sums, reductions of leaves, and exact sums.

Sums whose elements cross the links as codes of one byte: ``all_reduce(wire=…)``.

Elements are encoded in groups of 128 (``device/groups.py``), which begin at the array's
own indices. So an element's code depends only on its group. The steps of a call:

1. Each rank encodes its input. Shard r, a whole number of records, is for rank r.
2. The ranks exchange the shards with an ``all_to_all``.
3. Each rank adds the values of its shard's codes by their tree, and encodes the sums.
4. The ranks exchange these codes with an ``all_gather``.
5. Each rank decodes all of them, those of its own shard, too. So all get the same bits.

The codes are in the staging memory. The exchanges are those of any other call. They
order a rank's stores before the other ranks' loads, and these before its next call.

Reductions of several leaves of each rank: ``all_reduce(leaves=True)``.

The first axis of the input is leaves, the same power of two on every rank. A rank
reduces its own ones by their tree, in the type in which they accumulate, and the ranks
reduce these results by the tree of ranks. So this is the tree of all leaves: how many
ranks share them does not change the bits.

Sums whose bits do not depend on the ranks: ``sum``, ``dot`` and ``norm``.

The sums are exact sums of integers (``device/arithmetic.py``), so neither the order of
the elements nor their division among threads, blocks, ranks and islands matters. The
steps of a call:

1. Each rank finds the largest exponent of its terms, and whether it has infinities.
2. The ranks exchange the maximum with an ``all_reduce``.
3. Each rank adds its terms as integers, whose unit follows from that exponent.
4. The ranks add these sums with an ``all_reduce`` of integers.
5. One thread rounds the sum to the result, on each rank the same.

All but the result is in the staging memory, as for quantized sums.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numba_symm import dtypes
from numba_symm.arguments import shown
from numba_symm.collectives import staging
from numba_symm.collectives.binder import Binder
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.collectives.invocation import (
    NEW,
    NO_ROOT,
    UNKNOWN,
    Invocation,
    check_length,
)
from numba_symm.collectives.kernels import coded_sum, exact_sum, pack
from numba_symm.collectives.kernels.exact_sum import LARGEST, TOTAL
from numba_symm.collectives.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    Operation,
    compiling,
)
from numba_symm.collectives.protocols.binding import (
    Call,
    Carried,
    Endpoint,
    Enqueue,
    Series,
)
from numba_symm.collectives.protocols.partition import is_ragged
from numba_symm.collectives.protocols.workspace import MAX_BLOCKS, VECTOR, divide_up
from numba_symm.collectives.staging import BoundCall
from numba_symm.device import arithmetic
from numba_symm.device.groups import FP8, GROUP, INT8
from numba_symm.dtypes import Element
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, loads
from numba_symm.gpu.arrays import ArrayView
from numba_symm.launch.devices import GPU

WIRES = {"fp8": FP8, "int8": INT8}
"""The types of codes, by the argument ``wire``."""

CODED_ELEMENTS = "float32", "bfloat16", "float16"
"""The types of elements that can be encoded."""

WORDS = dtypes.element("int64", "wire")
"""The type as which codes are exchanged."""


def check_name(wire: Any, what: str) -> None:
    """Refuse a value that is not the name of codes."""
    if type(wire) is not str or wire not in WIRES:
        known = ", ".join(map(repr, WIRES))
        raise ArgumentError(
            f"{what}: expected wire to be {known}, or None for the elements "
            f"themselves, got wire={shown(wire)}"
        )


def check_codes(given: Invocation[Operation], dtype: Any, gpu: GPU) -> None:
    """Refuse a call that cannot have codes; their name was checked."""
    what, wire = given.operation.name, given.wire
    if given.op != "sum":
        raise ArgumentError(
            f"{what}: expected op='sum' with wire={wire!r}, got op={given.op!r}; "
            "reduce without wire="
        )
    if given.algorithm is not None:
        raise ArgumentError(
            f"{what}: expected algorithm=None with wire={wire!r}, which has steps of "
            f"its own, got {given.algorithm!r}"
        )
    if dtype.name not in CODED_ELEMENTS:
        raise ArgumentError(
            f"{what}: expected x of {', '.join(CODED_ELEMENTS)} with wire={wire!r}, "
            f"got {dtype.name}; convert the array, or reduce without wire="
        )
    if not SIMULATED:
        check_capability(wire, gpu, what)


def check_capability(wire: str, gpu: GPU, what: str) -> None:
    """Refuse codes that the GPU cannot convert."""
    try:
        given = gpu.compute_capability, gpu.name, what
        dtypes.check_capability(WIRES[wire], *given)
    except ArgumentError as error:
        found = ".".join(map(str, gpu.compute_capability))
        raise ArgumentError(
            f"{what}: expected compute capability 8.9 or higher for wire={wire!r}, got "
            f"{found} of {gpu.name}; pass wire='int8'"
        ) from error


def nbytes_of(count: int, size: int) -> int:
    """Return the bytes of a shard of the codes of ``count`` elements."""
    records = divide_up(count, GROUP * coded_sum.IN_RECORD)
    return divide_up(records, size) * coded_sum.RECORD


def room_of_codes(count: int, size: int) -> int:
    """Return the bytes of staging memory that a call needs."""
    return (2 * size + 1) * nbytes_of(count, size)


def bind_codes(
    end: Endpoint, binder: Binder, wire: str, call: Call, room: int
) -> Enqueue:
    """Return what enqueues the steps.

    Args:
        end: this rank's end of the communicator.
        binder: binds the exchanges.
        wire: the name of the codes.
        call: the call.
        room: the address of ``room_of`` bytes.
    """
    codes = WIRES[wire]
    size, element = end.size, call.element
    nbytes = nbytes_of(call.count, size)
    number = nbytes // coded_sum.RECORD * coded_sum.IN_RECORD
    sent, arrived, summed = room, room + size * nbytes, room + 2 * size * nbytes
    exchange = exchanging(end, binder)
    off = is_ragged(Call(call.source, 0, call.count, element, "sum"))
    out_off = is_ragged(Call(0, call.target, call.count, element, "sum"))
    own = binder.end  # of the island, which the kernels belong to
    encode = coded_sum.encode_kernel(own.size, codes, element, off)
    add = coded_sum.add_kernel(own.size, codes, size)
    decode = coded_sum.decode_kernel(own.size, codes, element, out_off)
    groups, used = size * number, divide_up(call.count, GROUP)
    return Series(
        coded_sum.bind(encode, own, groups, call.source, sent, call.count, groups),
        exchange(ALL_TO_ALL, sent, arrived, nbytes),
        coded_sum.bind(add, own, number, arrived, summed, number, nbytes),
        exchange(ALL_GATHER, summed, sent, nbytes),
        coded_sum.bind(decode, own, used, sent, call.target, call.count, used),
    )


def exchanging(end: Endpoint, binder: Binder) -> Callable[..., Enqueue]:
    """Return what binds an exchange between memory that is not symmetric."""

    def bound(
        operation: Operation, source: int, target: int, nbytes: int, op: str = "sum"
    ) -> Enqueue:
        call = Call(source, target, nbytes // WORDS.itemsize, WORDS, op)
        return binder.staged(end, operation, call)

    return bound


def leaves_of(
    given: Invocation[Operation], fields: tuple[Any, ...]
) -> tuple[int, tuple[Any, ...]]:
    """Return the number of an array's leaves, and the first one; or refuse the call."""
    what, view = given.operation.name, ArrayView(*fields)
    number = view.shape[0] if view.shape else 0
    if number < 1 or number & (number - 1):
        raise ArgumentError(
            f"{what}: expected x with 1, 2, 4, 8, ... leaves in its first axis, got "
            f"shape {view.shape}"
        )
    if view.order != "C":
        raise ArgumentError(
            f"{what}: expected x in C order with leaves=True, got order "
            f"{view.order}; pass a contiguous copy"
        )
    if (given.wire, given.epilogue, given.algorithm) != (None, None, None):
        raise ArgumentError(
            f"{what}: expected wire, epilogue and algorithm to be None with "
            "leaves=True; apply them in a second call"
        )
    return number, (fields[0], view.shape[1:], *fields[2:])


def room_of_leaves(call: Call, number: int, shards: int) -> int:
    """Return the bytes of staging memory that a call needs."""
    carried = Carried(call)
    results = divide_up(call.count, carried.element.lanes) * VECTOR
    return results + pack.leaves_room(carried, number, call.count * shards)


def bind_leaves(
    end: Endpoint, binder: Binder, given: Invocation[Operation], call: Call, room: int
) -> Enqueue:
    """Return what enqueues the steps.

    Args:
        end: this rank's end of the communicator.
        binder: binds the reduction over the ranks.
        given: the call.
        call: the same, of the first leaf.
        room: the address of ``room_of`` bytes.
    """
    carried, operation = Carried(call), given.operation
    kinds = carried.element, call.element
    converted = kinds[0] != kinds[1] or call.op == "avg"
    result = room if converted else call.target
    own = room + divide_up(call.count, carried.element.lanes) * VECTOR
    whole = call.count * operation.shards(end.size)
    step = replace(carried.step(own, result, call.count), root=call.root)
    given_leaves = given.leaves, call.source, own, whole
    with compiling((call.op, carried.element), operation.name):
        first = pack.bind_leaves(binder.end, carried, *given_leaves)
    steps: list[Any] = [first, binder.staged(end, operation, step)]
    if converted:
        op = "avg" if call.op == "avg" else "sum"
        terms = end.size * given.leaves
        steps.append(
            pack.bind_convert(
                binder.end, kinds, room, call.target, call.count, op, terms
            )
        )
    return Series(*steps)


EXACT_ELEMENTS = "float64", "float32", "bfloat16", "float16"
"""The types of elements that can be summed."""

ROOM = MAX_BLOCKS * (LARGEST + TOTAL)
"""Bytes of staging memory of a call."""


class ExactSum(NamedTuple):
    """The kind of a call.

    Attributes:
        name: the name of the communicator's method.
        collective: whether all ranks make the same calls.
        at_root: whether only one rank has an output.
    """

    name: str
    collective: bool = True
    at_root: bool = False

    def prepare(self, calls: Any, given: "Invocation[ExactSum]") -> BoundCall:
        """Check and bind a call of ``Calls``, of arrays with or without gaps."""
        what = self.name
        both = {what: given.x} | {f"{what}: y": each for each in given.args}
        calls.staging.stream = chosen = calls.streams.of(given.stream, given.x)
        if calls.thread.group is None:
            calls.staging.used = 0
        views = [arrays.view(each, name) for name, each in both.items()]
        self._check(views)
        dtype = np.dtype(np.float32 if views[0].dtype.itemsize < 4 else views[0].dtype)
        out = target = given.out
        if out is None:
            alike, same = ArrayView(0, (), dtype, "C", False), dtype == views[0].dtype
            out = target = calls.new(given.x if same else None, alike, (), chosen, what)
            if not same:
                out = arrays.as_that_of(given.x, target)
        written = arrays.view(out, f"{what}: out")
        check_length(written, 1, f"{what}: out", "the sum")
        if written.dtype != dtype:
            raise ArgumentError(
                f"{what}: expected out of {dtype.name} for x of {views[0].dtype.name}, "
                f"got {written.dtype.name}; pass such an array, or omit out="
            )
        staged = []
        if {view.order for view in views} not in ({"C"}, {"F"}):
            pack = partial(staging.stage, calls, written=False, message=False)
            staged = [pack(each, name) for name, each in both.items()]
            views = [arrays.view(each.array, what) for each in staged]
        call = _packed_exact_sum(
            calls, what, dict(zip(both, views, strict=True)), written
        )
        if given.out is None and same and not staged:
            calls.memory.put((what, PLAIN, _of_key(views), NEW), (alike, ()))
        call = calls.enqueuer.around([each.pack for each in staged], call, ())
        keep = (*both.values(), *staged, target, out, given.stream)
        return BoundCall(call, chosen, keep, out)

    def _check(self, views: list[ArrayView]) -> None:
        """Refuse arrays of other types, or two that differ."""
        x, y = views[0], views[-1]
        if x.dtype.name not in EXACT_ELEMENTS:
            raise ArgumentError(
                f"{self.name}: expected x of {', '.join(EXACT_ELEMENTS)}, got "
                f"{x.dtype.name}; convert the array, or sum it on each rank and call "
                "all_reduce"
            )
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ArgumentError(
                f"{self.name}: expected y of x's shape {x.shape} and dtype "
                f"{x.dtype.name}, got shape {y.shape} and {y.dtype.name}"
            )


PLAIN = ("sum", None, *NO_ROOT)
"""The options of a call, which has none."""

SUM, DOT, NORM = map(ExactSum, (arithmetic.SUM, arithmetic.DOT, arithmetic.NORM))


def _packed_exact_sum(
    calls: Any, what: str, views: dict[str, ArrayView], out: ArrayView
) -> PackedCall:
    """Return the packed call, remembered or new; the views are by name, for errors."""
    key = what, PLAIN, _of_key([*views.values()]), out
    call: PackedCall = calls.memory.get(key)
    if call is UNKNOWN:
        read = [calls.usable(view, name) for name, view in views.items()]
        x, y = read[0], read[-1]
        calls.usable(out, f"{what}: out", written=True)
        element, addresses = dtypes.element(x.dtype, what), (x.address, y.address)
        room = calls.staging.scratch(ROOM, what)
        calls.members.check()  # after a failure, do not compile a kernel
        given = what, element, (*addresses, out.address), x.size, room
        with loads.of(what):
            launch = bind_exact_sum(calls.end, calls.binder, *given)
        about = calls.descriptions.of(what, element.name, element.name)
        call = calls.enqueuer.pack(about, launch)
        calls.memory.put(key, call)
    return call


def _of_key(views: list[ArrayView]) -> tuple[Any, ...]:
    """Return the inputs of a call as ``Calls.operate`` has them in its keys."""
    return views[0] if len(views) == 1 else (*views,)


def bind_exact_sum(
    end: Endpoint,
    binder: Binder,
    name: str,
    element: Element,
    addresses: tuple[int, int, int],
    count: int,
    room: int,
) -> Enqueue:
    """Return what enqueues the steps.

    Args:
        end: this rank's end of the communicator.
        binder: binds the exchanges.
        name: which sum.
        element: the type of the arrays.
        addresses: of x, of y (or x again), and of the result.
        count: the number of elements on this rank.
        room: the address of ``ROOM`` bytes.
    """
    own, exchange = binder.end, exchanging(end, binder)
    x, y, out = addresses
    ragged = (x | y) % VECTOR != 0 or count % element.lanes != 0
    grid = exact_sum.grid_of(own, name, element, count)
    found, total = room, room + MAX_BLOCKS * LARGEST
    steps: list[Enqueue] = []
    for records, nbytes, op in ((found, LARGEST, "max"), (total, TOTAL, "sum")):
        kernel = exact_sum.reduce_kernel(
            own.size, name, element, ragged, records == total
        )
        steps.append(exact_sum.bind(kernel, own, grid, x, y, count, found, records))
        left = grid
        while left > 1:  # into the first records
            number = min(left, exact_sum.FOLDED)
            left //= number
            given = nbytes // VECTOR * left, 0, number, exact_sum.WORD, op
            steps.append(pack.bind_reduce_shards(own, records, *given))
        steps.append(exchange(ALL_REDUCE, records, records, nbytes, op))
    last = exact_sum.round_kernel(own.size, name, exact_sum.width_of(element))
    return Series(*steps, exact_sum.bind(last, own, 1, found, total, out))
