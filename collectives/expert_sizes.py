"""The sizes of a mixture of experts, checked."""

from typing import Any, NamedTuple

import numpy as np

from numba_symm import arguments, dtypes
from numba_symm.collectives import expert_wires
from numba_symm.collectives.kernels import (
    expert_combine,
    expert_dispatch,
    mailed_dispatch,
)
from numba_symm.collectives.protocols import few_tokens
from numba_symm.collectives.protocols.binding import Endpoint
from numba_symm.collectives.protocols.tokens import MOST_EXPERTS, MOST_TOKENS
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.errors import ArgumentError

_MOST_CHOICES, _MOST_HIDDEN = 64, 1 << 20
_LINE = 128


class Mailed(NamedTuple):
    """The grid and the share of each kernel for few tokens (``few_tokens.py``)."""

    dispatch: tuple[int, few_tokens.Share]
    combine: tuple[int, few_tokens.Share]


class ExpertSizes(NamedTuple):
    """The checked sizes of an object, equal on all ranks.

    Attributes:
        experts: experts of all ranks together.
        top_k: experts of a token.
        tokens: the most tokens of a rank.
        capacity: the most tokens of a rank that are for another one.
        hidden: elements of a token.
        dtype: the type of tokens and results.
    """

    experts: int
    top_k: int
    tokens: int
    capacity: int
    hidden: int
    dtype: np.dtype[Any]

    @property
    def vectors(self) -> int:
        """Vectors of a token."""
        return self.hidden * self.dtype.itemsize // VECTOR

    @property
    def codes(self) -> int:
        """Vectors of a token as codes; 0: it cannot have codes."""
        return expert_wires.vectors_of(self.hidden)

    @property
    def row(self) -> tuple[int, int]:
        """The vectors of a token, and the shift by which threads share it."""
        return self.vectors, expert_dispatch.shift_of(self.vectors)

    def mailed(self, end: Endpoint, vectors: int) -> Mailed | None:
        """Return the grids and shares of calls of few tokens; None: there are many.

        Args:
            end: this rank's end.
            vectors: those of a token as it is sent.
        """
        sent = mailed_dispatch.vectors_of(self.top_k, vectors)
        there = few_tokens.share_of(end, self.tokens, sent)
        back = few_tokens.share_of(end, self.tokens, self.vectors)
        return Mailed(there, back) if there and back else None

    @property
    def words(self) -> str:
        """The sizes as errors show them."""
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items())

    def places(self, size: int) -> tuple[dict[str, int], int]:
        """Return where each part of a rank's memory begins, and its bytes."""
        room = size * self.capacity
        parts = {
            "counts": 8 * size,
            "tokens": VECTOR * self.vectors * room,
            "ids": 4 * self.top_k * room,
            "weights": 4 * self.top_k * room,
            "sources": 4 * room,
            "results": VECTOR * self.vectors * room,
        }
        found, end = {}, 0
        for name, nbytes in parts.items():
            found[name] = end
            end += divide_up(nbytes, _LINE) * _LINE
        return found, end


def checked(
    experts: Any,
    top_k: Any,
    hidden: Any,
    tokens: Any,
    capacity: Any,
    dtype: Any,
    size: int,
) -> ExpertSizes:
    """Return the sizes, or refuse one."""
    what = "experts"

    def integer(value: Any, name: str, most: int, do: str) -> int:
        words = f"{name} to be an integer from 1 to {most}"
        return arguments.integer(value, what, words, least=1, most=most, do=do)

    kind = dtypes.checked(dtype, what)
    if kind.name not in expert_combine.DTYPES:
        known = ", ".join(expert_combine.DTYPES)
        raise ArgumentError(
            f"{what}: expected dtype {known}, got {kind.name}; convert the tokens"
        )
    found = integer(experts, "experts", MOST_EXPERTS, "pass those of all ranks")
    if found % size:
        raise ArgumentError(
            f"{what}: expected a multiple of the {size} ranks, got {found} experts; "
            "every rank has the same number"
        )
    most = integer(tokens, "tokens", MOST_TOKENS, "pass the most tokens of a rank")
    room = most
    if capacity is not None:
        do = "pass the most tokens of a rank for another one"
        room = integer(capacity, "capacity", most, do)
    choices = integer(top_k, "top_k", _MOST_CHOICES, "pass the experts of a token")
    length = integer(hidden, "hidden", _MOST_HIDDEN, "pass the elements of a token")
    if length * kind.itemsize % VECTOR:
        raise ArgumentError(
            f"{what}: expected tokens of a multiple of {VECTOR} bytes, got hidden "
            f"{length} of {kind.name}; pad the tokens"
        )
    return ExpertSizes(found, choices, most, room, length, kind)
