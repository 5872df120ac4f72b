"""Reductions of several leaves of each rank: ``all_reduce(leaves=True)``.

The first axis of the input is leaves, the same power of two on every rank. A rank
reduces its own ones by their tree, in the type in which they accumulate, and the ranks
reduce these results by the tree of ranks. So this is the tree of all leaves: how many
ranks share them does not change the bits.
"""

from dataclasses import replace
from typing import Any

from numba_symm.arrays import ArrayView
from numba_symm.collectives.binder import Binder
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.kernels import convert, reduce_shards
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.binding import (
    Call,
    Carried,
    Endpoint,
    Enqueue,
    Series,
)
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.errors import ArgumentError


def first_of(
    given: Invocation[Operation], fields: tuple[Any, ...]
) -> tuple[Invocation[Operation], tuple[Any, ...]]:
    """Return a call with the number of its leaves, and the first leaf; or refuse it."""
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
    return given._replace(leaves=number), (fields[0], view.shape[1:], *fields[2:])


def room_of(call: Call, number: int, shards: int) -> int:
    """Return the bytes of staging memory that a call needs."""
    carried = Carried(call)
    results = divide_up(call.count, carried.element.lanes) * VECTOR
    return results + reduce_shards.leaves_room(carried, number, call.count * shards)


def bind(
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
    steps: list[Any] = [
        reduce_shards.bind_leaves(
            binder.end, carried, given.leaves, call.source, own, whole
        ),
        binder.staged(end, operation, step),
    ]
    if converted:
        op = "avg" if call.op == "avg" else "sum"
        terms = end.size * given.leaves
        steps.append(
            convert.bind(binder.end, kinds, room, call.target, call.count, op, terms)
        )
    return Series(*steps)
