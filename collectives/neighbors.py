"""Collectives between neighbours: each rank names those it sends to and receives from.

They consist of messages, as the v forms. Messages of two ranks match in the order of
their lists.
"""

from collections.abc import Sequence
from typing import Any

from numba_symm.arrays import ArrayView
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.checks import check_apart, check_peer
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.protocols.workspace import most_messages
from numba_symm.collectives.transfers import Prepared, Transfers
from numba_symm.collectives.vector_forms import (
    Form,
    Shard,
    check_even,
    flat,
    formed,
    output,
)
from numba_symm.errors import ArgumentError

Neighbors = Sequence[int | None]

Peers = tuple[int | None, ...]
"""Checked neighbours; None: nobody."""


def all_gather(
    calls: Calls,
    what: str,
    x: Any,
    sources: Neighbors,
    destinations: Neighbors | None,
    out: Any,
    stream: Any,
) -> Prepared:
    """Prepare a ``neighbor_all_gather``."""
    peers = _checked(calls, what, sources, destinations)
    return formed(calls, _ALL_GATHER, what, x, out, stream, *peers)


def all_to_all(
    calls: Calls,
    what: str,
    x: Any,
    sources: Neighbors,
    destinations: Neighbors | None,
    out: Any,
    stream: Any,
) -> Prepared:
    """Prepare a ``neighbor_all_to_all``."""
    peers = _checked(calls, what, sources, destinations)
    return formed(calls, _ALL_TO_ALL, what, x, out, stream, *peers)


def _checked(
    calls: Calls, what: str, sources: Any, destinations: Any
) -> tuple[Peers, Peers]:
    found = _peers(calls, sources, f"{what}: sources")
    others = found
    if destinations is not None:
        others = _peers(calls, destinations, f"{what}: destinations")
    taken, given = (each.count(calls.rank) for each in (found, others))
    if taken != given:
        raise ArgumentError(
            f"{what}: expected rank {calls.rank} as often in sources as in "
            f"destinations, because it receives what it sends itself, got {taken} and "
            f"{given} times"
        )
    return found, others


def _peers(calls: Calls, asked: Any, what: str) -> Peers:
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


def _gathered_shape(
    calls: Calls, what: str, x: ArrayView, sources: Peers, destinations: Peers
) -> tuple[int, ...]:
    return len(sources), *flat(calls, x, what).shape


def _gathered(
    calls: Calls,
    what: str,
    x: ArrayView,
    out: ArrayView,
    sources: Peers,
    destinations: Peers,
) -> Transfers:
    x = flat(calls, x, what)
    parts = [Shard(x, 0, x.size) for _ in destinations]
    return _moved(calls, what, x, out, parts, sources, destinations)


def _exchanged_shape(
    calls: Calls, what: str, x: ArrayView, sources: Peers, destinations: Peers
) -> tuple[int, ...]:
    x, number = flat(calls, x, what), len(destinations)
    if not x.shape or (x.shape[0] % number if number else x.shape[0]):
        raise ArgumentError(
            f"{what}: expected x with a multiple of {number} along its first axis, of "
            f"which each destination has a part, got shape {x.shape}"
        )
    length = x.shape[0] // number if number else 1
    return len(sources) * length, *x.shape[1:]


def _exchanged(
    calls: Calls,
    what: str,
    x: ArrayView,
    out: ArrayView,
    sources: Peers,
    destinations: Peers,
) -> Transfers:
    _exchanged_shape(calls, what, x, sources, destinations)
    number = len(destinations)
    size = x.size // number if number else 0
    parts = [Shard(x, size * i, size) for i in range(number)]
    return _moved(calls, what, x, out, parts, sources, destinations)


def _moved(
    calls: Calls,
    what: str,
    x: ArrayView,
    out: ArrayView,
    parts: list[Shard],
    sources: Peers,
    destinations: Peers,
) -> Transfers:
    """Return the messages: a part to each destination, as much from each source."""
    out = output(calls, out, x, what)
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


_ALL_GATHER = Form(_gathered_shape, _gathered)
_ALL_TO_ALL = Form(_exchanged_shape, _exchanged)
