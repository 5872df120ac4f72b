"""A call as one value: its arguments, their checks, and the call's stream."""

import inspect
import sys
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from numba_symm.arguments import is_integer, shown
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.arrays import ArrayView

Kind = TypeVar("Kind")

NONE: tuple[Any, ...] = ()
"""No arguments of an epilogue."""


class Invocation(NamedTuple, Generic[Kind]):
    """The arguments of one call, as its caller passed them.

    The public method makes it. The checks, the agreement of the ranks, the choice of
    the algorithm, the memory of former calls and the launch read it. A step that
    replaces an argument, such as a strided array, passes on a changed copy.

    Attributes:
        operation: what is called.
        x: the input.
        out: the output; None: a new array.
        stream: the stream; None: that of the arrays.
        op: the operator, if the operation reduces.
        algorithm: its name; None: the fastest.
        root: the root, if the operation has one.
        wire: of a sum, how its elements cross the links; None: as they are.
        epilogue: the user's function of each element of the result; None: there is
            none.
        args: what the function takes besides: arrays and numbers.
        row_sum: a function whose results are summed over each row for it, or None.
        second: the output of the second result of such a function, or None.
        leaves: whether the first axis of ``x`` is leaves; once bound, their number.
        tables: of a v form, its counts and displacements: one pair, or two.
        peers: of messages, whom this rank sends to, and whom it receives from.
        count: of a message that may be shorter than ``out``, where its number of
            elements is stored.
    """

    operation: Kind
    x: Any = None
    out: Any = None
    stream: Any = None
    op: Any = "sum"
    algorithm: str | None = None
    root: Any = None
    wire: Any = None
    epilogue: Any = None
    args: Any = NONE
    row_sum: Any = None
    second: Any = None
    leaves: Any = False
    tables: tuple[Any, ...] = ()
    peers: tuple[Any, ...] = ()
    count: Any = None


OPTIONS = slice(4, 13)
"""The fields that are options. A call is remembered by its options and its arrays."""

NO_ROOT: tuple[Any, ...] = None, None, None, NONE, None, None, False
"""The options from the root on of a call that has none of them."""

NO_WIRE = NO_ROOT[1:]
"""The options after the root of a call that has none of them."""

ROOT = 2
"""Which of the options is the root."""


def check_rank(rank: Any, size: int, what: str, also: str = "") -> int:
    """Return a rank as a Python int, or refuse a value that is not a rank."""
    if not is_integer(rank) or not 0 <= rank < size:
        raise ArgumentError(
            f"{what}: expected a rank from 0 to {size - 1}{also}, got {shown(rank)}"
        )
    return int(rank)


def check_peer(peer: Any, size: int, what: str) -> int | None:
    """Return the other rank of a message, or None for no rank, or refuse the value."""
    if peer is None:
        return None
    # Without this import, no caller has MPI's constant.
    null = getattr(sys.modules.get("mpi4py.MPI"), "PROC_NULL", None)
    if is_integer(peer) and peer == null:
        return None
    return check_rank(peer, size, what, ", or None or MPI.PROC_NULL for no rank")


def check_writable(view: ArrayView, what: str) -> None:
    """Refuse a read-only array."""
    if view.readonly:
        raise ArgumentError(f"{what}: expected a writable array, got a read-only one")


def check_order(view: ArrayView, what: str) -> None:
    """Refuse an array whose elements are not in C order."""
    if view.order != "C":
        raise ArgumentError(
            f"{what}: expected an array in C order, got one in Fortran order, in which "
            "a rank's shard is not contiguous; pass its transpose, or a copy"
        )


def check_shards(x: ArrayView, size: int, what: str) -> None:
    """Refuse an array whose first axis is not a multiple of the number of ranks."""
    check_order(x, f"{what}: x")
    if not x.shape or x.shape[0] % size:
        raise ArgumentError(
            f"{what}: expected x with a multiple of {size} along its first axis, of "
            f"which each rank has a shard, got shape {x.shape}; use {what}_v"
        )


def check_type(target: ArrayView, source: ArrayView, what: str) -> None:
    """Refuse an output of another dtype than the input."""
    if target.dtype != source.dtype:
        raise ArgumentError(
            f"{what}: expected out of x's dtype, {source.dtype.name}, got "
            f"{target.dtype.name}"
        )


def check_length(view: ArrayView, count: int, what: str, name: str) -> None:
    """Refuse an array of another number of elements."""
    if view.size != count:
        raise ArgumentError(
            f"{what}: expected {count} elements, which is {name}, got {view.size}"
        )


def are_apart(source: ArrayView, target: ArrayView) -> bool:
    """Return whether two arrays share no memory."""
    return (
        source.address >= target.address + target.nbytes
        or target.address >= source.address + source.nbytes
    )


def check_apart(source: ArrayView, target: ArrayView, what: str) -> None:
    """Refuse arrays that share memory."""
    if not are_apart(source, target):
        raise ArgumentError(
            f"{what}: expected out apart from x, got arrays that overlap"
        )


class CallStreams:
    """Chooses the streams of a communicator's calls, and returns their handles.

    Args:
        given: the stream of calls whose array names none; None: the legacy default
            stream.

    Attributes:
        given: the same.
    """

    def __init__(self, given: Any):
        self.given = given
        self._own = streams.handle_or_default(given)

    def of(self, stream: Any, array: Any) -> int:
        """Return the stream that was passed; for None, that of work on an array."""
        if stream is not None:
            return streams.handle_or_default(stream)
        kind = arrays.KINDS.get(array.__class__) or arrays.kind_of(array)
        named = None if kind.stream is None else kind.stream(array)
        return self._own if named is None else named

    def default(self, stream: Any) -> int:
        """Return the stream that was passed; for None, the communicator's."""
        return self._own if stream is None else streams.handle_or_default(stream)


def spelled(methods: type) -> type:
    """Return the class; have Python's errors for a method's arguments begin with these.

    Python raises them before a method runs, with its qualified name. A parameter that
    takes what is misplaced would cost every call 6 ns.
    """
    for name, method in vars(methods).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            function = inspect.unwrap(method)
            first, named = _parameters(function)
            if named:
                given = ", ".join((*first, *named))
                after = f" after {first[-1]}" if first else ""
                words = f"Communicator.{name}({given}), by keyword{after}: {name}"
                function.__qualname__ = words
    return methods


def _parameters(function: Any) -> tuple[list[str], list[str]]:
    """Return a method's parameters, then those by keyword: ``x``, ``op='sum'``."""
    _, *found = inspect.signature(function).parameters.values()  # without self
    first = [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = [
        f"{each.name}={'…' if each.default is each.empty else repr(each.default)}"
        for each in found
        if each.kind is each.KEYWORD_ONLY
    ]
    return first, named


_CALLS = {
    "barrier": "barrier",
    "broadcast": "bcast",
    "reduce": "reduce",
    "all_reduce": "allreduce",
    "scan": "scan",
    "exscan": "exscan",
    "gather": "gather",
    "gather_v": "gatherv",
    "scatter": "scatter",
    "scatter_v": "scatterv",
    "all_gather": "allgather",
    "all_gather_v": "allgatherv",
    "all_to_all": "alltoall",
    "all_to_all_v": "alltoallv",
    "reduce_scatter": "reduce_scatter_block",
    "reduce_scatter_v": "reduce_scatter",
    "neighbor_all_gather": "neighbor_allgather",
    "neighbor_all_to_all": "neighbor_alltoall",
    "send": "send",
    "recv": "recv",
    "sendrecv": "sendrecv",
    "isend": "isend",
    "irecv": "irecv",
}
"""By method, mpi4py's name of it in lower case."""

_NAMES = {"split": "split", "dup": "dup", "close": "free"}
_NAMES |= {"rank": "get_rank", "size": "get_size"}


_OURS = {theirs: ours for ours, theirs in (_CALLS | _NAMES).items()}
_OURS |= {ours.replace("_", ""): ours for ours in _CALLS}  # NCCL's, in lower case


class OthersNames:
    """A base of communicators, whose errors for names of mpi4py and NCCL have ours."""

    if not TYPE_CHECKING:  # for which a communicator has only what it defines

        def __getattr__(self, name: str) -> Any:
            theirs, given = name.lower(), ""
            right = _OURS.get(theirs) or _OURS.get(theirs.removeprefix("i"))
            if right is None:
                text = f"'Communicator' object has no attribute {name!r}"
                raise AttributeError(
                    text, name=name, obj=self
                )  # Python adds a near one
            method = getattr(type(self), right, None)
            if inspect.isfunction(method):
                first, named = _parameters(method)
                given = f"({', '.join((*first, *named))})"
            raise AttributeError(
                f"Communicator.{name}: expected a name of this library, got "
                f"another's; write comm.{right}{given}, or make the call of a "
                "numba_symm.mpi.Comm, which has mpi4py's names"
            )


UNKNOWN: Any = object()
"""The result of ``Cache.get`` for a missing key."""

NEW = "new"
"""In the place of an output in a key, whose value is a new output's type and shape."""


class Cache:
    """Values by key: those of the ``most`` keys used last, and at most as many more.

    There are two generations. A lookup moves a value to the younger one. When that is
    full, it replaces the older one. So a lookup of a recently used key hashes the key
    once, as in a dictionary.

    Attributes:
        young: the values of the younger generation, for lookups that may miss others.
    """

    def __init__(self, most: int):
        self._most = most
        self.young: dict[Hashable, Any] = {}
        self._old: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        """Return a key's value, or ``UNKNOWN``."""
        found = self.young.get(key, UNKNOWN)
        if found is UNKNOWN:
            found = self._old.pop(key, UNKNOWN)
            if found is not UNKNOWN:
                self.put(key, found)
        return found

    def put(self, key: Hashable, value: Any) -> None:
        """Store a value."""
        if len(self.young) >= self._most:
            self._old = self.young
            self.young = {}
        self.young[key] = value

    def clear(self) -> None:
        """Remove all values."""
        self.young.clear()
        self._old.clear()
