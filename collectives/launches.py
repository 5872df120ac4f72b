"""What a packed call is, and several of them in turn."""

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
