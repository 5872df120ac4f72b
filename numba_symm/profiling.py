"""NVTX ranges around calls, if the program runs under a profiler."""

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
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


class Tag(AbstractContextManager[None]):
    """Labels the calls within ``with`` blocks. It may be entered again, and nested.

    Args:
        begin: returns what labels the calls of one block.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[None]]):
        self._begin = begin
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        block = self._begin()
        block.__enter__()
        self._open.append(block)

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


def marks() -> Marks | None:
    """Return what marks ranges; None without a profiler, or without ``nvtx``."""
    if ATTACHED not in os.environ or importlib.util.find_spec("nvtx") is None:
        return None
    return Marks(importlib.import_module("nvtx"))
