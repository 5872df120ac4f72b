"""Gather, scatter, and the v forms, in which ranks contribute different amounts.

All but one consist of messages between pairs of ranks (``transfer.py``), so they may
be grouped with other messages. Counts and displacements are those of MPI.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    Range,
    end_of,
    places_of,
    refuse_overlap,
    table_of,
)
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.operations import REDUCE_SHARD
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.transfers import BoundCall, OwnCopy, Prepared, Transfers
from numba_symm.errors import ArgumentError


class Shard:
    """The range of an array that one rank sends or receives."""

    def __init__(self, view: ArrayView, first: int, count: int):
        itemsize = view.dtype.itemsize
        self.address = view.address + first * itemsize
        self.nbytes = count * itemsize


@dataclass(frozen=True, eq=False)
class Form:
    """A collective that consists of messages.

    The functions take the communicator and the call. ``shape`` and ``transfers`` run
    for new arguments only. They get views in place of the arrays, and no stream. Their
    results depend on these arguments only.

    Attributes:
        name: the name of the communicator's method.
        check: checks all arguments but arrays and stream, and returns the call.
        shape: checks all but ``out``, and returns the shape of a new ``out``.
        transfers: checks all arguments, and returns the messages.
        at_root: the array that only the root has: ``"x"``, ``"out"`` or ``""``.
        counts: the names of the arguments that are counts, for errors.
        copies: whether a call in place sends a copy of x.
        on_gpu: whether the counts are device arrays.
    """

    name: str
    check: "Callable[[Calls, FormCall], FormCall]"
    shape: "Callable[[Calls, FormCall], tuple[int, ...]]"
    transfers: "Callable[[Calls, FormCall], Transfers]"
    at_root: str = ""
    counts: tuple[str, ...] = ()
    copies: bool = False
    on_gpu: bool = False
    collective = True

    def prepare(self, calls: Calls, given: "FormCall") -> Prepared:
        """Prepare a call of arrays with or without gaps."""
        tables = given.tables
        given = self.check(calls, given)
        call = staging.prepared(calls, given, _formed)
        if self.on_gpu:
            call = call._replace(keep=(*call.keep, tables))
        if calls.agreement.debug and calls.enqueuer.group is not None:
            # Before the ranks compare the call.
            calls.enqueuer.group.pending.check(call.transfers, call.stream)
        return call


FormCall = Invocation[Form]


def _formed(calls: Calls, given: FormCall) -> Prepared:
    """Prepare a call of arrays without gaps, whose other arguments were checked."""
    form, x, out, stream = given[:4]
    what = form.name
    if form.copies and out is x:
        calls.staging.stream = chosen = calls.streams.of(stream, x)
        copy, step = staging.copied(calls, x, what)
        call = _formed(calls, given._replace(x=copy, stream=chosen))
        return call._replace(keep=(*call.keep, stream), before=(step,))
    lacks = form.at_root if given.root != calls.rank else ""
    source = None if lacks == "x" else arrays.view(x, what)
    chosen = calls.streams.of(stream, out if source is None else x)
    if source is None and out is None:
        raise ArgumentError(
            f"{what}: expected out on every rank but the root, got None; only the root "
            "knows the size"
        )
    if source is not None and out is None and lacks != "out":
        new = given._replace(x=source, stream=None)
        shape = calls.remembered(form.shape, new)
        out = calls.new(x, source, shape, chosen, what)
    target = None if lacks == "out" else arrays.view(out, f"{what}: out")
    read = given._replace(x=source, out=target, stream=None)
    transfers = calls.remembered(form.transfers, read)
    return Prepared(transfers, chosen, (x, out, stream), out)


def _with_tables(calls: Calls, given: FormCall) -> FormCall:
    """Check the root, and the counts of the ranks that need them."""
    form, what = given.operation, given.operation.name
    if form.at_root:
        root = check_rank(given.root, calls.size, f"{what}: root")
        if calls.rank != root:  # ignores the counts and the root's array, as in MPI
            if form.at_root == "x":
                return given._replace(x=None, root=root, tables=())
            return given._replace(out=None, root=root, tables=())
        given = given._replace(root=root)
    if not form.counts:
        return given
    tables = tuple(
        table_of(counts, displs, calls.size, f"{what}: {name}")
        for (counts, displs), name in zip(given.tables, form.counts, strict=True)
    )
    return given._replace(tables=tables)


class Shards:
    """The kind of ``reduce_scatter_v``: one reduction for each rank's shard."""

    name = REDUCE_SHARD.name
    collective = True

    def prepare(self, calls: Calls, given: "Invocation[Shards]") -> BoundCall:
        """Bind a call of arrays with or without gaps."""
        _, x, out, stream = given[:4]
        if staging.has_gaps(x, self.name) or staging.has_gaps(out, self.name):
            calls.staging.stream = calls.streams.of(stream, x)
            return staging.bound(calls, given, out, partial(_shards, calls))
        return _shards(calls, given)


def _shards(calls: Calls, given: Invocation[Shards]) -> BoundCall:
    """Return the reductions of all shards."""
    operation, x, out, stream = given[:4]
    what = operation.name
    source = flat(calls, arrays.view(x, what), what)
    ((counts, _),) = given.tables
    places = places_of(table_of(counts, None, calls.size, f"{what}: counts"))
    check_length(source, sum(places[-1]), f"{what}: x", "the sum of counts")
    first, count = places[calls.rank]
    chosen = calls.streams.of(stream, x)
    if out is None:
        out = calls.new(x, source, (count,), chosen, what)
    target = flat(calls, arrays.view(out, f"{what}: out"), f"{what}: out", True)
    check_length(target, count, f"{what}: out", "counts[rank]")
    check_type(target, source, what)
    itemsize = source.dtype.itemsize
    if target.address != source.address + first * itemsize:
        # Later reductions read x after this rank's result was stored.
        check_apart(source, target, what)
    parts: list[Enqueue] = []
    for root, (first, count) in enumerate(places):
        address = source.address + first * itemsize
        shard = source._replace(address=address, shape=(count,))
        into = target._replace(shape=(count,)) if root == calls.rank else None
        reduction = Invocation(REDUCE_SHARD, op=given.op, root=root)
        parts += calls.packed(reduction, shard, into).parts
    op = dtypes.reduction(given.op, what)
    words = f"counts {[n for _, n in places]}, {source.dtype.name}, op {op!r}"
    about = calls.descriptions.of(what, words, words)
    call = calls.enqueuer.pack(about, Series(*parts))
    return BoundCall(call, chosen, (x, out, stream), out)


def flat(calls: Calls, view: ArrayView, what: str, written: bool = False) -> ArrayView:
    """Return an array that counts and displacements can address, or refuse it."""
    found = calls.usable(view, what, written)
    check_order(found, what)
    return found


def _gathered_shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    what, root = given.operation.name, given.root
    x = flat(calls, given.x, what)
    if not given.tables:
        return calls.size, *x.shape
    places = places_of(*given.tables)
    refuse_overlap(places, f"{what}: displs")
    check_length(x, places[root][1], f"{what}: x", f"counts[{root}]")
    return (end_of(places),)


def _gathered(calls: Calls, given: FormCall) -> Transfers:
    what, root = given.operation.name, given.root
    x = flat(calls, given.x, what)
    words = f"{x.dtype.name}, root {root}"
    if given.operation is GATHER:
        words = f"{x.size} {words}"
    if calls.rank != root:
        sends = [Message(root, x.address, x.nbytes)]
        return Transfers(sends, [], (), words, x.dtype.itemsize)
    _gathered_shape(calls, given)
    out = output(calls, given)
    if given.tables:
        places = places_of(*given.tables)
        check_room(out, places, f"{what}: out")
    else:
        places = places_of(((x.size,) * calls.size, None))
        check_even(out, calls.size * x.size, x, what)
    shards = [Shard(out, *place) for place in places]
    copies = _own_copy(shards[root], x, out, what)
    return Transfers([], _messages(shards, root), copies, words, x.dtype.itemsize)


def _scattered_shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    what = given.operation.name
    x = flat(calls, given.x, what)
    if not given.tables:
        check_shards(x, calls.size, what)
        return x.shape[0] // calls.size, *x.shape[1:]
    places = places_of(*given.tables)
    check_room(x, places, f"{what}: x")
    return (places[given.root][1],)


def _scattered(calls: Calls, given: FormCall) -> Transfers:
    what, root = given.operation.name, given.root
    if calls.rank != root:
        out = flat(calls, given.out, f"{what}: out", written=True)
        receives = [Message(root, out.address, out.nbytes)]
        words = f"{out.dtype.name}, root {root}"
        return Transfers([], receives, (), words, out.dtype.itemsize)
    _scattered_shape(calls, given)
    x, out = given.x, output(calls, given)
    if given.tables:
        places = places_of(*given.tables)
        check_length(out, places[root][1], f"{what}: out", f"counts[{root}]")
    else:
        places = places_of(((x.size // calls.size,) * calls.size, None))
        check_even(out, x.size // calls.size, x, what)
    shards = [Shard(x, *place) for place in places]
    own = _own_copy(shards[root], out, x, what)
    copies = [(there, here, nbytes) for here, there, nbytes in own]
    words = f"{x.dtype.name}, root {root}"
    return Transfers(_messages(shards, root), [], copies, words, x.dtype.itemsize)


def _all_gathered_shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    what = given.operation.name
    x = flat(calls, given.x, what)
    places = places_of(*given.tables)
    refuse_overlap(places, f"{what}: displs")
    check_length(x, places[calls.rank][1], f"{what}: x", "counts[rank]")
    return (end_of(places),)


def _all_gathered(calls: Calls, given: FormCall) -> Transfers:
    _all_gathered_shape(calls, given)
    x, (table,), what = given.x, given.tables, given.operation.name
    places = places_of(table)
    out = output(calls, given)
    check_room(out, places, f"{what}: out")
    shards = [Shard(out, *place) for place in places]
    sends = [
        Message(peer, x.address, x.nbytes)
        for peer in range(calls.size)
        if peer != calls.rank
    ]
    copies = _own_copy(shards[calls.rank], x, out, what)
    words = f"counts {list(table[0])}, {x.dtype.name}"
    return Transfers(sends, _messages(shards, calls.rank), copies, words)


def _exchanged_shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    what = given.operation.name
    x = flat(calls, given.x, what)
    outgoing, incoming = map(places_of, given.tables)
    refuse_overlap(incoming, f"{what}: recv_displs")
    (_, sent), (_, received) = outgoing[calls.rank], incoming[calls.rank]
    if sent != received:
        raise ArgumentError(
            f"{what}: expected equal counts for what rank {calls.rank} sends itself, "
            f"got {sent} in send_counts and {received} in recv_counts; pass equal ones"
        )
    check_room(x, outgoing, f"{what}: x")
    return (end_of(incoming),)


def _exchanged(calls: Calls, given: FormCall) -> Transfers:
    _exchanged_shape(calls, given)
    x, out, what = given.x, output(calls, given), given.operation.name
    sent, received = map(places_of, given.tables)
    check_room(out, received, f"{what}: out")
    check_apart(x, out, what)
    outgoing = [Shard(x, *place) for place in sent]
    incoming = [Shard(out, *place) for place in received]
    own, into = outgoing[calls.rank], incoming[calls.rank]
    return Transfers(
        _messages(outgoing, calls.rank),
        _messages(incoming, calls.rank),
        [(into.address, own.address, own.nbytes)],
        x.dtype.name,
        x.dtype.itemsize,
    )


REDUCE_SCATTER_V = Shards()
_GATHERED = _with_tables, _gathered_shape, _gathered, "out"
_SCATTERED = _with_tables, _scattered_shape, _scattered, "x"
GATHER = Form("gather", *_GATHERED)
GATHER_V = Form("gather_v", *_GATHERED, counts=("counts",))
SCATTER = Form("scatter", *_SCATTERED)
SCATTER_V = Form("scatter_v", *_SCATTERED, counts=("counts",))
ALL_GATHER_V = Form(
    "all_gather_v", _with_tables, _all_gathered_shape, _all_gathered, counts=("counts",)
)
ALL_TO_ALL_V = Form(
    "all_to_all_v",
    _with_tables,
    _exchanged_shape,
    _exchanged,
    counts=("send_counts", "recv_counts"),
    copies=True,
)


def output(calls: Calls, given: FormCall) -> ArrayView:
    """Return the view of ``out``, or refuse one that does not fit x."""
    what = given.operation.name
    out = flat(calls, given.out, f"{what}: out", written=True)
    check_type(out, given.x, what)
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
) -> list[OwnCopy]:
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


def check_room(view: ArrayView, places: list[Range], what: str) -> None:
    """Refuse an array that is too small for all ranges."""
    if view.size < end_of(places):
        raise ArgumentError(
            f"{what}: expected at least {end_of(places)} elements for these counts and "
            f"displacements, got {view.size}"
        )
