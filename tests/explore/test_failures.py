"""Calls that fail: a rank leaves before its last call, or is late.

Any check of the clock may find that a deadline has passed. A thread may start late, and
more stores are buffered than in other tests. In any case:

- a thread stores no data after it has found a failure;
- no thread loads a word while another one may store it;
- every word of every result is right or unchanged;
- if one rank has failed, every rank's board has a record.
"""

import pytest

from explore.block_calls import collectives
from explore.finishing import fused
from explore.markers import removed, replaced, within
from explore.scenarios import (
    all_reduces,
    breaks,
    calls_of,
    calls_on_own_arrays,
    exchanges_between_barriers,
    holds,
    mailed_calls,
    messages,
    requests,
    requests_and_sums,
    words_by_signals,
)
from explore.source import device_code
from explore.test_barriers import exchanges as exchanges_of_grids
from explore.test_copies import calls_by_copies
from explore.test_counting import gatherings, pipelines
from explore.test_device_copies import pipelines as pipelines_of_packets
from explore.test_expert_calls import calls_of_experts, calls_of_few_tokens
from explore.test_operations import calls_of_pairs
from explore.world import ALGORITHMS

IMPATIENT = replaced("polling", "polls", "POLLS_PER_CHECK = 1")
"""Every poll looks at the clock."""

HASTE = 0.02
CALLS = {
    **{name: lambda code, name=name: all_reduces(code, name) for name in ALGORITHMS},
    "all_reduces": lambda code: all_reduces(code, *ALGORITHMS),
    "few_ll": lambda code: mailed_calls(code, "ll"),
    "few_marked": lambda code: mailed_calls(code, "marked"),
    "gather": lambda code: calls_of(code, "gather"),
    "scan": lambda code: calls_of(code, "scan"),
    "reduce": lambda code: calls_of(code, "reduce"),
    "broadcast": lambda code: calls_of(code, "broadcast"),
    "relayed": lambda code: calls_of_pairs(code, ("broadcast", "two_shot_marked")),
    "own_arrays": calls_on_own_arrays,
    "copies": calls_by_copies,
    "fused": fused,
    "experts": calls_of_experts,
    "few_tokens": calls_of_few_tokens,
    "messages": messages,
    "requests": requests,
    "request_then_sum": lambda code: requests_and_sums(code, "request_then_sum"),
    "sum_then_request": lambda code: requests_and_sums(code, "sum_then_request"),
    "barrier": exchanges_between_barriers,
    "signals": words_by_signals,
    "pipeline": pipelines,
    "gatherings": gatherings,
    "packets": pipelines_of_packets,
    "grids": exchanges_of_grids,
    "collectives_of_blocks": lambda code: collectives(code, steps=2),
}

AGREED = "syncthreads_or(failed)"
RESUME = "workspace.resume(marks, kept, block)"
BROKEN = {
    "a total of data that did not arrive": (
        ("one_shot_ll", "one_shot_sentinel"),
        removed("one_shot", "give-up"),
    ),
    "a shard of data that did not arrive": (
        ("two_shot_sentinel", "two_shot_marked"),
        removed("two_shot", "give-up-scatter"),
    ),
    "shards that did not arrive": (
        ("two_shot_sentinel", "two_shot_marked"),
        removed("two_shot", "give-up-gather"),
    ),
    "a shard of the root that did not arrive": (
        ("relayed",),
        removed("two_shot_broadcast", "give-up-scatter"),
    ),
    "shards of other owners that did not arrive": (
        ("relayed",),
        removed("two_shot_broadcast", "give-up-relay"),
    ),
    "data of packets that did not arrive": (
        ("packets",),
        within("packets", "received", "arrived", "True"),
    ),
    "a mailbox is cleared before data arrives": (
        ("one_shot_sentinel",),
        within("mailboxes", "arrived", "arrived", "True"),
    ),
    "another epoch": (
        ("one_shot_ll", "one_shot_sentinel", "few_ll"),
        replaced("mailboxes", "synchronize", AGREED),
    ),
    "another call": (
        (
            *("two_shot_marked", "chunked"),
            *("reduce", "messages", "own_arrays", "experts"),
        ),
        within(
            "workspace",
            "failed",
            "load_failure(own, block)",
            "load_failure(own, block) * 0",
        ),
    ),
    "a kernel after copies that reads no mark": (
        ("copies",),
        replaced("workspace", "mark", "return 0"),
    ),
    "a sum after a failed request": (
        ("request_then_sum",),
        within("transfer", "keep", "failed", "False"),
    ),
    "a request after a failed sum": (
        ("sum_then_request",),
        within("transfer", "resume", RESUME, f"({RESUME}[0], 0)"),
    ),
    "a block that does not agree on its flags": (
        ("chunked", "gather", "reduce", "broadcast", "experts"),
        replaced("flags", "agree", f"{AGREED}\nreturn failed"),
    ),
    "a token that did not arrive": (
        ("few_tokens",),
        removed("mailed_dispatch", "give-up"),
    ),
    "a result that did not arrive": (
        ("few_tokens",),
        removed("mailed_combine", "give-up"),
    ),
    "messages after giving up": (("messages",), removed("transfer", "give-up")),
    "messages of a block that does not agree": (
        ("messages",),
        replaced("transfer", "agree", AGREED),
    ),
    "messages after a length that did not arrive": (
        ("messages",),
        removed("transfer", "unlearned"),
    ),
    "a barrier that returns only what its thread found": (
        ("barrier",),
        replaced("barriers", "agree", "syncthreads()\nreturn arrived"),
    ),
    "a result of packets that did not arrive": (
        ("collectives_of_blocks",),
        within("block_exchange", "arrived", "arrived", "True"),
    ),
    "a collective of a block that does not agree": (
        ("collectives_of_blocks",),
        within("block_exchange", "agree", AGREED, f"{AGREED} and failed"),
    ),
    "a collective whose start has found a failure": (
        ("collectives_of_blocks",),
        removed("block_exchange", "refuse"),
    ),
    "the next collective of a block": (
        ("collectives_of_blocks",),
        removed("block_exchange", "keep-failure"),
    ),
    "the next collective of another block": (
        ("collectives_of_blocks",),
        within(
            "block_exchange",
            "find",
            "ld_relaxed_sys_u32(own + MARK * block) != 0",
            "False",
        ),
    ),
    "signals after giving up": (
        ("grids",),
        replaced("barriers", "token", "return before"),
    ),
    "a generation after giving up": (
        ("grids",),
        within("barriers", "generation", "arrived and thread == 0", "thread == 0"),
    ),
    "a signal that was not taken": (
        ("signals",),
        within("signals", "put", "taken", "True"),
    ),
    "a signal that did not arrive": (
        ("signals",),
        within("signals", "take", "arrived", "True"),
    ),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_fail(name, ranks):
    holds(CALLS[name](device_code(IMPATIENT)), ranks, 120 // ranks, haste=HASTE)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "name", sorted(CALLS.keys() - {"messages", "requests"})
)  # not to all
def test_every_rank_ends_when_one_is_absent(name, ranks):
    calls = CALLS[name](device_code(IMPATIENT))
    holds(calls, ranks, 12 // ranks, haste=HASTE, absent=ranks - 1)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        pytest.param(name, edit, id=f"{what}-{name}")
        for what, (names, edit) in BROKEN.items()
        for name in names
    ],
)
def test_work_after_giving_up_is_found(name, edit):
    breaks(CALLS[name](device_code(IMPATIENT, edit)), 3, haste=HASTE)


SILENT = {
    "only its own board": within("polling", "fail", "8 * r", "8 * guard.rank"),
    "no board": removed("polling", "fail"),
    "nothing after a deadline": replaced("polling", "deadline", "return False"),
}


@pytest.mark.parametrize("absent", [None, 2])
@pytest.mark.parametrize("what", SILENT)
@pytest.mark.parametrize("name", ["one_shot_ll", "chunked", "signals"])
def test_a_failure_that_is_not_reported_is_found(name, what, absent):
    code = device_code(IMPATIENT, SILENT[what])
    breaks(CALLS[name](code), 3, haste=HASTE, absent=absent)
