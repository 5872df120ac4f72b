"""What each collective operation takes and gives, and its algorithms."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.arrays import ArrayView
from numba_symm.collectives import select
from numba_symm.collectives.kernels import (
    chunked_broadcast,
    chunked_exchange,
    chunked_reduce,
    copied_exchange,
    direct_broadcast,
    direct_reduce,
    exchange,
    two_shot,
)
from numba_symm.collectives.kernels.exchange import EXCHANGES, Output
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.protocols.mailboxes import TRANSPORTS
from numba_symm.dtypes import Element, Op
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError


class Operation(NamedTuple):
    """One operation.

    Attributes:
        name: as the communicator's method.
        reduces: whether it has an operator; without one, any dtype will do.
        algorithms: by name, each a ``Bind`` (``select.py``); what they take as
            ``count`` is the elements of a part. Those of an operation with a root
            take ``root``, too, and 0 for the output of a rank that has none.
        fastest: ``(bytes of a part, ranks, element)`` returns a name.
        shape: ``(input, ranks)`` returns the output's shape.
        parts: into how many parts the input is cut, for a number of ranks.
        without: the operators that mean nothing for it.
        rooted: whether one rank is the root.
        at_root: whether only the root has an output.
    """

    name: str
    reduces: bool
    algorithms: dict[str, Callable[..., Enqueue]]
    fastest: Callable[[int, int, Element], str]
    shape: Callable[[ArrayView, int], tuple[int, ...]]
    parts: Callable[[int], int]
    without: tuple[str, ...] = ()
    rooted: bool = False
    at_root: bool = False

    def check(self, op: Op) -> None:
        """Refuse an operator that the operation cannot have."""
        if op in self.without:
            raise ArgumentError(
                f"{self.name}: op={op!r} means nothing for it, as its outputs reduce "
                "different numbers of ranks; use 'sum' and divide"
            )

    def check_algorithm(self, algorithm: Any) -> None:
        """Refuse what is not the name of an algorithm."""
        if not isinstance(algorithm, str) or algorithm not in self.algorithms:
            known = ", ".join(repr(name) for name in self.algorithms)
            raise ArgumentError(
                f"{self.name}: algorithm={algorithm!r} is not known; use {known}, or "
                "None to have the fastest one chosen"
            )

    def chosen(
        self, algorithm: str | None, nbytes: int, size: int, element: Element
    ) -> str:
        """Return ``algorithm`` if it can do it; choose one for None."""
        if algorithm is None:
            return self.fastest(nbytes, size, element)
        if algorithm.endswith("sentinel") and not element.floating:
            raise ArgumentError(
                f"{self.name}: algorithm={algorithm!r} is for floats, which have a "
                f"value to spare; for {element.name} use "
                f"{algorithm.replace('sentinel', 'marked')!r}"
            )
        return algorithm


def _same_shape(x: ArrayView, size: int) -> tuple[int, ...]:
    return x.shape


def _gathered_shape(x: ArrayView, size: int) -> tuple[int, ...]:
    _check_order(x, "all_gather")
    return (size, *x.shape)


def _exchanged_shape(x: ArrayView, size: int) -> tuple[int, ...]:
    _check_parts(x, size, "all_to_all")
    return x.shape


def _scattered_shape(x: ArrayView, size: int) -> tuple[int, ...]:
    _check_parts(x, size, "reduce_scatter")
    return (x.shape[0] // size, *x.shape[1:])


def _check_order(x: ArrayView, what: str) -> None:
    if x.order != "C":
        raise ArgumentError(
            f"{what}: x is in Fortran order, in which a rank's part is not contiguous; "
            "pass it in C order, or its transpose"
        )


def _check_parts(x: ArrayView, size: int, what: str) -> None:
    _check_order(x, what)
    if not x.shape or x.shape[0] % size:
        raise ArgumentError(
            f"{what}: x has shape {x.shape}; the first axis is cut into a part for "
            f"each rank, so its length must be a multiple of {size}"
        )


_K, _M = 1 << 10, 1 << 20


class Limits(NamedTuple):
    """The most bytes that a rank sends by each kind of algorithm; larger: copies."""

    sentinel: int
    ll: int
    marked: int
    signalled: int


class ReduceLimits(NamedTuple):
    """The most bytes of a reduction to one rank in one flight, and in two by each kind.

    Larger ones go between the ranks' own arrays. Two ranks have nothing in two flights.
    """

    in_one: int
    sentinel: int
    marked: int


# Measured on H200s with 2, 4 and 8 ranks; see bench/README.md. By number of ranks, as
# ``row`` of ``select.py`` says.
_LIMITS = (
    Limits(32 * _M, 64 * _K, 2 * _M, 40 * _M),
    Limits(3 * _M, 64 * _K, 1536 * _K, 40 * _M),
    Limits(14 * _M, 224 * _K, 1792 * _K, 56 * _M),
)
_REDUCE_LIMITS = (
    ReduceLimits(2 * _M, 0, 0),
    ReduceLimits(256 * _K, 8 * _M, 1 * _M),
    ReduceLimits(128 * _K, 4 * _M, 1 * _M),
)
# Between the ranks' own arrays, from so many bytes on; two ranks relay nothing, and
# reduce by signals before.
_BROADCAST_DIRECT = (math.inf, 1 * _M, 2 * _M)
_REDUCE_OF_TWO_DIRECT = 32 * _M
# A simulated round costs milliseconds, whatever it carries.
_SIMULATED = Limits(512, 128, 512, 64 * _M)
_SIMULATED_REDUCE = ReduceLimits(512, 2048, 2048)


def _fastest_exchange(
    reduces: bool, copied: bool, nbytes: int, size: int, element: Element
) -> str:
    limits = _SIMULATED if SIMULATED else _LIMITS[select.row(size)]
    sent = nbytes * (size - 1)
    # A sentinel changes a NaN's bits: for what is only moved, flags or marks.
    if sent <= limits.sentinel and reduces and element.floating:
        return "sentinel"
    if sent <= limits.ll:
        return "ll"
    if sent <= limits.marked:
        return "marked"
    return "copy_engine" if copied and sent > limits.signalled else "signalled"


def _fastest_broadcast(nbytes: int, size: int, element: Element) -> str:
    if nbytes >= _BROADCAST_DIRECT[select.row(size)]:
        return "direct"
    return _fastest_exchange(False, size <= 2, nbytes, size, element)


def _fastest_reduce(nbytes: int, size: int, element: Element) -> str:
    limits = _SIMULATED_REDUCE if SIMULATED else _REDUCE_LIMITS[select.row(size)]
    transport = select.transport_of(element, nbytes, size)
    if nbytes <= limits.in_one:
        return transport
    if size <= 2:
        return "direct" if nbytes >= _REDUCE_OF_TWO_DIRECT else "signalled"
    in_two = limits.sentinel if transport == "sentinel" else limits.marked
    return f"two_shot_{transport}" if nbytes <= in_two else "direct"


def _exchange(
    name: str,
    shape: Callable[[ArrayView, int], tuple[int, ...]],
    signalled: Callable[..., Enqueue] | None = None,
    without: tuple[str, ...] = (),
) -> Operation:
    kind = EXCHANGES[name]
    reduces = kind.output.reduces
    algorithms: dict[str, Callable[..., Enqueue]] = {
        "marked": functools.partial(exchange.bind, "marked", kind),
        "ll": functools.partial(exchange.bind, "ll", kind),
        "signalled": signalled or functools.partial(chunked_exchange.bind, kind),
    }
    if reduces:
        algorithms["sentinel"] = functools.partial(exchange.bind, "sentinel", kind)
    else:
        algorithms["copy_engine"] = functools.partial(copied_exchange.bind, name)
    fastest = functools.partial(_fastest_exchange, reduces, not reduces)
    parts = (lambda size: size) if kind.parts_in else (lambda size: 1)
    at_root = kind.output is Output.AT_ROOT
    rooted = at_root or kind.output is Output.OF_ROOT
    return Operation(
        *(name, reduces, algorithms, fastest, shape, parts, without, rooted, at_root)
    )


def _reduce_in_two_shots(
    transport: str,
    comm: Any,
    source: int,
    target: int,
    count: int,
    element: Element,
    op: Op,
    root: int,
) -> Enqueue:
    """Bind an all-reduce whose result only the root keeps: only it has a target."""
    return two_shot.bind(transport, comm, source, target, count, element, op)


ALL_REDUCE = Operation(
    "all_reduce",
    True,
    select.ALL_REDUCE,
    select.all_reduce,
    _same_shape,
    lambda size: 1,
)
ALL_GATHER = _exchange("all_gather", _gathered_shape)
ALL_TO_ALL = _exchange("all_to_all", _exchanged_shape)
REDUCE_SCATTER = _exchange("reduce_scatter", _scattered_shape)
SCAN = _exchange("scan", _same_shape, without=("avg",))
EXSCAN = _exchange("exscan", _same_shape, without=("avg",))
_REDUCE = _exchange("reduce", _same_shape, chunked_reduce.bind)
REDUCE = _REDUCE._replace(
    fastest=_fastest_reduce,
    algorithms=_REDUCE.algorithms
    | {"direct": direct_reduce.bind}
    | {
        f"two_shot_{transport}": functools.partial(_reduce_in_two_shots, transport)
        for transport in TRANSPORTS
    },
)
REDUCE_PART = REDUCE._replace(name="reduce_scatter_v")
"""One of the reductions that a ``reduce_scatter_v`` is made of."""
_BROADCAST = _exchange("broadcast", _same_shape, chunked_broadcast.bind)
BROADCAST = _BROADCAST._replace(
    fastest=_fastest_broadcast,
    algorithms=_BROADCAST.algorithms | {"direct": direct_broadcast.bind},
)
