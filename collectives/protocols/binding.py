"""What a packed call is, several of them in turn, and what ranks compare of one."""

import zlib
from collections.abc import Callable

Enqueue = Callable[[int], None]
"""Enqueues a packed call on the stream of that handle."""


class InTurn:
    """Calls one after another."""

    def __init__(self, *calls: Enqueue):
        self._calls = calls

    def __call__(self, stream: int) -> None:
        """Enqueue all."""
        for call in self._calls:
            call(stream)


def digest_of(call: str) -> int:
    """Return what must be equal on all ranks, of a call in words."""
    return zlib.crc32(call.encode())
