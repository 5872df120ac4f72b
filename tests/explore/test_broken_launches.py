"""Broken variants of launches that overlap, and of blocks that share a thread block."""

import pytest

from explore.coding import sums_by_codes
from explore.markers import removed, replaced, within
from explore.scenarios import (
    all_reduces,
    breaks,
    by_anything_and_by_result,
    calls_of,
    calls_on_own_arrays,
    mailed_calls,
    messages,
)
from explore.source import device_code

CALLS = {
    "one_shot_ll": lambda code: all_reduces(code, "one_shot_ll"),
    "two_shot_marked": lambda code: all_reduces(code, "two_shot_marked"),
    "few_sentinel": lambda code: mailed_calls(code, "sentinel"),
    "chunked": lambda code: all_reduces(code, "chunked"),
    "exchanges": lambda code: calls_of(code, "gather", "scan"),
    "direct": calls_on_own_arrays,
    "messages": messages,
    "codes": sums_by_codes,
}
STARTS_BROKEN = {
    "no wait for the previous grid": removed("workspace", "previous"),
    "a wait of each block's first thread for the previous grid": replaced(
        "workspace",
        "previous",
        "if thread_index_x() == 0:\n    griddepcontrol_wait()",
    ),
}


@by_anything_and_by_result
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("what", STARTS_BROKEN)
def test_starts_that_do_not_follow_the_previous_grid_are_found(what, name, races):
    breaks(CALLS[name](device_code(STARTS_BROKEN[what])), 2, races=races)


ONE_BARRIER = [
    within(file, mark, "thread_index_y()", "0")
    for file, mark in (
        ("workspace", "synchronize"),
        ("workspace", "agree"),
        ("flags", "synchronize"),
        ("flags", "agree"),
        ("handshake", "agree"),
    )
]
# One block takes its registers; nothing to synchronize.
SHARING = CALLS.keys() - {"one_shot_ll", "codes"}


@pytest.mark.parametrize("name", sorted(SHARING))
def test_one_barrier_for_all_blocks_of_a_thread_block_is_found(name):
    breaks(CALLS[name](device_code(*ONE_BARRIER)), 2)
