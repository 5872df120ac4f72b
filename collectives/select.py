"""The one table that picks an algorithm, by bytes, type and number of ranks."""

import functools
from typing import Any, NamedTuple, Protocol

from numba_symm.collectives.kernels import (
    chunked_all_reduce,
    copied_all_reduce,
    one_shot,
    one_shot_pull,
    two_shot,
)
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.dtypes import Element, Op
from numba_symm.environment import SIMULATED


class Bind(Protocol):
    """Packs one all-reduce algorithm."""

    def __call__(
        self,
        comm: Any,
        source: int,
        target: int,
        count: int,
        element: Element,
        op: Op,
    ) -> Enqueue:
        """Return what all-reduces ``count`` elements.

        Everything but the addresses is equal on all ranks; grid and slots follow from
        it alone.

        Args:
            comm: the communicator (its guard, workspace and agreed grid are used).
            source: address of the input, on this rank.
            target: address of the output; may be ``source``.
            count: number of elements, at least 1.
            element: their type.
            op: the operator.
        """
        ...


ALL_REDUCE: dict[str, Bind] = {
    "one_shot_sentinel": functools.partial(one_shot.bind, "sentinel"),
    "one_shot_marked": functools.partial(one_shot.bind, "marked"),
    "one_shot_ll": functools.partial(one_shot.bind, "ll"),
    "two_shot_sentinel": functools.partial(two_shot.bind, "sentinel"),
    "two_shot_marked": functools.partial(two_shot.bind, "marked"),
    "two_shot_ll": functools.partial(two_shot.bind, "ll"),
    "two_shot_signalled": chunked_all_reduce.bind,
    "copy_engine": copied_all_reduce.bind,
    "one_shot_pull": one_shot_pull.bind,
}
"""Algorithms of all_reduce by name."""


class Limits(NamedTuple):
    """The largest message, in bytes, of each kind of algorithm; larger: copies."""

    one_shot: int
    two_shot: int
    signalled: int


_K, _M = 1 << 10, 1 << 20

# Measured on H200s with 2, 4 and 8 ranks; see bench/README.md. By number of ranks, as
# ``row`` says.
_SENTINEL = (
    Limits(1 * _M, 8 * _M, 64 * _M),
    Limits(128 * _K, 4 * _M, 64 * _M),
    Limits(64 * _K, 16 * _M, 256 * _M),
)
_MARKED = (
    Limits(2 * _M, 2 * _M, 64 * _M),
    Limits(128 * _K, 1 * _M, 64 * _M),
    Limits(64 * _K, 1 * _M, 256 * _M),
)
# The largest message by packets: less to do, but twice the bytes.
_MOST_LL = (8 * _K, 8 * _K, 32 * _K)
# A simulated round costs milliseconds, whatever it carries.
_SIMULATED = Limits(512, 2048, 64 * _M)
_SIMULATED_MOST_LL = 64


def transport_of(element: Element, nbytes: int, size: int) -> str:
    """Return the fastest transport of ``mailboxes.py`` for a type that is reduced."""
    if element.floating:
        return "sentinel"
    most = _SIMULATED_MOST_LL if SIMULATED else _MOST_LL[row(size)]
    return "ll" if nbytes <= most else "marked"


def limits_of(size: int, element: Element) -> Limits:
    """Return the limits for a number of ranks and a type."""
    if SIMULATED:
        return _SIMULATED
    return (_SENTINEL if element.floating else _MARKED)[row(size)]


def row(size: int) -> int:
    """Return the place in a table of what is for 2 ranks, 3 to 4, and more."""
    return 0 if size <= 2 else 1 if size <= 4 else 2


def all_reduce(nbytes: int, size: int, element: Element) -> str:
    """Return the name of the fastest algorithm for a message and a world size."""
    limits = limits_of(size, element)
    transport = transport_of(element, nbytes, size)
    if nbytes <= limits.one_shot:
        return f"one_shot_{transport}"
    if nbytes <= limits.two_shot:
        return f"two_shot_{transport}"
    return "two_shot_signalled" if nbytes <= limits.signalled else "copy_engine"
