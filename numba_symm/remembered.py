"""A cache that forgets what was not used for long."""

from collections.abc import Hashable
from typing import Any

UNKNOWN: Any = object()
"""What ``Remembered.get`` returns for a key that is not there."""


class Remembered:
    """Values by key: those of the ``most`` keys used last, and some more.

    There are two generations; what is used moves to the younger one, and the older one
    goes when that is full. So a lookup hashes its key once, as in a plain dictionary.
    """

    def __init__(self, most: int):
        self._most = most
        self._young: dict[Hashable, Any] = {}
        self._old: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        """Return a key's value, or ``UNKNOWN``."""
        found = self._young.get(key, UNKNOWN)
        if found is UNKNOWN:
            found = self._old.pop(key, UNKNOWN)
            if found is not UNKNOWN:
                self.put(key, found)
        return found

    def put(self, key: Hashable, value: Any) -> None:
        """Remember a value."""
        if len(self._young) >= self._most:
            self._old = self._young
            self._young = {}
        self._young[key] = value

    def clear(self) -> None:
        """Forget everything."""
        self._young.clear()
        self._old.clear()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
