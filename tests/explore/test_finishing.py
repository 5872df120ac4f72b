"""The kernels of epilogues, and broken variants."""

import pytest

from explore.finishing import ELEMENTS, ROWS, epilogues, fused
from explore.markers import removed, replaced
from explore.scenarios import breaks, each_transport, holds, worlds
from explore.source import device_code

NO_CHECK = {ELEMENTS: removed("epilogue", "failed")}
NO_CHECK[ROWS] = replaced("epilogue", "failed-rows", "failed = False")


@pytest.mark.parametrize("failed", [False, True], ids=["works", "has failed"])
def test_epilogues_hold(failed):
    holds(epilogues(device_code(), failed), 2, 10)


@pytest.mark.parametrize("kind", [ELEMENTS, ROWS], ids=["elements", "rows"])
def test_a_rank_that_stores_a_result_after_a_failure_is_found(kind):
    code = device_code(NO_CHECK[kind])
    breaks(epilogues(code, failed=True, kinds=[kind]), 2)


@pytest.mark.parametrize(
    "edit",
    [
        removed("finishing", "partials"),
        replaced("epilogue", "parity", "parity = 0"),
    ],
    ids=["no synchronization", "one room"],
)
def test_sums_of_rows_that_threads_do_not_wait_for_are_found(edit):
    breaks(epilogues(device_code(edit), kinds=[ROWS]), 2)


@worlds
@each_transport
def test_all_reduces_that_apply_epilogues_hold(transport, ranks):
    holds(fused(device_code(), transport), ranks, 8)


@worlds
def test_all_reduces_that_apply_epilogues_as_the_epochs_overflow_hold(ranks):
    holds(fused(device_code(), "ll", wrap=True), ranks, 30 // ranks)


@pytest.mark.parametrize(
    ("transport", "edit"),
    [
        ("ll", removed("finishing", "partials")),
        ("ll", removed("mailed_epilogue", "resumed")),
        ("marked", removed("mailboxes", "synchronize")),
    ],
    ids=["no synchronization", "not resumed", "no epochs"],
)
def test_broken_ones_are_found(transport, edit):
    breaks(fused(device_code(edit), transport), 2)
