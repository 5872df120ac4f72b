"""The communicator of explored programs: the library's own, until a call is enqueued.

The methods, with the checks of their arguments, groups, plans and requests, are the
library's. Only what they would launch is replaced: a call is a *work* of the rank's
stream here, which copies and reduces by NumPy.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np

from numba_symm import dtypes
from numba_symm.collectives.calls import BARRIER, Calls
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.composed import leaves_of
from numba_symm.collectives.enqueueing import Enqueuer
from numba_symm.collectives.invocation import UNKNOWN, Invocation
from numba_symm.collectives.messages import IRECV, ISEND, Group, requests_of
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols.exchanges import Output
from numba_symm.collectives.requests import Request
from numba_symm.collectives.staging import matched
from numba_symm.device.arithmetic import DOT, NORM, SUM
from numba_symm.device.polling import Guard
from numba_symm.device.signals import CHANNELS, Context
from numba_symm.dtypes import UserOperator
from numba_symm.explore.host import (
    HOSTS,
    REQUESTS,
    Host,
    RankPart,
    RankStream,
    StreamWork,
    host,
)
from numba_symm.explore.machine import running
from numba_symm.explore.memory import Fault
from numba_symm.explore.standins import ExploredKernel, StandIn, device_module
from numba_symm.explore.threads import Array, unsupported
from numba_symm.gpu import arrays, entry
from numba_symm.gpu.arrays import ArrayView
from numba_symm.memory import pads
from numba_symm.memory.symmetric import SymmetricMemory


def _fields(array: Any, what: str) -> arrays.Fields:
    if not array.flags.c_contiguous:
        raise unsupported(f"{what} of an array that is not in C order")
    return array.address, array.shape, array.dtype, "C", False


arrays.KINDS[Array] = arrays._ArrayClass(_fields, None, lambda array: array.strides)


class ExploredCall:
    """A call that was checked.

    Attributes:
        parts: one after another on the stream, what returns a rank's shares in it.
    """

    about = SimpleNamespace(words="")

    def __init__(self, calls: "ExploredCalls", *parts: Callable[[], list[RankPart]]):
        self._calls, self.parts = calls, parts

    def enqueue(self, stream: int) -> int:
        """Enqueue the call; return what the compiled function of the library does."""
        if self._calls.thread.group is not None:
            return entry.SLOW
        mine = host()
        for part in self.parts:
            mine.stream.enqueue(StreamWork(mine.world, part()))
        return entry.DONE


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Enqueuer(Enqueuer):
    """Enqueues works."""

    give_up = _nothing

    def __init__(self, calls: "ExploredCalls"):
        self._calls, self.thread = calls, calls.thread
        self.gate: Any = SimpleNamespace(slow=0, thread=0)
        self.record = self.marks = None

    def pack(self, about: Any, launch: Any) -> Any:
        return ExploredCall(self._calls, *launch.calls)

    def go_on(self, status: int, call: Any, stream: int, *keep: Any) -> None:
        call.enqueue(stream)


class ExploredCalls(Calls):
    """A rank's calls of a communicator: the library's, but for what they launch.

    Args:
        mine: the rank's host.
        number: which communicator of the program it is.
    """

    def __init__(self, mine: Host, number: int):
        self.rank, self.size = mine.rank, mine.world.size
        self._host, self._number = mine, number
        make: Any = functools.partial(StandIn, "numba_symm.Communicator")
        # One thread makes all calls. None is remembered, staged, or compared.
        self.thread = make(
            group=None,
            alone=nullcontext,
            claim=lambda: entry.SLOW,
            open=lambda: entry.SLOW,
            begin=_nothing,
            finish=_nothing,
            close=_nothing,
        )
        self.enqueuer = _Enqueuer(self)
        self.staging = make(apart=nullcontext)
        self.memory = make(get=self._made, put=_nothing, young={})
        self.agreement = make(
            debug=False,
            made=lambda what, function, *args: function(*args),
            checked=lambda what, words, prepare, given, compare: prepare(given),
        )
        agreed = make(
            agreed=self._agreed,
            agree_equal=lambda fact, what: self.set_up(f"{what} of {fact}"),
        )
        self.members = make(
            check=_nothing, check_open=_nothing, set_up=nullcontext, closed=False,
            parts=[range(self.size)], exchange=agreed,
        )  # fmt: skip
        stream = mine.check_stream
        self.streams = make(of=stream, default=stream)
        self.descriptions = make(of=_nothing)
        island = make(
            world=make(rank=self.rank, size=self.size), check=_nothing, note=""
        )
        self.heap = make(
            array=self._symmetric,
            rendezvous=self._rendezvous,
            island=island,
            debug=True,
        )

    @contextmanager
    def _agreed(self, what: str) -> Iterator[Any]:
        """Give each rank what all ranks have set in a block."""
        outcomes = SimpleNamespace(mine=None, all=[])
        yield outcomes
        outcomes.all = self.set_up(f"{what}: outcome", outcomes.mine)

    def set_up(self, what: str, value: Any = None) -> list[Any]:
        """Wait for all ranks; return what each of them has given."""
        return self._host.meet(what, value, ("set-up", self._number))

    def _symmetric(self, shape: Any, dtype: Any, what: str, like: Any = None) -> Array:
        if like is not None:
            raise unsupported(f"{what} with like")
        name = "a symmetric array" if what in ("empty", "zeros") else f"the {what}"
        found = self._host.new(shape, dtype, unset=what == "empty", what=name)
        self.set_up(f"{what} of {found.nbytes} bytes")
        return found

    def _rendezvous(
        self, address: int, array: Any, channels: int | None = None
    ) -> "ExploredMemory":
        region, nbytes = array.region, functools.partial(pads.pad_nbytes, self.size)
        number = CHANNELS if channels is None else channels
        if region.pad is None:
            region.pad = running().memory.allocate(
                f"the signal pad of rank {self.rank}", nbytes(number), 4
            )
            region.pad.rank = self.rank
            region.pad.slots = functools.partial(_slot, self.size)
        found = self.set_up(
            f"rendezvous at byte {array.start()} with channels={channels}",
            (address, region.pad.base),
        )
        buffers, signal_pads = zip(*found, strict=True)
        guard = Guard(self._host.world.board.base, self.rank, self.size, 0)
        ctx = Context(self.rank, self.size, buffers, signal_pads, guard)
        ctx.buffer_size = region.nbytes - array.start()
        ctx.channels = region.pad.nbytes // nbytes(1)
        if number > ctx.channels:
            raise Fault(
                "error",
                f"rendezvous: expected at most {ctx.channels} channels of the "
                f"allocation's signal pad, got {number}; pass the most that a kernel "
                "needs in the allocation's first rendezvous",
            )
        return ExploredMemory(self._host, ctx, self.heap.island)

    def new(
        self, x: Any, like: ArrayView, shape: tuple[int, ...], handle: int, what: str
    ) -> Any:
        """Return a new array."""
        return self._host.new(shape, like.dtype, unset=True)

    def usable(self, view: ArrayView, what: str, written: bool = False) -> ArrayView:
        """Return an array's view."""
        return view

    def remembered(self, work_out: Any, given: Any) -> Any:
        """StreamWork it out."""
        return work_out(self, given)

    def prepared(self, given: Invocation[Any]) -> Any:
        """Check a call."""
        if getattr(given.operation, "on_gpu", False):
            raise unsupported(f"{given.operation.name} with counts on the GPU")
        return super().prepared(given)

    def _made(self, key: Any) -> Any:
        """Return the call of a barrier or an exact sum, as if it was made before."""
        if key[0] == BARRIER.name:
            return self._packed(key[0], [], range(self.size))
        if key[0] not in (SUM, DOT, NORM):
            return UNKNOWN
        what, _, given, out = key
        views = [given] if isinstance(given, ArrayView) else given

        def stores(loaded: dict[int, Any]) -> list[tuple[Array, Any]]:
            x, y = (
                np.concatenate([each[k] for each in loaded.values()]).astype(np.float64)
                for k in (0, -1)
            )
            total = _exactly(key[0], x, np.ones_like(x) if key[0] == SUM else y)
            return [(Array.at(out.address, 1, out.dtype), [total])]

        reads = [Array.at(view.address, view.size, view.dtype) for view in views]
        what = f"{what} of {views[0].dtype.name}"
        return self._packed(what, reads, range(self.size), stores)

    def _packed(
        self, what: str, reads: list[Array], sources: Sequence[int], *stores: Any
    ) -> Any:
        """Return a collective."""

        def share() -> list[RankPart]:
            key = "calls", self._number, self._host.count(("calls", self._number))
            return [RankPart(key, self.size, what, self.rank, reads, sources, *stores)]

        return ExploredCall(self, share)

    def packed(self, given: Any, source: Any, target: Any) -> Any:
        """Return a call of an operation."""
        kind, root, view = given.operation, given.root or 0, ArrayView(*source)
        for option in ("wire", "epilogue", "row_sum"):
            if getattr(given, option) is not None:
                raise unsupported(f"{kind.name} with {option}")
        output, size, rank = kind.exchange.output, self.size, self.rank
        op, element = dtypes.reduction(given.op, kind.name), None
        if kind.reduces:
            kind.check(op)
            if op in dtypes.LOCATED:
                raise unsupported(f"{kind.name} with op={op!r}")
            element = dtypes.element(view.dtype, kind.name)
            dtypes.check(op, element, kind.name)
        leaves, first = leaves_of(given, source) if given.leaves else (1, source)
        out: list[Array] = []
        if target is not None:
            kind.check_output(ArrayView(*first), ArrayView(*target), rank, size)
            out.append(Array.at(target[0], ArrayView(*target).size, target[2]))
        if (output is Output.OF_ROOT and rank == root) or not view.size:
            out.clear()
        used = output.used(rank, size, root)

        def stores(loaded: dict[int, Any]) -> list[tuple[Array, Any]]:
            if not out or (not used and isinstance(op, UserOperator)):
                return []
            rows = [row for r in used for row in loaded[r][0].reshape(leaves, -1)]
            if kind.exchange.sends_shards:
                rows = [row.reshape(size, -1)[rank] for row in rows]
            if not kind.reduces:
                values = np.concatenate(rows)
            elif rows:
                values = _folded(element, op, rows, used.start)
            else:  # the first rank of an exscan
                values = np.full(out[0].shape, dtypes.identity(op, view.dtype))
            return [(out[0], values)]

        more = f", op {op}" * kind.reduces + f", root {root}" * kind.rooted
        what = f"{kind.name} of {view.size} {view.dtype.name}{more}"
        x = Array.at(view.address, view.size, view.dtype)
        return self._packed(what, [x], used if out else [], stores)

    def packed_messages(self, what: str, call: Any, kind: str = "message") -> Any:
        """Return messages, which are side by side."""
        sent = call.transfers
        copies, fills = matched(sent.own[0], sent.own[1], what)

        def shares() -> list[RankPart]:
            found = [self._message(each, False, kind) for each in sent.sends]
            found += [self._message(each, True, kind) for each in sent.receives]
            copy = self._host.copy
            found += [
                copy(*(Array.at(each, nbytes, np.uint8) for each in ends))
                for *ends, nbytes in (*sent.copies, *copies)
            ]
            found += [
                copy(Array.at(address, 1, np.int64), number)
                for address, number in (*sent.fills, *fills)
            ]
            return found

        return ExploredCall(self, shares)

    def _message(self, given: Any, receives: bool, kind: str) -> RankPart:
        """Return an end of a message."""
        ends = (given.peer, self.rank) if receives else (self.rank, given.peer)
        what = f"a {kind} from rank {ends[0]} to rank {ends[1]}"
        key = what, self._number, self._host.count((what, self._number, receives))
        data = Array.at(given.address, given.nbytes, np.uint8)
        if not receives:
            return RankPart(key, 2, what, self.rank, [data])

        def stores(loaded: dict[int, Any]) -> list[tuple[Array, Any]]:
            found = loaded[given.peer][0]
            number, rest = divmod(len(found), given.itemsize)
            fits = len(found) <= given.nbytes and not rest
            if not (fits if given.count_at else len(found) == given.nbytes):
                raise Fault(
                    "error",
                    f"rank {given.peer} sends {len(found)} bytes, and rank {self.rank} "
                    f"expects {given.nbytes}",
                    sites=[(f"rank {self.rank}", share.site)],
                )
            stored = [(data[: len(found)], found)]
            if given.count_at:
                stored.append((Array.at(given.count_at, 1, np.int64), [number]))
            return stored

        share = RankPart(key, 2, what, self.rank, [], [given.peer], stores)
        return share

    def request(self, given: Invocation[Any]) -> Request:
        """Start a message on a stream of its own."""
        what, mine = given.operation.name, self._host
        call = self.prepared(given)
        requests_of(self, what)
        self.enqueuer.refuse_in_group(what)
        side = RankStream(running(), mine.rank, REQUESTS + mine.count("requests"))
        mine.order(mine.stream, side)
        for part in self.packed_messages(what, call, "request").parts:
            side.enqueue(StreamWork(mine.world, part()))
        return Request(self.members, what, _Done(mine, side), call.result, 0, _nothing)


class _Done:
    """The end of a request."""

    def __init__(self, mine: Host, side: RankStream):
        self._host, self._side = mine, side

    def query(self) -> bool:
        raise unsupported("a test of a request, which may return True or False")

    def wait(self, stream: Any = None) -> None:
        self._host.order(self._side, self._host.stream)

    def synchronize(self) -> None:
        aside = RankStream(running(), self._host.rank, HOSTS)
        self._host.order(self._side, aside)
        self._host.wait_for(aside)


def _folded(element: Any, op: Any, rows: list[Any], first: int) -> Any:
    """Reduce arrays, as the simulator's kernels do."""
    lanes, nbytes = device_module("lanes"), rows[0].nbytes
    vectors = [
        np.frombuffer(row.tobytes() + bytes(-nbytes % 16), lanes.VECTOR) for row in rows
    ]
    with np.errstate(all="ignore"):
        found = lanes.fold(element, op, first + len(rows), vectors, first)
    return np.frombuffer(found.tobytes()[:nbytes], rows[0].dtype)


def _exactly(what: str, x: Any, y: Any) -> float:
    """Return a sum of products, or its root, rounded once to float64."""
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return float((x * y).sum())
    exact = sum(map(operator.mul, map(Fraction, x), map(Fraction, y)), Fraction(0))
    if what == NORM:
        root = math.isqrt(exact.numerator * 4**1200 // exact.denominator)
        exact = Fraction(root, 2**1200)
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


class _OfLibrary:
    """A class of the library, of which some names have a stand-in."""

    _public: frozenset[str]

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in self._public:
            raise unsupported(f"{type(self).__bases__[1].__name__}.{name}")
        return super().__getattribute__(name)


_PLANNED = (
    *(*OPERATIONS, "reduce_scatter_v", "sum", "dot", "norm", "gather", "gather_v"),
    *("scatter", "scatter_v", "all_gather_v", "all_to_all_v", "neighbor_all_gather"),
    *("neighbor_all_to_all", "send", "recv", "sendrecv", "group"),
)


class ExploredCommunicator(_OfLibrary, Communicator):
    """Stand-in for ``numba_symm.Communicator``."""

    _public = frozenset(
        (
            *("rank", "size", "barrier", "isend", "irecv", "empty", "zeros"),
            *("rendezvous", "device_workspace", "launch_limit", "prepare", "check"),
            *("synchronize", "tag", "close", *_PLANNED),
            *(f"{name}_init" for name in _PLANNED),
        )
    )
    __repr__ = object.__repr__

    def __init__(self, *args: Any, **options: Any):
        signature, mine = inspect.signature(Communicator.__init__), host()
        given = signature.bind(self, *args, **options).arguments
        mine.check_stream(given.get("stream"))
        self._host = mine
        self._calls: Any = ExploredCalls(mine, mine.count("communicators"))
        self._group = Group(self._calls, "group")
        self._calls.requests = given.get("requests") or None
        self.rank, self.size = mine.rank, mine.world.size
        self._calls.set_up("Communicator")

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        """Wait for the stream and for all ranks."""
        self._host.drain()
        self._calls.set_up("close")

    def rendezvous(self, array: Any, *, channels: int | None = None) -> Any:
        """Return all ranks' addresses of an array."""
        return self._calls.heap.rendezvous(array.address, array, channels)

    def launch_limit(self, kernel: Any, threads: int) -> int:
        """Return how many blocks may wait: as many as channels."""
        return CHANNELS

    def synchronize(self, stream: Any = None) -> None:
        """Wait for the stream."""
        self._host.check_stream(stream)
        self._host.drain()

    def prepare(self, *calls: Any, **options: Any) -> None:
        """Do nothing: an exploration loads no kernels."""

    def isend(self, x: Any, *, dst: Any, stream: Any = None) -> Any:
        """Start to send a message."""
        return self._calls.request(
            Invocation(ISEND, x, None, stream, peers=(dst, None))
        )

    def irecv(
        self, out: Any, *, src: Any, count: Any = None, stream: Any = None
    ) -> Any:
        """Start to receive a message."""
        return self._calls.request(
            Invocation(IRECV, None, out, stream, peers=(None, src), count=count)
        )


def _slot(size: int, offset: int) -> tuple[str, int, int]:
    """Return what a pad has at an offset, the channel and the source."""
    channel, place = divmod(offset, pads.pad_nbytes(size, 1))
    if place < 16:
        return "grid barrier", channel, -1
    if place < 16 + 8 * size:
        return "word", channel, (place - 16) // 8
    return "signal", channel, (place - 16 - 8 * size) // 4


class ExploredMemory(_OfLibrary, SymmetricMemory):
    """Stand-in for ``numba_symm.SymmetricMemory``."""

    _public = frozenset(
        (
            *("rank", "world_size", "buffer_size", "channels", "signal_pad_size"),
            *("buffer_ptrs", "signal_pad_ptrs", "ctx", "get_buffer", "put", "get"),
            *("barrier", "put_signal", "wait_signal", "is_of"),
        )
    )

    def __init__(self, mine: Host, ctx: Any, island: Any):
        self._host, self._users_ctx = mine, ctx
        self.rank, self.world_size, self.buffer_ptrs, self.signal_pad_ptrs, _ = ctx
        self.buffer_size, self.channels = ctx.buffer_size, ctx.channels
        self.signal_pad_size = pads.pad_nbytes(self.world_size, self.channels)
        self._check_mapped: Any = _nothing
        self._island: Any = island

    def get_buffer(
        self, rank: int, shape: Any, dtype: Any, storage_offset: int = 0
    ) -> Array:
        """Return a rank's buffer as an array."""
        dtype = np.dtype(dtype)
        shape, start = self._place(rank, shape, dtype, storage_offset, "get_buffer")
        return Array.at(self.buffer_ptrs[rank] + start, shape, dtype)

    def _contiguous(self, array: Any, what: str) -> ArrayView:
        return arrays.view(array, what)

    def _new_array(self, shape: Any, dtype: Any) -> Any:
        return self._host.new(shape, dtype, unset=True)

    def _copy(
        self, target: int, source: int, nbytes: int, stream: Any, what: str
    ) -> None:
        self._host.check_stream(stream)
        copy = self._host.copy(
            Array.at(target, nbytes, np.uint8), Array.at(source, nbytes, np.uint8)
        )
        self._host.stream.enqueue(StreamWork(self._host.world, [copy]))

    def _launch(self, what: str, kernel: Any, stream: Any, *args: int) -> None:
        self._host.check_stream(stream)
        call = functools.partial(getattr(device_module(), what), self._users_ctx, *args)
        ExploredKernel(call)[1, 32 if what == "barrier" else 1]()
