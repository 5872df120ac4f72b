"""Gather, scatter, and the collectives to which ranks contribute different amounts.

All are messages between pairs (``transfer.py``), and so may be grouped with others.
Counts and displacements are MPI's: in elements of the flattened arrays.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from numba_symm.arrays import ArrayView
from numba_symm.collectives.point_to_point import (
    PointToPoint,
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


class VectorForms(PointToPoint):
    """The part of a communicator whose collectives are made of messages."""

    def _agree(self, what: str, call: str) -> None:
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
        source = self._flat(x, "gather")
        counts = [source.size] * self.size
        shape = (self.size, *source.shape)
        return self._gather("gather", x, source, counts, None, root, out, shape, stream)

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
        source = self._flat(x, "gather_v")
        check_rank(root, self.size, "gather_v: root")
        if self.rank != root:
            counts, displs = [source.size] * self.size, None
        return self._gather(
            "gather_v", x, source, counts, displs, root, out, None, stream
        )

    def _gather(
        self,
        what: str,
        x: Any,
        source: ArrayView,
        counts: Counts | None,
        displs: Counts | None,
        root: int,
        out: Any,
        shape: tuple[int, ...] | None,
        stream: Any,
    ) -> Any:
        self.check()
        check_rank(root, self.size, f"{what}: root")
        same = f"{source.size} " if what == "gather" else ""
        self._agree(what, f"{same}{source.dtype.name}, root {root}")
        chosen = self._stream_for(stream, source)
        if self.rank != root:
            _refuse_output(out, what, root)
            message = Message(root, source.address, source.nbytes)
            self._transfer(Transfers([message], []), chosen, x)
            return None
        places = places_of(counts, displs, self.size, f"{what}: counts")
        check_length(source, places[root][1], f"{what}: x", f"counts[{root}]")
        if out is None:
            out = self._new(source, shape or (_end(places),), chosen[0], what)
        target = self._flat(out, f"{what}: out", written=True)
        _check_type(target, source, what)
        _check_room(target, places, f"{what}: out")
        pieces = [Piece(target, *place) for place in places]
        receives = _messages(pieces, root)
        copies = _own_piece(pieces[root], source, target, what)
        self._transfer(Transfers([], receives, copies), chosen, x, out)
        return out

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
            stream: as for :meth:`all_reduce`; None takes the one of ``out``, or of x.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        check_rank(root, self.size, "scatter: root")
        counts = shape = None
        if self.rank == root:
            source = self._flat(x, "scatter")
            if not source.shape or source.shape[0] % self.size:
                raise ArgumentError(
                    f"scatter: x has shape {source.shape}; the first axis is cut into "
                    f"a part for each rank, so its length must be a multiple of "
                    f"{self.size}"
                )
            counts = [source.size // self.size] * self.size
            shape = (source.shape[0] // self.size, *source.shape[1:])
        return self._scatter("scatter", x, counts, None, root, out, shape, stream)

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
            stream: as for :meth:`all_reduce`; None takes the one of ``out``, or of x.

        Returns:
            ``out``, or the new array.

        Raises:
            As :meth:`all_reduce`.
        """
        check_rank(root, self.size, "scatter_v: root")
        return self._scatter("scatter_v", x, counts, displs, root, out, None, stream)

    def _scatter(
        self,
        what: str,
        x: Any,
        counts: Counts | None,
        displs: Counts | None,
        root: int,
        out: Any,
        shape: tuple[int, ...] | None,
        stream: Any,
    ) -> Any:
        self.check()
        self._agree(what, f"root {root}")
        if self.rank != root:
            if x is not None:
                raise ArgumentError(
                    f"{what}: x is given on rank {self.rank}, and rank {root} is root; "
                    "pass x=None and out= there"
                )
            if out is None:
                raise ArgumentError(
                    f"{what}: pass out= on other ranks than root, which alone knows "
                    "how much there is"
                )
            target = self._flat(out, f"{what}: out", written=True)
            message = Message(root, target.address, target.nbytes)
            chosen = self._stream_for(stream, target)
            self._transfer(Transfers([], [message]), chosen, out)
            return out
        source = self._flat(x, what)
        places = places_of(counts, displs, self.size, f"{what}: counts")
        _check_room(source, places, f"{what}: x")
        if out is None:
            chosen = self._stream_for(stream, source)
            out = self._new(source, shape or (places[root][1],), chosen[0], what)
        target = self._flat(out, f"{what}: out", written=True)
        chosen = self._stream_for(stream, target)
        _check_type(target, source, what)
        check_length(target, places[root][1], f"{what}: out", f"counts[{root}]")
        pieces = [Piece(source, *place) for place in places]
        copies = _own_piece(pieces[root], target, source, what)
        copies = [(there, here, nbytes) for here, there, nbytes in copies]
        self._transfer(Transfers(_messages(pieces, root), [], copies), chosen, x, out)
        return out

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
        what = "all_gather_v"
        self.check()
        source = self._flat(x, what)
        self._agree(what, f"counts {list(counts)}, {source.dtype.name}")
        places = places_of(counts, displs, self.size, f"{what}: counts")
        check_length(source, places[self.rank][1], f"{what}: x", "counts[rank]")
        chosen = self._stream_for(stream, source)
        if out is None:
            out = self._new(source, (_end(places),), chosen[0], what)
        target = self._flat(out, f"{what}: out", written=True)
        _check_type(target, source, what)
        _check_room(target, places, f"{what}: out")
        pieces = [Piece(target, *place) for place in places]
        sends = [
            Message(peer, source.address, source.nbytes)
            for peer in range(self.size)
            if peer != self.rank
        ]
        copies = _own_piece(pieces[self.rank], source, target, what)
        receives = _messages(pieces, self.rank)
        self._transfer(Transfers(sends, receives, copies), chosen, x, out)
        return out

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
        what = "all_to_all_v"
        self.check()
        source = self._flat(x, what)
        self._agree(what, source.dtype.name)
        given = places_of(send_counts, send_displs, self.size, f"{what}: send_counts")
        taken = places_of(recv_counts, recv_displs, self.size, f"{what}: recv_counts")
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
        _check_type(target, source, what)
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
        self._transfer(transfers, chosen, x, out)
        return out


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
    found = list(given)
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


def _check_type(target: ArrayView, source: ArrayView, what: str) -> None:
    if target.dtype != source.dtype:
        raise ArgumentError(
            f"{what}: out is of {target.dtype.name} and x of {source.dtype.name}; pass "
            "both of one type"
        )


def check_length(view: ArrayView, count: int, what: str, name: str) -> None:
    """Refuse an array of another number of elements."""
    if view.size != count:
        raise ArgumentError(f"{what} has {view.size} elements, and {name} is {count}")


def _check_room(view: ArrayView, places: list[tuple[int, int]], what: str) -> None:
    if view.size < _end(places):
        raise ArgumentError(
            f"{what} has {view.size} elements, and counts and displacements reach to "
            f"{_end(places)}"
        )
