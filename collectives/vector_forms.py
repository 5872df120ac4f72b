"""Gather, scatter, and the collectives to which ranks contribute different amounts.

All are messages between pairs (``transfer.py``), and so may be grouped with others.
Counts and displacements are MPI's: in elements of the flattened arrays.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from numba_symm import arrays, dtypes
from numba_symm.arrays import ArrayView
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.checks import (
    check_apart,
    check_length,
    check_order,
    check_parts,
    check_rank,
    check_type,
)
from numba_symm.collectives.counts import (
    Counts,
    Place,
    Table,
    agree_on_counts,
    end_of,
    places_of,
    refuse_overlap,
    table_of,
)
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.operations import REDUCE_PART
from numba_symm.collectives.protocols.binding import Enqueue, InTurn
from numba_symm.collectives.transfers import Copy, Stream, Transfers
from numba_symm.errors import ArgumentError


class Piece:
    """The part of an array that one rank sends or receives, in bytes."""

    def __init__(self, view: ArrayView, first: int, count: int):
        itemsize = view.dtype.itemsize
        self.address = view.address + first * itemsize
        self.nbytes = count * itemsize


class Collected(NamedTuple):
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


def collected(
    calls: Calls, what: str, prepare: Callable[..., Collected], *args: Any
) -> Any:
    """Make a collective that ``prepare(calls, what, *args)`` makes of messages.

    In debug mode the ranks agree first, so that an error of one is all ranks'.
    """

    def admitted(call: Collected) -> str:
        """Return what the ranks must agree on, if an open group can take the call."""
        if calls.pending is not None:
            calls.pending.check(call.transfers, call.stream)
        return call.transfers.words

    with calls.alone(what):
        given = calls, what, *args
        if calls.compares():
            with calls.set_up(what):
                call = calls.compared(what, admitted, prepare, *given)
                agree_on_counts(calls.island.exchange, what, call.transfers)
        else:
            calls.island.check_open()
            try:
                call = prepare(*given)
            except BaseException as error:
                calls.give_up_unless_refused(error, what)
                raise
        calls.transfer(what, call.transfers, call.stream, *call.keep)
    return call.result


def gather(
    calls: Calls,
    what: str,
    x: Any,
    counts: Counts | None,
    displs: Counts | None,
    root: int,
    out: Any,
    stream: Any,
) -> Collected:
    """Prepare a ``gather`` or ``gather_v``."""
    root = check_rank(root, calls.size, f"{what}: root")
    if calls.rank == root:
        table = None if what == "gather" else _table(calls, what, counts, displs)
        return _formed(calls, _GATHER, what, x, out, stream, root, table)
    source = arrays.view(x, what)
    transfers = calls.remembered(_contributed, what, source, root)
    return Collected(transfers, calls.stream_for(stream, x), (x,), None)


def scatter(
    calls: Calls,
    what: str,
    x: Any,
    counts: Counts | None,
    displs: Counts | None,
    root: int,
    out: Any,
    stream: Any,
) -> Collected:
    """Prepare a ``scatter`` or ``scatter_v``."""
    root = check_rank(root, calls.size, f"{what}: root")
    if calls.rank == root:
        table = None if what == "scatter" else _table(calls, what, counts, displs)
        return _formed(calls, _SCATTER, what, x, out, stream, root, table)
    if out is None:
        raise ArgumentError(
            f"{what}: pass out= on other ranks than root, which alone knows how much "
            "there is"
        )
    target = arrays.view(out, f"{what}: out")
    transfers = calls.remembered(_taken, what, target, root)
    return Collected(transfers, calls.stream_for(stream, out), (out,), out)


def all_gather(
    calls: Calls,
    what: str,
    x: Any,
    counts: Counts,
    displs: Counts | None,
    out: Any,
    stream: Any,
) -> Collected:
    """Prepare an ``all_gather_v``."""
    table = _table(calls, what, counts, displs)
    return _formed(calls, _ALL_GATHER, what, x, out, stream, table)


def all_to_all(
    calls: Calls,
    what: str,
    x: Any,
    sent: tuple[Counts, Counts | None],
    received: tuple[Counts, Counts | None],
    out: Any,
    stream: Any,
) -> Collected:
    """Prepare an ``all_to_all_v``."""
    given = table_of(*sent, calls.size, f"{what}: send_counts")
    taken = table_of(*received, calls.size, f"{what}: recv_counts")
    return _formed(calls, _ALL_TO_ALL, what, x, out, stream, given, taken)


def reduce_scatter(
    calls: Calls, x: Any, counts: Counts, op: Any, out: Any, stream: Any
) -> Any:
    """Make a ``reduce_scatter_v``: a reduction of each rank's part."""
    what = "reduce_scatter_v"
    given = calls, what, x, counts, op, out, stream
    with calls.alone(what):
        _, launch, chosen, out = calls.checked(what, itemgetter(0), _parts, *given)
        calls.run(what, launch, chosen, x, out)
    return out


def _parts(
    calls: Calls,
    what: str,
    x: Any,
    counts: Counts,
    op: Any,
    out: Any,
    stream: Any,
) -> tuple[str, Enqueue | None, Stream, Any]:
    """Return the reductions of all ranks' parts, in words and as a launch."""
    source = _flat(calls, arrays.view(x, what), what)
    places = places_of(table_of(counts, None, calls.size, f"{what}: counts"))
    check_length(source, sum(places[-1]), f"{what}: x", "the sum of counts")
    first, count = places[calls.rank]
    chosen = calls.stream_for(stream, x)
    if out is None:
        out = calls.new(source, (count,), chosen[0], what)
    target = _flat(calls, arrays.view(out, f"{what}: out"), f"{what}: out", True)
    check_length(target, count, f"{what}: out", "counts[rank]")
    check_type(target, source, what)
    itemsize = source.dtype.itemsize
    if target.address != source.address + first * itemsize:
        # Another rank's part is reduced after this one's was written.
        check_apart(source, target, what)
    launches = []
    for root, (first, count) in enumerate(places):
        address = source.address + first * itemsize
        part = source._replace(address=address, shape=(count,), size=count)
        into = target._replace(shape=(count,)) if root == calls.rank else None
        launches.append(calls.packed(REDUCE_PART, part, into, op, None, root))
    op = dtypes.reduction(op, what)
    words = f"counts {[n for _, n in places]}, {source.dtype.name}, op {op!r}"
    todo = [launch for launch in launches if launch is not None]
    return words, InTurn(*todo) if todo else None, chosen, out


def _flat(calls: Calls, view: ArrayView, what: str, written: bool = False) -> ArrayView:
    """Return an array whose elements are counted in C order, or refuse it."""
    found = calls.usable(view, what, written)
    check_order(found, what)
    return found


def _table(
    calls: Calls, what: str, counts: Counts | None, displs: Counts | None
) -> Table:
    return table_of(counts, displs, calls.size, f"{what}: counts")


def _formed(
    calls: Calls, form: Form, what: str, x: Any, out: Any, stream: Any, *given: Any
) -> Collected:
    """Return a call that reads x and writes out, which it makes if it is None."""
    source = arrays.view(x, what)
    chosen = calls.stream_for(stream, x)
    if out is None:
        shape = calls.remembered(form.shape, what, source, *given)
        out = calls.new(source, shape, chosen[0], what)
    target = arrays.view(out, f"{what}: out")
    transfers = calls.remembered(form.transfers, what, source, target, *given)
    return Collected(transfers, chosen, (x, out), out)


def _gathered_shape(
    calls: Calls, what: str, x: ArrayView, root: int, table: Table | None
) -> tuple[int, ...]:
    x = _flat(calls, x, what)
    if table is None:
        return calls.size, *x.shape
    places = places_of(table)
    refuse_overlap(places, f"{what}: displs")
    check_length(x, places[root][1], f"{what}: x", f"counts[{root}]")
    return (end_of(places),)


def _gathered(
    calls: Calls,
    what: str,
    x: ArrayView,
    out: ArrayView,
    root: int,
    table: Table | None,
) -> Transfers:
    _gathered_shape(calls, what, x, root, table)
    places = places_of(table or ((x.size,) * calls.size, None))
    out = _output(calls, out, x, what)
    if table is None:
        _check_even(out, calls.size * x.size, x, what)
    else:
        _check_room(out, places, f"{what}: out")
    pieces = [Piece(out, *place) for place in places]
    copies = _own_piece(pieces[root], x, out, what)
    words = _contribution(what, x, root)
    return Transfers([], _messages(pieces, root), copies, words, x.dtype.itemsize)


def _contributed(calls: Calls, what: str, x: ArrayView, root: int) -> Transfers:
    """Return what another rank than the root sends in a gather."""
    x = _flat(calls, x, what)
    words = _contribution(what, x, root)
    sends = [Message(root, x.address, x.nbytes)]
    return Transfers(sends, [], (), words, x.dtype.itemsize)


def _contribution(what: str, x: ArrayView, root: int) -> str:
    words = f"{x.dtype.name}, root {root}"
    return f"{x.size} {words}" if what == "gather" else words


def _scattered_shape(
    calls: Calls, what: str, x: ArrayView, root: int, table: Table | None
) -> tuple[int, ...]:
    x = _flat(calls, x, what)
    if table is None:
        check_parts(x, calls.size, "scatter")
        return x.shape[0] // calls.size, *x.shape[1:]
    places = places_of(table)
    _check_room(x, places, f"{what}: x")
    return (places[root][1],)


def _scattered(
    calls: Calls,
    what: str,
    x: ArrayView,
    out: ArrayView,
    root: int,
    table: Table | None,
) -> Transfers:
    _scattered_shape(calls, what, x, root, table)
    places = places_of(table or ((x.size // calls.size,) * calls.size, None))
    out = _output(calls, out, x, what)
    if table is None:
        _check_even(out, x.size // calls.size, x, what)
    else:
        check_length(out, places[root][1], f"{what}: out", f"counts[{root}]")
    pieces = [Piece(x, *place) for place in places]
    own = _own_piece(pieces[root], out, x, what)
    copies = [(there, here, nbytes) for here, there, nbytes in own]
    words = f"{x.dtype.name}, root {root}"
    return Transfers(_messages(pieces, root), [], copies, words, x.dtype.itemsize)


def _taken(calls: Calls, what: str, out: ArrayView, root: int) -> Transfers:
    """Return what another rank than the root receives in a scatter."""
    out = _flat(calls, out, f"{what}: out", written=True)
    receives = [Message(root, out.address, out.nbytes)]
    words = f"{out.dtype.name}, root {root}"
    return Transfers([], receives, (), words, out.dtype.itemsize)


def _all_gathered_shape(
    calls: Calls, what: str, x: ArrayView, table: Table
) -> tuple[int, ...]:
    x = _flat(calls, x, what)
    places = places_of(table)
    refuse_overlap(places, f"{what}: displs")
    check_length(x, places[calls.rank][1], f"{what}: x", "counts[rank]")
    return (end_of(places),)


def _all_gathered(
    calls: Calls, what: str, x: ArrayView, out: ArrayView, table: Table
) -> Transfers:
    _all_gathered_shape(calls, what, x, table)
    places = places_of(table)
    out = _output(calls, out, x, what)
    _check_room(out, places, f"{what}: out")
    pieces = [Piece(out, *place) for place in places]
    sends = [
        Message(peer, x.address, x.nbytes)
        for peer in range(calls.size)
        if peer != calls.rank
    ]
    copies = _own_piece(pieces[calls.rank], x, out, what)
    words = f"counts {list(table[0])}, {x.dtype.name}"
    return Transfers(sends, _messages(pieces, calls.rank), copies, words)


def _exchanged_shape(
    calls: Calls, what: str, x: ArrayView, given: Table, taken: Table
) -> tuple[int, ...]:
    x = _flat(calls, x, what)
    outgoing, incoming = places_of(given), places_of(taken)
    refuse_overlap(incoming, f"{what}: recv_displs")
    (_, sent), (_, received) = outgoing[calls.rank], incoming[calls.rank]
    if sent != received:
        raise ArgumentError(
            f"{what}: rank {calls.rank} sends itself {sent} elements and receives "
            f"{received} from itself"
        )
    _check_room(x, outgoing, f"{what}: x")
    return (end_of(incoming),)


def _exchanged(
    calls: Calls,
    what: str,
    x: ArrayView,
    out: ArrayView,
    given: Table,
    taken: Table,
) -> Transfers:
    _exchanged_shape(calls, what, x, given, taken)
    out = _output(calls, out, x, what)
    _check_room(out, places_of(taken), f"{what}: out")
    check_apart(x, out, what)
    outgoing = [Piece(x, *place) for place in places_of(given)]
    incoming = [Piece(out, *place) for place in places_of(taken)]
    own, into = outgoing[calls.rank], incoming[calls.rank]
    return Transfers(
        _messages(outgoing, calls.rank),
        _messages(incoming, calls.rank),
        [(into.address, own.address, own.nbytes)],
        x.dtype.name,
        x.dtype.itemsize,
    )


_GATHER = Form(_gathered_shape, _gathered)
_SCATTER = Form(_scattered_shape, _scattered)
_ALL_GATHER = Form(_all_gathered_shape, _all_gathered)
_ALL_TO_ALL = Form(_exchanged_shape, _exchanged)


def _output(calls: Calls, out: ArrayView, x: ArrayView, what: str) -> ArrayView:
    """Return the output of a call that reads x, or refuse it."""
    out = _flat(calls, out, f"{what}: out", written=True)
    check_type(out, x, what)
    return out


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


def _check_even(out: ArrayView, count: int, x: ArrayView, what: str) -> None:
    """Refuse an output of another size than follows from x and the ranks."""
    if out.size != count:
        raise ArgumentError(
            f"{what}: expected out of {count} elements, as x has {x.size}, got "
            f"{out.size}; pass such an array, or None for a new one"
        )


def _check_room(view: ArrayView, places: list[Place], what: str) -> None:
    """Refuse an array that is too small."""
    if view.size < end_of(places):
        raise ArgumentError(
            f"{what} has {view.size} elements, and counts and displacements reach to "
            f"{end_of(places)}"
        )
