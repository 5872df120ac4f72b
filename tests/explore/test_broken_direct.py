"""Broken variants of calls on the ranks' own arrays, which the search must find."""

import pytest

from explore.markers import removed, replaced, within
from explore.scenarios import (
    breaks,
    by_anything_and_by_result,
    calls_on_own_arrays,
    holds,
    worlds,
)
from explore.source import device_code

DONE = "is_done(guard, ring, own, block, fallback_for)"


def left_undone(module):
    """Return the edit by which the third launch does nothing."""
    return within(module, "fallback", DONE, f"({DONE} or fallback_for != 0)")


def done_always(module):
    """Return the edit by which the third launch does the call again."""
    return within(module, "fallback", DONE, f"({DONE} and False)")


ADDRESSES = {
    "no fence before the addresses": removed("handshake", "fence"),
    "the addresses not acquired": removed("handshake", "acquire"),
    "no wait for the block's addresses": replaced(
        "handshake", "agree", "return failed"
    ),
}
REFUSALS = {
    "its own refusal ignored": within(
        "handshake", "refuses", "first[0] == REFUSED", "False"
    ),
    "another rank's refusal ignored": removed("handshake", "found"),
    "no wait for the others' loads and stores": removed("handshake", "wait"),
    "the work after a refusal": within("direct", "refused", "not found", "True"),
    "no fallback after a refusal": left_undone("chunked"),
    "a fallback without a refusal": done_always("chunked"),
}
BROKEN = {
    **ADDRESSES,
    **REFUSALS,
    "the digest not compared": within("handshake", "poll", "missing | late", "missing"),
    "the input's address for the output's": replaced(
        "direct", "into", "there, _ = handshake.words_of(sent, to_root)"
    ),
}
OF_SHARDS_BROKEN = {
    **ADDRESSES,
    **REFUSALS,
    "addresses that have not arrived": within(
        "handshake", "poll", "missing | late", "late"
    ),
    "another rank's shard loaded": within("direct", "shard", "offset", "0"),
}
OF_ALL_REDUCE_BROKEN = {
    "the input's address for the output's": replaced(
        "direct", "everywhere", "there, _ = handshake.words_of(sent, k)"
    ),
    "the result stored in another shard": within(
        "direct", "whose", "there + offset", "there"
    ),
    "an output's refusal ignored": replaced("direct", "both", "pass"),
}
OF_TWO_RANKS_BROKEN = {
    **ADDRESSES,
    "no fallback after a refusal": left_undone("chunked"),
    "a fallback without a refusal": done_always("chunked"),
    "no wait for the other's loads": removed("handshake", "wait"),
}
FLAGS_NOT_RENEWED = replaced(
    "handshake",
    "signal",
    "if not found:\n    failed = raise_flags(ring, flag, guard.rank, epoch, failed)",
)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN)
def test_calls_on_own_arrays_broken_are_found(what, races):
    breaks(calls_on_own_arrays(device_code(BROKEN[what])), 3, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", OF_TWO_RANKS_BROKEN)
def test_reductions_of_two_ranks_own_arrays_broken_are_found(what, races):
    code = device_code(OF_TWO_RANKS_BROKEN[what])
    breaks(calls_on_own_arrays(code), 2, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", OF_SHARDS_BROKEN)
def test_reductions_of_own_arrays_by_shards_broken_are_found(what, ranks, races):
    code = device_code(OF_SHARDS_BROKEN[what])
    names = "all_reduce", "reduce_scatter"
    breaks(calls_on_own_arrays(code, names=names), ranks, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", OF_ALL_REDUCE_BROKEN)
def test_all_reduces_of_own_arrays_broken_are_found(what, ranks, races):
    code = device_code(OF_ALL_REDUCE_BROKEN[what])
    breaks(calls_on_own_arrays(code, names=["all_reduce"]), ranks, races=races)


@by_anything_and_by_result
def test_flags_that_refused_calls_did_not_renew_are_found(races):
    code = device_code(FLAGS_NOT_RENEWED)
    breaks(calls_on_own_arrays(code, 2**31, 2**31 - 1), 3, races=races)


POLLS = replaced("polling", "polls", "POLLS_PER_CHECK = 4")
"""A wait that has begun to check may end between two checks."""

OFTEN = 0.2  # deadlines pass

LATE_BROKEN = {
    "no look at the mark after the addresses": removed("handshake", "given-up"),
    "no mark by who gives up": removed("handshake", "tell"),
    "no read of the board after a long wait": within(
        "handshake", "late", "started != 0", "False"
    ),
}


@worlds
def test_late_ranks_change_no_arrays(ranks):
    holds(calls_on_own_arrays(device_code(POLLS)), ranks, 120 // ranks, haste=OFTEN)


# Of three ranks, one is seldom late after both others have given up.
@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        *((what, 2) for what in LATE_BROKEN),
        ("no mark by who gives up", 3),
        ("no read of the board after a long wait", 3),
    ],
)
def test_late_ranks_that_change_arrays_are_found(what, ranks):
    code = device_code(POLLS, LATE_BROKEN[what])
    breaks(calls_on_own_arrays(code, names=["all_reduce"]), ranks, haste=OFTEN)
