"""Sends and receives between two ranks, and groups of calls that go on together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from numba_symm import streams
from numba_symm.arrays import ArrayView
from numba_symm.collectives import transfer
from numba_symm.collectives.select import Enqueue
from numba_symm.collectives.transfer import Message
from numba_symm.errors import ArgumentError

Stream = tuple[int, Any]
"""A stream's handle, and what keeps the stream."""


class Transfers:
    """Messages of one call, or of a group: enqueued as often as one likes.

    Attributes:
        sends: to other ranks.
        receives: from other ranks.
        copies: ``(target, source, bytes)`` of what a rank sends itself.
    """

    def __init__(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        copies: Sequence[tuple[int, int, int]] = (),
    ):
        self.sends = tuple(each for each in sends if each.nbytes)
        self.receives = tuple(each for each in receives if each.nbytes)
        self.copies = tuple(each for each in copies if each[2] and each[0] != each[1])

    @property
    def key(self) -> tuple[Any, ...]:
        """What its packed launches depend on."""
        return "transfers", self.sends, self.receives, self.copies

    def bind(self, comm: Any) -> Enqueue | None:
        """Return what enqueues it, or None if there is nothing to do."""
        launches = [transfer.bind(comm, *wave) for wave in self._waves()]
        if not launches and not self.copies:
            return None

        def enqueue(stream: int) -> None:
            for target, source, nbytes in self.copies:
                streams.copy(target, source, nbytes, stream)
            for launch in launches:
                launch(stream)

        return enqueue

    def _waves(self) -> list[tuple[list[Message], list[Message]]]:
        """Return the messages of each launch: so many of a pair it can take."""
        found: list[tuple[list[Message], list[Message]]] = []
        for which, messages in enumerate((self.sends, self.receives)):
            seen: dict[int, int] = {}
            for message in messages:
                wave = seen.get(message.peer, 0) // transfer.MESSAGES
                seen[message.peer] = seen.get(message.peer, 0) + 1
                while len(found) <= wave:
                    found.append(([], []))
                found[wave][which].append(message)
        return found


class Pending:
    """The calls of a group that is open: messages by stream, and all else in order."""

    def __init__(self) -> None:
        self.transfers: dict[int, tuple[Stream, list[Transfers]]] = {}
        self.launches: list[tuple[Enqueue, Stream]] = []
        self.kept: list[Any] = []

    def add(self, transfers: Transfers, stream: Stream) -> None:
        """Add a call's messages."""
        self.transfers.setdefault(stream[0], (stream, []))[1].append(transfers)

    def together(self) -> Iterator[tuple[Transfers, Stream]]:
        """Give all messages of each stream as one."""
        for stream, calls in self.transfers.values():
            yield (
                Transfers(
                    [each for call in calls for each in call.sends],
                    [each for call in calls for each in call.receives],
                    [each for call in calls for each in call.copies],
                ),
                stream,
            )


class PointToPoint:
    """The part of a communicator that sends messages between two ranks."""

    rank: int
    size: int
    _pending: Pending | None

    def check(self) -> None:
        """See :class:`~numba_symm.Communicator`."""
        raise NotImplementedError

    def _viewed(self, array: Any, what: str, written: bool = False) -> ArrayView:
        raise NotImplementedError

    def _stream_for(self, stream: Any, array: ArrayView) -> Stream:
        raise NotImplementedError

    def _transfer(self, transfers: Transfers, stream: Stream, *keep: Any) -> None:
        raise NotImplementedError

    def _run(self, launch: Enqueue | None, stream: Stream, *keep: Any) -> None:
        raise NotImplementedError

    def send(self, x: Any, dst: int, stream: Any = None) -> None:
        """Send ``x`` to rank ``dst``, which calls :meth:`recv`. Asynchronous.

        The two ranks' calls match in the order in which they are made. A large message
        waits, on the GPU, for the receiver: two ranks that send each other something
        do so by :meth:`sendrecv`, or in a :meth:`group`.

        Args:
            x: a contiguous device array of any shape and dtype.
            dst: the rank to send to, another than this one.
            stream: as for :meth:`all_reduce`.

        Raises:
            ArgumentError: an array or rank is wrong.
            CollectiveTimeout: an earlier call of the communicator has failed.
            ClosedError: it was closed.
        """
        self.check()
        self._check_other(dst, "send: dst")
        found = self._viewed(x, "send")
        messages = [Message(dst, found.address, found.nbytes)]
        self._transfer(Transfers(messages, []), self._stream_for(stream, found), x)

    def recv(self, out: Any, src: int, stream: Any = None) -> Any:
        """Receive into ``out`` what rank ``src`` sends by :meth:`send`. Asynchronous.

        Args:
            out: a contiguous device array of as many bytes as are sent. Another number
                makes all ranks' later calls fail with an error that says so.
            src: the rank to receive from.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``.

        Raises:
            As :meth:`send`.
        """
        self.check()
        self._check_other(src, "recv: src")
        found = self._viewed(out, "recv: out", written=True)
        messages = [Message(src, found.address, found.nbytes)]
        self._transfer(Transfers([], messages), self._stream_for(stream, found), out)
        return out

    def sendrecv(
        self, x: Any, dst: int | None, out: Any, src: int | None, stream: Any = None
    ) -> Any:
        """Send ``x`` to rank ``dst`` while receiving into ``out`` from rank ``src``.

        Asynchronous. Matches :meth:`send`, :meth:`recv` and :meth:`sendrecv` of the
        other ranks.

        Args:
            x: as for :meth:`send`.
            dst: the rank to send to, this one included; None: to nobody.
            out: as for :meth:`recv`; apart from x.
            src: the rank to receive from, this one included; None: from nobody.
            stream: as for :meth:`all_reduce`; None takes the one of ``x``.

        Returns:
            ``out``.

        Raises:
            As :meth:`send`.
        """
        self.check()
        for peer, name in ((dst, "dst"), (src, "src")):
            if peer is not None:
                check_rank(peer, self.size, f"sendrecv: {name}")
        if (dst == self.rank) != (src == self.rank):
            raise ArgumentError(
                f"sendrecv: dst={dst} and src={src} on rank {self.rank}; what a rank "
                "sends itself, it must receive in the same call"
            )
        given = self._viewed(x, "sendrecv")
        taken = self._viewed(out, "sendrecv: out", written=True)
        check_apart(given, taken, "sendrecv")
        if dst == self.rank and given.nbytes != taken.nbytes:
            raise ArgumentError(
                f"sendrecv: {given.nbytes} bytes are sent and {taken.nbytes} received"
            )
        sends, receives, copies = [], [], []
        if dst == self.rank:
            copies.append((taken.address, given.address, given.nbytes))
        else:
            if dst is not None:
                sends.append(Message(dst, given.address, given.nbytes))
            if src is not None:
                receives.append(Message(src, taken.address, taken.nbytes))
        transfers = Transfers(sends, receives, copies)
        self._transfer(transfers, self._stream_for(stream, given), x, out)
        return out

    @contextmanager
    def group(self) -> Iterator[None]:
        """Start the calls within a ``with`` block together, at its end.

        Sends, receives and the collectives made of them (``gather``, ``scatter`` and
        the vector forms) go on side by side in one kernel a stream, whatever their
        order: so two ranks may both send first. Other calls follow, in their order.
        After an exception within the block nothing is started.

        Ranks need not group alike, but their messages to each other match in the order
        of the calls. Not collective by itself.

        Raises:
            ArgumentError: groups are nested.
            CollectiveTimeout, ClosedError: as for any call.
        """
        self.check()
        if self._pending is not None:
            raise ArgumentError("group: a group is open already; they do not nest")
        pending = self._pending = Pending()
        try:
            yield
        finally:
            self._pending = None
        for transfers, stream in pending.together():
            self._transfer(transfers, stream)
        for launch, stream in pending.launches:
            self._run(launch, stream)

    def _check_other(self, peer: Any, what: str) -> None:
        check_rank(peer, self.size, what)
        if peer == self.rank:
            raise ArgumentError(
                f"{what}={peer} is this rank itself; use sendrecv, or copy the array"
            )


def check_rank(rank: Any, size: int, what: str) -> None:
    """Refuse what is no rank."""
    integer = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    if not integer or not 0 <= rank < size:
        raise ArgumentError(f"{what}={rank!r}; give a rank from 0 to {size - 1}")


def check_apart(source: ArrayView, target: ArrayView, what: str) -> None:
    """Refuse arrays that share memory."""
    if (
        source.address < target.address + target.nbytes
        and target.address < source.address + source.nbytes
    ):
        raise ArgumentError(f"{what}: out overlaps x; pass an array apart")
