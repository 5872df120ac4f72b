"""Broken variants of the flags, and of the ring, which the search must find."""

import pytest

from explore.markers import moved, removed, replaced, within
from explore.scenarios import (
    all_reduces,
    breaks,
    by_anything_and_by_result,
    calls_after_many,
    each_broken,
    plain_stores_between_barriers,
    worlds,
)
from explore.source import device_code
from explore.world import ALGORITHMS, FLAGGED, MAILED

RELAXED = within(
    "polling", "await-epoch", "ld_acquire_sys_u32(flag)", "ld_relaxed_sys_u32(flag)"
)

# What is broken: the algorithms that it must spoil, and the edits that break them.
BROKEN = {
    "no fence before the flags": (FLAGGED, removed("flags", "fence")),
    "no synchronization before the flags": (FLAGGED, removed("flags", "synchronize")),
    "flags loaded relaxed": (FLAGGED, RELAXED),
    "no synchronization after the flags": (
        FLAGGED,
        replaced("flags", "agree", "return failed"),
    ),
    "one half": (
        FLAGGED,
        within("chunked_all_reduce", "half", "epoch & 1", "0"),
    ),
    "one set of slots": (
        ("chunked",),
        within("chunked_all_reduce", "set", "which * set_stride", "0"),
    ),
    "one set of flags": (
        ("chunked",),
        within("chunked_all_reduce", "flags", "which * flag_set", "0"),
    ),
    "scatter before gather": (
        ("chunked",),
        moved("chunked_all_reduce", "gather", after="scatter"),
    ),
    "gather last": (
        ("chunked",),
        moved("chunked_all_reduce", "gather", after="reduce"),
    ),
}
OF_THREE_RANKS_BROKEN = {  # each has more than one neighbour
    "one flag for all ranks": (
        FLAGGED,
        within("flags", "raise", "4 * rank", "0"),
        within("flags", "wait", "4 * peer", "0"),
    ),
    "neighbours numbered as by their receiver": (
        MAILED,
        replaced("order", "mirror", "return k"),
    ),
    "vectors in the ring's order": (
        ALGORITHMS,
        replaced("order", "rotating", "rotating = False"),
    ),
    "one mailbox for all ranks": (
        MAILED,
        replaced("mailboxes", "rank-stride", "rank_stride = 0"),
    ),
    "slots numbered as by their receiver": (
        ("chunked",),
        replaced("order", "mirror", "return k"),
    ),
}
BARRIER_BROKEN = {
    "no fence before the flags": removed("flags", "fence"),
    "flags loaded relaxed": RELAXED,
}
RESULTS_WITH_THE_CALLS_OF_OTHERS = replaced(
    "chunked_all_reduce", "results", "results_before = before"
)


@by_anything_and_by_result
@each_broken(BROKEN)
def test_flags_broken_are_found(algorithm, edits, ranks, races):
    breaks(all_reduces(device_code(*edits), algorithm), ranks, races=races)


@by_anything_and_by_result
@each_broken(OF_THREE_RANKS_BROKEN, [3])
def test_the_ring_broken_is_found(algorithm, edits, ranks, races):
    breaks(all_reduces(device_code(*edits), algorithm), ranks, races=races)


@worlds
@by_anything_and_by_result
def test_results_counted_with_the_calls_of_others_are_found(races, ranks):
    code = device_code(RESULTS_WITH_THE_CALLS_OF_OTHERS)
    breaks(calls_after_many(code, 2**31 + 10), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", BARRIER_BROKEN)
def test_the_barrier_on_a_stream_broken_is_found(what, races, ranks):
    code = device_code(BARRIER_BROKEN[what])
    breaks(plain_stores_between_barriers(code), ranks, races=races)
