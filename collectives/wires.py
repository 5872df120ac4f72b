"""Sums whose elements cross the links as codes of one byte: ``all_reduce(wire=…)``.

Elements are encoded in groups of 128 (``device/groups.py``), which begin at the array's
own indices. So an element's code depends only on its group. The steps of a call:

1. Each rank encodes its input. Shard r, a whole number of records, is for rank r.
2. The ranks exchange the shards with an ``all_to_all``.
3. Each rank adds the values of its shard's codes by their tree, and encodes the sums.
4. The ranks exchange these codes with an ``all_gather``.
5. Each rank decodes all of them, those of its own shard, too. So all get the same bits.

The codes are in the staging memory. The exchanges are those of any other call. They
order a rank's stores before the other ranks' loads, and these before its next call.
"""

from collections.abc import Callable
from typing import Any

from numba_symm import dtypes
from numba_symm.arguments import shown
from numba_symm.collectives.binder import Binder
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.kernels import coded_sum
from numba_symm.collectives.operations import ALL_GATHER, ALL_TO_ALL, Operation
from numba_symm.collectives.protocols.binding import Call, Endpoint, Enqueue, Series
from numba_symm.collectives.protocols.partition import is_ragged
from numba_symm.collectives.protocols.workspace import divide_up
from numba_symm.device.groups import FP8, GROUP, INT8
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.launch.devices import GPU

WIRES = {"fp8": FP8, "int8": INT8}
"""The types of codes, by the argument ``wire``."""

ELEMENTS = "float32", "bfloat16", "float16"
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


def check(given: Invocation[Operation], dtype: Any, gpu: GPU) -> None:
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
    if dtype.name not in ELEMENTS:
        raise ArgumentError(
            f"{what}: expected x of {', '.join(ELEMENTS)} with wire={wire!r}, got "
            f"{dtype.name}; convert the array, or reduce without wire="
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


def room_of(count: int, size: int) -> int:
    """Return the bytes of staging memory that a call needs."""
    return (2 * size + 1) * nbytes_of(count, size)


def bind(end: Endpoint, binder: Binder, wire: str, call: Call, room: int) -> Enqueue:
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
