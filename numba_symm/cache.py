"""A cache that evicts values that were not used recently."""

from collections.abc import Hashable
from typing import Any

UNKNOWN: Any = object()
"""The result of ``Cache.get`` for a missing key."""


class Cache:
    """Values by key: those of the ``most`` keys used last, and at most as many more.

    There are two generations. A lookup moves a value to the younger one. When that is
    full, it replaces the older one. So a lookup of a recently used key hashes the key
    once, as in a dictionary.

    Attributes:
        young: the values of the younger generation, for lookups that may miss others.
    """

    def __init__(self, most: int):
        self._most = most
        self.young: dict[Hashable, Any] = {}
        self._old: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        """Return a key's value, or ``UNKNOWN``."""
        found = self.young.get(key, UNKNOWN)
        if found is UNKNOWN:
            found = self._old.pop(key, UNKNOWN)
            if found is not UNKNOWN:
                self.put(key, found)
        return found

    def put(self, key: Hashable, value: Any) -> None:
        """Store a value."""
        if len(self.young) >= self._most:
            self._old = self.young
            self.young = {}
        self.young[key] = value

    def clear(self) -> None:
        """Remove all values."""
        self.young.clear()
        self._old.clear()

    def __len__(self) -> int:
        return len(self.young) + len(self._old)
