"""Messages that are enqueued together, and the calls of an open group.

A message of a rank to itself is a copy on the stream. Such messages of one call or
group match in the order of their calls.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numba_symm import streams
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.workspace import most_messages
from numba_symm.errors import ArgumentError

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
