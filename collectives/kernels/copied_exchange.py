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

from typing import Any, NamedTuple

from numba_symm.collectives.kernels import chunked_broadcast, chunked_exchange
from numba_symm.collectives.kernels.exchange import EXCHANGES
from numba_symm.collectives.protocols import handshake
from numba_symm.collectives.protocols.binding import Enqueue, InTurn
from numba_symm.collectives.protocols.copies import Copies, Copy
from numba_symm.collectives.protocols.handshake import along_ring, refusal
from numba_symm.dtypes import Element, Op
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


def bind(
    name: str,
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
    root: int = 0,
) -> Enqueue:
    """Return what enqueues it; see ``Bind`` in ``select.py``, ``operations.py``.

    ``name`` is ``"all_gather"``, ``"all_to_all"`` or ``"broadcast"``.
    """
    args, rank = (comm, source, target, count, element, op), comm.rank
    operation = _OPERATIONS[name]
    if name == "broadcast":
        if comm.size != 2:
            return chunked_broadcast.bind(*args, root)
        rest = chunked_broadcast.bind(*args, root, left_over=True)
    elif comm.size == 1:
        return chunked_exchange.bind(EXCHANGES[name], *args)
    else:
        rest = chunked_exchange.bind(EXCHANGES[name], *args, left_over=operation)
    part = count * element.itemsize
    read = _read(name, comm, source, target, part)
    call = f"{name} of {count} {element.name} from {root}"
    offer = known = refusal(comm.size), refusal(comm.size)
    copies = Copies(comm.order, [])
    if read is not None:
        array = (read.array,) * (comm.size - 1)
        offer = along_ring(rank, read.seen), array
        known = along_ring(rank, read.sources), array
        copies = _copies(name, comm, source, target, part, root, read)
    move: Enqueue = handshake.bind(comm, operation, call, offer, copies, rest, known)
    own = Copy(target + rank * part, source, part)
    if read is not None and read.array == _OUTPUT and own.source != own.target:
        return InTurn(Copies(comm.order, [own]), move)
    return move


def _read(name: str, comm: Any, source: int, target: int, part: int) -> _Read | None:
    """Return what the ranks copy from, or None if this rank must refuse."""
    rank, size = comm.rank, comm.size
    in_place = source == target + rank * part
    if name == "all_gather" and not in_place:
        place = comm.heap.place(source, part)
        if place is not None:
            return _Read(_INPUT, place.seen, place.addresses)
    if name == "all_gather":
        place = comm.heap.place(target, size * part)
        if place is None:
            return None
        seen = tuple(address + rank * part for address in place.seen)
        sources = tuple(address + r * part for r, address in enumerate(place.addresses))
        return _Read(_OUTPUT, seen, sources)
    if name == "all_to_all" and source == target:
        return None  # the input would be overwritten
    parts = size if name == "all_to_all" else 1
    place = comm.heap.place(source, parts * part)
    return place and _Read(_INPUT, place.seen, place.addresses)


def _copies(
    name: str,
    comm: Any,
    source: int,
    target: int,
    part: int,
    root: int,
    read: _Read,
) -> Copies:
    rank, size = comm.rank, comm.size
    if name == "broadcast":
        copies = [Copy(target, read.sources[root], part)]
        return Copies(comm.order, copies if rank != root else [])
    # Of an all-to-all's input, one part is for this rank.
    mine = rank * part if name == "all_to_all" else 0

    def of(r: int) -> Copy:
        return Copy(target + r * part, read.sources[r] + mine, part)

    others = [of((rank + 1 + k) % size) for k in range(size - 1)]
    own = Copy(target + rank * part, source + mine, part)
    beside = [own] if read.array == _INPUT and own.source != own.target else []
    return Copies(comm.order, others, beside)
