"""Broken variants of the flags, and of the ring, which the search must find."""

import pytest

from explore.markers import moved, removed, replaced, within
from explore.scenarios import (
    all_reduces,
    breaks,
    by_anything_and_by_result,
    each_broken,
    holds,
    long_all_reduces,
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
    "one half": (FLAGGED, replaced("slots", "half", "half = 1")),
    "one set of slots in a half": (
        FLAGGED,
        within("slots", "set", "chunk & 1", "0"),
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
OF_SETS_BROKEN = {
    "sent before the wait": [moved("chunked", "send", before="wait")],
    **{
        f"results in set {sets} from their chunk's on": [
            within("chunked", "set", "passed", f"{sets}"),
            within("chunked", "collected", "passed", f"{sets}"),
        ]
        for sets in (0, 1, 2)
    },
}
BARRIER_BROKEN = {
    "no fence before the flags": removed("flags", "fence"),
    "flags loaded relaxed": RELAXED,
}


@by_anything_and_by_result
@each_broken(BROKEN)
def test_flags_broken_are_found(algorithm, edits, ranks, races):
    breaks(all_reduces(device_code(*edits), algorithm), ranks, races=races)


@by_anything_and_by_result
@each_broken(OF_THREE_RANKS_BROKEN, [3])
def test_the_ring_broken_is_found(algorithm, edits, ranks, races):
    breaks(all_reduces(device_code(*edits), algorithm), ranks, races=races)


@worlds
def test_all_reduces_in_more_chunks_than_sets(ranks):
    holds(long_all_reduces(device_code()), ranks, 60)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", OF_SETS_BROKEN)
def test_sets_of_results_broken_are_found(what, races, ranks):
    code = device_code(*OF_SETS_BROKEN[what])
    breaks(long_all_reduces(code), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", BARRIER_BROKEN)
def test_the_barrier_on_a_stream_broken_is_found(what, races, ranks):
    code = device_code(BARRIER_BROKEN[what])
    breaks(plain_stores_between_barriers(code), ranks, races=races)
