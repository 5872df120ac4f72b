"""Collectives between neighbours: each rank names its destinations and its sources.

They consist of messages, as the v forms do. The messages of two ranks match in the
order of the ranks' lists.
"""

from typing import Any

from numba_symm.collectives.calls import Calls
from numba_symm.collectives.checks import check_apart, check_peer
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import most_messages
from numba_symm.collectives.transfers import Transfers
from numba_symm.collectives.vector_forms import (
    Form,
    FormCall,
    Shard,
    check_even,
    flat,
    output,
)
from numba_symm.errors import ArgumentError

Neighbors = tuple[int | None, ...]
"""Checked neighbours; None: nobody."""


def _checked(calls: Calls, given: FormCall) -> FormCall:
    """Check the neighbours."""
    what, (destinations, sources) = given.operation.name, given.peers
    found = _peers(calls, sources, f"{what}: sources")
    others = found
    if destinations is not None:
        others = _peers(calls, destinations, f"{what}: destinations")
    taken, sent = (each.count(calls.rank) for each in (found, others))
    if taken != sent:
        raise ArgumentError(
            f"{what}: expected rank {calls.rank} as often in sources as in "
            f"destinations, because it receives what it sends itself, got {taken} and "
            f"{sent} times"
        )
    return given._replace(peers=(others, found))


def _peers(calls: Calls, asked: Any, what: str) -> Neighbors:
    try:
        listed = list(asked)
    except Exception as error:  # an object's own method may raise anything
        raise ArgumentError(
            f"{what}: expected a sequence of ranks, got {asked!r:.100}"
        ) from error
    found = tuple(check_peer(each, calls.size, what) for each in listed)
    most = most_messages(calls.size)
    for rank in set(found) - {None, calls.rank}:
        if found.count(rank) > most:
            raise ArgumentError(
                f"{what}: expected each rank at most {most} times, got rank {rank} "
                f"{found.count(rank)} times"
            )
    return found


def _gathered_shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    _, sources = given.peers
    return len(sources), *flat(calls, given.x, given.operation.name).shape


def _gathered(calls: Calls, given: FormCall) -> Transfers:
    x = flat(calls, given.x, given.operation.name)
    destinations, _ = given.peers
    return _moved(calls, given, [Shard(x, 0, x.size) for _ in destinations])


def _exchanged_shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    what, (destinations, sources) = given.operation.name, given.peers
    x, number = flat(calls, given.x, what), len(destinations)
    if not x.shape or (x.shape[0] % number if number else x.shape[0]):
        raise ArgumentError(
            f"{what}: expected x with a multiple of {number} along its first axis, of "
            f"which each destination has a part, got shape {x.shape}"
        )
    length = x.shape[0] // number if number else 1
    return len(sources) * length, *x.shape[1:]


def _exchanged(calls: Calls, given: FormCall) -> Transfers:
    _exchanged_shape(calls, given)
    x, number = given.x, len(given.peers[0])
    size = x.size // number if number else 0
    return _moved(calls, given, [Shard(x, size * i, size) for i in range(number)])


def _moved(calls: Calls, given: FormCall, parts: list[Shard]) -> Transfers:
    """Return the messages: a part to each destination, as much from each source."""
    x, out, what = given.x, output(calls, given), given.operation.name
    destinations, sources = given.peers
    check_apart(x, out, what)
    size = parts[0].nbytes // x.dtype.itemsize if parts else None
    if size is None:  # only the sources know how much they send
        size = out.size // len(sources) if sources else 0
    check_even(out, len(sources) * size, x, what)
    places = [Shard(out, size * i, size) for i in range(len(sources))]
    sends, receives, own = [], [], []
    for peer, part in zip(destinations, parts, strict=True):
        if peer == calls.rank:
            own.append(part)
        elif peer is not None:
            sends.append(Message(peer, part.address, part.nbytes))
    copies = []
    for peer, place in zip(sources, places, strict=True):
        if peer == calls.rank:
            part = own.pop(0)
            copies.append((place.address, part.address, part.nbytes))
        elif peer is not None:
            receives.append(Message(peer, place.address, place.nbytes))
    return Transfers(sends, receives, copies, x.dtype.name, x.dtype.itemsize)


NEIGHBOR_ALL_GATHER = Form("neighbor_all_gather", _checked, _gathered_shape, _gathered)
NEIGHBOR_ALL_TO_ALL = Form(
    "neighbor_all_to_all", _checked, _exchanged_shape, _exchanged
)
