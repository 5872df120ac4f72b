"""The kernels of quantized sums: encode, add, decode; also for tokens.

``collectives/composed.py`` contains the calls, in which other kernels exchange the
codes. Each thread reads and writes codes and elements of its own. The kernels wait only
for the previous kernel of the stream, and not for other ranks. The threads of a group
only exchange their largest magnitudes, in registers. A rank that has failed stores no
result.

A *record* contains the codes of four groups, and then their scales. So any number of
records is a contiguous array with aligned vectors.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.workspace import THREADS, VECTOR
from numba_symm.device import groups, intrinsics
from numba_symm.device.groups import GROUP, IN_VECTOR
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import Element, left_half
from numba_symm.gpu.kernels import Kernel, Launch

LANES = min(GROUP // IN_VECTOR, THREADS)
"""Threads of a group."""

PARTS = GROUP // IN_VECTOR // LANES
"""Vectors of codes of a thread."""

IN_RECORD = 4
"""Groups of a record."""

RECORD = IN_RECORD * (GROUP + 4)
"""Bytes of a record."""

MOST = 8
"""The most ranks whose codes are added without a loop; a power of two."""

IN_WORD = IN_VECTOR // 2
"""Codes of a word."""

_TEAMS = THREADS // LANES
_VALUES = IN_VECTOR * PARTS


@intrinsics.device_function
def place_of(group: int) -> int:
    """Return the offset of a group's codes."""
    return (group >> 2) * RECORD + (group & 3) * GROUP


@intrinsics.device_function
def scale_place_of(group: int) -> int:
    """Return the offset of a group's scale."""
    return (group >> 2) * RECORD + IN_RECORD * GROUP + (group & 3) * 4


@functools.cache
def make_keep(codes: Element) -> Callable[..., None]:
    """Return a device function that encodes a group, by all its threads together.

    ``(target, group, lane, values, exists)`` stores codes and scale, if ``exists``.
    """
    scale_of, encode_16, *_ = groups.make_codes(codes)
    largest_of = groups.make_largest(_VALUES)

    @intrinsics.device_function
    def keep(target: int, group: int, lane: int, values: Any, exists: bool) -> None:
        scale = scale_of(largest_of(values))
        inverse = groups.ONE / scale
        if exists:
            at = target + place_of(group) + VECTOR * PARTS * lane
            for part in range(PARTS):
                words = encode_16(values, IN_VECTOR * part, inverse)
                intrinsics.st_v2_u64(at + VECTOR * part, words)
            if lane == 0:
                bits = intrinsics.bits_of_f32(scale)
                intrinsics.st_u32(target + scale_place_of(group), bits)

    return keep


def make_encode(size: int, codes: Element, kind: Element, ragged: bool) -> Any:
    """Return the kernel: elements become codes.

    Args:
        size: the number of ranks of the island.
        codes: the type of codes.
        kind: that of elements.
        ragged: as for ``lanes.make_lanes``.
    """
    access = make_lanes(kind, "sum", ragged, 1)
    load = groups.make_spread(kind, access.load, access.store).load
    keep = make_keep(codes)

    def encode(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        source: int,
        target: int,
        count: int,
        number: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        thread = cuda.threadIdx.x
        values = cuda.local.array(_VALUES, types.float32)
        lane, team = thread % LANES, thread // LANES
        group = block * _TEAMS + team
        # While the block's first team has a group: a warp's threads exchange.
        while group - team < number:
            for part in range(PARTS):
                at = PARTS * lane + part
                load(source, group, at, count, values, IN_VECTOR * part)
            keep(target, group, lane, values, group < number)
            group += grid * _TEAMS

    return encode


@functools.cache
def _make_sum(codes: Element, ranks: int) -> Callable[..., None]:
    """Return a device function that adds a word of codes of each rank, by their tree.

    ``(scale, word, nbytes, taken, sums)`` stores the elements of the sum of the first
    ``taken`` ranks, of at most ``ranks``, in the local array ``sums``. ``scale`` and
    ``word`` are the addresses of those of the first rank; ranks are ``nbytes`` apart.
    """
    decode_word = groups.make_codes(codes).decode_word

    @intrinsics.device_function
    def load(scale: int, word: int, nbytes: int, taken: int, sums: Any) -> None:
        factor = intrinsics.f32_of_bits(intrinsics.ld_u32(scale))
        decode_word(intrinsics.ld_u64(word), factor, sums, 0)

    if ranks == 1:
        return load
    half = left_half(ranks)
    left, right = _make_sum(codes, half), _make_sum(codes, ranks - half)

    @intrinsics.device_function
    def add(scale: int, word: int, nbytes: int, taken: int, sums: Any) -> None:
        left(scale, word, nbytes, taken, sums)
        if taken > half:
            others = cuda.local.array(IN_WORD, types.float32)
            apart = half * nbytes
            right(scale + apart, word + apart, nbytes, taken - half, others)
            for j in range(IN_WORD):
                sums[j] = groups.sum_of(sums[j], others[j])

    return add


def make_add(size: int, codes: Element, ranks: int) -> Any:
    """Return the kernel: the codes of all ranks become those of their sum.

    Args:
        size: the number of ranks of the island.
        codes: the type of codes.
        ranks: the number of all ranks, which are added by their tree.
    """
    keep, most = make_keep(codes), min(ranks, MOST)
    sum_of_first = _make_sum(codes, most)
    levels = ((ranks - 1) // MOST).bit_length()
    room = max(1, levels) * IN_WORD

    def add(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        given: int,
        result: int,
        number: int,
        nbytes: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        thread = cuda.threadIdx.x
        values = cuda.local.array(_VALUES, types.float32)
        taken = cuda.local.array(IN_WORD, types.float32)
        # By level, the sum of 2**level times ``MOST`` ranks whose sibling is missing.
        sums = cuda.local.array(room, types.float32)
        lane, team = thread % LANES, thread // LANES
        group = block * _TEAMS + team
        while group - team < number:
            # Those of a team without a group are of the last one, and not kept.
            at = min(group, number - 1)
            scale = given + scale_place_of(at)
            words = given + place_of(at) + VECTOR * PARTS * lane
            # Word by word, because the sums of whole vectors need too many registers.
            for word in range(_VALUES // IN_WORD):
                mine = words + IN_WORD * word
                for first in range(0, ranks, most):
                    apart, left = first * nbytes, min(ranks - first, most)
                    sum_of_first(scale + apart, mine + apart, nbytes, left, taken)
                    last = first + most >= ranks
                    missing = True
                    for level in range(levels):
                        sibling = first // most >> level & 1 != 0
                        for j in range(IN_WORD):
                            k = level * IN_WORD + j
                            if sibling and (missing or last):
                                taken[j] = groups.sum_of(sums[k], taken[j])
                            elif missing and not last:
                                sums[k] = taken[j]
                        missing = missing and sibling
                for j in range(IN_WORD):
                    values[word * IN_WORD + j] = taken[j]
            keep(result, group, lane, values, group < number)
            group += grid * _TEAMS

    return add


@functools.cache
def make_decode_group(
    codes: Element, kind: Element, ragged: bool
) -> Callable[..., None]:
    """Return a device function that decodes a thread's elements of a group.

    ``(given, target, group, lane, count, values)``; ``values`` is a local array of
    ``IN_VECTOR``. The arguments are those of ``make_encode``.
    """
    access = make_lanes(kind, "sum", ragged, 1)
    store = groups.make_spread(kind, access.load, access.store).store
    decode_16 = groups.make_codes(codes).decode

    @intrinsics.device_function
    def decode_group(
        given: int, target: int, group: int, lane: int, count: int, values: Any
    ) -> None:
        bits = intrinsics.ld_u32(given + scale_place_of(group))
        scale = intrinsics.f32_of_bits(bits)
        for part in range(PARTS):
            at = PARTS * lane + part
            low, high = intrinsics.ld_v2_u64(given + place_of(group) + VECTOR * at)
            decode_16(low, high, scale, values, 0)
            store(target, group, at, count, values, 0)

    return decode_group


def make_decode(size: int, codes: Element, kind: Element, ragged: bool) -> Any:
    """Return the kernel: codes become elements; see ``make_encode``."""
    decode_group = make_decode_group(codes, kind, ragged)

    def decode(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        given: int,
        target: int,
        count: int,
        number: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if workspace.load_failure(own, block) != 0:  # explore: failed
            return  # what arrived may not be the sums
        thread = cuda.threadIdx.x
        values = cuda.local.array(IN_VECTOR, types.float32)
        lane, team = thread % LANES, thread // LANES
        group = block * _TEAMS + team
        while group < number:
            decode_group(given, target, group, lane, count, values)
            group += grid * _TEAMS

    return decode


def make_decode_rows(size: int, codes: Element, kind: Element) -> Any:
    """Return the kernel: the codes of a dispatch's tokens become elements.

    Each rank has room for ``capacity`` tokens, of whole records, and ``counts`` has
    their numbers. A token has ``width`` groups.
    """
    decode_group, itemsize = make_decode_group(codes, kind, False), kind.itemsize

    def decode_rows(
        guard: Any,
        early: bool,
        ring: Any,
        own: int,
        grid: int,
        given: int,
        target: int,
        counts: int,
        capacity: int,
        width: int,
    ) -> None:
        block = intrinsics.block_index()
        if block >= grid:
            return
        workspace.follow_previous_grid(early)
        if workspace.load_failure(own, block) != 0:  # explore: rows-failed
            return  # what arrived may not be the tokens
        thread = cuda.threadIdx.x
        values = cuda.local.array(IN_VECTOR, types.float32)
        lane, team = thread % LANES, thread // LANES
        for r in range(size):
            first = r * capacity * width
            there = given + first // IN_RECORD * RECORD
            to, number = target + first * GROUP * itemsize, width
            number *= intrinsics.ld_u64(counts + 8 * r)
            group = block * _TEAMS + team
            while group < number:
                decode_group(there, to, group, lane, number * GROUP, values)
                group += grid * _TEAMS

    return decode_rows


_ARGUMENTS = binding.ADDRESS, binding.ADDRESS, types.int64, types.int64


encode_kernel = binding.kernels_of(make_encode, *_ARGUMENTS)
"""Returns a kernel, compiled when first bound."""


add_kernel = binding.kernels_of(make_add, *_ARGUMENTS)
"""Returns a kernel, compiled when first bound."""


decode_kernel = binding.kernels_of(make_decode, *_ARGUMENTS)
"""Returns a kernel, compiled when first bound."""


decode_rows_kernel = binding.kernels_of(make_decode_rows, *_ARGUMENTS, types.int64)
"""Returns a kernel, compiled when first bound."""


def bind(
    of_call: Kernel, end: binding.Endpoint, number: int, *arguments: int
) -> Launch:
    """Return the packed launch of one of the kernels.

    Args:
        of_call: the kernel.
        end: this rank's end of its island.
        number: the groups.
        arguments: what the kernel takes after the grid.
    """
    grid = min(workspace.divide_up(number, _TEAMS), end.max_blocks)
    return binding.launch(of_call, end, grid, arguments)
