"""Sends and receives between two ranks, and groups of calls that start together.

The functions that ``remembered`` calls derive messages from a call's arguments. They
run only for arguments that were not passed before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np

from numba_symm.collectives import staging
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.collectives.invocation import (
    Invocation,
    are_apart,
    check_apart,
    check_peer,
)
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.requests import (
    Request,
    RequestCall,
    Requests,
)
from numba_symm.collectives.staging import Pending, Prepared, Transfers
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, entry, streams
from numba_symm.gpu.arrays import ArrayView
from numba_symm.gpu.events import Point
from numba_symm.launch.ranks import name_ranks


@dataclass(frozen=True, eq=False)
class MessageKind:
    """A message of one array, or of one in each direction.

    Attributes:
        name: the name of the communicator's method.
        sends: whether it sends ``x``.
        receives: whether it receives into ``out``.
        beside: whether it is a request, which runs beside all other calls.
        collective: whether all ranks make the same calls.
    """

    name: str
    sends: bool
    receives: bool
    beside: bool = False
    collective: bool = False

    def prepare(self, calls: Calls, given: "MessageCall") -> Prepared:
        """Prepare to send, to receive, or both."""
        return staging.prepared(calls, given, _prepared)


MessageCall = Invocation[MessageKind]

SEND, RECV = MessageKind("send", True, False), MessageKind("recv", False, True)
SENDRECV = MessageKind("sendrecv", True, True)
ISEND = MessageKind("isend", True, False, beside=True)
IRECV = MessageKind("irecv", False, True, beside=True)


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
    return Prepared(transfers, chosen, (x, out, given.count, stream), out)


def start(
    calls: Calls,
    kind: MessageKind,
    x: Any,
    dst: Any,
    out: Any,
    src: Any,
    count: Any,
    stream: Any,
) -> Any:
    """Make a call of messages, or add it to an open group; return its result.

    That of a request is the request.
    """
    key, group = None, calls.thread.group
    if group is not None and group.thread != get_ident():
        group = None  # that of another thread may end before this call is refused
    # A rank of another class may equal a known one, and be refused.
    if count is None and dst.__class__ in _RANKS and src.__class__ in _RANKS:
        try:
            source = None if x is None else arrays.KINDS[x.__class__].read(x, "")
            target = None if out is None else arrays.KINDS[out.__class__].read(out, "")
            handle = calls.streams.of(stream, out if x is None else x)
        except (KeyError, TypeError, ArgumentError):
            pass  # what is called below raises it
        else:
            node = None if group is None else group.node
            key = node, kind, dst, src, source, target
            found = calls.memory.young.get(key)
            if found is None:
                pass  # what is called below remembers it, after this node
            elif group is not None:
                known = group.handle
                if known == handle or known is None:
                    group.node, group.handle = found, handle
                    group.kept = x, out, stream, group.kept
                    return out
            elif kind.beside:
                if calls.thread.claim() == entry.DONE:
                    try:
                        return started(calls, found, handle, (x, out, stream), out)
                    finally:
                        calls.thread.finish()
            else:
                status = found.enqueue(handle)
                if status == entry.DONE or calls.made(status, found, handle, x, out):
                    return out
    given = Invocation(kind, x, out, stream, peers=(dst, src), count=count)
    if kind.beside:
        with calls.thread.alone(kind.name):
            return request(calls, given, key)
    return calls.call(given, key)


_RANKS = int, type(None)


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


def request(calls: Calls, given: MessageCall, key: Any) -> Request:
    """Check and start an ``isend`` or ``irecv``, beside all other calls.

    Args:
        calls: the communicator's calls.
        given: the call.
        key: by which it is remembered; None: it is not.
    """
    what = given.operation.name
    with calls.staging.apart():
        call = calls.prepared(given)
    assert isinstance(call, Prepared)
    requests, handle = requests_of(calls, what), call.stream
    calls.enqueuer.refuse_in_group(what)
    transfers = call.transfers
    if not transfers.complete:
        name = "src" if transfers.own[1] else "dst"
        raise ArgumentError(
            f"{what}: {name}: expected another rank, got {calls.rank}, which is this "
            "rank; use sendrecv, or send and recv in one group"
        )
    messages = [*transfers.sends, *transfers.receives]
    if not messages:  # to or from no rank
        _refuse_capture(what, handle)
        calls.enqueue(what, call)
        done, settle = Point([], handle), requests.settle
        return Request(calls.members, what, done, call.result, handle, settle)
    message = messages[0], bool(transfers.receives)
    bound = calls.agreement.made(what, calls.remembered, _bound, message)
    launch = Series(*call.before, bound, *call.after)
    about = calls.descriptions.messages(what, transfers)
    made = requests.pack((messages[0].peer, message[1]), about, launch)
    if key is not None and not (call.before or call.after):
        calls.memory.put(key, made)
    return started(calls, made, handle, call.keep, call.result)


def started(
    calls: Calls, made: RequestCall, stream: int, keep: Any, result: Any
) -> Request:
    """Start a request that was checked, in a call of one thread.

    Args:
        calls: the communicator's calls.
        made: the request.
        stream: the handle of the stream whose work it follows.
        keep: objects that must live until it is done.
        result: that of its ``wait``.
    """
    about, requests = made.call.about, calls.requests
    assert requests is not None
    _refuse_capture(about.what, stream)
    if calls.enqueuer.record is not None:
        calls.enqueuer.record.note(about, stream)
    failed = partial(calls.enqueuer.give_up, what=about.what)
    try:
        done = requests.start(made, stream, keep, failed)
    except BaseException as error:
        failed(error)
        raise
    return Request(calls.members, about.what, done, result, stream, requests.settle)


def _refuse_capture(what: str, stream: int) -> None:
    if not SIMULATED and streams.is_capturing(stream):
        raise ArgumentError(
            f"{what}: expected a stream that is not being captured into a graph, got "
            "one that is; use send and recv, in a group, there"
        )


def _bound(calls: Calls, message: tuple[Message, bool]) -> Enqueue:
    """Return the packed launch of a request: a message, and whether it is received."""
    assert calls.requests is not None
    return calls.requests.bind(*message)


class _Node:
    """The first calls of groups that begin with the same remembered calls.

    The memory of calls has, for a node and the key of the next call, the next node.

    Attributes:
        transfers: the messages of each call.
        call: the packed group of these calls, if there was one.
    """

    def __init__(self, transfers: tuple[Transfers, ...] = ()):
        self.transfers = transfers
        self.call: PackedCall | None = None


_NO_CALLS, _OTHER_CALLS = _Node(), _Node()
"""The beginning of a group; one with calls that are not remembered."""


class Group:
    """The calls of an open group, which start at the end of a ``with`` block.

    If all of them are remembered, it only moves from node to node.

    Args:
        calls: the communicator's calls.
        what: the communicator's method.
        done: is called with the calls at the end; None: they start.

    Attributes:
        node: that of the calls so far.
        handle: the handle of the stream of the messages so far, or None.
        kept: what must live until the calls start that are only remembered.
        thread: the thread that has opened the group.
    """

    node = _NO_CALLS
    handle: Any = None
    kept: tuple[Any, ...] = ()
    _known: Pending | None = None

    def __init__(
        self, calls: Calls, what: str, done: Callable[[Pending], None] | None = None
    ):
        self._calls, self._what, self._done = calls, what, done

    def __enter__(self) -> None:
        thread = self._calls.thread
        if thread.open() != entry.DONE:
            thread.begin(self._what)
            try:
                self._calls.members.check()
                self._calls.enqueuer.refuse_in_group(self._what)
            except BaseException:
                thread.finish()
                raise
            self._calls.enqueuer.gate.slow |= entry.GROUPED
        self.thread = get_ident()
        self._calls.staging.used = 0
        thread.group = self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        calls, node, handle, kept = self._calls, self.node, self.handle, self.kept
        call = None if self._done else node.call
        try:
            if kind is None and call is None:
                found = self.pending
        finally:
            calls.thread.group = None
            self.node, self.handle, self.kept, self._known = _NO_CALLS, None, (), None
            calls.thread.close()
        if kind is not None:
            return
        if call is not None:
            status = call.enqueue(handle)
            if status == entry.DONE or calls.made(status, call, handle, kept):
                return
        with calls.thread.alone(self._what):
            calls.members.check()
            if call is not None:
                calls.enqueuer.run(call, handle, kept)
            elif self._done is not None:
                self._done(found)
            else:
                start_group(calls, found)
                if node is not _OTHER_CALLS:
                    node.call = transfers_of(calls, found).call

    @property
    def pending(self) -> Pending:
        """The calls so far, with their messages together."""
        if self._known is None:
            self._known = Pending(self._calls.size)
        for each in self.node.transfers[len(self._known.calls) :]:
            self._known.add(Prepared(each, self.handle, (), None))
        self._known.kept += self.kept
        self.kept = ()
        return self._known

    def add(self, call: Prepared, key: Any) -> None:
        """Add messages; raise what :meth:`Pending.check` raises."""
        node = self.node
        self.pending.add(call)
        self.node = _OTHER_CALLS
        follows = key is not None and key[0] is node and node is not _OTHER_CALLS
        alone = self.handle in (None, call.stream)
        if follows and alone and not (call.before or call.after):
            self.handle = call.stream
            self.node = _Node((*node.transfers, call.transfers))
            self._calls.memory.put(key, self.node)

    def append(self, call: PackedCall, stream: int, keep: tuple[Any, ...]) -> None:
        """Add a call that does not start together with messages."""
        pending = self.pending
        self.node = _OTHER_CALLS
        pending.kept += keep
        pending.launches.append((call, stream))


def start_group(
    calls: Calls, found: Pending, stream: int | None = None, *keep: Any
) -> None:
    """Enqueue the calls of a group, or add them to an open one.

    Args:
        calls: the communicator's calls.
        found: the calls of the group.
        stream: the handle of the stream of all of them; None: that of each.
        keep: objects that must live until they are enqueued.
    """
    keep = (*found.kept, *keep)
    call = None
    if found.stream is not None:
        call = prepared_group(calls, found, stream, keep)
        if calls.thread.group is None:  # refuse it before anything is enqueued
            calls.agreement.made("group", calls.packed_messages, "group", call)
    try:
        if call is not None:
            calls.enqueue("group", call)
        for packed, own in found.launches:
            calls.enqueuer.run(packed, own if stream is None else stream, *keep)
    except BaseException as error:
        if calls.thread.group is None:
            handles = found.stream_handles if stream is None else {stream}
            calls.enqueuer.give_up(error, "group", *handles)
        raise


def prepared_group(
    calls: Calls,
    found: Pending,
    stream: int | None = None,
    keep: tuple[Any, ...] = (),
) -> Prepared:
    """Return the messages of a group that has some; see :func:`start_group`."""
    assert found.stream is not None
    before = tuple(step for each in found.calls for step in each.before)
    after = tuple(step for each in found.calls for step in each.after)
    on = found.stream if stream is None else stream
    transfers = transfers_of(calls, found)
    return Prepared(transfers, on, keep, None, before, after)


def transfers_of(calls: Calls, found: Pending) -> Transfers:
    """Return the messages of a group."""
    return calls.remembered(_grouped, tuple(each.transfers for each in found.calls))


def _grouped(calls: Calls, several: tuple[Transfers, ...]) -> Transfers:
    def all_of(name: str) -> list[Any]:
        return [each for one in several for each in getattr(one, name)]

    sends, receives, copies = map(all_of, ("sends", "receives", "copies"))
    own = [[each for one in several for each in one.own[end]] for end in (0, 1)]
    fills = all_of("fills")
    return Transfers(sends, receives, copies, fills=fills, own=(own[0], own[1]))


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
