"""Sends and receives between two ranks, and groups of calls that start together.

The functions that ``remembered`` calls derive messages from a call's arguments. They
run only for arguments that were not passed before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from numba_symm import arrays
from numba_symm.arrays import ArrayView
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.checks import check_apart, check_peer
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.transfers import Copy, Pending, Prepared, Stream, Transfers
from numba_symm.errors import ArgumentError


def sending(calls: Calls, x: Any, dst: int | None, stream: Any) -> Prepared:
    """Prepare to send an array; see :meth:`Communicator.send`."""
    calls.island.check_open()
    to = _check_other(calls, dst, "send: dst")
    given = arrays.view(x, "send")
    transfers = calls.remembered(_sent, given, to)
    return Prepared(transfers, calls.stream_for(stream, x), (x,), None)


def receiving(calls: Calls, out: Any, src: int | None, stream: Any) -> Prepared:
    """Prepare to receive an array; see :meth:`Communicator.recv`."""
    calls.island.check_open()
    source = _check_other(calls, src, "recv: src")
    taken = arrays.view(out, "recv: out")
    transfers = calls.remembered(_received, taken, source)
    return Prepared(transfers, calls.stream_for(stream, out), (out,), out)


def exchanging(
    calls: Calls, x: Any, dst: int | None, out: Any, src: int | None, stream: Any
) -> Prepared:
    """Prepare to send and receive; see :meth:`Communicator.sendrecv`."""
    calls.island.check_open()
    dst = check_peer(dst, calls.size, "sendrecv: dst")
    src = check_peer(src, calls.size, "sendrecv: src")
    given = arrays.view(x, "sendrecv")
    taken = arrays.view(out, "sendrecv: out")
    transfers = calls.remembered(_exchanged, given, dst, taken, src)
    return Prepared(transfers, calls.stream_for(stream, x), (x, out), out)


def start(calls: Calls, what: str, call: Prepared) -> Any:
    """Enqueue a prepared call, or add it to an open group; return its result."""
    calls.transfer(what, call.transfers, call.stream, *call.keep)
    return call.result


@contextmanager
def collecting(
    calls: Calls, what: str, done: Callable[[Pending], None]
) -> Iterator[None]:
    """Collect the calls within a ``with`` block, and pass them to ``done``."""
    with calls.alone(what):
        calls.island.check()
        calls.refuse_in_group(what)
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
    try:
        if found.stream is not None:
            transfers = transfers_of(calls, found)
            calls.transfer("group", transfers, stream or found.stream, *keep)
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
    return calls.remembered(_grouped, *messages, tuple(found.copies))


def _check_other(calls: Calls, asked: Any, what: str) -> int | None:
    peer = check_peer(asked, calls.size, what)
    if peer == calls.rank:
        raise ArgumentError(
            f"{what}: expected another rank, got {peer}, which is this rank; use "
            "sendrecv, or copy the array"
        )
    return peer


def _sent(calls: Calls, x: ArrayView, dst: int | None) -> Transfers:
    return Transfers(_with(dst, calls.usable(x, "send")), [])


def _received(calls: Calls, out: ArrayView, src: int | None) -> Transfers:
    return Transfers([], _with(src, calls.usable(out, "recv: out", written=True)))


def _with(peer: int | None, array: ArrayView) -> list[Message]:
    """Return the message of an array to or from a rank: none if it is nobody."""
    return [] if peer is None else [Message(peer, array.address, array.nbytes)]


def _exchanged(
    calls: Calls, x: ArrayView, dst: int | None, out: ArrayView, src: int | None
) -> Transfers:
    if (dst == calls.rank) != (src == calls.rank):
        raise ArgumentError(
            f"sendrecv: expected both dst and src to be this rank, {calls.rank}, or "
            f"neither, got dst={dst} and src={src}; a rank receives in the same call "
            "what it sends itself"
        )
    x = calls.usable(x, "sendrecv")
    out = calls.usable(out, "sendrecv: out", written=True)
    check_apart(x, out, "sendrecv")
    if dst == calls.rank:
        if x.nbytes != out.nbytes:
            raise ArgumentError(
                f"sendrecv: expected x and out of equal size, got {x.nbytes} and "
                f"{out.nbytes} bytes"
            )
        return Transfers([], [], [(out.address, x.address, x.nbytes)])
    return Transfers(_with(dst, x), _with(src, out))


def _grouped(
    calls: Calls,
    sends: Sequence[Message],
    receives: Sequence[Message],
    copies: Sequence[Copy],
) -> Transfers:
    return Transfers(sends, receives, copies)
