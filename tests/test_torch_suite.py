"""torch's own tests of collectives and messages, by the backend, between two ranks.

They are in torch's wheel. In the simulator, the backend takes tensors of the CPU, so
these are the tests that torch makes of gloo and MPI, too. ``make nightly`` runs them in
an environment that has torch and expecttest.
"""

import os
import subprocess
import sys

import pytest

from tests.whole import WHOLE

TESTS = (
    *("all_gather", "all_gather_complex", "all_reduce_sum", "all_reduce_product"),
    *("all_reduce_full_group_min", "all_reduce_sum_async", "all_reduce_sum_complex"),
    *("all_reduce_complex_unsupported_ops", "barrier", "barrier_full_group"),
    *("all_reduce_coalesced_max_complex_unsupported", "broadcast", "gather"),
    *("gather_checks", "gather_full_group", "get_backend", "irecv", "isend"),
    *("reduce_sum", "reduce_max", "reduce_sum_twice", "scatter", "scatter_checks"),
    *("scatter_complex", "DistributedDataParallelCPU", "Backend_enum_class"),
)


@pytest.mark.skipif(not WHOLE, reason="it takes minutes: make nightly")
@pytest.mark.parametrize("name", TESTS)
def test_torch_s_own(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("expecttest")
    for folder in ("barrier", "test_dir", "init_dir"):
        (tmp_path / folder).mkdir()
    own = {"BACKEND": "symm", "WORLD_SIZE": "2", "TEMP_DIR": str(tmp_path)}
    given = os.environ | own | {"NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "tests.test_torch_suite", f"Own.test_{name}"]
    ended = subprocess.run(command, env=given, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "\nOK\n" in ended.stderr, "it was skipped"


if "BACKEND" in os.environ:  # also in the processes that torch starts
    from torch.testing._internal.common_utils import run_tests
    from torch.testing._internal.distributed import distributed_test

    import numba_symm.torch  # noqa: F401  # registers the backend

    class Own(
        distributed_test.TestDistBackend,
        distributed_test.DistributedTest._DistTestBase,
    ):
        def setUp(self):
            super().setUp()
            self._spawn_processes()

    if __name__ == "__main__":
        run_tests()
