"""Gather, scatter, the v forms, and collectives between neighbours.

Gather, scatter, and the v forms, in which ranks contribute different amounts.

All but one consist of messages between pairs of ranks (``transfer.py``), so they may
be grouped with other messages. Counts and displacements are those of MPI.

The v forms whose counts are on the GPU, where the kernel reads them.

The host knows only a capacity: the most elements that a rank sends to another one. So
it does not wait for the GPU, and each replay of a graph may have other counts.

Collectives between neighbours: each rank names its destinations and its sources.

They consist of messages, as the v forms do. The messages of two ranks match in the
order of the ranks' lists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numba_symm import arguments, dtypes
from numba_symm.collectives import staging
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.collectives.invocation import (
    Invocation,
    are_apart,
    check_apart,
    check_length,
    check_order,
    check_peer,
    check_rank,
    check_shards,
    check_type,
    check_writable,
)
from numba_symm.collectives.operations import REDUCE_SHARD
from numba_symm.collectives.protocols.binding import Enqueue, Series
from numba_symm.collectives.protocols.credit import Message, Span
from numba_symm.collectives.protocols.workspace import most_messages
from numba_symm.collectives.staging import (
    BoundCall,
    Prepared,
    Range,
    Transfers,
    end_of,
    places_of,
    refuse_overlap,
    table_of,
)
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays
from numba_symm.gpu.arrays import ArrayView


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
        at_root: whether only the root has an output.
        from_root: whether only the root has an input.
        counts: the names of the arguments that are counts, for errors.
        copies: whether a call in place sends a copy of x.
        on_gpu: whether the counts are device arrays.
    """

    name: str
    check: "Callable[[Calls, FormCall], FormCall]"
    shape: "Callable[[Calls, FormCall], tuple[int, ...]]"
    transfers: "Callable[[Calls, FormCall], Transfers]"
    at_root: bool = False
    from_root: bool = False
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
        if calls.agreement.debug and calls.thread.group is not None:
            # Before the ranks compare the call.
            calls.thread.group.pending.check(call.transfers, call.stream)
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
    elsewhere = given.root != calls.rank
    source = None if form.from_root and elsewhere else arrays.view(x, what)
    chosen = calls.streams.of(stream, out if source is None else x)
    if source is None and out is None:
        raise ArgumentError(
            f"{what}: expected out on every rank but the root, got None; only the root "
            "knows the size"
        )
    lacks = form.at_root and elsewhere
    if source is not None and out is None and not lacks:
        new = given._replace(x=source, stream=None)
        shape = calls.remembered(form.shape, new)
        out = calls.new(x, source, shape, chosen, what)
    target = None if lacks else arrays.view(out, f"{what}: out")
    read = given._replace(x=source, out=target, stream=None)
    transfers = calls.remembered(form.transfers, read)
    return Prepared(transfers, chosen, (x, out, stream), out)


def _with_tables(calls: Calls, given: FormCall) -> FormCall:
    """Check the root, and the counts of the ranks that need them."""
    form, what = given.operation, given.operation.name
    if form.at_root or form.from_root:
        root = check_rank(given.root, calls.size, f"{what}: root")
        if calls.rank != root:  # ignores the counts and the root's array, as in MPI
            if form.from_root:
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
    table = table_of(counts, None, calls.size, f"{what}: counts")
    check_length(source, sum(table[0]), f"{what}: x", "the sum of counts")
    count = table[0][calls.rank]
    chosen = calls.streams.of(stream, x)
    if out is None:
        out = calls.new(x, source, (count,), chosen, what)
    target = flat(calls, arrays.view(out, f"{what}: out"), f"{what}: out", True)
    check_length(target, count, f"{what}: out", "counts[rank]")
    check_type(target, source, what)
    op = dtypes.reduction(given.op, what)
    read = given._replace(x=source, out=target, stream=None, op=op, tables=(table,))
    call = calls.remembered(_packed_shards, read)
    return BoundCall(call, chosen, (x, out, stream), out)


def _packed_shards(calls: Calls, given: Invocation[Shards]) -> PackedCall:
    """Return the packed reductions of all shards, of arrays that were read."""
    _, source, target, _, op = given[:5]
    what, places = given.operation.name, places_of(*given.tables)
    itemsize = source.dtype.itemsize
    if target.address != source.address + places[calls.rank][0] * itemsize:
        # Later reductions read x after this rank's result was stored.
        check_apart(source, target, what)
    parts: list[Enqueue] = []
    for root, (first, count) in enumerate(places):
        address = source.address + first * itemsize
        shard = source._replace(address=address, shape=(count,))
        into = target._replace(shape=(count,)) if root == calls.rank else None
        reduction = Invocation(REDUCE_SHARD, op=op, root=root)
        parts += calls.packed(reduction, shard, into).parts
    words = f"counts {[n for _, n in places]}, {source.dtype.name}, op {op!r}"
    about = calls.descriptions.of(what, words, words)
    return calls.enqueuer.pack(about, Series(*parts))


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
    sends = [Message(root, x.address, x.nbytes)]
    if calls.rank != root:
        return _transfers(calls, given, sends, [], words)
    _gathered_shape(calls, given)
    out = output(calls, given)
    if given.tables:
        places = places_of(*given.tables)
        check_room(out, places, f"{what}: out")
    else:
        places = places_of(((x.size,) * calls.size, None))
        check_even(out, calls.size * x.size, x, what)
    return _transfers(calls, given, sends, _parts(out, places), words)


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
    if calls.rank == root:
        _scattered_shape(calls, given)
        out = output(calls, given)
    else:
        out = flat(calls, given.out, f"{what}: out", written=True)
    receives = [Message(root, out.address, out.nbytes)]
    words = f"{out.dtype.name}, root {root}"
    if calls.rank != root:
        return _transfers(calls, given, [], receives, words)
    x = given.x
    if given.tables:
        places = places_of(*given.tables)
        check_length(out, places[root][1], f"{what}: out", f"counts[{root}]")
    else:
        places = places_of(((x.size // calls.size,) * calls.size, None))
        check_even(out, x.size // calls.size, x, what)
    return _transfers(calls, given, _parts(x, places), receives, words)


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
    places, out = places_of(table), output(calls, given)
    check_room(out, places, f"{what}: out")
    sends = _parts(x, calls.size * [(0, x.size)])
    words = f"counts {list(table[0])}, {x.dtype.name}"
    return _transfers(calls, given, sends, _parts(out, places), words)


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
    ends = _parts(x, sent), _parts(out, received)
    return _transfers(calls, given, *ends, x.dtype.name)


REDUCE_SCATTER_V = Shards()
_GATHERED = _with_tables, _gathered_shape, _gathered, True
_SCATTERED = _with_tables, _scattered_shape, _scattered, False, True
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


def _parts(
    view: ArrayView, places: Sequence[Range], peers: "Neighbors | None" = None
) -> list[Message]:
    """Return the messages to or from peers, by default all ranks.

    Args:
        view: the array.
        places: for each peer, where its part is.
        peers: the peers.
    """
    size = view.dtype.itemsize
    pairs = zip(peers or range(len(places)), places, strict=True)
    return [
        Message(peer, view.address + first * size, count * size)
        for peer, (first, count) in pairs
        if peer is not None
    ]


def _transfers(
    calls: Calls,
    given: FormCall,
    sends: Sequence[Message],
    receives: Sequence[Message],
    words: str,
) -> Transfers:
    """Return the messages; those of this rank to itself are copies."""
    rank, x, out = calls.rank, given.x, given.out
    own = [[each for each in end if each.peer == rank] for end in (sends, receives)]
    copies = [
        (into.address, source.address, source.nbytes)
        for source, into in zip(*own, strict=True)
    ]
    if any(nbytes and target != source for target, source, nbytes in copies):
        check_apart(x, out, given.operation.name)  # otherwise the call is in place
    sends = [each for each in sends if each.peer != rank]
    receives = [each for each in receives if each.peer != rank]
    itemsize = (out if x is None else x).dtype.itemsize
    return Transfers(sends, receives, copies, words, itemsize)


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


_MOST = 1 << 40
_INT64 = np.dtype(np.int64)


class OnGPU(NamedTuple):
    """The checked arguments of a call.

    Attributes:
        capacity: the most elements of a rank for another one.
        counts_at: the address of the counts of what this rank sends.
        displs_at: the address of their displacements; 0: the ranges follow one another.
        received_at: the address of the counts of what this rank receives.
        displs: where in ``out`` the elements of each rank begin.
    """

    capacity: int
    counts_at: int
    displs_at: int
    received_at: int
    displs: tuple[int, ...]


def _counts(calls: Calls, array: Any, what: str, written: bool) -> int:
    """Return the address of counts or displacements, or refuse the array."""
    view = calls.usable(arrays.view(array, what), what)
    check_length(view, calls.size, what, "the number of ranks")
    if view.dtype != _INT64:
        raise ArgumentError(
            f"{what}: expected a device array of int64, got {view.dtype.name}; convert "
            "the counts on the GPU"
        )
    arrays.check_aligned(view, what)
    if written:
        check_writable(view, what)
    return view.address


def _counted_checked(calls: Calls, given: FormCall) -> FormCall:
    """Check all arguments but arrays and stream, and return the call."""
    what = given.operation.name
    (counts, displs), (received, into), capacity = given.tables
    if len(calls.members.parts) > 1:
        raise ArgumentError(
            f"{what}: expected ranks of one island for counts on the GPU, got "
            f"{len(calls.members.parts)} islands; the host needs the sizes between "
            "islands, so pass counts on the host"
        )
    most = arguments.integer(
        capacity,
        what,
        f"capacity to be an integer from 1 to {_MOST}",
        least=1,
        most=_MOST,
        do="pass the most elements of any rank for another one",
    )
    name, gathers = given.operation.counts[0], given.operation is ALL_GATHER_COUNTED
    sent = _counts(calls, counts, f"{what}: {name}", written=gathers)
    displaced, stored = 0, sent
    if displs is not None:
        displaced = _counts(calls, displs, f"{what}: send_displs", False)
    if not gathers:
        stored = _counts(calls, received, f"{what}: recv_counts", True)
    others = filter(None, (sent, displaced))
    if not gathers and any(abs(stored - each) < 8 * calls.size for each in others):
        raise ArgumentError(
            f"{what}: expected recv_counts apart from send_counts and send_displs, got "
            "arrays that overlap"
        )
    table = table_of((most,) * calls.size, into, calls.size, f"{what}: recv_counts")
    places = places_of(table)
    refuse_overlap(places, f"{what}: displs")
    found = OnGPU(most, sent, displaced, stored, tuple(first for first, _ in places))
    return given._replace(tables=(found,))


def _shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    (table,) = given.tables
    flat(calls, given.x, given.operation.name)
    return (max(table.displs) + table.capacity,)


def _counted(calls: Calls, given: FormCall) -> Transfers:
    what, (table,) = given.operation.name, given.tables
    x, out = flat(calls, given.x, what), output(calls, given)
    itemsize, room = x.dtype.itemsize, x.dtype.itemsize * table.capacity
    check_room(out, [(first, table.capacity) for first in table.displs], f"{what}: out")
    check_apart(x, out, what)
    used = filter(None, (table.counts_at, table.displs_at, table.received_at))
    for view in (ArrayView(each, (calls.size,), _INT64, "C", False) for each in used):
        if not (are_apart(x, view) and are_apart(out, view)):
            raise ArgumentError(
                f"{what}: expected counts apart from x and out, got arrays that overlap"
            )
    gathers = given.operation is ALL_GATHER_COUNTED
    if gathers:
        check_length(x, table.capacity, f"{what}: x", "capacity")
    sends, receives = [], []
    for peer, first in enumerate(table.displs):
        at = table.counts_at + 8 * (calls.rank if gathers else peer)
        span = Span(peer, table.displs_at and table.displs_at + 8 * peer, x.size)
        if gathers:
            span = Span(0, 0, x.size)
        sends.append(Message(peer, x.address, room, at, itemsize, span))
        place, count_at = out.address + itemsize * first, table.received_at + 8 * peer
        receives.append(Message(peer, place, room, count_at, itemsize))
    words = f"capacity {table.capacity}, {x.dtype.name}"
    return Transfers(sends, receives, (), words, itemsize)


ALL_TO_ALL_COUNTED = Form(
    "all_to_all_v",
    _counted_checked,
    _shape,
    _counted,
    counts=("send_counts", "recv_counts"),
    on_gpu=True,
)
ALL_GATHER_COUNTED = Form(
    "all_gather_v",
    _counted_checked,
    _shape,
    _counted,
    counts=("counts",),
    on_gpu=True,
)


def gathering(counts: Any, displs: Any, capacity: Any) -> tuple[Form, Any]:
    """Return ``all_gather_v`` with counts on the host or on the GPU, and its tables."""
    if capacity is None:
        return ALL_GATHER_V, ((counts, displs),)
    return ALL_GATHER_COUNTED, ((counts, None), (None, displs), capacity)


def exchanging(sent: Any, received: Any, capacity: Any) -> tuple[Form, Any]:
    """Return ``all_to_all_v`` with counts on the host or on the GPU, and its tables."""
    if capacity is None:
        return ALL_TO_ALL_V, (sent, received)
    return ALL_TO_ALL_COUNTED, (sent, received, capacity)


Neighbors = tuple[int | None, ...]
"""Checked neighbours; None: nobody."""


def _neighbors_checked(calls: Calls, given: FormCall) -> FormCall:
    """Check the neighbours."""
    what, (destinations, sources) = given.operation.name, given.peers
    found = _peers(calls, sources, f"{what}: sources")
    others = found
    if destinations is not None:
        others = _peers(calls, destinations, f"{what}: destinations")
    taken, sent = (each.count(calls.rank) for each in (found, others))
    if taken != sent:
        raise ArgumentError(
            f"{what}: expected rank {calls.rank} as often in sources as in "
            f"destinations, because it receives what it sends itself, got {taken} and "
            f"{sent} times"
        )
    return given._replace(peers=(others, found))


def _peers(calls: Calls, asked: Any, what: str) -> Neighbors:
    try:
        listed = list(asked)
    except Exception as error:  # an object's own method may raise anything
        raise ArgumentError(
            f"{what}: expected a sequence of ranks, got {asked!r:.100}"
        ) from error
    found = tuple(check_peer(each, calls.size, what) for each in listed)
    most = most_messages(calls.size)
    for rank in set(found) - {None, calls.rank}:
        if found.count(rank) > most:
            raise ArgumentError(
                f"{what}: expected each rank at most {most} times, got rank {rank} "
                f"{found.count(rank)} times"
            )
    return found


def _neighbors_gathered_shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    _, sources = given.peers
    return len(sources), *flat(calls, given.x, given.operation.name).shape


def _neighbors_gathered(calls: Calls, given: FormCall) -> Transfers:
    x = flat(calls, given.x, given.operation.name)
    return _moved(calls, given, [(0, x.size) for _ in given.peers[0]])


def _neighbors_exchanged_shape(calls: Calls, given: FormCall) -> tuple[int, ...]:
    what, (destinations, sources) = given.operation.name, given.peers
    x, number = flat(calls, given.x, what), len(destinations)
    if not x.shape or (x.shape[0] % number if number else x.shape[0]):
        raise ArgumentError(
            f"{what}: expected x with a multiple of {number} along its first axis, of "
            f"which each destination has a part, got shape {x.shape}"
        )
    length = x.shape[0] // number if number else 1
    return len(sources) * length, *x.shape[1:]


def _neighbors_exchanged(calls: Calls, given: FormCall) -> Transfers:
    _neighbors_exchanged_shape(calls, given)
    number = len(given.peers[0])
    size = given.x.size // number if number else 0
    return _moved(calls, given, [(size * i, size) for i in range(number)])


def _moved(calls: Calls, given: FormCall, parts: list[Range]) -> Transfers:
    """Return the messages: a part to each destination, as much from each source."""
    x, out, what = given.x, output(calls, given), given.operation.name
    destinations, sources = given.peers
    check_apart(x, out, what)
    if parts:
        _, size = parts[0]
    else:  # only the sources know how much they send
        size = out.size // len(sources) if sources else 0
    check_even(out, len(sources) * size, x, what)
    places = [(size * i, size) for i in range(len(sources))]
    ends = _parts(x, parts, destinations), _parts(out, places, sources)
    return _transfers(calls, given, *ends, x.dtype.name)


NEIGHBOR_ALL_GATHER = Form(
    "neighbor_all_gather",
    _neighbors_checked,
    _neighbors_gathered_shape,
    _neighbors_gathered,
)
NEIGHBOR_ALL_TO_ALL = Form(
    "neighbor_all_to_all",
    _neighbors_checked,
    _neighbors_exchanged_shape,
    _neighbors_exchanged,
)
