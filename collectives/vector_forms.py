"""Gather, scatter, and the collectives to which ranks contribute different amounts.

All are messages between pairs (``transfer.py``), and so may be grouped with others.
Counts and displacements are MPI's: in elements of the flattened arrays.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numba_symm import arrays
from numba_symm.arrays import ArrayView
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.messages import (
    Copy,
    PointToPoint,
    Stream,
    Transfers,
    check_apart,
    check_rank,
    is_integer,
)
from numba_symm.errors import ArgumentError
from numba_symm.launch.store import StoreExchange

Counts = Sequence[int]

Table = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Counts and displacements, checked; None: one after another."""

Place = tuple[int, int]
"""Where a rank's part begins, and how long it is, in elements."""


_COUNTS = {
    "gather_v": ("x.size", "counts[{}]"),
    "scatter": ("x.size // size", "out.size"),
    "scatter_v": ("counts[{}]", "out.size"),
    "all_to_all_v": ("send_counts[{}]", "recv_counts[{}]"),
}
"""What says how much a rank sends to another, and how much that one expects of it."""

_NAMED = 4  # pairs of ranks, in an error


def agree_on_counts(exchange: StoreExchange, what: str, transfers: Transfers) -> None:
    """Check that every rank expects of every other what that one sends. Collective.

    Raises:
        ArgumentError: on all ranks, with who passed what.
    """
    if what not in _COUNTS:  # the ranks have agreed on all counts
        return
    sends, receives = (
        {message.peer: message.nbytes // transfers.itemsize for message in messages}
        for messages in (transfers.sends, transfers.receives)
    )
    everyone = exchange.all_gather((sends, receives), f"{what}: counts")
    sent_as, expected_as = _COUNTS[what]
    wrong = [
        f"rank {rank} sends {sent} elements ({sent_as.format(peer)}) to rank {peer}, "
        f"which expects {everyone[peer][1][rank]} ({expected_as.format(rank)})"
        for rank, (sends, _) in enumerate(everyone)
        for peer, sent in sends.items()
        if sent != everyone[peer][1][rank]
    ]
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ArgumentError(
            f"{what}: {'; '.join(wrong[:_NAMED])}{more}; pass counts that agree"
        )


class Piece:
    """The part of an array that one rank sends or receives, in bytes."""

    def __init__(self, view: ArrayView, first: int, count: int):
        itemsize = view.dtype.itemsize
        self.address = view.address + first * itemsize
        self.nbytes = count * itemsize


class Call(NamedTuple):
    """A collective made of messages, ready to be enqueued.

    Attributes:
        transfers: this rank's messages.
        stream: where to.
        keep: arrays that must live until they are enqueued.
        result: what the call returns.
    """

    transfers: Transfers
    stream: Stream
    keep: tuple[Any, ...]
    result: Any


class Form(NamedTuple):
    """What is worked out for new arguments of a call that reads x and writes out.

    Both take the communicator, the operation's name and x, the second out, then what
    else the call was given. Nothing else that changes may enter.

    Attributes:
        shape: checks all but out, and returns the shape of a new one.
        transfers: checks all, and returns the messages.
    """

    shape: Callable[..., tuple[int, ...]]
    transfers: Callable[..., Transfers]


class VectorForms(PointToPoint):
    """The part of a communicator whose collectives are made of messages."""

    def _collected(self, what: str, prepare: Callable[..., Call], *args: Any) -> Any:
        raise NotImplementedError

    def _new(
        self, like: ArrayView, shape: tuple[int, ...], handle: int, what: str
    ) -> Any:
        raise NotImplementedError

    def _flat(self, view: ArrayView, what: str, written: bool = False) -> ArrayView:
        """Return an array whose elements are counted in C order, or refuse it."""
        found = self._usable(view, what, written)
        if found.order != "C":
            raise ArgumentError(
                f"{what} is in Fortran order, in which a rank's part is not "
                "contiguous; pass it in C order, or its transpose"
            )
        return found

    def _formed(
        self, form: Form, what: str, x: Any, out: Any, stream: Any, *given: Any
    ) -> Call:
        """Return a call that reads x and writes out, which it makes if it is None."""
        source = arrays.view(x, what)
        chosen = self._stream_for(stream, source)
        if out is None:
            shape = self._planned(form.shape, what, source, *given)
            out = self._new(source, shape, chosen[0], what)
        target = arrays.view(out, f"{what}: out")
        transfers = self._planned(form.transfers, what, source, target, *given)
        return Call(transfers, chosen, (x, out), out)

    def gather(self, x: Any, root: int = 0, out: Any = None, stream: Any = None) -> Any:
        """Bring every rank's array to rank ``root``.

        Collective: every rank passes an array of equal shape and dtype, and the same
        ``root``. Asynchronous.

        Args:
            x: a device array in C order. In place on root: ``out[root]``.
            root: the rank that gets all.
            out: on root: where to, an array of shape ``(size, *x.shape)``; None: a new
                array of ordinary device memory. Elsewhere ignored, as in MPI.
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
            out: on root: where to; None: a new array of one axis. Elsewhere ignored.
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
        if self.rank == root:
            even = what == "gather"
            table = None if even else self._table(counts, displs, f"{what}: counts")
            return self._formed(_GATHER, what, x, out, stream, root, table)
        source = arrays.view(x, what)
        transfers = self._planned(_contributed, what, source, root)
        return Call(transfers, self._stream_for(stream, source), (x,), None)

    def _table(self, counts: Counts | None, displs: Counts | None, what: str) -> Table:
        return table_of(counts, displs, self.size, what)

    def scatter(
        self, x: Any = None, root: int = 0, out: Any = None, stream: Any = None
    ) -> Any:
        """Give each rank its part of rank ``root``'s array.

        Collective: every rank passes the same ``root``. Asynchronous.

        Args:
            x: on root: a device array in C order whose first axis' length is a
                multiple of the number of ranks; its r-th part goes to rank r.
                Elsewhere ignored, as in MPI.
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
            x: on root: a device array in C order. Elsewhere ignored, as in MPI.
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
        if self.rank == root:
            even = what == "scatter"
            table = None if even else self._table(counts, displs, f"{what}: counts")
            return self._formed(_SCATTER, what, x, out, stream, root, table)
        if out is None:
            raise ArgumentError(
                f"{what}: pass out= on other ranks than root, which alone knows how "
                "much there is"
            )
        target = arrays.view(out, f"{what}: out")
        transfers = self._planned(_taken, what, target, root)
        return Call(transfers, self._stream_for(stream, target), (out,), out)

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
        table = self._table(counts, displs, f"{what}: counts")
        return self._formed(_ALL_GATHER, what, x, out, stream, table)

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
        given = self._table(*sent, f"{what}: send_counts")
        taken = self._table(*received, f"{what}: recv_counts")
        return self._formed(_ALL_TO_ALL, what, x, out, stream, given, taken)


def _gathered_shape(
    comm: VectorForms, what: str, x: ArrayView, root: int, table: Table | None
) -> tuple[int, ...]:
    x = comm._flat(x, what)
    if table is None:
        return comm.size, *x.shape
    places = places_of(table)
    _refuse_overlap(places, f"{what}: displs")
    check_length(x, places[root][1], f"{what}: x", f"counts[{root}]")
    return (_end(places),)


def _gathered(
    comm: VectorForms,
    what: str,
    x: ArrayView,
    out: ArrayView,
    root: int,
    table: Table | None,
) -> Transfers:
    _gathered_shape(comm, what, x, root, table)
    places = places_of(table or ((x.size,) * comm.size, None))
    out = _output(comm, out, x, what)
    if table is None:
        _check_even(out, comm.size * x.size, x, what)
    else:
        _check_room(out, places, f"{what}: out")
    pieces = [Piece(out, *place) for place in places]
    copies = _own_piece(pieces[root], x, out, what)
    words = _contribution(what, x, root)
    return Transfers([], _messages(pieces, root), copies, words, x.dtype.itemsize)


def _contributed(comm: VectorForms, what: str, x: ArrayView, root: int) -> Transfers:
    """Return what another rank than the root sends in a gather."""
    x = comm._flat(x, what)
    words = _contribution(what, x, root)
    sends = [Message(root, x.address, x.nbytes)]
    return Transfers(sends, [], (), words, x.dtype.itemsize)


def _contribution(what: str, x: ArrayView, root: int) -> str:
    words = f"{x.dtype.name}, root {root}"
    return f"{x.size} {words}" if what == "gather" else words


def _scattered_shape(
    comm: VectorForms, what: str, x: ArrayView, root: int, table: Table | None
) -> tuple[int, ...]:
    x = comm._flat(x, what)
    if table is None:
        _check_shares(x, comm.size)
        return x.shape[0] // comm.size, *x.shape[1:]
    places = places_of(table)
    _check_room(x, places, f"{what}: x")
    return (places[root][1],)


def _scattered(
    comm: VectorForms,
    what: str,
    x: ArrayView,
    out: ArrayView,
    root: int,
    table: Table | None,
) -> Transfers:
    _scattered_shape(comm, what, x, root, table)
    places = places_of(table or ((x.size // comm.size,) * comm.size, None))
    out = _output(comm, out, x, what)
    if table is None:
        _check_even(out, x.size // comm.size, x, what)
    else:
        check_length(out, places[root][1], f"{what}: out", f"counts[{root}]")
    pieces = [Piece(x, *place) for place in places]
    own = _own_piece(pieces[root], out, x, what)
    copies = [(there, here, nbytes) for here, there, nbytes in own]
    words = f"{x.dtype.name}, root {root}"
    return Transfers(_messages(pieces, root), [], copies, words, x.dtype.itemsize)


def _taken(comm: VectorForms, what: str, out: ArrayView, root: int) -> Transfers:
    """Return what another rank than the root receives in a scatter."""
    out = comm._flat(out, f"{what}: out", written=True)
    receives = [Message(root, out.address, out.nbytes)]
    words = f"{out.dtype.name}, root {root}"
    return Transfers([], receives, (), words, out.dtype.itemsize)


def _all_gathered_shape(
    comm: VectorForms, what: str, x: ArrayView, table: Table
) -> tuple[int, ...]:
    x = comm._flat(x, what)
    places = places_of(table)
    _refuse_overlap(places, f"{what}: displs")
    check_length(x, places[comm.rank][1], f"{what}: x", "counts[rank]")
    return (_end(places),)


def _all_gathered(
    comm: VectorForms, what: str, x: ArrayView, out: ArrayView, table: Table
) -> Transfers:
    _all_gathered_shape(comm, what, x, table)
    places = places_of(table)
    out = _output(comm, out, x, what)
    _check_room(out, places, f"{what}: out")
    pieces = [Piece(out, *place) for place in places]
    sends = [
        Message(peer, x.address, x.nbytes)
        for peer in range(comm.size)
        if peer != comm.rank
    ]
    copies = _own_piece(pieces[comm.rank], x, out, what)
    words = f"counts {list(table[0])}, {x.dtype.name}"
    return Transfers(sends, _messages(pieces, comm.rank), copies, words)


def _exchanged_shape(
    comm: VectorForms, what: str, x: ArrayView, given: Table, taken: Table
) -> tuple[int, ...]:
    x = comm._flat(x, what)
    outgoing, incoming = places_of(given), places_of(taken)
    _refuse_overlap(incoming, f"{what}: recv_displs")
    (_, sent), (_, received) = outgoing[comm.rank], incoming[comm.rank]
    if sent != received:
        raise ArgumentError(
            f"{what}: rank {comm.rank} sends itself {sent} elements and receives "
            f"{received} from itself"
        )
    _check_room(x, outgoing, f"{what}: x")
    return (_end(incoming),)


def _exchanged(
    comm: VectorForms,
    what: str,
    x: ArrayView,
    out: ArrayView,
    given: Table,
    taken: Table,
) -> Transfers:
    _exchanged_shape(comm, what, x, given, taken)
    out = _output(comm, out, x, what)
    _check_room(out, places_of(taken), f"{what}: out")
    check_apart(x, out, what)
    outgoing = [Piece(x, *place) for place in places_of(given)]
    incoming = [Piece(out, *place) for place in places_of(taken)]
    own, into = outgoing[comm.rank], incoming[comm.rank]
    return Transfers(
        _messages(outgoing, comm.rank),
        _messages(incoming, comm.rank),
        [(into.address, own.address, own.nbytes)],
        x.dtype.name,
        x.dtype.itemsize,
    )


_GATHER = Form(_gathered_shape, _gathered)
_SCATTER = Form(_scattered_shape, _scattered)
_ALL_GATHER = Form(_all_gathered_shape, _all_gathered)
_ALL_TO_ALL = Form(_exchanged_shape, _exchanged)


def _output(comm: VectorForms, out: ArrayView, x: ArrayView, what: str) -> ArrayView:
    """Return the output of a call that reads x, or refuse it."""
    out = comm._flat(out, f"{what}: out", written=True)
    check_type(out, x, what)
    return out


def _check_shares(source: ArrayView, size: int) -> None:
    """Refuse an array that cannot be cut into a part for each rank."""
    if not source.shape or source.shape[0] % size:
        raise ArgumentError(
            f"scatter: x has shape {source.shape}; the first axis is cut into a part "
            f"for each rank, so its length must be a multiple of {size}"
        )


def table_of(
    counts: Counts | None, displs: Counts | None, size: int, what: str
) -> Table:
    """Return counts and displacements, which may be anything, as a table, checked."""
    if counts is None:
        raise ArgumentError(f"{what}=None; give a number of elements for each rank")
    lengths = _integers(counts, size, what)
    if displs is None:
        return lengths, None
    return lengths, _integers(displs, size, what.replace("counts", "displs"))


def places_of(table: Table) -> list[Place]:
    """Return every rank's place."""
    lengths, starts = table
    if starts is None:
        starts = (0, *itertools.accumulate(lengths[:-1]))
    return list(zip(starts, lengths, strict=True))


def _integers(given: Counts, size: int, what: str) -> tuple[int, ...]:
    try:
        found = tuple(given)
    except Exception:  # whatever an object's own method raises
        found = ()
    integers = len(found) == size and all(map(is_integer, found))
    if not integers or min(found) < 0:
        raise ArgumentError(
            f"{what}={given!r}; give an integer from 0 for each of {size} ranks"
        )
    return tuple(map(int, found))


def _end(places: list[Place]) -> int:
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
) -> list[Copy]:
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


def _refuse_overlap(places: list[Place], what: str) -> None:
    """Refuse parts of an output that are written twice."""
    taken = sorted(place for place in places if place[1])
    for (first, count), (following, _) in itertools.pairwise(taken):
        if first + count > following:
            raise ArgumentError(f"{what}: the parts of two ranks overlap in out")


def _check_even(out: ArrayView, count: int, x: ArrayView, what: str) -> None:
    """Refuse an output of another size than follows from x and the ranks."""
    if out.size != count:
        raise ArgumentError(
            f"{what}: expected out of {count} elements, as x has {x.size}, got "
            f"{out.size}; pass such an array, or None for a new one"
        )


def _check_room(view: ArrayView, places: list[Place], what: str) -> None:
    """Refuse an array that is too small."""
    if view.size < _end(places):
        raise ArgumentError(
            f"{what} has {view.size} elements, and counts and displacements reach to "
            f"{_end(places)}"
        )
