"""The memory of strided arrays, messages that start together, and counts.

Strided arrays: a call works on contiguous memory instead.

A kernel packs such an array before the call, and another one unpacks an output after
it. An output is packed, too, because a call may not write all of it. A message may be
shorter, ranges may leave elements out, and a call may fail.

The memory belongs to the communicator. Its calls follow one another, also on different
streams, so all of them may use the same memory. It is kept until the communicator is
closed, because graphs may contain its address.

Messages that are enqueued together, and the calls of an open group.

A message of a rank to itself is a copy on the stream. Such messages of one call or
group match in the order of their calls.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from numba_symm.arguments import is_integer
from numba_symm.collectives.enqueueing import Enqueuer, PackedCall, ThreadGuard
from numba_symm.collectives.invocation import (
    CallStreams,
    Invocation,
    are_apart,
    check_writable,
)
from numba_symm.collectives.kernels import pack
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import most_messages
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, GapsError
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.arrays import ArrayView, Memory
from numba_symm.launch.devices import GPU
from numba_symm.launch.store import StoreExchange

OwnCopy = tuple[int, int, int]
"""A copy within this rank: target, source, bytes."""

Own = tuple[Sequence[Message], Sequence[Message]]
"""What this rank sends itself, and what it receives from itself."""

Fill = tuple[int, int]
"""An integer of 8 bytes that a call stores: its address, its value."""


BindMessages = Callable[[Sequence[Message], Sequence[Message]], Enqueue]
"""Packs messages to other ranks, and messages from other ranks."""


class Transfers:
    """The messages of one call or group, which may be enqueued many times.

    Attributes:
        sends: to other ranks.
        receives: from other ranks.
        own: to and from this rank.
        copies: within this rank.
        fills: the counts that are known beforehand.
        words: the arguments on which the ranks of a collective must agree.
        itemsize: bytes of an element, if the ranks compare counts.
        call: the packed call that was made of them, if one was.
    """

    call: PackedCall | None = None

    def __init__(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        copies: Sequence[OwnCopy] = (),
        words: str = "",
        itemsize: int = 1,
        fills: Sequence[Fill] = (),
        own: Own = ((), ()),
    ):
        self.sends = tuple(sends)
        self.receives = tuple(receives)
        self.own = tuple(own[0]), tuple(own[1])
        self.copies = tuple(each for each in copies if each[2] and each[0] != each[1])
        self.fills = tuple(fills)
        self.words = words
        self.itemsize = itemsize

    @property
    def complete(self) -> bool:
        """Whether they have both ends of each message of this rank to itself."""
        return len(self.own[0]) == len(self.own[1])

    def packed(self, bind: BindMessages, what: str) -> Enqueue | None:
        """Return the launch of the messages, or None if there are none.

        Args:
            bind: packs messages between ranks.
            what: the call.

        Raises:
            ArgumentError: the messages of this rank to itself do not match.
        """
        copies, fills = matched(*self.own, what) if any(self.own) else ([], [])
        calls: list[Enqueue] = [streams.Copy(*each) for each in (*self.copies, *copies)]
        calls += [streams.Fill(*each) for each in (*self.fills, *fills)]
        if self.sends or self.receives:
            calls.append(bind(self.sends, self.receives))
        return Series(*calls) if len(calls) > 1 else calls[0] if calls else None


def matched(
    sends: Sequence[Message], receives: Sequence[Message], what: str
) -> tuple[list[OwnCopy], list[Fill]]:
    """Return the copies and counts of messages of a rank to itself, in order.

    Raises:
        ArgumentError: their numbers or sizes differ, or their arrays overlap.
    """
    if len(sends) != len(receives):
        raise ArgumentError(
            f"{what}: expected this rank to receive from itself what it sends itself, "
            f"got {len(sends)} sent and {len(receives)} received; make both calls in "
            "one group, or use sendrecv"
        )
    copies, fills = [], []
    for sent, received in zip(sends, receives, strict=True):
        if not received.count_at and sent.nbytes != received.nbytes:
            raise ArgumentError(
                f"{what}: expected x and out of equal size, got {sent.nbytes} and "
                f"{received.nbytes} bytes; with count=, x may be smaller"
            )
        elements, rest = divmod(sent.nbytes, received.itemsize)
        if sent.nbytes > received.nbytes or (received.count_at and rest):
            raise ArgumentError(
                f"{what}: expected x of at most {received.nbytes} bytes, and whole "
                f"elements of out, got {sent.nbytes} bytes"
            )
        if max(sent.address, received.address) < min(
            sent.address + sent.nbytes, received.address + received.nbytes
        ):
            raise ArgumentError(
                f"{what}: expected out apart from x, which this rank sends itself, got "
                "arrays that overlap"
            )
        if sent.nbytes:
            copies.append((received.address, sent.address, sent.nbytes))
        if received.count_at:
            fills.append((received.count_at, elements))
    return copies, fills


class BoundCall(NamedTuple):
    """A call that is not made of messages, ready to be enqueued.

    Attributes:
        call: the packed call.
        stream: the handle of the stream to enqueue it on.
        keep: what must live until then: arrays, and the stream.
        result: the value that the call returns.
    """

    call: PackedCall
    stream: int
    keep: tuple[Any, ...]
    result: Any

    @property
    def words(self) -> str:
        """What must be equal on all ranks."""
        return self.call.about.words


class Prepared(NamedTuple):
    """A call made of messages, ready to be enqueued.

    Attributes:
        transfers: this rank's messages.
        stream: as in :class:`BoundCall`.
        keep: as in :class:`BoundCall`.
        result: as in :class:`BoundCall`.
        before: what is enqueued before the messages.
        after: what is enqueued after them.
    """

    transfers: Transfers
    stream: int
    keep: tuple[Any, ...]
    result: Any
    before: tuple[Enqueue, ...] = ()
    after: tuple[Enqueue, ...] = ()

    @property
    def words(self) -> str:
        """What must be equal on all ranks; "" for messages of two ranks."""
        return self.transfers.words


class Pending:
    """The calls of an open group: its messages, and its other calls in order.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.calls: list[Prepared] = []
        self.stream: int | None = None
        self.launches: list[tuple[PackedCall, int]] = []
        self.kept: list[Any] = []
        self._size = size
        self._sent, self._received = [0] * size, [0] * size  # by peer

    @property
    def stream_handles(self) -> set[int]:
        """Handles of all streams that the calls are on."""
        own = {stream for _, stream in self.launches}
        return own if self.stream is None else {self.stream, *own}

    def check(self, more: Transfers, stream: int) -> tuple[int, list[int], list[int]]:
        """Return the stream, and the numbers of messages of each peer with a call's.

        Raises:
            ArgumentError: another stream than before, or too many messages.
        """
        stream = streams.named(stream)
        if self.stream is not None and stream != self.stream:
            raise ArgumentError(
                "group: expected one stream for its sends and receives, which start "
                "together, got several; pass the same stream= to all of them"
            )
        several = *(call.transfers for call in self.calls), more
        # One message that may be shorter makes all of them take more arguments.
        counted = any(each.count_at for one in several for each in one.receives)
        most = most_messages(self._size, counted)
        sent = _counted(self._sent, more.sends, most)
        return stream, sent, _counted(self._received, more.receives, most)

    def add(self, call: Prepared) -> None:
        """Add a call's messages; raise what :meth:`check` raises."""
        checked = self.check(call.transfers, call.stream)
        self.stream, self._sent, self._received = checked
        self.calls.append(call)
        self.kept += call.keep


def _counted(before: list[int], messages: Sequence[Message], most: int) -> list[int]:
    """Return each peer's number of messages with these, or refuse too many."""
    numbers = before.copy()
    for message in messages:
        numbers[message.peer] += 1
    for peer, number in enumerate(numbers):
        if number > most:
            raise ArgumentError(
                f"group: expected at most {most} messages to or from one rank, got "
                f"more for rank {peer}; use several groups, the same on both ranks"
            )
    return numbers


_LINE = 256  # bytes: an array in the memory begins on a multiple


class Staging:
    """The contiguous memory of one communicator.

    Attributes:
        used: bytes of the latest memory that the call, or the open group, uses.
        stream: the handle of the call's stream.
    """

    stream = streams.LEGACY_DEFAULT

    def __init__(self) -> None:
        self._rooms: list[Any] = []  # the latest one is the largest
        self.used = 0
        self._apart = False
        self._scratch: list[Any] = []  # the latest one is the largest

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Give the calls within the block memory of their own, which they keep."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def take(self, nbytes: int, what: str, message: bool) -> tuple[int, Any]:
        """Return the address of memory, and the object that owns it.

        Args:
            nbytes: its size.
            what: the call.
            message: whether the call may start together with others.
        """
        if self._apart and message:
            room = _new(nbytes, self.stream, what)
            return arrays.view(room, what).address, room
        whole = self._rooms[-1].size if self._rooms else 0
        if not self._rooms or self.used + nbytes > whole:  # nbytes may be 0
            self._rooms.append(_new(max(nbytes, 2 * whole), self.stream, what))
            self.used = 0
        room = self._rooms[-1]
        address = arrays.view(room, what).address + self.used
        self.used += -(-nbytes // _LINE) * _LINE
        return address, room

    def scratch(self, nbytes: int, what: str) -> int:
        """Return the address of memory within a call, for other data than arrays.

        The arguments are those of :meth:`take`. Each call uses it from its start.
        """
        if not self._scratch or self._scratch[-1].size < nbytes:
            most = 2 * self._scratch[-1].size if self._scratch else 0
            expected = (
                "a call of a size that has been made before, while a stream is being "
                "captured into a graph"
            )
            self._scratch.append(_new(max(nbytes, most), self.stream, what, expected))
        return arrays.view(self._scratch[-1], what).address


_EXPECTED = (
    "a contiguous array, or one whose size has been used before, while a stream is "
    "being captured into a graph"
)


def _new(nbytes: int, stream: int, what: str, expected: str = _EXPECTED) -> Any:
    if not SIMULATED and streams.is_capturing(stream):
        raise ArgumentError(
            f"{what}: expected {expected}; make such a call before the capture"
        )
    return arrays.empty((nbytes,), np.dtype(np.uint8), what)


class Caller(Protocol):
    """The calls of a communicator, as strided arrays need them: ``Calls``."""

    gpu: GPU
    staging: Staging
    streams: CallStreams
    enqueuer: Enqueuer
    thread: ThreadGuard

    def remembered(self, work_out: Any, given: Any) -> Any: ...


class Staged(NamedTuple):
    """The contiguous memory that replaces a strided array in a call.

    Attributes:
        array: an array of that memory.
        pack: copies the array there.
        unpack: copies it back.
    """

    array: Any
    pack: Enqueue
    unpack: Enqueue


def has_gaps(array: Any, what: str) -> bool:
    """Return whether an argument is a strided array."""
    if array is None:
        return False
    try:
        return arrays.fields(array, what)[3] is None
    except ArgumentError:  # the call itself raises it, unless it ignores the argument
        return False


def stage(calls: Caller, array: Any, what: str, written: bool, message: bool) -> Staged:
    """Return what replaces a strided array.

    Args:
        calls: the communicator's calls.
        array: the array.
        what: the call, and the argument.
        written: whether the call writes it.
        message: whether the call consists of messages.
    """
    view, strides = arrays.view(array, what), arrays.strides_of(array)
    arrays.check_device(view, calls.gpu.ordinal, what)
    arrays.check_aligned(view, what)
    if written:
        check_writable(view, what)
        # An axis of length 1 may have any stride.
        if any(each == 0 for n, each in zip(view.shape, strides, strict=True) if n > 1):
            raise ArgumentError(
                f"{what}: expected an array whose elements are apart, got one that is "
                f"broadcast, of shape {view.shape} and strides {strides}"
            )
    address, owner = calls.staging.take(view.nbytes, what, message)
    copies = [
        calls.remembered(_copy, (view, strides, address, packing))
        for packing in (True, False)
    ]
    memory = Memory(address, view.nbytes, owner)
    return Staged(memory.array(view.shape, view.dtype), *copies)


def _copy(
    calls: Caller, given: tuple[ArrayView, tuple[int, ...], int, bool]
) -> Enqueue:
    view, strides, address, packing = given
    size = view.dtype.itemsize
    return pack.bind(address, view.address, view.shape, strides, size, packing)


def copied(calls: Caller, x: Any, what: str) -> tuple[Any, Enqueue]:
    """Return an array for a copy of one without gaps, and what makes the copy."""
    view = arrays.dense(arrays.view(x, what), what)
    arrays.check_device(view, calls.gpu.ordinal, what)
    address, owner = calls.staging.take(view.nbytes, what, message=True)
    copy = Memory(address, view.nbytes, owner).array(view.shape, view.dtype)
    return copy, streams.Copy(address, view.address, view.nbytes)


class Replaced:
    """The input and the output of a call, with contiguous memory for strided ones.

    Attributes:
        x: the input.
        out: the output, which may be ``x``.
        before: what is enqueued before the call.
        after: what is enqueued after it.
    """

    def __init__(
        self,
        calls: Caller,
        what: str,
        x: Any,
        out: Any,
        message: bool = False,
    ):
        self._x, self._out = x, out
        self.x, self.out = x, out
        self.before: list[Enqueue] = []
        self.after: list[Enqueue] = []
        same = out is x
        if has_gaps(x, what):
            found = stage(calls, x, what, same, message)
            self.x = found.array
            self.before.append(found.pack)
            if same:
                self.out = found.array
                self.after.append(found.unpack)
        if not same and has_gaps(out, what):
            found = stage(calls, out, f"{what}: out", True, message)
            self.out = found.array
            self.before.append(found.pack)
            self.after.append(found.unpack)

    def result(self, made: Any) -> Any:
        """Return what the call returns, of what it would with contiguous memory."""
        if self._out is None:  # it is of Numba's, because the contiguous input is
            return made if self.x is self._x else arrays.as_that_of(self._x, made)
        return self._out if made is self.out else made


def bound(
    calls: Caller,
    given: Invocation[Any],
    out: Any,
    bind: Callable[[Invocation[Any]], BoundCall],
) -> BoundCall:
    """Bind a call whose ``x``, or whose output ``out``, has gaps.

    Args:
        calls: the communicator's calls.
        given: the call.
        out: the output.
        bind: binds calls of contiguous arrays.
    """
    if calls.thread.group is None:
        calls.staging.used = 0
    what = given.operation.name
    if given.second is not None:  # later, the copies in their place are compared
        second = _extent(given.second, f"{what}: out[1]")
        others = [_extent(each, what) for each in (given.x, out) if each is not None]
        if not all(are_apart(second, each) for each in others):
            raise ArgumentError(
                f"{what}: out[1]: expected an array apart from x and out[0], got "
                "arrays that overlap; it may be one of args"
            )
    dense = Replaced(calls, what, given.x, out)
    on = calls.staging.stream
    made = bind(given._replace(x=dense.x, out=dense.out, stream=on))
    return made._replace(
        call=calls.enqueuer.around(dense.before, made.call, dense.after),
        keep=(*made.keep, given.x, out, given.stream),
        result=dense.result(made.result),
    )


def _extent(array: Any, what: str) -> ArrayView:
    """Return the bytes from an array's first element to its last one, as an array."""
    address, shape, dtype, *_ = arrays.fields(array, what)
    along = zip(shape, arrays.strides_of(array), strict=True)
    steps = [(n - 1) * stride for n, stride in along] if 0 not in shape else []
    first = address + sum(step for step in steps if step < 0)
    nbytes = sum(map(abs, steps)) + dtype.itemsize * (0 not in shape)
    return ArrayView(first, (nbytes,), np.dtype(np.uint8), "C", False)


def prepared(
    calls: Caller,
    given: Invocation[Any],
    prepare: Callable[[Any, Invocation[Any]], Prepared],
) -> Prepared:
    """Return ``prepare(calls, given)``; strided arrays are replaced.

    Args:
        calls: the communicator's calls.
        given: the call.
        prepare: takes calls of contiguous arrays.
    """
    if calls.thread.group is None:
        calls.staging.used = 0
    what, x, out, stream = given.operation.name, *given[1:4]
    try:
        return prepare(calls, given)
    except GapsError:  # to look for gaps beforehand takes longer
        if not has_gaps(x, what) and not has_gaps(out, what):
            raise
    calls.staging.stream = chosen = calls.streams.of(stream, out if x is None else x)
    dense = Replaced(calls, what, x, out, message=True)
    call = prepare(calls, given._replace(x=dense.x, out=dense.out, stream=chosen))
    return call._replace(
        keep=(*call.keep, x, out, stream),
        result=dense.result(call.result),
        before=(*dense.before, *call.before),
        after=(*call.after, *dense.after),
    )


Counts = Sequence[int]

Table = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Checked counts and displacements; None: the ranges follow one another."""

Lengths = tuple[int, ...]
"""The elements of a rank's messages to, or from, one other rank, in order."""

Range = tuple[int, int]
"""A rank's range: its first element, and its number of elements."""


_COUNTS = {
    "gather_v": ("x.size", "counts[{}]"),
    "scatter": ("x.size // size", "out.size"),
    "scatter_v": ("counts[{}]", "out.size"),
    "all_to_all_v": ("send_counts[{}]", "recv_counts[{}]"),
    "neighbor_all_gather": ("destinations", "sources"),
    "neighbor_all_to_all": ("destinations", "sources"),
}
"""The arguments that state how much a rank sends, and how much its peer expects."""

_NAMED = 4  # pairs of ranks that an error names, at most


def agree_on_counts(exchange: StoreExchange, what: str, transfers: Transfers) -> None:
    """Check that every rank expects from each peer what that peer sends. Collective.

    Raises:
        ArgumentError: on all ranks, with the ranks and counts that differ.
    """
    if what not in _COUNTS:  # the ranks have agreed on all counts
        return
    mine = tuple(
        _by_peer(messages, transfers.itemsize)
        for messages in (transfers.sends, transfers.receives)
    )
    everyone = exchange.all_gather(mine, f"{what}: counts")
    pairs = {(rank, peer) for rank, (sends, _) in enumerate(everyone) for peer in sends}
    pairs |= {
        (peer, rank) for rank, (_, found) in enumerate(everyone) for peer in found
    }
    sent_as, expected_as = _COUNTS[what]
    wrong = [
        f"rank {rank} sends {_in_words(sent, ' elements')} ({sent_as.format(peer)}) to "
        f"rank {peer}, which expects {_in_words(expected)} ({expected_as.format(rank)})"
        for rank, peer in sorted(pairs)
        if (sent := everyone[rank][0].get(peer, ()))
        != (expected := everyone[peer][1].get(rank, ()))
    ]
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ArgumentError(
            f"{what}: {'; '.join(wrong[:_NAMED])}{more}; pass counts that agree"
        )


def _by_peer(messages: Sequence[Message], itemsize: int) -> dict[int, Lengths]:
    """Return the elements of the messages to or from each rank, in order."""
    found: dict[int, Lengths] = {}
    for message in messages:
        length = message.nbytes // itemsize
        found[message.peer] = *found.get(message.peer, ()), length
    return found


def _in_words(lengths: Lengths, unit: str = "") -> str:
    """Return "3 elements", "4 + 4 elements" or "nothing"."""
    return " + ".join(map(str, lengths)) + unit if lengths else "nothing"


def table_of(
    counts: Counts | None, displs: Counts | None, size: int, what: str
) -> Table:
    """Return the table of counts and displacements, or refuse wrong values."""
    lengths = _integers(counts, size, what)
    if displs is None:
        return lengths, None
    return lengths, _integers(displs, size, what.replace("counts", "displs"))


def places_of(table: Table) -> list[Range]:
    """Return every rank's range."""
    lengths, starts = table
    if starts is None:
        starts = (0, *itertools.accumulate(lengths[:-1]))
    return list(zip(starts, lengths, strict=True))


def _integers(given: Counts | None, size: int, what: str) -> tuple[int, ...]:
    try:
        found = () if given is None else tuple(given)
    except Exception:  # an object's own method may raise anything
        found = ()
    integers = len(found) == size and all(map(is_integer, found))
    if not integers or min(found) < 0:
        raise ArgumentError(
            f"{what}: expected {size} integers from 0, one for each rank, got {given!r}"
        )
    return tuple(map(int, found))


def end_of(places: list[Range]) -> int:
    """Return the number of elements that an array with these ranges has at least."""
    return max(first + count for first, count in places)


def refuse_overlap(places: list[Range], what: str) -> None:
    """Refuse ranges of an output that overlap."""
    taken = sorted(place for place in places if place[1])
    for (first, count), (following, _) in itertools.pairwise(taken):
        if first + count > following:
            raise ArgumentError(
                f"{what}: expected ranges of out that do not overlap, got one of "
                f"{count} elements from {first}, and one from {following}"
            )
