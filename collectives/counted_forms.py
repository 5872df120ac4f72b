"""The v forms whose counts are on the GPU, where the kernel reads them.

The host knows only a capacity: the most elements that a rank sends to another one. So
it does not wait for the GPU, and each replay of a graph may have other counts.
"""

from typing import Any, NamedTuple

import numpy as np

from numba_symm import arguments, arrays
from numba_symm.arrays import ArrayView
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.checks import (
    are_apart,
    check_apart,
    check_length,
    check_writable,
)
from numba_symm.collectives.counts import places_of, refuse_overlap, table_of
from numba_symm.collectives.protocols.credit import Message, Span
from numba_symm.collectives.transfers import Transfers
from numba_symm.collectives.vector_forms import (
    ALL_GATHER_V,
    ALL_TO_ALL_V,
    Form,
    FormCall,
    check_room,
    flat,
    output,
)
from numba_symm.errors import ArgumentError

_MOST = 1 << 40
_INT64 = np.dtype(np.int64)


class OnGPU(NamedTuple):
    """The checked arguments of a call.

    Attributes:
        capacity: the most elements of a rank for another one.
        counts_at: the address of the counts of what this rank sends.
        displs_at: the address of their displacements; 0: the ranges follow one another.
        received_at: the address of the counts of what this rank receives.
        displs: where in ``out`` the elements of each rank begin.
    """

    capacity: int
    counts_at: int
    displs_at: int
    received_at: int
    displs: tuple[int, ...]


def _counts(calls: Calls, array: Any, what: str, written: bool) -> int:
    """Return the address of counts or displacements, or refuse the array."""
    view = calls.usable(arrays.view(array, what), what)
    check_length(view, calls.size, what, "the number of ranks")
    if view.dtype != _INT64:
        raise ArgumentError(
            f"{what}: expected a device array of int64, got {view.dtype.name}; convert "
            "the counts on the GPU"
        )
    arrays.check_aligned(view, what)
    if written:
        check_writable(view, what)
    return view.address


def _checked(calls: Calls, given: FormCall) -> FormCall:
    """Check all arguments but arrays and stream, and return the call."""
    what = given.operation.name
    (counts, displs), (received, into), capacity = given.tables
    if len(calls.members.parts) > 1:
        raise ArgumentError(
            f"{what}: expected ranks of one island for counts on the GPU, got "
            f"{len(calls.members.parts)} islands; the host needs the sizes between "
            "islands, so pass counts on the host"
        )
    most = arguments.integer(
        capacity,
        what,
        f"capacity to be an integer from 1 to {_MOST}",
        least=1,
        most=_MOST,
        do="pass the most elements of any rank for another one",
    )
    name, gathers = given.operation.counts[0], given.operation is ALL_GATHER_COUNTED
    sent = _counts(calls, counts, f"{what}: {name}", written=gathers)
    displaced, stored = 0, sent
    if displs is not None:
        displaced = _counts(calls, displs, f"{what}: send_displs", False)
    if not gathers:
        stored = _counts(calls, received, f"{what}: recv_counts", True)
    others = filter(None, (sent, displaced))
    if not gathers and any(abs(stored - each) < 8 * calls.size for each in others):
        raise ArgumentError(
            f"{what}: expected recv_counts apart from send_counts and send_displs, got "
            "arrays that overlap"
        )
    table = table_of((most,) * calls.size, into, calls.size, f"{what}: recv_counts")
    places = places_of(table)
    refuse_overlap(places, f"{what}: displs")
    found = OnGPU(most, sent, displaced, stored, tuple(first for first, _ in places))
    return given._replace(tables=(found,))


def _shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    (table,) = given.tables
    flat(calls, given.x, given.operation.name)
    return (max(table.displs) + table.capacity,)


def _ends(calls: Calls, given: FormCall) -> tuple[ArrayView, OnGPU, list[Message]]:
    """Return the input, the arguments, and the messages that this rank receives."""
    what, (table,) = given.operation.name, given.tables
    x, out = flat(calls, given.x, what), output(calls, given)
    places = [(first, table.capacity) for first in table.displs]
    check_room(out, places, f"{what}: out")
    check_apart(x, out, what)
    used = filter(None, (table.counts_at, table.displs_at, table.received_at))
    for view in (ArrayView(each, (calls.size,), _INT64, "C", False) for each in used):
        if not (are_apart(x, view) and are_apart(out, view)):
            raise ArgumentError(
                f"{what}: expected counts apart from x and out, got arrays that overlap"
            )
    itemsize = x.dtype.itemsize
    receives = [
        Message(
            peer,
            out.address + itemsize * first,
            itemsize * table.capacity,
            table.received_at + 8 * peer,
            itemsize,
        )
        for peer, (first, _) in enumerate(places)
    ]
    return x, table, receives


def _exchanged(calls: Calls, given: FormCall) -> Transfers:
    x, table, receives = _ends(calls, given)
    itemsize = x.dtype.itemsize
    sends = [
        Message(
            peer,
            x.address,
            itemsize * table.capacity,
            table.counts_at + 8 * peer,
            itemsize,
            Span(peer, table.displs_at and table.displs_at + 8 * peer, x.size),
        )
        for peer in range(calls.size)
    ]
    words = f"capacity {table.capacity}, {x.dtype.name}"
    return Transfers(sends, receives, (), words, itemsize)


def _gathered(calls: Calls, given: FormCall) -> Transfers:
    x, table, receives = _ends(calls, given)
    what, itemsize = given.operation.name, x.dtype.itemsize
    check_length(x, table.capacity, f"{what}: x", "capacity")
    mine = table.counts_at + 8 * calls.rank
    sends = [
        Message(peer, x.address, x.nbytes, mine, itemsize, Span(0, 0, x.size))
        for peer in range(calls.size)
    ]
    words = f"capacity {table.capacity}, {x.dtype.name}"
    return Transfers(sends, receives, (), words, itemsize)


ALL_TO_ALL_COUNTED = Form(
    "all_to_all_v",
    _checked,
    _shape,
    _exchanged,
    counts=("send_counts", "recv_counts"),
    on_gpu=True,
)
ALL_GATHER_COUNTED = Form(
    "all_gather_v", _checked, _shape, _gathered, counts=("counts",), on_gpu=True
)


def gathering(counts: Any, displs: Any, capacity: Any) -> tuple[Form, Any]:
    """Return ``all_gather_v`` with counts on the host or on the GPU, and its tables."""
    if capacity is None:
        return ALL_GATHER_V, ((counts, displs),)
    return ALL_GATHER_COUNTED, ((counts, None), (None, displs), capacity)


def exchanging(sent: Any, received: Any, capacity: Any) -> tuple[Form, Any]:
    """Return ``all_to_all_v`` with counts on the host or on the GPU, and its tables."""
    if capacity is None:
        return ALL_TO_ALL_V, (sent, received)
    return ALL_TO_ALL_COUNTED, (sent, received, capacity)
