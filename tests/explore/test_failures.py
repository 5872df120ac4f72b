"""Calls that fail: a rank leaves before its last call, or comes about the deadline.

Any look at the clock may find that a deadline has passed, a thread may begin late, and
more stores wait than elsewhere. Whatever fails: nobody stores anything after it has
found a failure, nobody loads what another one may be storing, every word of every
result is right or untouched, and if one rank has failed, all are told.
"""

import pytest

from explore.scenarios import (
    all_reduces,
    breaks,
    calls_of,
    calls_on_own_arrays,
    exchanges_between_barriers,
    holds,
    mailed_calls,
    messages,
    words_by_signals,
)
from explore.source import device_code
from explore.world import ALGORITHMS

IMPATIENT = ("signals", "8 if SIMULATED else 4096", "1")
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
    "own_arrays": calls_on_own_arrays,
    "messages": messages,
    "barrier": exchanges_between_barriers,
    "signals": words_by_signals,
}

GIVE_UP = "                    if failed:\n                        break\n"
AGREED = "syncthreads_or(failed)"
BROKEN = {
    "a total of what did not come": (
        ("one_shot_ll", "one_shot_sentinel"),
        ("one_shot", GIVE_UP, ""),
    ),
    "a shard of what did not come": (
        ("two_shot_ll", "two_shot_marked"),
        ("two_shot", GIVE_UP + " " * 20 + "in_rank", " " * 20 + "in_rank"),
    ),
    "shards that did not come": (
        ("two_shot_ll", "two_shot_marked"),
        ("two_shot", GIVE_UP + " " * 20 + "if target", " " * 20 + "if target"),
    ),
    "vectors that did not come": (("few_ll",), ("exchange", GIVE_UP, "")),
    "what did not come is cleared": (
        ("one_shot_sentinel",),
        (
            "mailboxes",
            "        if arrived:\n            for",
            "        if 1:\n            for",
        ),
    ),
    "another round": (
        ("one_shot_ll", "one_shot_sentinel", "few_ll"),
        ("mailboxes", f"failed = {AGREED}", AGREED),
    ),
    "another call": (
        (
            *("two_shot_marked", "chunked_all_reduce", "one_shot_pull"),
            *("reduce", "messages"),
        ),
        ("workspace", "own + 8 * block) != 0", "own + 8 * block) == -1"),
    ),
    "a block that does not agree on its flags": (
        ("chunked_all_reduce", "one_shot_pull", "gather", "reduce", "broadcast"),
        ("flags", f"return {AGREED}", f"{AGREED}\n        return failed"),
    ),
    "a block of which some have begun late": (
        ("one_shot_pull",),
        (
            "one_shot_pull",
            "while start < vectors:",
            "while start < vectors and not failed:",
        ),
    ),
    "messages of who gave up": (
        ("messages",),
        ("transfer", "                if stopped:\n                    break\n", ""),
    ),
    "messages of a block that does not agree": (
        ("messages",),
        ("transfer", f"stopped = {AGREED}", AGREED),
    ),
    "addresses of who does not come": (
        ("own_arrays",),
        ("handshake", "REFUSED, FAILED = 0, -1", "REFUSED, FAILED = 0, 0"),
    ),
    "a barrier that tells who waited only": (
        ("barrier",),
        (
            "signals",
            "return not syncthreads_or(not met)",
            "syncthreads()\n    return met",
        ),
    ),
    "a signal that was not taken": (
        ("signals",),
        ("signals", "    if taken:\n", "    if True:\n"),
    ),
    "a signal that did not come": (
        ("signals",),
        ("signals", "    if arrived:\n", "    if True:\n"),
    ),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_fail(name, ranks):
    holds(CALLS[name](device_code(IMPATIENT)), ranks, 120 // ranks, haste=HASTE)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        pytest.param(name, edit, id=f"{what}-{name}")
        for what, (names, edit) in BROKEN.items()
        for name in names
    ],
)
def test_who_gave_up_and_goes_on_is_found(name, edit):
    breaks(CALLS[name](device_code(IMPATIENT, edit)), 3, haste=HASTE)
