"""Gather, scatter, and the collectives to which ranks contribute different amounts.

All are messages between pairs (``transfer.py``), and so may be grouped with others.
Counts and displacements are MPI's: in elements of the flattened arrays.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from numba_symm.arrays import ArrayView
from numba_symm.collectives.point_to_point import (
    PointToPoint,
    Stream,
    Transfers,
    check_apart,
    check_rank,
)
from numba_symm.collectives.transfer import Message
from numba_symm.errors import ArgumentError

Counts = Sequence[int]


class Piece:
    """The part of an array that one rank sends or receives, in bytes."""

    def __init__(self, view: ArrayView, first: int, count: int):
        itemsize = view.dtype.itemsize
        self.address = view.address + first * itemsize
        self.nbytes = count * itemsize


class Call(NamedTuple):
    """A collective made of messages, ready to be enqueued.

    Attributes:
        words: what the ranks must agree on.
        transfers: this rank's messages.
        stream: where to.
        keep: arrays that must live until they are enqueued.
        result: what the call returns.
    """

    words: str
    transfers: Transfers
    stream: Stream
    keep: tuple[Any, ...]
    result: Any


class VectorForms(PointToPoint):
    """The part of a communicator whose collectives are made of messages."""

    def _collected(self, what: str, prepare: Callable[..., Call], *args: Any) -> Any:
        raise NotImplementedError

    def _new(
        self, like: ArrayView, shape: tuple[int, ...], handle: int, what: str
    ) -> Any:
        raise NotImplementedError

    def _flat(self, array: Any, what: str, written: bool = False) -> ArrayView:
        """Return an array whose elements are counted in C order."""
        found = self._viewed(array, what, written)
        if found.order != "C":
            raise ArgumentError(
                f"{what} is in Fortran order, in which a rank's part is not "
                "contiguous; pass it in C order, or its transpose"
            )
        return found

    def gather(self, x: Any, root: int = 0, out: Any = None, stream: Any = None) -> Any:
        """Bring every rank's array to rank ``root``.

        Collective: every rank passes an array of equal shape and dtype, and the same
        ``root``. Asynchronous.

        Args:
            x: a device array in C order. In place on root: ``out[root]``.
            root: the rank that gets all.
            out: on root: where to, an array of shape ``(size, *x.shape)``; None: a new
                array of ordinary device memory. On other ranks: None.
            stream: as for :meth:`all_reduce`.

        Returns:
            On root ``out``, or the new array: ``out[r]`` is rank r's x. Else None.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._collected("gather", self._gather, x, None, None, root, out, stream)

    def gather_v(
        self,
        x: Any,
        counts: Counts | None = None,
        displs: Counts | None = None,
        root: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Bring every rank's array, of any length, to rank ``root``.

        Collective: every rank passes the same ``root`` and dtype. Asynchronous.

        Args:
            x: a device array in C order.
            counts: on root: how many elements each rank's x has. Elsewhere ignored.
            displs: on root: where in ``out`` each begins; None: one after another.
            root: the rank that gets all.
            out: on root: where to; None: a new array of one axis. Elsewhere None.
            stream: as for :meth:`all_reduce`.

        Returns:
            On root ``out``, or the new array. Else None.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._collected(
            "gather_v", self._gather, x, counts, displs, root, out, stream
        )

    def _gather(
        self,
        what: str,
        x: Any,
        counts: Counts | None,
        displs: Counts | None,
        root: int,
        out: Any,
        stream: Any,
    ) -> Call:
        root = check_rank(root, self.size, f"{what}: root")
        source = self._flat(x, what)
        chosen = self._stream_for(stream, source)
        even = what == "gather"
        call = f"{source.dtype.name}, root {root}"
        call = f"{source.size} {call}" if even else call
        if self.rank != root:
            _refuse_output(out, what, root)
            message = Message(root, source.address, source.nbytes)
            return Call(call, Transfers([message], []), chosen, (x,), None)
        counts = [source.size] * self.size if even else counts
        places = places_of(counts, displs, self.size, f"{what}: counts")
        _refuse_overlap(places, f"{what}: displs")
        check_length(source, places[root][1], f"{what}: x", f"counts[{root}]")
        if out is None:
            shape = (self.size, *source.shape) if even else (_end(places),)
            out = self._new(source, shape, chosen[0], what)
        target = self._flat(out, f"{what}: out", written=True)
        check_type(target, source, what)
        _check_room(target, places, f"{what}: out", exact=even)
        pieces = [Piece(target, *place) for place in places]
        copies = _own_piece(pieces[root], source, target, what)
        transfers = Transfers([], _messages(pieces, root), copies)
        return Call(call, transfers, chosen, (x, out), out)

    def scatter(
        self, x: Any = None, root: int = 0, out: Any = None, stream: Any = None
    ) -> Any:
        """Give each rank its part of rank ``root``'s array.

        Collective: every rank passes the same ``root``. Asynchronous.

        Args:
            x: on root: a device array in C order whose first axis' length is a
                multiple of the number of ranks; its r-th part goes to rank r.
                Elsewhere None.
            root: the rank that has x.
            out: where to: an array of the part's size and x's dtype, required on other
                ranks than root. On root None gives a new array of shape
                ``(x.shape[0] // size, *x.shape[1:])``; in place: x's own part.
            stream: as for :meth:`all_reduce`; None takes x's on root, else out's.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._collected(
            "scatter", self._scatter, x, None, None, root, out, stream
        )

    def scatter_v(
        self,
        x: Any = None,
        counts: Counts | None = None,
        displs: Counts | None = None,
        root: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Give each rank a part, of any length, of rank ``root``'s array.

        Collective: every rank passes the same ``root``. Asynchronous.

        Args:
            x: on root: a device array in C order. Elsewhere None.
            counts: on root: how many elements each rank gets. Elsewhere ignored.
            displs: on root: where in ``x`` each rank's begin; None: one after another.
            root: the rank that has x.
            out: where to: an array of as many elements, required on other ranks than
                root. On root None gives a new array of one axis.
            stream: as for :meth:`all_reduce`; None takes x's on root, else out's.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._collected(
            "scatter_v", self._scatter, x, counts, displs, root, out, stream
        )

    def _scatter(
        self,
        what: str,
        x: Any,
        counts: Counts | None,
        displs: Counts | None,
        root: int,
        out: Any,
        stream: Any,
    ) -> Call:
        root = check_rank(root, self.size, f"{what}: root")
        call = f"root {root}"
        if self.rank != root:
            return self._scattered(what, x, root, out, stream, call)
        source = self._flat(x, what)
        even = what == "scatter"
        if even:
            counts = [_share(source, self.size)] * self.size
        places = places_of(counts, displs, self.size, f"{what}: counts")
        _check_room(source, places, f"{what}: x")
        chosen = self._stream_for(stream, source)
        if out is None:
            shape: tuple[int, ...] = (places[root][1],)
            if even:
                shape = (source.shape[0] // self.size, *source.shape[1:])
            out = self._new(source, shape, chosen[0], what)
        target = self._flat(out, f"{what}: out", written=True)
        check_type(target, source, what)
        check_length(target, places[root][1], f"{what}: out", f"counts[{root}]")
        pieces = [Piece(source, *place) for place in places]
        own = _own_piece(pieces[root], target, source, what)
        copies = [(there, here, nbytes) for here, there, nbytes in own]
        transfers = Transfers(_messages(pieces, root), [], copies)
        return Call(call, transfers, chosen, (x, out), out)

    def _scattered(
        self, what: str, x: Any, root: int, out: Any, stream: Any, call: str
    ) -> Call:
        if x is not None:
            raise ArgumentError(
                f"{what}: x is given on rank {self.rank}, and rank {root} is root; "
                "pass x=None and out= there"
            )
        if out is None:
            raise ArgumentError(
                f"{what}: pass out= on other ranks than root, which alone knows how "
                "much there is"
            )
        target = self._flat(out, f"{what}: out", written=True)
        message = Message(root, target.address, target.nbytes)
        chosen = self._stream_for(stream, target)
        return Call(call, Transfers([], [message]), chosen, (out,), out)

    def all_gather_v(
        self,
        x: Any,
        counts: Counts,
        displs: Counts | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Give every rank the arrays of all, which may differ in length.

        Collective: every rank passes the same ``counts`` and dtype. Asynchronous.

        Args:
            x: a device array in C order with ``counts[rank]`` elements.
            counts: how many elements each rank's x has.
            displs: where in ``out`` each begins; None: one after another.
            out: where to; None: a new array of one axis. In place, x is its own part.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._collected(
            "all_gather_v", self._all_gather, x, counts, displs, out, stream
        )

    def _all_gather(
        self,
        what: str,
        x: Any,
        counts: Counts,
        displs: Counts | None,
        out: Any,
        stream: Any,
    ) -> Call:
        source = self._flat(x, what)
        places = places_of(counts, displs, self.size, f"{what}: counts")
        _refuse_overlap(places, f"{what}: displs")
        check_length(source, places[self.rank][1], f"{what}: x", "counts[rank]")
        chosen = self._stream_for(stream, source)
        if out is None:
            out = self._new(source, (_end(places),), chosen[0], what)
        target = self._flat(out, f"{what}: out", written=True)
        check_type(target, source, what)
        _check_room(target, places, f"{what}: out")
        pieces = [Piece(target, *place) for place in places]
        sends = [
            Message(peer, source.address, source.nbytes)
            for peer in range(self.size)
            if peer != self.rank
        ]
        copies = _own_piece(pieces[self.rank], source, target, what)
        transfers = Transfers(sends, _messages(pieces, self.rank), copies)
        call = f"counts {[count for _, count in places]}, {source.dtype.name}"
        return Call(call, transfers, chosen, (x, out), out)

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Counts,
        recv_counts: Counts,
        send_displs: Counts | None = None,
        recv_displs: Counts | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Send each rank a part of ``x``, and take every rank's part for this one.

        Collective: every rank passes the same dtype; what rank r sends rank s,
        ``send_counts[s]`` there, is what s receives, ``recv_counts[r]`` here.
        Asynchronous.

        Args:
            x: a device array in C order.
            send_counts: how many elements go to each rank.
            recv_counts: how many come from each rank.
            send_displs: where in ``x`` those for each rank begin; None: one after
                another.
            recv_displs: where in ``out`` those of each rank begin; None likewise.
            out: where to, apart from x; None: a new array of one axis.
            stream: as for :meth:`all_reduce`.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        return self._collected(
            *("all_to_all_v", self._all_to_all, x, (send_counts, send_displs)),
            *((recv_counts, recv_displs), out, stream),
        )

    def _all_to_all(
        self,
        what: str,
        x: Any,
        sent: tuple[Counts, Counts | None],
        received: tuple[Counts, Counts | None],
        out: Any,
        stream: Any,
    ) -> Call:
        source = self._flat(x, what)
        given = places_of(*sent, self.size, f"{what}: send_counts")
        taken = places_of(*received, self.size, f"{what}: recv_counts")
        _refuse_overlap(taken, f"{what}: recv_displs")
        if given[self.rank][1] != taken[self.rank][1]:
            raise ArgumentError(
                f"{what}: rank {self.rank} sends itself {given[self.rank][1]} elements "
                f"and receives {taken[self.rank][1]} from itself"
            )
        _check_room(source, given, f"{what}: x")
        chosen = self._stream_for(stream, source)
        if out is None:
            out = self._new(source, (_end(taken),), chosen[0], what)
        target = self._flat(out, f"{what}: out", written=True)
        check_type(target, source, what)
        _check_room(target, taken, f"{what}: out")
        check_apart(source, target, what)
        outgoing = [Piece(source, *place) for place in given]
        incoming = [Piece(target, *place) for place in taken]
        own, into = outgoing[self.rank], incoming[self.rank]
        transfers = Transfers(
            _messages(outgoing, self.rank),
            _messages(incoming, self.rank),
            [(into.address, own.address, own.nbytes)],
        )
        return Call(source.dtype.name, transfers, chosen, (x, out), out)


def _share(source: ArrayView, size: int) -> int:
    """Return the elements of each rank's part of an array."""
    if not source.shape or source.shape[0] % size:
        raise ArgumentError(
            f"scatter: x has shape {source.shape}; the first axis is cut into a part "
            f"for each rank, so its length must be a multiple of {size}"
        )
    return source.size // size


def places_of(
    counts: Counts | None, displs: Counts | None, size: int, what: str
) -> list[tuple[int, int]]:
    """Return ``(first, count)`` for each rank, checked."""
    if counts is None:
        raise ArgumentError(f"{what}=None; give a number of elements for each rank")
    lengths = _integers(counts, size, what)
    if displs is None:
        starts = [0, *itertools.accumulate(lengths)][:size]
    else:
        starts = _integers(displs, size, what.replace("counts", "displs"))
    return list(zip(starts, lengths, strict=True))


def _integers(given: Counts, size: int, what: str) -> list[int]:
    found = list(given) if isinstance(given, Iterable) else []
    if len(found) != size or any(
        not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 0
        for n in found
    ):
        raise ArgumentError(
            f"{what}={given!r}; give an integer from 0 for each of {size} ranks"
        )
    return [int(n) for n in found]


def _end(places: list[tuple[int, int]]) -> int:
    return max(first + count for first, count in places)


def _messages(pieces: list[Piece], but: int) -> list[Message]:
    """Return the messages to or from all ranks but one."""
    return [
        Message(peer, piece.address, piece.nbytes)
        for peer, piece in enumerate(pieces)
        if peer != but
    ]


def _own_piece(
    piece: Piece, alone: ArrayView, whole: ArrayView, what: str
) -> list[tuple[int, int, int]]:
    """Return the copy of what a rank has for itself: none where it is in place.

    Args:
        piece: where it lies, or goes to, in the array that has parts for all.
        alone: the array of its own, which may be that very piece.
        whole: the array that has parts for all.
        what: the operation.
    """
    if piece.nbytes == 0 or alone.address == piece.address:
        return []
    check_apart(alone, whole, what)
    return [(piece.address, alone.address, piece.nbytes)]


def _refuse_output(out: Any, what: str, root: int) -> None:
    if out is not None:
        raise ArgumentError(
            f"{what}: out is given, and only rank {root}, the root, gets a result; "
            "pass out=None on the others"
        )


def check_type(target: ArrayView, source: ArrayView, what: str) -> None:
    """Refuse arrays of two types."""
    if target.dtype != source.dtype:
        raise ArgumentError(
            f"{what}: out is of {target.dtype.name} and x of {source.dtype.name}; pass "
            "both of one type"
        )


def check_length(view: ArrayView, count: int, what: str, name: str) -> None:
    """Refuse an array of another number of elements."""
    if view.size != count:
        raise ArgumentError(f"{what} has {view.size} elements, and {name} is {count}")


def _refuse_overlap(places: list[tuple[int, int]], what: str) -> None:
    """Refuse parts of an output that are written twice."""
    taken = sorted(place for place in places if place[1])
    for (first, count), (following, _) in itertools.pairwise(taken):
        if first + count > following:
            raise ArgumentError(f"{what}: the parts of two ranks overlap in out")


def _check_room(
    view: ArrayView, places: list[tuple[int, int]], what: str, exact: bool = False
) -> None:
    """Refuse an array that is too small or, if asked, too large."""
    if view.size < _end(places) or (exact and view.size > _end(places)):
        raise ArgumentError(
            f"{what} has {view.size} elements, and counts and displacements reach to "
            f"{_end(places)}"
        )
