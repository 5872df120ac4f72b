"""The kernels of quantized sums, and broken variants."""

import pytest

from explore.coding import sums_by_codes, tokens_by_codes
from explore.markers import removed
from explore.scenarios import breaks, holds
from explore.source import Shape, device_code

CALLS = {
    sums_by_codes: removed("coded_sum", "failed"),
    tokens_by_codes: removed("coded_sum", "rows-failed"),
}
TEAMS = Shape(16, 2, 2)  # a block has two teams, and often one group


@pytest.mark.parametrize("failed", [False, True], ids=["works", "has failed"])
@pytest.mark.parametrize("calls", CALLS)
def test_calls_by_codes_hold(calls, failed):
    holds(calls(device_code(shape=TEAMS), failed), 2, 20, shape=TEAMS)


@pytest.mark.parametrize("calls", CALLS)
def test_a_rank_that_stores_a_result_after_a_failure_is_found(calls):
    breaks(calls(device_code(CALLS[calls]), failed=True), 2)
