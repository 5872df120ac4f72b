"""The kernels of exact sums, and a broken variant."""

import pytest

from explore.markers import removed
from explore.scenarios import breaks, holds
from explore.source import device_code
from explore.summing import exact_sums

STORES_AFTER_A_FAILURE = removed("exact_sum", "failed")


@pytest.mark.parametrize("failed", [False, True], ids=["works", "has failed"])
def test_exact_sums_hold(failed):
    holds(exact_sums(device_code(), failed), 2, 10)


def test_a_rank_that_stores_a_result_after_a_failure_is_found():
    breaks(exact_sums(device_code(STORES_AFTER_A_FAILURE), failed=True), 2)
