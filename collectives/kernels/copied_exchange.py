"""All-gather, all-to-all and broadcast of the largest messages, with copy engines.

Each rank copies its shards from the other ranks' arrays directly into its output.
``copies.py`` explains how. What the ranks copy from must be symmetric:

    all_gather   the inputs; or the outputs, where each rank copies its shard first
    all_to_all   the inputs, which are not the outputs
    broadcast    the arrays of two ranks

A rank whose arrays are not symmetric refuses the call in the handshake, and the kernel
in chunks executes the call. A broadcast to more than one rank never uses copy engines,
because its root would send the message once for each rank.
"""

from typing import NamedTuple

from numba_symm.collectives.protocols import binding, exchanges, handshake
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.collectives.protocols.copies import Beside
from numba_symm.gpu.streams import Copy


class _Read(NamedTuple):
    """What the ranks copy from.

    Attributes:
        output: whether it is the output, else the input.
        seen: by rank, at which address that rank sees what it copies from this one.
        sources: by rank, the assumed address of what this rank copies from that one.
    """

    output: bool
    seen: tuple[int, ...]
    sources: tuple[int, ...]


def bind(
    kind: exchanges.Exchange,
    operation: int,
    bind_fallback: binding.BindFallback,
    end: binding.Endpoint,
    call: binding.Call,
) -> binding.Enqueue:
    """Return what enqueues it, for two ranks or more, a broadcast for two.

    Args:
        kind: what is exchanged; nothing is reduced.
        operation: the number in ``launch/failures.py`` for a wait that is given up.
        bind_fallback: binds the operation through the workspace.
        end: this rank's end.
        call: the call.
    """
    rank = end.rank
    digest = binding.digest_of(
        f"{kind} of {call.count} {call.element.name} from {call.root}"
    )
    read = _read(kind, end, call)
    seen = known = handshake.refusal(end.size)
    copies: Enqueue = Series()
    if read is not None:
        seen = binding.along_ring(rank, read.seen)
        known = binding.along_ring(rank, read.sources)
        copies = _copies(kind, end, call, read)
    sent = digest, seen, seen
    move = handshake.bind(bind_fallback, end, call, operation, sent, known, copies)
    own = Copy(call.target + rank * call.nbytes, call.source, call.nbytes)
    if read is not None and read.output and own.source != own.target:
        return Series(own, move)
    return move


def _read(
    kind: exchanges.Exchange, end: binding.Endpoint, call: binding.Call
) -> _Read | None:
    """Return what the ranks copy from, or None if this rank must refuse."""
    rank, size, shard_bytes = end.rank, end.size, call.nbytes
    in_place = call.source == call.target + rank * shard_bytes
    gathers = kind.output is exchanges.Output.SHARDS and not kind.sends_shards
    if gathers and not in_place:
        place = end.place(call.source, shard_bytes)
        if place is not None:
            return _Read(False, place.seen, place.addresses)
    if gathers:
        place = end.place(call.target, size * shard_bytes)
        if place is None:
            return None
        seen = tuple(address + rank * shard_bytes for address in place.seen)
        sources = tuple(
            address + r * shard_bytes for r, address in enumerate(place.addresses)
        )
        return _Read(True, seen, sources)
    if kind.sends_shards and call.source == call.target:
        return None  # the input would be overwritten
    shards = size if kind.sends_shards else 1
    place = end.place(call.source, shards * shard_bytes)
    return None if place is None else _Read(False, place.seen, place.addresses)


def _copies(
    kind: exchanges.Exchange, end: binding.Endpoint, call: binding.Call, read: _Read
) -> Enqueue:
    rank, size, shard_bytes, target = end.rank, end.size, call.nbytes, call.target
    if kind.output is exchanges.Output.OF_ROOT:
        copy = Copy(target, read.sources[call.root], shard_bytes)
        return copy if rank != call.root else Series()
    # Of an all-to-all's input, one shard is for this rank.
    mine = rank * shard_bytes if kind.sends_shards else 0

    def of(r: int) -> Copy:
        return Copy(target + r * shard_bytes, read.sources[r] + mine, shard_bytes)

    others = Series(*(of((rank + 1 + k) % size) for k in range(size - 1)))
    own = Copy(target + rank * shard_bytes, call.source + mine, shard_bytes)
    if read.output or own.source == own.target:
        return others
    return Beside(end.order, others, own)
