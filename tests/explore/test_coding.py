"""The kernels of sums by codes, and broken variants."""

import pytest

from explore.coding import sums_by_codes
from explore.markers import removed
from explore.scenarios import breaks, holds
from explore.source import device_code

NO_CHECK = removed("coded_sum", "failed")


@pytest.mark.parametrize("failed", [False, True], ids=["works", "has failed"])
def test_sums_by_codes_hold(failed):
    holds(sums_by_codes(device_code(), failed), 2, 10)


def test_a_rank_that_stores_a_result_after_a_failure_is_found():
    breaks(sums_by_codes(device_code(NO_CHECK), failed=True), 2)
