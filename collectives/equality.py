"""Digests of arrays, with which ranks compare their arrays."""

from collections import Counter
from typing import Any

import numpy as np

from numba_symm.collectives import staging
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.kernels import pack as kernel
from numba_symm.collectives.protocols import workspace
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device.groups import VECTOR
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, ArraysDiffer
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.arrays import ArrayView
from numba_symm.launch.ranks import name_ranks, sentence


class Digests:
    """The digests of an array's ranges on its stream.

    Arrays in another order than C's are packed first, so that a digest does not depend
    on strides.

    Args:
        calls: the communicator's calls.
        x: the array.
        stream: what the caller passed.
        what: the call.

    Attributes:
        view: the array, contiguous.
        vectors: the number of its vectors of 16 bytes.
    """

    def __init__(self, calls: Calls, x: Any, stream: Any, what: str):
        self._calls, self._what, self._keep = calls, what, x
        self._about = calls.descriptions.of(what)  # each rank digests what it has
        view = arrays.view(x, what)
        self._stream = calls.streams.of(stream, x)
        if not SIMULATED and streams.is_capturing(self._stream):
            raise ArgumentError(
                f"{what}: expected a stream that is not being captured, because the "
                "host waits for it; call it before or after the capture"
            )
        if view.order == "C":
            view = calls.usable(view, what)
        else:
            calls.staging.used, calls.staging.stream = 0, self._stream
            found = staging.stage(calls, x, what, False, False)
            self._run(found.pack, x)
            view, self._keep = arrays.view(found.array, what), found
        self.view: ArrayView = view
        self.vectors = -(-view.nbytes // VECTOR)

    def _run(self, launch: Enqueue, *keep: Any) -> None:
        enqueuer = self._calls.enqueuer
        enqueuer.run(enqueuer.pack(self._about, launch), self._stream, *keep)

    def of(self, first: int, end: int) -> tuple[list[int], int]:
        """Return the digests of ranges of these vectors, and the length of a range."""
        if first == end:
            return [], 1
        count = end - first
        blocks = min(workspace.divide_up(count, THREADS), workspace.MAX_BLOCKS)
        span = workspace.divide_up(count, blocks)
        blocks = workspace.divide_up(count, span)
        made = arrays.empty((blocks, THREADS), np.dtype(np.int64), self._what)
        address, nbytes = self.view.address, self.view.nbytes
        sums = arrays.view(made, self._what).address
        launch = kernel.bind_digest(address, nbytes, first, end, span, sums)
        self._run(launch, made, self._keep)
        streams.synchronize(self._stream)
        self._calls.members.check()
        found = made.copy_to_host().view(np.uint64).sum(axis=1, dtype=np.uint64)
        return [int(each) for each in found], span

    def bytes_of(self, first: int, end: int) -> bytes:
        """Return the bytes of vectors."""
        first *= VECTOR
        count = min(end * VECTOR, self.view.nbytes) - first
        memory = arrays.Memory(self.view.address + first, count, self._keep)
        return bytes(memory.array(count, np.uint8).copy_to_host())


def digest(calls: Calls, x: Any, stream: Any) -> int:
    """Return the digest of an array; see ``Communicator.digest``."""
    what = "digest"
    calls.members.check()
    calls.enqueuer.refuse_in_group(what)
    found = Digests(calls, x, stream, what)
    return _total(found.of(0, found.vectors)[0])


def check_equal(calls: Calls, x: Any, stream: Any) -> None:
    """Raise on every rank if the arrays differ; see ``Communicator.check_equal``."""
    what = "check_equal"
    calls.enqueuer.refuse_in_group(what)
    with calls.members.set_up(what):
        exchange = calls.members.exchange
        with exchange.agreed(what):
            found = Digests(calls, x, stream, what)
            view = arrays.view(x, what)
            sums, span = found.of(0, found.vectors)
        exchange.agree_equal(f"shape {view.shape} and dtype {view.dtype}", what)
        totals = exchange.all_gather(_total(sums), f"{what}: digests")
        if len(set(totals)) == 1:
            return
        usual, _ = Counter(totals).most_common(1)[0]  # of the lowest rank, if several
        same = [rank for rank, each in enumerate(totals) if each == usual]
        others = [rank for rank, each in enumerate(totals) if each != usual]
        first, end = 0, found.vectors
        while end - first > THREADS:
            first += span * _first_difference(
                exchange.all_gather(sums, f"{what}: ranges")
            )
            end = min(first + span, found.vectors)
            with exchange.agreed(what):
                sums, span = found.of(first, end)
        with exchange.agreed(what):
            mine = found.bytes_of(first, end)
        held = exchange.all_gather(mine, f"{what}: bytes")
        raise _difference(view, first * VECTOR, held, same, others)


def _total(sums: list[int]) -> int:
    return sum(sums) % (1 << 64)


def _first_difference(everyone: list[Any]) -> int:
    """Return the first place at which some of the ranks' sequences differ."""
    return next(
        i for i, each in enumerate(zip(*everyone, strict=True)) if len(set(each)) > 1
    )


def _difference(
    view: ArrayView,
    first: int,
    held: list[bytes],
    usual: list[int],
    differing: list[int],
) -> ArraysDiffer:
    """Return the error, which names the first element that differs.

    Args:
        view: an array of their shape and dtype.
        first: the byte at which a range begins in which arrays differ.
        held: by rank, the bytes of the range.
        usual: the ranks whose arrays most ranks have.
        differing: the others.
    """
    size = view.dtype.itemsize
    place = (first + _first_difference(held)) // size
    index = tuple(int(i) for i in np.unravel_index(place, view.shape))
    start = max(0, place * size - first)
    end = (place + 1) * size - first
    texts = {rank: _text(each[start:end], view.dtype) for rank, each in enumerate(held)}
    return ArraysDiffer(
        f"check_equal: expected equal bits on all ranks, got different ones on "
        f"{name_ranks(differing)} (compared with {name_ranks(usual)}); first "
        f"difference at index {index}: {sentence(texts, 'has', 'have')}",
        ranks=tuple(differing),
        index=index,
    )


def _text(held: bytes, dtype: np.dtype[Any]) -> str:
    """Return an element as bits, and in words if it is a number and whole."""
    bits = f"0x{int.from_bytes(held, 'little'):0{2 * len(held)}x}"
    if len(held) != dtype.itemsize or dtype.names:
        return bits
    return f"{np.frombuffer(held, dtype)[0]} ({bits})"
