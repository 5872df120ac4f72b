"""The one table that picks an algorithm, by bytes and number of ranks."""

from typing import Any, Protocol

from numba_symm.collectives import one_shot_ll, one_shot_pull
from numba_symm.dtypes import Element
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.kernels import Launch


class AllReduce(Protocol):
    """What a file of an all-reduce algorithm offers."""

    def bind(
        self,
        comm: Any,
        source: int,
        target: int,
        count: int,
        element: Element,
        op: str,
    ) -> Launch:
        """Return the launch that all-reduces ``count`` elements.

        Everything but the addresses is equal on all ranks; the grid follows from it.

        Args:
            comm: the communicator (its guard, workspace and agreed grid are used).
            source: address of the input, on this rank.
            target: address of the output; may be ``source``.
            count: number of elements, at least 1.
            element: their type.
            op: the reduction's name.
        """
        ...


ALL_REDUCE: dict[str, AllReduce] = {
    "one_shot_ll": one_shot_ll,
    "one_shot_pull": one_shot_pull,
}
"""Algorithms of all_reduce by name."""

# Largest message, in bytes, that LL packets carry faster than the pull kernel does:
# on H200s the two cross between 256 KiB and 1 MiB with 2, 3 and 4 ranks
# (bench/results); with more, LL's traffic of 2 (n - 1) messages a rank tells earlier.
_LL_LIMIT_FEW = 512 << 10
_LL_LIMIT_MANY = 128 << 10
# A simulated round costs milliseconds, whatever it carries: LL's are many and small.
_LL_LIMIT_SIMULATED = 512


def all_reduce(nbytes: int, size: int) -> str:
    """Return the name of the fastest algorithm for a message and a world size."""
    limit = _LL_LIMIT_FEW if size <= 4 else _LL_LIMIT_MANY
    if SIMULATED:
        limit = _LL_LIMIT_SIMULATED
    return "one_shot_ll" if nbytes <= limit else "one_shot_pull"


def named(algorithm: str | None, nbytes: int, size: int) -> str:
    """Return ``algorithm`` if there is one of that name; choose one for None."""
    if algorithm is None:
        return all_reduce(nbytes, size)
    if algorithm not in ALL_REDUCE:
        known = ", ".join(repr(name) for name in ALL_REDUCE)
        raise ArgumentError(
            f"all_reduce: algorithm={algorithm!r} is not known; use {known}, or None "
            "to have the fastest one chosen"
        )
    return algorithm
