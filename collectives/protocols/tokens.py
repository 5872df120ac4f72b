"""Code that all dispatches and combines share: tokens, their experts and results."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba.cuda import types

from numba_symm.collectives.protocols.workspace import THREADS, VECTOR
from numba_symm.device import lanes
from numba_symm.device.intrinsics import (
    device_function,
    f32_of_bits,
    ld_u32,
    ld_v2_u64,
    mul_rn_f32,
    word_of,
)
from numba_symm.device.polling import fail, wait_record
from numba_symm.dtypes import Element
from numba_symm.launch import failures

NONE = 0xFFFFFFFF
"""The number of no expert, -1, as it is loaded; and the place of a token not sent."""

LANES = min(THREADS, 32)
"""Threads of a warp, which vote."""

MOST_TOKENS = (1 << 15) - 1
MOST_EXPERTS = (1 << 15) - 1

_ONE = 0x3F800000  # the bits of a float32


class Routing(NamedTuple):
    """The experts of a call's tokens.

    Attributes:
        ids: the address of the expert numbers, an int32 for each token and choice.
        weights: that of their weights, of float32; 0: each is 1.
        tokens: how many tokens there are.
        choices: experts of a token.
        experts: experts of all ranks.
        each: experts of a rank.
        inverse: by which numbers are divided by ``each``, see ``inverse_of``.
    """

    ids: int
    weights: int
    tokens: int
    choices: int
    experts: int
    each: int
    inverse: int


class TokenRoom(NamedTuple):
    """Where a rank's memory has what it receives: byte offsets.

    The number of tokens of each rank, an int64, is at the beginning.

    Attributes:
        tokens: the tokens.
        ids: for each token and choice, the number of the expert on this rank, an int32;
            -1: it is on another rank.
        weights: for each token and choice, its weight.
        sources: the numbers of the tokens on their rank, of int32.
        capacity: for how many tokens of each rank there is room.
    """

    tokens: int
    ids: int
    weights: int
    sources: int
    capacity: int


class Rows(NamedTuple):
    """Tokens as their bytes.

    Attributes:
        address: of the first one.
        vectors: vectors of 16 bytes of a token.
        shift: a token is copied by 2 to the power of this many threads together.
    """

    address: int
    vectors: int
    shift: int


def typed(kind: Any) -> Any:
    """Return the type of a kernel's argument that is such a tuple of words."""
    return types.NamedTuple((types.int64,) * len(kind._fields), kind)


def inverse_of(each: int) -> int:
    """Return the factor by which, and by 2**32, numbers are divided by ``each``.

    A GPU has no instruction that divides. The quotient is exact if the number, times
    ``each``, is less than 2**32.
    """
    return (1 << 32) // each + 1


@device_function
def ranks_of(routing: Any, token: int) -> Any:
    """Return the ranks that a token is for, as bits.

    And an expert that does not exist, or NONE.
    """
    bits, wrong, choice = 0, NONE, 0
    at = routing.ids + 4 * token * routing.choices
    while choice < routing.choices:
        expert = word_of(ld_u32(at + 4 * choice))
        if expert < routing.experts:
            bits |= 1 << (expert * routing.inverse >> 32)
        elif expert != NONE:
            wrong = expert
        choice += 1
    return bits, wrong


@device_function
def refuse(guard: Any, token: int, expert: int) -> None:
    """Report a token whose expert does not exist, a number of 32 bits."""
    upper = expert >> 24  # in the place of a peer, because no other rank is concerned
    fail(guard, wait_record(failures.NO_EXPERT, guard.rank, upper, token, expert))


@device_function
def report_above(guard: Any, rank: int, capacity: int, count: int) -> None:
    """Report that more tokens are for a rank than its room for them."""
    fail(guard, wait_record(failures.TOKENS_ABOVE, guard.rank, rank, capacity, count))


@device_function
def number_on(routing: Any, rank: int, expert: int) -> int:
    """Return an expert's number on a rank; NONE if it is elsewhere."""
    number = expert - rank * routing.each
    return word_of(number if 0 <= number < routing.each else NONE)


@device_function
def number_there(routing: Any, rank: int, choice: int) -> int:
    """Return the number of a choice's expert on a rank; NONE if it is elsewhere."""
    return number_on(routing, rank, word_of(ld_u32(routing.ids + 4 * choice)))


@device_function
def weight_of(routing: Any, choice: int) -> int:
    """Return the bits of a choice's weight."""
    weight = word_of(_ONE)
    if routing.weights != 0:
        weight = word_of(ld_u32(routing.weights + 4 * choice))
    return weight


def make_times(depth: int) -> Callable[[Any, Any], Any]:
    """Return a device function of nested pairs of float32 and a factor."""
    if depth == 0:

        @device_function
        def times(value: Any, factor: Any) -> Any:
            return mul_rn_f32(value, factor)

        return times
    half = make_times(depth - 1)

    @device_function
    def times_both(values: Any, factor: Any) -> Any:
        return half(values[0], factor), half(values[1], factor)

    return times_both


@functools.cache
def make_load_result(size: int, element: Element, weighted: bool) -> Callable[..., Any]:
    """Return a device function that loads a vector of a rank's result of a token.

    ``(results, ids, weights, choices, row, vectors, vector)`` returns its two words.

    Args:
        size: the number of ranks.
        element: the type of the results.
        weighted: whether there is a result for each choice of a token, which are added
            up, each times its weight; otherwise, there is one for each token.
    """
    unpack, pack, combine, *_ = lanes.make_lanes(element, "sum", False, size)
    times = make_times((element.lanes).bit_length() - 1)

    @device_function
    def load(
        results: int,
        ids: int,
        weights: int,
        choices: int,
        row: int,
        vectors: int,
        vector: int,
    ) -> Any:
        if not weighted:
            return ld_v2_u64(results + VECTOR * (row * vectors + vector))
        made = unpack(0, 0)
        for i in range(choices):
            choice = row * choices + i
            if word_of(ld_u32(ids + 4 * choice)) != NONE:
                weight = f32_of_bits(ld_u32(weights + 4 * choice))
                there = results + VECTOR * (choice * vectors + vector)
                low, high = ld_v2_u64(there)
                made = combine(made, times(unpack(low, high), weight))
        return pack(made)

    return load
