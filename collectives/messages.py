"""Sends and receives between two ranks, and groups of calls that start together.

The functions that ``remembered`` calls derive messages from a call's arguments. They
run only for arguments that were not passed before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numba_symm import arrays
from numba_symm.arrays import ArrayView
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.checks import check_apart, check_peer
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.transfers import Copy, Pending, Transfers
from numba_symm.errors import ArgumentError


def send(calls: Calls, x: Any, dst: int | None, stream: Any) -> None:
    """Send an array; see :meth:`Communicator.send`."""
    calls.island.check_open()
    to = _check_other(calls, dst, "send: dst")
    given = arrays.view(x, "send")
    transfers = calls.remembered(_sent, given, to)
    calls.transfer("send", transfers, calls.stream_for(stream, x), x)


def recv(calls: Calls, out: Any, src: int | None, stream: Any) -> None:
    """Receive an array; see :meth:`Communicator.recv`."""
    calls.island.check_open()
    source = _check_other(calls, src, "recv: src")
    taken = arrays.view(out, "recv: out")
    transfers = calls.remembered(_received, taken, source)
    calls.transfer("recv", transfers, calls.stream_for(stream, out), out)


def sendrecv(
    calls: Calls, x: Any, dst: int | None, out: Any, src: int | None, stream: Any
) -> None:
    """Send one array and receive another; see :meth:`Communicator.sendrecv`."""
    calls.island.check_open()
    dst = check_peer(dst, calls.size, "sendrecv: dst")
    src = check_peer(src, calls.size, "sendrecv: src")
    given = arrays.view(x, "sendrecv")
    taken = arrays.view(out, "sendrecv: out")
    transfers = calls.remembered(_exchanged, given, dst, taken, src)
    chosen = calls.stream_for(stream, x)
    calls.transfer("sendrecv", transfers, chosen, x, out)


@contextmanager
def group(calls: Calls) -> Iterator[None]:
    """Start the calls within a ``with`` block together; see Communicator.group."""
    with calls.alone("group"):
        calls.island.check()
        calls.refuse_in_group("group")
        pending = calls.pending = Pending(calls.size)
        try:
            yield
        finally:
            calls.pending = None
        calls.island.check()
        try:
            _start(calls, pending)
        except BaseException as error:
            calls.give_up(error, "group", *pending.stream_handles)
            raise


def _start(calls: Calls, pending: Pending) -> None:
    if pending.stream is not None:
        transfers = calls.remembered(
            *(_grouped, tuple(pending.sends), tuple(pending.receives)),
            tuple(pending.copies),
        )
        calls.transfer("group", transfers, pending.stream)
    for what, launch, stream in pending.launches:
        calls.run(what, launch, stream)


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
