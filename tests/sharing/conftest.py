"""The processes of these tests may share a GPU: two are enough for most of them."""

import pytest

from numba_symm.launch import devices


@pytest.fixture(autouse=True)
def _one_gpu_is_enough(monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES", "1")


@pytest.fixture
def gpus():
    """Skip without a GPU: what the simulator cannot show."""
    if not devices.visible_gpus():
        pytest.skip("no NVIDIA GPU")
