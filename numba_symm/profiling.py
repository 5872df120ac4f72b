"""NVTX ranges around calls, if the program runs under a profiler."""

import importlib.util
import os
from typing import Any

DOMAIN = "numba_symm"
"""The domain of the ranges, by which a profiler groups them."""

ATTACHED = "NVTX_INJECTION64_PATH"
"""The variable by which a profiler attaches itself to NVTX."""


class Marks:
    """Begins and ends ranges.

    Args:
        nvtx: the package of that name.
    """

    def __init__(self, nvtx: Any):
        self._nvtx = nvtx

    def push(self, text: str) -> None:
        """Begin a range."""
        self._nvtx.push_range(text, domain=DOMAIN)

    def pop(self) -> None:
        """End the latest range."""
        self._nvtx.pop_range(domain=DOMAIN)


def marks() -> Marks | None:
    """Return what marks ranges; None without a profiler, or without ``nvtx``."""
    if ATTACHED not in os.environ or importlib.util.find_spec("nvtx") is None:
        return None
    return Marks(importlib.import_module("nvtx"))
