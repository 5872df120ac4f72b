"""Messages that are enqueued together, and the calls of an open group."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from numba_symm import streams
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.collectives.protocols.workspace import most_messages
from numba_symm.errors import ArgumentError

Stream = tuple[int, Any]
"""A stream's handle, and the object that keeps the stream."""

Copy = tuple[int, int, int]
"""A message of a rank to itself: target, source, bytes."""


Fill = tuple[int, int]
"""An integer of 8 bytes that a call stores: its address, its value."""


def owned(stream: Any) -> Stream:
    """Return a stream's handle, and the object that keeps the stream or None."""
    owner = None if isinstance(stream, int) else stream
    return streams.handle_or_default(stream), owner


BindMessages = Callable[[Sequence[Message], Sequence[Message]], Enqueue]
"""Packs messages to other ranks, and messages from other ranks."""


class Transfers:
    """The messages of one call or group, which may be enqueued many times.

    Attributes:
        sends: to other ranks.
        receives: from other ranks.
        copies: within this rank.
        fills: the counts that are known beforehand.
        words: the arguments on which the ranks of a collective must agree.
        itemsize: bytes of an element, if the ranks compare counts.
    """

    def __init__(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        copies: Sequence[Copy] = (),
        words: str = "",
        itemsize: int = 1,
        fills: Sequence[Fill] = (),
    ):
        self.sends = tuple(sends)
        self.receives = tuple(receives)
        self.copies = tuple(each for each in copies if each[2] and each[0] != each[1])
        self.fills = tuple(fills)
        self.words = words
        self.itemsize = itemsize
        self._enqueue: Enqueue | None = None

    def packed(self, bind: BindMessages) -> Enqueue | None:
        """Return the launch of the messages, or None if there are none. Packs once.

        Args:
            bind: packs messages between ranks.
        """
        work = self.sends or self.receives or self.copies or self.fills
        if self._enqueue is None and work:
            self._enqueue = self._pack(bind)
        return self._enqueue

    def _pack(self, bind: BindMessages) -> Enqueue:
        calls: list[Enqueue] = [partial(streams.copy, *each) for each in self.copies]
        calls += [partial(streams.fill, *each) for each in self.fills]
        if self.sends or self.receives:
            calls.append(bind(self.sends, self.receives))
        return calls[0] if len(calls) == 1 else Series(*calls)


class Prepared(NamedTuple):
    """A call made of messages, ready to be enqueued.

    Attributes:
        transfers: this rank's messages.
        stream: the stream to enqueue them on.
        keep: arrays that must live until then.
        result: the value that the call returns.
        before: what is enqueued before the messages.
        after: what is enqueued after them.
    """

    transfers: Transfers
    stream: Stream
    keep: tuple[Any, ...]
    result: Any
    before: tuple[Enqueue, ...] = ()
    after: tuple[Enqueue, ...] = ()

    def packed(self, bind: BindMessages) -> Enqueue | None:
        """Return the launches, or None if there are none; see ``Transfers.packed``."""
        return self.around(self.transfers.packed(bind))

    def around(self, launch: Enqueue | None) -> Enqueue | None:
        """Return a launch of the messages with what is before and after it."""
        if launch is None or not (self.before or self.after):
            return launch
        return Series(*self.before, launch, *self.after)


class Pending:
    """The calls of an open group: its messages, and its other calls in order.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.sends: list[Message] = []
        self.receives: list[Message] = []
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.before: list[Enqueue] = []
        self.after: list[Enqueue] = []
        self.stream: Stream | None = None
        self.launches: list[tuple[str, Enqueue, Stream]] = []
        self.kept: list[Any] = []
        self._size = size
        self._sent, self._received = [0] * size, [0] * size  # by peer

    @property
    def stream_handles(self) -> set[int]:
        """Handles of all streams that the calls are on."""
        streams = [stream for *_, stream in self.launches]
        return {handle for handle, _ in filter(None, [self.stream, *streams])}

    def check(
        self, more: Transfers, stream: Stream
    ) -> tuple[Stream, list[int], list[int]]:
        """Return the stream, and the numbers of messages of each peer with a call's.

        Raises:
            ArgumentError: another stream than before, or too many messages.
        """
        stream = streams.named(stream[0]), stream[1]
        if self.stream is not None and stream[0] != self.stream[0]:
            raise ArgumentError(
                "group: expected one stream for its sends and receives, which start "
                "together, got several; pass the same stream= to all of them"
            )
        # One message that may be shorter makes all of them take more arguments.
        counted = any(each.count_at for each in (*self.receives, *more.receives))
        most = most_messages(self._size, counted)
        sent = _counted(self._sent, more.sends, most)
        return stream, sent, _counted(self._received, more.receives, most)

    def add(self, call: Prepared) -> None:
        """Add a call's messages; raise what :meth:`check` raises."""
        more = call.transfers
        self.stream, self._sent, self._received = self.check(more, call.stream)
        self.kept += call.keep
        self.before += call.before
        self.after += call.after
        self.sends += more.sends
        self.receives += more.receives
        self.copies += more.copies
        self.fills += more.fills


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
