"""All-gather, all-to-all and broadcast by the GPUs' copy engines: for the largest.

Each rank copies its parts from the other ranks' arrays straight into its output.
``copies.py`` says how, and orders it. What the ranks copy from must be symmetric:

    all_gather   the inputs; or the outputs, where each rank copies its part first
    all_to_all   the inputs, which are not the outputs
    broadcast    the arrays of two ranks

A rank for which this does not hold refuses in the meeting, and the kernel with signals
does the call. A broadcast to more than one rank always goes by signals: its root would
send the message once for each rank.
"""

from typing import NamedTuple

from numba_symm.collectives.protocols import handshake
from numba_symm.collectives.protocols.binding import (
    BindRest,
    Call,
    Endpoint,
    Enqueue,
    InTurn,
    along_ring,
)
from numba_symm.collectives.protocols.copies import Copies, Copy
from numba_symm.collectives.protocols.handshake import refusal
from numba_symm.waits import ALL_GATHER_COPIES, ALL_TO_ALL_COPIES, BROADCAST_COPIES

_OPERATIONS = {
    "all_gather": ALL_GATHER_COPIES,
    "all_to_all": ALL_TO_ALL_COPIES,
    "broadcast": BROADCAST_COPIES,
}
_INPUT, _OUTPUT = 1, 2  # which of a rank's arrays the others copy from


class _Read(NamedTuple):
    """What the ranks copy from.

    Attributes:
        array: ``_INPUT`` or ``_OUTPUT``.
        seen: by rank, where that rank sees what it copies from this one.
        sources: by rank, where this rank takes what it copies from that one to be.
    """

    array: int
    seen: tuple[int, ...]
    sources: tuple[int, ...]


def bind(name: str, rest: BindRest, end: Endpoint, call: Call) -> Enqueue:
    """Return what enqueues it, for two ranks or more, a broadcast for two.

    Args:
        name: ``"all_gather"``, ``"all_to_all"`` or ``"broadcast"``.
        rest: binds the operation through the workspace.
        end: this rank's end.
        call: the call.
    """
    rank = end.rank
    operation = _OPERATIONS[name]
    words = f"{name} of {call.count} {call.element.name} from {call.root}"
    read = _read(name, end, call)
    offer = known = refusal(end.size), refusal(end.size)
    copies = Copies(end.order, [])
    if read is not None:
        array = (read.array,) * (end.size - 1)
        offer = along_ring(rank, read.seen), array
        known = along_ring(rank, read.sources), array
        copies = _copies(name, end, call, read)
    left = rest(end, call, operation)
    move = handshake.bind(end, operation, words, offer, copies, left, known)
    own = Copy(call.target + rank * call.nbytes, call.source, call.nbytes)
    if read is not None and read.array == _OUTPUT and own.source != own.target:
        return InTurn(Copies(end.order, [own]), move)
    return move


def _read(name: str, end: Endpoint, call: Call) -> _Read | None:
    """Return what the ranks copy from, or None if this rank must refuse."""
    rank, size, part = end.rank, end.size, call.nbytes
    in_place = call.source == call.target + rank * part
    if name == "all_gather" and not in_place:
        place = end.place(call.source, part)
        if place is not None:
            return _Read(_INPUT, place.seen, place.addresses)
    if name == "all_gather":
        place = end.place(call.target, size * part)
        if place is None:
            return None
        seen = tuple(address + rank * part for address in place.seen)
        sources = tuple(address + r * part for r, address in enumerate(place.addresses))
        return _Read(_OUTPUT, seen, sources)
    if name == "all_to_all" and call.source == call.target:
        return None  # the input would be overwritten
    parts = size if name == "all_to_all" else 1
    place = end.place(call.source, parts * part)
    return None if place is None else _Read(_INPUT, place.seen, place.addresses)


def _copies(name: str, end: Endpoint, call: Call, read: _Read) -> Copies:
    rank, size, part, target = end.rank, end.size, call.nbytes, call.target
    if name == "broadcast":
        copies = [Copy(target, read.sources[call.root], part)]
        return Copies(end.order, copies if rank != call.root else [])
    # Of an all-to-all's input, one part is for this rank.
    mine = rank * part if name == "all_to_all" else 0

    def of(r: int) -> Copy:
        return Copy(target + r * part, read.sources[r] + mine, part)

    others = [of((rank + 1 + k) % size) for k in range(size - 1)]
    own = Copy(target + rank * part, call.source + mine, part)
    beside = [own] if read.array == _INPUT and own.source != own.target else []
    return Copies(end.order, others, beside)
