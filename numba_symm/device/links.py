"""Atomic operations between GPUs: where there are none.

A GPU updates a word of another one's memory atomically only if their link supports it:
NVLink does, PCIe does not. Over PCIe, an update would be a load and a store, which may
overwrite other updates.
"""

from collections.abc import Sequence

_missing: list[str] = []
"""The pairs of GPUs of this process' communicators without native atomics."""


def note_missing(pairs: Sequence[str]) -> None:
    """Refuse atomic operations in kernels that this process compiles from now on."""
    _missing.extend(pair for pair in pairs if pair not in _missing)


def refusal(name: str) -> str:
    """Return why a kernel must not call an atomic function; "" if it may."""
    if not _missing:
        return ""
    return (
        f"{name}: expected GPUs whose links have native atomics (NVLink), got none "
        f"between {', '.join(_missing)}; give each rank its own part of the peer's "
        "buffer, in which no other rank stores"
    )
