"""Sends and receives between two ranks, and groups of calls that go on together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from numba_symm import streams
from numba_symm.arrays import ArrayView
from numba_symm.collectives import transfer
from numba_symm.collectives.launches import Enqueue
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
        self.sends = tuple(sends)
        self.receives = tuple(receives)
        self.copies = tuple(each for each in copies if each[2] and each[0] != each[1])

    @property
    def key(self) -> tuple[Any, ...]:
        """What its packed launches depend on."""
        return "transfers", self.sends, self.receives, self.copies

    def bind(self, comm: Any) -> Enqueue | None:
        """Return what enqueues it, or None if there is nothing to do."""
        launch = None
        if self.sends or self.receives:
            launch = transfer.bind(comm, self.sends, self.receives)
        elif not self.copies:
            return None

        def enqueue(stream: int) -> None:
            for target, source, nbytes in self.copies:
                streams.copy(target, source, nbytes, stream)
            if launch is not None:
                launch(stream)

        return enqueue


class Pending:
    """The calls of a group that is open: messages, and all else in order.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.transfers = Transfers([], [])
        self.stream: Stream | None = None
        self.launches: list[tuple[Enqueue, Stream]] = []
        self.kept: list[Any] = []
        self._most = transfer.most_messages(size)

    def add(self, more: Transfers, stream: Stream) -> None:
        """Add a call's messages.

        Raises:
            ArgumentError: on another stream than those before, or too many.
        """
        stream = streams.named(stream[0]), stream[1]
        if self.stream is not None and stream[0] != self.stream[0]:
            raise ArgumentError(
                "group: its sends and receives are on several streams, and so could "
                "not go on together; pass the same stream= to all of them"
            )
        both = Transfers(
            self.transfers.sends + more.sends,
            self.transfers.receives + more.receives,
            self.transfers.copies + more.copies,
        )
        for messages in (both.sends, both.receives):
            for peer in {message.peer for message in messages}:
                number = sum(message.peer == peer for message in messages)
                if number > self._most:
                    raise ArgumentError(
                        f"group: more than {self._most} messages to or from rank "
                        f"{peer}; use several groups, on both ranks alike"
                    )
        self.transfers, self.stream = both, stream


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
        dst = self._check_other(dst, "send: dst")
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
        src = self._check_other(src, "recv: src")
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
        if dst is not None:
            dst = check_rank(dst, self.size, "sendrecv: dst")
        if src is not None:
            src = check_rank(src, self.size, "sendrecv: src")
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

        Until then nothing has happened, and no result may be used. Sends, receives and
        the collectives made of them (``gather``, ``scatter``, ``gather_v``,
        ``scatter_v``, ``all_gather_v``, ``all_to_all_v``) go on side by side in one
        kernel, whatever their order: so two ranks may both send first. They are on one
        stream. All other calls come after them, in their order. After an exception
        within the block nothing is started.

        Ranks need not group their messages alike: those of two ranks to each other
        match in the order of the calls. Other collectives, however, are in the group
        of all ranks or of none. Not collective by itself.

        Raises:
            ArgumentError: groups are nested; at a call, messages are on several streams
                or too many between two ranks (16 with 8 ranks, 64 with 2).
            CollectiveTimeout, ClosedError: as for any call.
        """
        self.check()
        self.refuse_in_group("group")
        pending = self._pending = Pending(self.size)
        try:
            yield
        finally:
            self._pending = None
        self.check()
        if pending.stream is not None:
            self._transfer(pending.transfers, pending.stream)
        for launch, stream in pending.launches:
            self._run(launch, stream)

    def refuse_in_group(self, what: str) -> None:
        """Refuse what makes no sense before a group's calls have started."""
        if self._pending is not None:
            raise ArgumentError(f"{what}: a group is open; leave its with block first")

    def _check_other(self, asked: Any, what: str) -> int:
        peer = check_rank(asked, self.size, what)
        if peer == self.rank:
            raise ArgumentError(
                f"{what}={peer} is this rank itself; use sendrecv, or copy the array"
            )
        return peer


def check_rank(rank: Any, size: int, what: str) -> int:
    """Return a rank as a plain integer, or refuse what is none."""
    integer = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    if not integer or not 0 <= rank < size:
        raise ArgumentError(f"{what}={rank!r}; give a rank from 0 to {size - 1}")
    return int(rank)


def check_apart(source: ArrayView, target: ArrayView, what: str) -> None:
    """Refuse arrays that share memory."""
    if (
        source.address < target.address + target.nbytes
        and target.address < source.address + source.nbytes
    ):
        raise ArgumentError(f"{what}: out overlaps x; pass an array apart")
