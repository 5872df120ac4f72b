"""Sends and receives between two ranks, and groups of calls that start together.

The functions that ``remembered`` calls derive messages from a call's arguments. They
run only for arguments that were not passed before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numba_symm import arrays, streams
from numba_symm.arrays import ArrayView
from numba_symm.collectives import staging
from numba_symm.collectives.call_streams import HeldStream
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.checks import are_apart, check_apart, check_peer
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.requests import Request, Requests, end_of
from numba_symm.collectives.transfers import (
    Fill,
    Own,
    OwnCopy,
    Pending,
    Prepared,
    Transfers,
)
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.launch.ranks import name_ranks


class MessageKind(NamedTuple):
    """A message of one array, or of one in each direction.

    Attributes:
        name: the name of the communicator's method.
        sends: whether it sends ``x``.
        receives: whether it receives into ``out``.
    """

    name: str
    sends: bool
    receives: bool


MessageCall = Invocation[MessageKind]

SEND, RECV = MessageKind("send", True, False), MessageKind("recv", False, True)
SENDRECV = MessageKind("sendrecv", True, True)
ISEND, IRECV = MessageKind("isend", True, False), MessageKind("irecv", False, True)


def prepared(calls: Calls, given: MessageCall) -> Prepared:
    """Prepare to send, to receive, or both."""
    calls.members.check_open()
    return staging.prepared(calls, given, _prepared)


def _prepared(calls: Calls, given: MessageCall) -> Prepared:
    """Prepare messages of arrays without gaps."""
    kind, x, out, stream = given[:4]
    what, (dst, src), count = kind.name, given.peers, given.count
    peers = (
        check_peer(dst, calls.size, f"{what}: dst"),
        check_peer(src, calls.size, f"{what}: src"),
    )
    if count is not None:
        count = arrays.view(count, f"{what}: count")
    source = arrays.view(x, what) if kind.sends else None
    target = arrays.view(out, f"{what}: out") if kind.receives else None
    read = given._replace(x=source, out=target, stream=None, peers=peers, count=count)
    transfers = calls.remembered(_transfers, read)
    chosen = calls.streams.of(stream, x if kind.sends else out)
    return Prepared(transfers, chosen, (x, out, given.count), out)


def start(calls: Calls, given: MessageCall) -> Any:
    """Make a call of messages, or add it to an open group; return its result."""
    call = prepared(calls, given)
    calls.transfer(given.operation.name, call)
    return call.result


def requests_of(calls: Calls, what: str) -> Requests:
    """Return the requests of a communicator, or refuse a call that needs them."""
    if calls.requests is not None:
        return calls.requests
    parts = calls.members.parts
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


def request(calls: Calls, given: MessageCall) -> Request:
    """Start an ``isend`` or ``irecv``, beside all other calls."""
    what = given.operation.name
    with calls.staging.apart():
        call = prepared(calls, given)
    requests, (handle, _) = requests_of(calls, what), call.stream
    calls.enqueuer.refuse_in_group(what)
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
        calls.transfer(what, call)
        done = end_of(handle)
    else:
        message = messages[0], bool(transfers.receives)
        bound = calls.agreement.made(what, calls.remembered, _bound, message)
        launch = call.around(bound) or bound
        calls.enqueuer.note(calls.descriptions.messages(what, transfers), handle)
        direction = message[0].peer, message[1]
        failed = partial(calls.enqueuer.give_up, what=what)
        try:
            done = requests.start(direction, launch, handle, call.keep, failed)
        except BaseException as error:
            failed(error)
            raise
    return Request(calls.members, what, done, call.result, call.stream, requests.settle)


def _bound(calls: Calls, message: tuple[Message, bool]) -> Enqueue:
    """Return the packed launch of a request: a message, and whether it is received."""
    assert calls.requests is not None
    return calls.requests.bind(*message)


@contextmanager
def collecting(
    calls: Calls, what: str, done: Callable[[Pending], None]
) -> Iterator[None]:
    """Collect the calls within a ``with`` block, and pass them to ``done``."""
    with calls.thread.alone(what):
        calls.members.check()
        calls.enqueuer.refuse_in_group(what)
        calls.staging.begin()
        pending = calls.enqueuer.group = Pending(calls.size)
        calls.thread.held = True
        try:
            yield
        finally:
            calls.thread.held = False
            calls.enqueuer.group = None
        calls.members.check()
        done(pending)


def group(calls: Calls) -> AbstractContextManager[None]:
    """Start the calls within a ``with`` block together; see Communicator.group."""
    return collecting(calls, "group", partial(start_group, calls))


def start_group(
    calls: Calls, found: Pending, stream: HeldStream | None = None, *keep: Any
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
        before, after = tuple(found.before), tuple(found.after)
        on = stream or found.stream
        call = Prepared(transfers_of(calls, found), on, keep, None, before, after)
        if calls.enqueuer.group is None:  # refuse it before anything is enqueued
            calls.agreement.made("group", call.packed, calls.binder.messages, "group")
    try:
        if call is not None:
            calls.transfer("group", call)
        for about, launch, own in found.launches:
            calls.enqueuer.run(about, launch, stream or own, *keep)
    except BaseException as error:
        if calls.enqueuer.group is None:
            handles = found.stream_handles if stream is None else {stream[0]}
            calls.enqueuer.give_up(error, "group", *handles)
        raise


def transfers_of(calls: Calls, found: Pending) -> Transfers:
    """Return the messages of a group."""
    return calls.remembered(
        _grouped,
        (
            tuple(found.sends),
            tuple(found.receives),
            tuple(found.copies),
            tuple(found.fills),
            (tuple(found.own[0]), tuple(found.own[1])),
        ),
    )


Grouped = tuple[
    tuple[Message, ...], tuple[Message, ...], tuple[OwnCopy, ...], tuple[Fill, ...], Own
]
"""What ``Transfers`` has of a group: sends, receives, copies, fills, own."""


def _grouped(calls: Calls, given: Grouped) -> Transfers:
    sends, receives, copies, fills, own = given
    return Transfers(sends, receives, copies, fills=fills, own=own)


def _transfers(calls: Calls, given: MessageCall) -> Transfers:
    """Check the arrays, and return the messages, those to and from this rank apart."""
    what, x, out = given.operation.name, given.x, given.out
    (dst, src), count = given.peers, given.count
    sends, receives = [], []
    if x is not None:
        x = calls.usable(x, what)
        if dst is not None:
            sends.append(Message(dst, x.address, x.nbytes))
    if out is not None:
        out = calls.usable(out, f"{what}: out", written=True)
        if src is not None:
            counted = () if count is None else (count.address, out.dtype.itemsize)
            receives.append(Message(src, out.address, out.nbytes, *counted))
    if x is not None and out is not None:
        check_apart(x, out, what)
    if count is not None:
        _check_count(
            calls, count, [each for each in (x, out) if each is not None], what
        )
    rank = calls.rank
    return Transfers(
        [each for each in sends if each.peer != rank],
        [each for each in receives if each.peer != rank],
        fills=[(count.address, 0)] if count is not None and src is None else [],
        own=(
            [each for each in sends if each.peer == rank],
            [each for each in receives if each.peer == rank],
        ),
    )


def _check_count(
    calls: Calls, count: ArrayView, others: Sequence[ArrayView], what: str
) -> None:
    """Refuse an array that the number of elements of a message cannot be stored in."""
    calls.usable(count, f"{what}: count", written=True)
    if count.dtype != np.int64 or count.size != 1:
        raise ArgumentError(
            f"{what}: expected count of 1 int64, got {count.size} {count.dtype.name}; "
            "pass cuda.device_array(1, np.int64), for example"
        )
    if not all(are_apart(other, count) for other in others):
        raise ArgumentError(
            f"{what}: expected count apart from the other arrays, got arrays that "
            "overlap"
        )
