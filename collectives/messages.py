"""Sends and receives between two ranks, and groups of calls that go on together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from numba_symm import arrays, streams
from numba_symm.arrays import ArrayView
from numba_symm.collectives.kernels import transfer
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.protocols.binding import Enqueue, InTurn
from numba_symm.errors import ArgumentError

Stream = tuple[int, Any]
"""A stream's handle, and what keeps the stream."""

Copy = tuple[int, int, int]
"""What a rank sends itself: target, source, bytes."""

Planned = TypeVar("Planned")
P = ParamSpec("P")
T = TypeVar("T")


class Transfers:
    """Messages of one call, or of a group: enqueued as often as one likes.

    Attributes:
        sends: to other ranks.
        receives: from other ranks.
        copies: within this rank.
        words: what the ranks of a collective must agree on.
        itemsize: bytes of an element, where that is among the words.
    """

    def __init__(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        copies: Sequence[Copy] = (),
        words: str = "",
        itemsize: int = 1,
    ):
        self.sends = tuple(sends)
        self.receives = tuple(receives)
        self.copies = tuple(each for each in copies if each[2] and each[0] != each[1])
        self.words = words
        self.itemsize = itemsize
        self._enqueue: Enqueue | None = None

    def packed(self, comm: Any) -> Enqueue | None:
        """Return what enqueues them, made once, or None if there is nothing to do."""
        if self._enqueue is None and (self.sends or self.receives or self.copies):
            self._enqueue = self._pack(comm)
        return self._enqueue

    def _pack(self, comm: Any) -> Enqueue:
        calls: list[Enqueue] = [partial(streams.copy, *each) for each in self.copies]
        if self.sends or self.receives:
            calls.append(transfer.bind(comm, self.sends, self.receives))
        return calls[0] if len(calls) == 1 else InTurn(*calls)


class Pending:
    """The calls of a group that is open: messages, and all else in order.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.sends: list[Message] = []
        self.receives: list[Message] = []
        self.copies: list[Copy] = []
        self.stream: Stream | None = None
        self.launches: list[tuple[str, Enqueue, Stream]] = []
        self.kept: list[Any] = []
        self._most = transfer.most_messages(size)
        self._sent, self._received = [0] * size, [0] * size  # by peer

    @property
    def stream_handles(self) -> set[int]:
        """Handles of all streams that the calls are on."""
        streams = [stream for *_, stream in self.launches]
        return {handle for handle, _ in filter(None, [self.stream, *streams])}

    def check(
        self, more: Transfers, stream: Stream
    ) -> tuple[Stream, list[int], list[int]]:
        """Return how many messages each peer has with a call's, and their stream.

        Raises:
            ArgumentError: on another stream than those before, or too many.
        """
        stream = streams.named(stream[0]), stream[1]
        if self.stream is not None and stream[0] != self.stream[0]:
            raise ArgumentError(
                "group: its sends and receives are on several streams, and so could "
                "not go on together; pass the same stream= to all of them"
            )
        sent = self._counted(self._sent, more.sends)
        return stream, sent, self._counted(self._received, more.receives)

    def add(self, more: Transfers, stream: Stream) -> None:
        """Add a call's messages; raise what :meth:`check` raises."""
        self.stream, self._sent, self._received = self.check(more, stream)
        self.sends += more.sends
        self.receives += more.receives
        self.copies += more.copies

    def _counted(self, before: list[int], messages: Sequence[Message]) -> list[int]:
        """Return how many messages each peer has with these, refusing too many."""
        numbers = before.copy()
        for message in messages:
            numbers[message.peer] += 1
            if numbers[message.peer] > self._most:
                raise ArgumentError(
                    f"group: more than {self._most} messages to or from rank "
                    f"{message.peer}; use several groups, on both ranks alike"
                )
        return numbers


def by_one_thread(method: Callable[P, T]) -> Callable[P, T]:
    """Refuse other threads' calls while one is in this method of a communicator."""

    @wraps(method)
    def alone(*args: P.args, **options: P.kwargs) -> T:
        comm: Any = args[0]
        comm._begin(method.__name__)
        try:
            return method(*args, **options)
        finally:
            comm._end()

    return alone


class PointToPoint:
    """The part of a communicator that sends messages between two ranks.

    What follows from a call's arguments is worked out by a function that ``_planned``
    calls for new arguments only.
    """

    rank: int
    size: int
    _pending: Pending | None

    def check(self) -> None:
        """See :class:`~numba_symm.Communicator`."""
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def _planned(self, plan: Callable[..., Planned], *given: Any) -> Planned:
        raise NotImplementedError

    def _usable(self, view: ArrayView, what: str, written: bool = False) -> ArrayView:
        raise NotImplementedError

    def _stream_for(self, stream: Any, array: ArrayView) -> Stream:
        raise NotImplementedError

    def _transfer(
        self, what: str, transfers: Transfers, stream: Stream, *keep: Any
    ) -> None:
        raise NotImplementedError

    def _run(
        self, what: str, launch: Enqueue | None, stream: Stream, *keep: Any
    ) -> None:
        raise NotImplementedError

    def _alone(self, what: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _give_up(self, error: BaseException, what: str, *stream_handles: int) -> None:
        raise NotImplementedError

    @by_one_thread
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
            CollectiveError: an earlier call of the communicator has failed.
            ClosedError: it was closed.
        """
        self._check_open()
        dst = self._check_other(dst, "send: dst")
        given = arrays.view(x, "send")
        transfers = self._planned(_sent, given, dst)
        self._transfer("send", transfers, self._stream_for(stream, given), x)

    @by_one_thread
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
        self._check_open()
        src = self._check_other(src, "recv: src")
        taken = arrays.view(out, "recv: out")
        transfers = self._planned(_received, taken, src)
        self._transfer("recv", transfers, self._stream_for(stream, taken), out)
        return out

    @by_one_thread
    def sendrecv(
        self, x: Any, dst: int | None, out: Any, src: int | None, stream: Any = None
    ) -> Any:
        """Send ``x`` to rank ``dst`` while receiving into ``out`` from rank ``src``.

        Asynchronous. Matches :meth:`send`, :meth:`recv` and :meth:`sendrecv` of the
        other ranks.

        Args:
            x: as for :meth:`send`.
            dst: the rank to send to, this one included; None, where MPI has
                PROC_NULL: to nobody.
            out: as for :meth:`recv`; apart from x.
            src: the rank to receive from, this one included; None, where MPI has
                PROC_NULL: from nobody.
            stream: as for :meth:`all_reduce`; None takes the one of ``x``.

        Returns:
            ``out``.

        Raises:
            As :meth:`send`.
        """
        self._check_open()
        if dst is not None:
            dst = check_rank(dst, self.size, "sendrecv: dst", _OR_NOBODY)
        if src is not None:
            src = check_rank(src, self.size, "sendrecv: src", _OR_NOBODY)
        given = arrays.view(x, "sendrecv")
        taken = arrays.view(out, "sendrecv: out")
        transfers = self._planned(_exchanged, given, dst, taken, src)
        chosen = self._stream_for(stream, given)
        self._transfer("sendrecv", transfers, chosen, x, out)
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
            CollectiveError, ClosedError: as for any call.
        """
        with self._alone("group"):
            self.check()
            self.refuse_in_group("group")
            pending = self._pending = Pending(self.size)
            try:
                yield
            finally:
                self._pending = None
            self.check()
            try:
                self._start(pending)
            except BaseException as error:
                self._give_up(error, "group", *pending.stream_handles)
                raise

    def _start(self, pending: Pending) -> None:
        if pending.stream is not None:
            transfers = self._planned(
                *(_grouped, tuple(pending.sends), tuple(pending.receives)),
                tuple(pending.copies),
            )
            self._transfer("group", transfers, pending.stream)
        for what, launch, stream in pending.launches:
            self._run(what, launch, stream)

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


def _sent(comm: PointToPoint, x: ArrayView, dst: int) -> Transfers:
    x = comm._usable(x, "send")
    return Transfers([Message(dst, x.address, x.nbytes)], [])


def _received(comm: PointToPoint, out: ArrayView, src: int) -> Transfers:
    out = comm._usable(out, "recv: out", written=True)
    return Transfers([], [Message(src, out.address, out.nbytes)])


def _exchanged(
    comm: PointToPoint, x: ArrayView, dst: int | None, out: ArrayView, src: int | None
) -> Transfers:
    if (dst == comm.rank) != (src == comm.rank):
        raise ArgumentError(
            f"sendrecv: dst={dst} and src={src} on rank {comm.rank}; what a rank "
            "sends itself, it must receive in the same call"
        )
    x = comm._usable(x, "sendrecv")
    out = comm._usable(out, "sendrecv: out", written=True)
    check_apart(x, out, "sendrecv")
    if dst == comm.rank:
        if x.nbytes != out.nbytes:
            raise ArgumentError(
                f"sendrecv: {x.nbytes} bytes are sent and {out.nbytes} received"
            )
        return Transfers([], [], [(out.address, x.address, x.nbytes)])
    sends = [] if dst is None else [Message(dst, x.address, x.nbytes)]
    receives = [] if src is None else [Message(src, out.address, out.nbytes)]
    return Transfers(sends, receives)


def _grouped(
    comm: PointToPoint,
    sends: Sequence[Message],
    receives: Sequence[Message],
    copies: Sequence[Copy],
) -> Transfers:
    return Transfers(sends, receives, copies)


_OR_NOBODY = ", or None, not MPI.PROC_NULL, for nobody"


def check_rank(rank: Any, size: int, what: str, also: str = "") -> int:
    """Return a rank as a plain integer, or refuse what is none."""
    if not is_integer(rank) or not 0 <= rank < size:
        raise ArgumentError(f"{what}={rank!r}; give a rank from 0 to {size - 1}{also}")
    return int(rank)


def second_thread(what: str) -> ArgumentError:
    """Return the error of a call amid another thread's."""
    return ArgumentError(
        f"{what}: expected one thread at a time in the calls of a communicator, got a "
        "second one; give each thread its own communicator, made by dup()"
    )


def is_integer(number: Any) -> bool:
    """Return whether a number is Python's or NumPy's, and no truth value."""
    kind = type(number)
    return kind is int or (isinstance(number, _INTEGERS) and kind is not bool)


_INTEGERS = (int, np.integer)


def check_apart(source: ArrayView, target: ArrayView, what: str) -> None:
    """Refuse arrays that share memory."""
    if (
        source.address < target.address + target.nbytes
        and target.address < source.address + source.nbytes
    ):
        raise ArgumentError(f"{what}: out overlaps x; pass an array apart")
