"""What the watchdog tells other islands."""

import numba_symm as ns
from numba_symm.board import Failure
from numba_symm.watchdog import abroad


def told(text, error=ns.CollectiveTimeout, **words):
    return str(abroad(Failure(error, text, **words), "b"))


def test_a_timeout_of_a_kernel_names_the_host():
    text = "rank 2 waited for rank 3 in barrier, block 0"
    assert told(text) == f"{text} on b"
    assert told("rank 3 left", ns.RankLeft) == "rank 3 left"


def test_a_timeout_of_a_host_has_named_it():
    text = "rank 2 waited for rank 0 on a in all_reduce (timeout: 2 s)"
    assert told(text) == text
    limit = "set-up timeout: 5 s"
    assert told("rank 2 waited for rank 3 in empty", limit=limit).endswith(" s)")
