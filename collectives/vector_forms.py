"""Gather, scatter, and the v forms, in which ranks contribute different amounts.

All but one consist of messages between pairs of ranks (``transfer.py``), so they may
be grouped with other messages. Counts and displacements are those of MPI.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from numba_symm import arrays, dtypes
from numba_symm.arrays import ArrayView
from numba_symm.collectives import staging
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.checks import (
    check_apart,
    check_length,
    check_order,
    check_rank,
    check_shards,
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
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.kernels.transfer import Message
from numba_symm.collectives.operations import REDUCE_SHARD
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.collectives.transfers import Copy, Prepared, Stream, Transfers
from numba_symm.errors import ArgumentError


class Shard:
    """The range of an array that one rank sends or receives."""

    def __init__(self, view: ArrayView, first: int, count: int):
        itemsize = view.dtype.itemsize
        self.address = view.address + first * itemsize
        self.nbytes = count * itemsize


class Form(NamedTuple):
    """The functions for new arguments of a call that reads x and writes out.

    Their arguments are the communicator, the operation's name, x, ``out`` (for the
    second one), and the call's other arguments. Their results depend on these only.

    Attributes:
        shape: checks all but ``out``, and returns the shape of a new ``out``.
        transfers: checks all arguments, and returns the messages.
    """

    shape: Callable[..., tuple[int, ...]]
    transfers: Callable[..., Transfers]


def collected(
    calls: Calls, what: str, prepare: Callable[..., Prepared], *args: Any
) -> Any:
    """Make the collective that ``prepare(calls, what, *args)`` returns."""
    with calls.alone(what):
        call = prepared(calls, what, prepare, *args)
        calls.transfer(what, call)
    return call.result


def prepared(
    calls: Calls, what: str, prepare: Callable[..., Prepared], *args: Any
) -> Prepared:
    """Return ``prepare(calls, what, *args)``, a collective made of messages.

    In debug mode the ranks agree first, so an error of one rank is raised on all.
    """

    def admitted(call: Prepared) -> str:
        """Return what the ranks must agree on; raise if the open group refuses it."""
        if calls.pending is not None:
            calls.pending.check(call.transfers, call.stream)
        return call.transfers.words

    if not calls.compares():
        return calls.made(what, _staged, calls, what, prepare, *args)
    with calls.set_up(what):
        call = calls.compared(what, admitted, _staged, calls, what, prepare, *args)
        agree_on_counts(calls.island.exchange, what, call.transfers)
    return call


def _staged(
    calls: Calls, what: str, prepare: Callable[..., Prepared], x: Any, *args: Any
) -> Prepared:
    """Return ``prepare(calls, what, x, …, out, stream)`` for arrays with gaps, too."""
    *given, out, stream = args
    # On other ranks than the root, these ignore one of the arrays.
    ignores = False
    if prepare in (gather, scatter):
        ignores = check_rank(given[-1], calls.size, f"{what}: root") != calls.rank
    no_x, no_out = ignores and prepare is scatter, ignores and prepare is gather

    def work(source: Any, target: Any, stream: Any) -> Prepared:
        source, target = x if no_x else source, out if no_out else target
        return prepare(calls, what, source, *given, target, stream)

    read, written = None if no_x else x, None if no_out else out
    return staging.prepared(calls, what, work, read, written, stream)


def gather(
    calls: Calls,
    what: str,
    x: Any,
    counts: Counts | None,
    displs: Counts | None,
    root: int,
    out: Any,
    stream: Any,
) -> Prepared:
    """Prepare a ``gather`` or ``gather_v``."""
    root = check_rank(root, calls.size, f"{what}: root")
    if calls.rank == root:
        table = None if what == "gather" else _table(calls, what, counts, displs)
        return formed(calls, _GATHER, what, x, out, stream, root, table)
    source = arrays.view(x, what)
    transfers = calls.remembered(_contributed, what, source, root)
    return Prepared(transfers, calls.stream_for(stream, x), (x,), None)


def scatter(
    calls: Calls,
    what: str,
    x: Any,
    counts: Counts | None,
    displs: Counts | None,
    root: int,
    out: Any,
    stream: Any,
) -> Prepared:
    """Prepare a ``scatter`` or ``scatter_v``."""
    root = check_rank(root, calls.size, f"{what}: root")
    if calls.rank == root:
        table = None if what == "scatter" else _table(calls, what, counts, displs)
        return formed(calls, _SCATTER, what, x, out, stream, root, table)
    if out is None:
        raise ArgumentError(
            f"{what}: expected out on every rank but the root, got None; only the root "
            "knows the size"
        )
    target = arrays.view(out, f"{what}: out")
    transfers = calls.remembered(_taken, what, target, root)
    return Prepared(transfers, calls.stream_for(stream, out), (out,), out)


def all_gather(
    calls: Calls,
    what: str,
    x: Any,
    counts: Counts,
    displs: Counts | None,
    out: Any,
    stream: Any,
) -> Prepared:
    """Prepare an ``all_gather_v``."""
    table = _table(calls, what, counts, displs)
    return formed(calls, _ALL_GATHER, what, x, out, stream, table)


def all_to_all(
    calls: Calls,
    what: str,
    x: Any,
    sent: tuple[Counts, Counts | None],
    received: tuple[Counts, Counts | None],
    out: Any,
    stream: Any,
) -> Prepared:
    """Prepare an ``all_to_all_v``; in place, a copy of x is sent."""
    if out is x:
        chosen = calls.stream_for(stream, x)
        copy, step = staging.copied(calls, x, what, chosen[0])
        call = all_to_all(calls, what, copy, sent, received, out, chosen[0])
        return call._replace(stream=chosen, before=(step,))
    given = table_of(*sent, calls.size, f"{what}: send_counts")
    taken = table_of(*received, calls.size, f"{what}: recv_counts")
    return formed(calls, _ALL_TO_ALL, what, x, out, stream, given, taken)


def reduce_scatter(
    calls: Calls, x: Any, counts: Counts, op: Any, out: Any, stream: Any
) -> Any:
    """Make a ``reduce_scatter_v``: one reduction for each rank's shard."""
    with calls.alone(REDUCE_SHARD.name):
        _, launch, chosen, out = shards(calls, x, counts, op, out, stream)
        calls.run(REDUCE_SHARD.name, launch, chosen, x, out)
    return out


Reductions = tuple[str, Enqueue | None, Stream, Any]
"""A ``reduce_scatter_v``: words to compare, its launch, its stream, its output."""


def shards(
    calls: Calls, x: Any, counts: Counts, op: Any, out: Any, stream: Any
) -> Reductions:
    """Prepare a ``reduce_scatter_v``; in debug mode, the ranks agree first."""
    given = calls, x, counts, op, out, stream
    return calls.checked(REDUCE_SHARD.name, itemgetter(0), _shards, *given)


def _shards(
    calls: Calls,
    x: Any,
    counts: Counts,
    op: Any,
    out: Any,
    stream: Any,
) -> Reductions:
    """Return the reductions of all shards."""
    what = REDUCE_SHARD.name
    if staging.has_gaps(x, what) or staging.has_gaps(out, what):
        chosen = calls.stream_for(stream, x)
        if calls.pending is None:
            calls.staging.begin()
        given = staging.Replaced(calls, what, x, out, chosen[0])
        words, launch, _, made = _shards(
            calls, given.x, counts, op, given.out, chosen[0]
        )
        return words, given.around(launch), chosen, given.result(made)
    source = flat(calls, arrays.view(x, what), what)
    places = places_of(table_of(counts, None, calls.size, f"{what}: counts"))
    check_length(source, sum(places[-1]), f"{what}: x", "the sum of counts")
    first, count = places[calls.rank]
    chosen = calls.stream_for(stream, x)
    if out is None:
        out = calls.new(source, (count,), chosen[0], what)
    target = flat(calls, arrays.view(out, f"{what}: out"), f"{what}: out", True)
    check_length(target, count, f"{what}: out", "counts[rank]")
    check_type(target, source, what)
    itemsize = source.dtype.itemsize
    if target.address != source.address + first * itemsize:
        # Later reductions read x after this rank's result was stored.
        check_apart(source, target, what)
    launches = []
    for root, (first, count) in enumerate(places):
        address = source.address + first * itemsize
        shard = source._replace(address=address, shape=(count,))
        into = target._replace(shape=(count,)) if root == calls.rank else None
        reduction = Invocation(REDUCE_SHARD, op=op, root=root)
        launches.append(calls.packed(reduction, shard, into))
    op = dtypes.reduction(op, what)
    words = f"counts {[n for _, n in places]}, {source.dtype.name}, op {op!r}"
    todo = [launch for launch in launches if launch is not None]
    return words, Series(*todo) if todo else None, chosen, out


def flat(calls: Calls, view: ArrayView, what: str, written: bool = False) -> ArrayView:
    """Return an array that counts and displacements can address, or refuse it."""
    found = calls.usable(view, what, written)
    check_order(found, what)
    return found


def _table(
    calls: Calls, what: str, counts: Counts | None, displs: Counts | None
) -> Table:
    return table_of(counts, displs, calls.size, f"{what}: counts")


def formed(
    calls: Calls, form: Form, what: str, x: Any, out: Any, stream: Any, *given: Any
) -> Prepared:
    """Prepare a call that reads x and writes ``out``, or a new array for None."""
    source = arrays.view(x, what)
    chosen = calls.stream_for(stream, x)
    if out is None:
        shape = calls.remembered(form.shape, what, source, *given)
        out = calls.new(source, shape, chosen[0], what)
    target = arrays.view(out, f"{what}: out")
    transfers = calls.remembered(form.transfers, what, source, target, *given)
    return Prepared(transfers, chosen, (x, out), out)


def _gathered_shape(
    calls: Calls, what: str, x: ArrayView, root: int, table: Table | None
) -> tuple[int, ...]:
    x = flat(calls, x, what)
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
    out = output(calls, out, x, what)
    if table is None:
        check_even(out, calls.size * x.size, x, what)
    else:
        _check_room(out, places, f"{what}: out")
    shards = [Shard(out, *place) for place in places]
    copies = _own_copy(shards[root], x, out, what)
    words = _contribution(what, x, root)
    return Transfers([], _messages(shards, root), copies, words, x.dtype.itemsize)


def _contributed(calls: Calls, what: str, x: ArrayView, root: int) -> Transfers:
    """Return the message of a gather on a rank other than the root."""
    x = flat(calls, x, what)
    words = _contribution(what, x, root)
    sends = [Message(root, x.address, x.nbytes)]
    return Transfers(sends, [], (), words, x.dtype.itemsize)


def _contribution(what: str, x: ArrayView, root: int) -> str:
    words = f"{x.dtype.name}, root {root}"
    return f"{x.size} {words}" if what == "gather" else words


def _scattered_shape(
    calls: Calls, what: str, x: ArrayView, root: int, table: Table | None
) -> tuple[int, ...]:
    x = flat(calls, x, what)
    if table is None:
        check_shards(x, calls.size, "scatter")
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
    out = output(calls, out, x, what)
    if table is None:
        check_even(out, x.size // calls.size, x, what)
    else:
        check_length(out, places[root][1], f"{what}: out", f"counts[{root}]")
    shards = [Shard(x, *place) for place in places]
    own = _own_copy(shards[root], out, x, what)
    copies = [(there, here, nbytes) for here, there, nbytes in own]
    words = f"{x.dtype.name}, root {root}"
    return Transfers(_messages(shards, root), [], copies, words, x.dtype.itemsize)


def _taken(calls: Calls, what: str, out: ArrayView, root: int) -> Transfers:
    """Return the message of a scatter on a rank other than the root."""
    out = flat(calls, out, f"{what}: out", written=True)
    receives = [Message(root, out.address, out.nbytes)]
    words = f"{out.dtype.name}, root {root}"
    return Transfers([], receives, (), words, out.dtype.itemsize)


def _all_gathered_shape(
    calls: Calls, what: str, x: ArrayView, table: Table
) -> tuple[int, ...]:
    x = flat(calls, x, what)
    places = places_of(table)
    refuse_overlap(places, f"{what}: displs")
    check_length(x, places[calls.rank][1], f"{what}: x", "counts[rank]")
    return (end_of(places),)


def _all_gathered(
    calls: Calls, what: str, x: ArrayView, out: ArrayView, table: Table
) -> Transfers:
    _all_gathered_shape(calls, what, x, table)
    places = places_of(table)
    out = output(calls, out, x, what)
    _check_room(out, places, f"{what}: out")
    shards = [Shard(out, *place) for place in places]
    sends = [
        Message(peer, x.address, x.nbytes)
        for peer in range(calls.size)
        if peer != calls.rank
    ]
    copies = _own_copy(shards[calls.rank], x, out, what)
    words = f"counts {list(table[0])}, {x.dtype.name}"
    return Transfers(sends, _messages(shards, calls.rank), copies, words)


def _exchanged_shape(
    calls: Calls, what: str, x: ArrayView, given: Table, taken: Table
) -> tuple[int, ...]:
    x = flat(calls, x, what)
    outgoing, incoming = places_of(given), places_of(taken)
    refuse_overlap(incoming, f"{what}: recv_displs")
    (_, sent), (_, received) = outgoing[calls.rank], incoming[calls.rank]
    if sent != received:
        raise ArgumentError(
            f"{what}: expected equal counts for what rank {calls.rank} sends itself, "
            f"got {sent} in send_counts and {received} in recv_counts"
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
    out = output(calls, out, x, what)
    _check_room(out, places_of(taken), f"{what}: out")
    check_apart(x, out, what)
    outgoing = [Shard(x, *place) for place in places_of(given)]
    incoming = [Shard(out, *place) for place in places_of(taken)]
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


def output(calls: Calls, out: ArrayView, x: ArrayView, what: str) -> ArrayView:
    """Return ``out``, or refuse one that does not fit x."""
    out = flat(calls, out, f"{what}: out", written=True)
    check_type(out, x, what)
    return out


def _messages(shards: list[Shard], but: int) -> list[Message]:
    """Return the messages to or from all ranks but ``but``."""
    return [
        Message(peer, shard.address, shard.nbytes)
        for peer, shard in enumerate(shards)
        if peer != but
    ]


def _own_copy(
    shard: Shard, alone: ArrayView, whole: ArrayView, what: str
) -> list[Copy]:
    """Return the copy of a rank's message to itself: none if the call is in place.

    Args:
        shard: the rank's shard of ``whole``.
        alone: the array that has only this rank's data; in place, it is ``shard``.
        whole: the array that has the data of all ranks.
        what: the operation.
    """
    if shard.nbytes == 0 or alone.address == shard.address:
        return []
    check_apart(alone, whole, what)
    return [(shard.address, alone.address, shard.nbytes)]


def check_even(out: ArrayView, count: int, x: ArrayView, what: str) -> None:
    """Refuse an output that does not have ``count`` elements."""
    if out.size != count:
        raise ArgumentError(
            f"{what}: expected out of {count} elements, as x has {x.size}, got "
            f"{out.size}; pass such an array, or None for a new one"
        )


def _check_room(view: ArrayView, places: list[Place], what: str) -> None:
    """Refuse an array that is too small for all ranges."""
    if view.size < end_of(places):
        raise ArgumentError(
            f"{what}: expected at least {end_of(places)} elements for these counts and "
            f"displacements, got {view.size}"
        )
