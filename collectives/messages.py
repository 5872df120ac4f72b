"""Sends and receives between two ranks, and groups of calls that start together.

The functions that ``remembered`` calls derive messages from a call's arguments. They
run only for arguments that were not passed before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np

from numba_symm import arrays, streams
from numba_symm.arrays import ArrayView
from numba_symm.collectives import staging
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.checks import are_apart, check_apart, check_peer
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.requests import Request, Requests, end_of
from numba_symm.collectives.transfers import (
    Copy,
    Fill,
    Own,
    Pending,
    Prepared,
    Stream,
    Transfers,
)
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.launch.ranks import name_ranks


def sending(
    calls: Calls, x: Any, dst: int | None, stream: Any, what: str = "send"
) -> Prepared:
    """Prepare to send an array; see :meth:`Communicator.send`."""
    calls.island.check_open()
    to = check_peer(dst, calls.size, f"{what}: dst")

    def prepare(x: Any, _: Any, stream: Any) -> Prepared:
        transfers = calls.remembered(_sent, what, arrays.view(x, what), to)
        return Prepared(transfers, calls.stream_for(stream, x), (x,), None)

    return staging.prepared(calls, what, prepare, x, None, stream)


def receiving(
    calls: Calls,
    out: Any,
    src: int | None,
    count: Any,
    stream: Any,
    what: str = "recv",
) -> Prepared:
    """Prepare to receive an array; see :meth:`Communicator.recv`."""
    calls.island.check_open()
    source = check_peer(src, calls.size, f"{what}: src")
    number = _count(count, what)

    def prepare(_: Any, out: Any, stream: Any) -> Prepared:
        taken = arrays.view(out, f"{what}: out")
        transfers = calls.remembered(_received, what, taken, source, number)
        return Prepared(transfers, calls.stream_for(stream, out), (out, count), out)

    return staging.prepared(calls, what, prepare, None, out, stream)


def exchanging(
    calls: Calls,
    x: Any,
    dst: int | None,
    out: Any,
    src: int | None,
    count: Any,
    stream: Any,
) -> Prepared:
    """Prepare to send and receive; see :meth:`Communicator.sendrecv`."""
    calls.island.check_open()
    dst = check_peer(dst, calls.size, "sendrecv: dst")
    src = check_peer(src, calls.size, "sendrecv: src")
    number = _count(count, "sendrecv")

    def prepare(x: Any, out: Any, stream: Any) -> Prepared:
        given = arrays.view(x, "sendrecv")
        taken = arrays.view(out, "sendrecv: out")
        transfers = calls.remembered(_exchanged, given, dst, taken, src, number)
        return Prepared(transfers, calls.stream_for(stream, x), (x, out, count), out)

    return staging.prepared(calls, "sendrecv", prepare, x, out, stream)


def start(calls: Calls, what: str, call: Prepared) -> Any:
    """Enqueue a prepared call, or add it to an open group; return its result."""
    calls.transfer(what, call)
    return call.result


def requests_of(calls: Calls, what: str) -> Requests:
    """Return the requests of a communicator, or refuse a call that needs them."""
    if calls.requests is not None:
        return calls.requests
    parts = calls.island.parts
    if len(parts) > 1:
        found = "; ".join(map(name_ranks, parts))
        raise ArgumentError(
            f"{what}: expected a communicator of one island, got the islands "
            f"{found}; use send, recv and group"
        )
    raise ArgumentError(
        f"{what}: expected a communicator with requests, got one without; pass "
        "requests=True to Communicator"
    )


def request(calls: Calls, what: str, call: Prepared) -> Request:
    """Start a prepared ``isend`` or ``irecv``, beside all other calls."""
    requests, (handle, _) = requests_of(calls, what), call.stream
    calls.refuse_in_group(what)
    if not SIMULATED and streams.is_capturing(handle):
        raise ArgumentError(
            f"{what}: expected a stream that is not being captured into a graph, got "
            "one that is; use send and recv, in a group, there"
        )
    transfers = call.transfers
    if not transfers.complete:
        name = "src" if transfers.own[1] else "dst"
        raise ArgumentError(
            f"{what}: {name}: expected another rank, got {calls.rank}, which is this "
            "rank; use sendrecv, or send and recv in one group"
        )
    messages = [*transfers.sends, *transfers.receives]
    if not messages:  # to or from no rank
        start(calls, what, call)
        done = end_of(handle)
    else:
        receiving = bool(transfers.receives)
        bound = calls.made(what, calls.remembered, _bound, messages[0], receiving)
        launch = call.around(bound) or bound
        direction = messages[0].peer, receiving
        failed = partial(calls.give_up, what=what)
        try:
            done = requests.start(direction, launch, handle, call.keep, failed)
        except BaseException as error:
            failed(error)
            raise
    return Request(calls.island, what, done, call.result, call.stream, requests.settle)


def _bound(calls: Calls, message: Message, receiving: bool) -> Enqueue:
    """Return the packed launch of a request."""
    assert calls.requests is not None
    return calls.requests.bind(message, receiving)


@contextmanager
def collecting(
    calls: Calls, what: str, done: Callable[[Pending], None]
) -> Iterator[None]:
    """Collect the calls within a ``with`` block, and pass them to ``done``."""
    with calls.alone(what):
        calls.island.check()
        calls.refuse_in_group(what)
        calls.staging.begin()
        pending = calls.pending = Pending(calls.size)
        try:
            yield
        finally:
            calls.pending = None
        calls.island.check()
        done(pending)


def group(calls: Calls) -> AbstractContextManager[None]:
    """Start the calls within a ``with`` block together; see Communicator.group."""
    return collecting(calls, "group", partial(start_group, calls))


def start_group(
    calls: Calls, found: Pending, stream: Stream | None = None, *keep: Any
) -> None:
    """Enqueue the calls of a group, or add them to an open one.

    Args:
        calls: the communicator's calls.
        found: the calls of the group.
        stream: the stream of all of them; None: that of each.
        keep: objects that must live until they are enqueued.
    """
    keep = (*found.kept, *keep)
    call = None
    if found.stream is not None:
        steps = tuple(found.before), tuple(found.after)
        on = stream or found.stream
        call = Prepared(transfers_of(calls, found), on, keep, None, *steps)
        if calls.pending is None:  # refuse it before anything is enqueued
            calls.made("group", call.packed, calls.binder.messages, "group")
    try:
        if call is not None:
            calls.transfer("group", call)
        for what, launch, own in found.launches:
            calls.run(what, launch, stream or own, *keep)
    except BaseException as error:
        if calls.pending is None:
            handles = found.stream_handles if stream is None else {stream[0]}
            calls.give_up(error, "group", *handles)
        raise


def transfers_of(calls: Calls, found: Pending) -> Transfers:
    """Return the messages of a group."""
    messages = tuple(found.sends), tuple(found.receives)
    own = tuple(map(tuple, found.own))
    return calls.remembered(
        _grouped, *messages, tuple(found.copies), tuple(found.fills), own
    )


def _count(count: Any, what: str) -> ArrayView | None:
    return None if count is None else arrays.view(count, f"{what}: count")


def _sent(calls: Calls, what: str, x: ArrayView, dst: int | None) -> Transfers:
    return _made(calls, _sends(dst, calls.usable(x, what)), [], ())


def _received(
    calls: Calls,
    what: str,
    out: ArrayView,
    src: int | None,
    count: ArrayView | None,
) -> Transfers:
    out = calls.usable(out, f"{what}: out", written=True)
    _check_count(calls, count, [out], what)
    fills = _fills(count) if src is None else ()
    return _made(calls, [], _receives(src, out, count), fills)


def _made(
    calls: Calls,
    sends: Sequence[Message],
    receives: Sequence[Message],
    fills: Sequence[Fill],
) -> Transfers:
    """Return the messages of a call, those to and from this rank apart."""
    rank = calls.rank
    own = (
        [each for each in sends if each.peer == rank],
        [each for each in receives if each.peer == rank],
    )
    return Transfers(
        [each for each in sends if each.peer != rank],
        [each for each in receives if each.peer != rank],
        fills=fills,
        own=own,
    )


def _check_count(
    calls: Calls, count: ArrayView | None, others: Sequence[ArrayView], what: str
) -> None:
    """Refuse an array that the number of elements of a message cannot be stored in."""
    if count is None:
        return
    calls.usable(count, f"{what}: count", written=True)
    if count.dtype != np.int64 or count.size != 1:
        raise ArgumentError(
            f"{what}: expected count of 1 int64, got {count.size} {count.dtype.name}; "
            "pass cuda.device_array(1, np.int64), say"
        )
    if not all(are_apart(other, count) for other in others):
        raise ArgumentError(
            f"{what}: expected count apart from the other arrays, got arrays that "
            "overlap"
        )


def _sends(peer: int | None, x: ArrayView) -> list[Message]:
    """Return the message of an array to a rank, if there is one."""
    return [] if peer is None else [Message(peer, x.address, x.nbytes)]


def _receives(
    peer: int | None, out: ArrayView, count: ArrayView | None
) -> list[Message]:
    """Return the message from a rank, if there is one."""
    if peer is None:
        return []
    counted = () if count is None else (count.address, out.dtype.itemsize)
    return [Message(peer, out.address, out.nbytes, *counted)]


def _fills(count: ArrayView | None) -> list[Fill]:
    """Return what stores the count of a message from no rank."""
    return [] if count is None else [(count.address, 0)]


def _exchanged(
    calls: Calls,
    x: ArrayView,
    dst: int | None,
    out: ArrayView,
    src: int | None,
    count: ArrayView | None,
) -> Transfers:
    x = calls.usable(x, "sendrecv")
    out = calls.usable(out, "sendrecv: out", written=True)
    check_apart(x, out, "sendrecv")
    _check_count(calls, count, [x, out], "sendrecv")
    fills = _fills(count) if src is None else ()
    return _made(calls, _sends(dst, x), _receives(src, out, count), fills)


def _grouped(
    calls: Calls,
    sends: Sequence[Message],
    receives: Sequence[Message],
    copies: Sequence[Copy],
    fills: Sequence[Fill],
    own: Own,
) -> Transfers:
    return Transfers(sends, receives, copies, fills=fills, own=own)
