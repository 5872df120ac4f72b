"""What each collective operation takes and gives, and its algorithms."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from numba_symm.arrays import ArrayView
from numba_symm.collectives import (
    broadcast_signalled,
    exchange,
    exchange_signalled,
    reduce_signalled,
    select,
)
from numba_symm.collectives.exchange import EXCHANGES, Output
from numba_symm.collectives.select import Enqueue
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

    def chosen(
        self, algorithm: str | None, nbytes: int, size: int, element: Element
    ) -> str:
        """Return ``algorithm`` if it can do it; choose one for None."""
        if algorithm is None:
            return self.fastest(nbytes, size, element)
        if algorithm not in self.algorithms:
            known = ", ".join(repr(name) for name in self.algorithms)
            raise ArgumentError(
                f"{self.name}: algorithm={algorithm!r} is not known; use {known}, or "
                "None to have the fastest one chosen"
            )
        if algorithm.endswith("sentinel") and not element.floating:
            raise ArgumentError(
                f"{self.name}: algorithm={algorithm!r} is for floats, which have a "
                f"value to spare; for {element.name} use "
                f"{algorithm.replace('sentinel', 'll')!r}"
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


# Guesses by analogy with all_reduce; only 2 and 4 ranks were ever measured.
_K = 1 << 10
_LL_LIMIT = 256 * _K  # bytes that a rank sends, without flags
_SENTINEL_LIMIT = 512 * _K
_SIMULATED_LIMIT = 512


def _fastest_exchange(reduces: bool, nbytes: int, size: int, element: Element) -> str:
    # A sentinel changes a NaN's bits: for what is only moved, flags.
    sentinel = reduces and element.floating
    limit = _SENTINEL_LIMIT if sentinel else _LL_LIMIT
    if SIMULATED:
        limit = _SIMULATED_LIMIT
    if nbytes * (size - 1) > limit:
        return "signalled"
    return "sentinel" if sentinel else "ll"


def _exchange(
    name: str,
    shape: Callable[[ArrayView, int], tuple[int, ...]],
    signalled: Callable[..., Enqueue] | None = None,
    without: tuple[str, ...] = (),
) -> Operation:
    kind = EXCHANGES[name]
    reduces = kind.output.reduces
    algorithms: dict[str, Callable[..., Enqueue]] = {
        "ll": functools.partial(exchange.bind, "ll", kind),
        "signalled": signalled or functools.partial(exchange_signalled.bind, kind),
    }
    if reduces:
        algorithms["sentinel"] = functools.partial(exchange.bind, "sentinel", kind)
    fastest = functools.partial(_fastest_exchange, reduces)
    parts = (lambda size: size) if kind.parts_in else (lambda size: 1)
    at_root = kind.output is Output.AT_ROOT
    rooted = at_root or kind.output is Output.OF_ROOT
    return Operation(
        *(name, reduces, algorithms, fastest, shape, parts, without, rooted, at_root)
    )


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
REDUCE = _exchange("reduce", _same_shape, reduce_signalled.bind)
BROADCAST = _exchange("broadcast", _same_shape, broadcast_signalled.bind)
