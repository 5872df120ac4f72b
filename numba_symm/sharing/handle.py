"""What travels from a producer to its consumers."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from numba_symm.errors import ArgumentError
from numba_symm.events import HANDLE_BYTES
from numba_symm.sharing.broker import Address
from numba_symm.sharing.counters import DIGEST_BYTES, SLOTS
from numba_symm.sharing.layout import Layout, shown

_MAGIC = b"numba_symm handle 1\n"
_NAME = re.compile(rb"\0numba_symm-[0-9a-f]{32}")
_TOKEN_BYTES = 16
_EXPORT_BYTES = {"ipc": 64, "pool": 64, "vmm": 0, "host": 0, "none": 0}


@dataclass(frozen=True)
class SharedHandle:
    """Names an array of another process; small, and may be pickled and copied.

    Dropping or pickling one gives nothing back. Made by
    :func:`numba_symm.sharing.share`. Through a file or a queue that others can write
    to, send what :meth:`to_bytes` returns, as a pickle may run any code.

    Attributes:
        producer: where its process answers.
        file: the number of its counter file.
        slot: its counter there.
        serial: which use of the slot it is.
        kind: of the memory, see :mod:`numba_symm.sharing.kinds`.
        base: where its allocation begins in the producer, which names it.
        base_nbytes: the allocation's size.
        base_handle: the allocation's inter-process handle, where that is bytes.
        pool: names the pool it is of.
        start: where in the allocation what was shared begins.
        nbytes: how many bytes of it were shared.
        layout: where in the allocation the array is: offset, shape, strides, dtype.
        event: the inter-process handle of what to wait for, or empty.
        event_sync_required: whether consumers have to wait for it.
        device: the UUID of the GPU it lies on.

    Raises:
        ArgumentError: an attribute cannot be one, or the array lies elsewhere.
    """

    producer: Address
    file: int
    slot: int
    serial: int
    kind: str
    base: int
    base_nbytes: int
    base_handle: bytes = field(repr=False)
    pool: int
    start: int
    nbytes: int
    layout: Layout
    event: bytes = field(repr=False)
    event_sync_required: bool
    device: str

    # Set by the module ``consumer``, which knows both sides and imports this one.
    _cancel: ClassVar[Callable[["SharedHandle"], int]]

    def __post_init__(self) -> None:
        for name, fits in _FITS.items():
            value = getattr(self, name)
            if not fits(value):
                raise ArgumentError(
                    f"SharedHandle: {name}={shown(value)} cannot be; pass what "
                    "share() gave"
                )
        low, high = self.layout.extent
        first = self.layout.offset - self.start
        inside = first + low >= 0 and first + high <= self.nbytes
        if not inside or self.start + self.nbytes > self.base_nbytes:
            raise ArgumentError(
                "SharedHandle: the array lies outside of what was shared; pass what "
                "share() gave"
            )
        if len(self.base_handle) != _EXPORT_BYTES[self.kind]:
            raise ArgumentError(
                f"SharedHandle: base_handle has {len(self.base_handle)} bytes, not "
                f"those of {self.kind!r}; pass what share() gave"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.layout.shape

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The array's dtype."""
        return self.layout.dtype

    @property
    def digest(self) -> bytes:
        """A digest of all but the layout, which the producer keeps to check by."""
        found = [getattr(self, name) for name in _RECORDED]
        return _digest(repr((self.producer.name, self.producer.token, *found)).encode())

    def to_bytes(self) -> bytes:
        """Return the handle as bytes, for :meth:`from_bytes` in any process."""
        text = json.dumps(self._recorded() | {"layout": self.layout.to_json()}).encode()
        return _MAGIC + _digest(text) + text

    @classmethod
    def from_bytes(cls, data: bytes) -> "SharedHandle":
        """Return the handle that :meth:`to_bytes` has made bytes of.

        Raises:
            ArgumentError: these are other bytes, or they were damaged.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentError(
                f"SharedHandle.from_bytes: expected bytes, got {type(data).__name__}"
            )
        data = bytes(data)
        text = data[len(_MAGIC) + DIGEST_BYTES :]
        if data != _MAGIC + _digest(text) + text:
            raise ArgumentError(
                "SharedHandle.from_bytes: these are not the bytes of a handle of this "
                "version, or they were damaged; pass what to_bytes() gave"
            )
        try:
            return cls(**_parsed(json.loads(text)))
        except ArgumentError:
            raise
        except Exception as error:  # whatever a wrong type or number leads to
            raise ArgumentError(
                f"SharedHandle.from_bytes: these bytes name no array ({error}); pass "
                "what to_bytes() gave"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedHandle.from_bytes, (self.to_bytes(),)

    def cancel(self) -> int:
        """Give back the references that no open has taken; return how many.

        All handles of this sharing share these references. An open that comes later
        adds one if others are still out, and else raises. Any process may cancel.

        Raises:
            ArgumentError: the handle was altered.
            ExchangeError: another process, which is stopped, keeps the counters locked.
        """
        return SharedHandle._cancel(self)

    def _recorded(self) -> dict[str, Any]:
        """Return all attributes but the layout, as JSON has them."""
        found = {name: getattr(self, name) for name in _RECORDED}
        producer = self.producer.name.hex(), self.producer.token.hex()
        handles = {name: found[name].hex() for name in ("base_handle", "event")}
        return found | handles | {"producer": producer}


def _parsed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return what :meth:`SharedHandle._recorded` and the layout were made of."""
    name, token = map(bytes.fromhex, fields["producer"])
    return fields | {
        "producer": Address(name, token),
        "base_handle": bytes.fromhex(fields["base_handle"]),
        "event": bytes.fromhex(fields["event"]),
        "layout": Layout.from_json(fields["layout"]),
    }


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def _below(limit: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value < limit


def _is_address(value: Any) -> bool:
    if not isinstance(value, Address):
        return False
    name, token = value.name, value.token
    if type(name) is not bytes or type(token) is not bytes:
        return False
    return _NAME.fullmatch(name) is not None and len(token) == _TOKEN_BYTES


_FITS: dict[str, Callable[[Any], bool]] = {
    "producer": _is_address,
    "file": _below(1 << 31),
    "slot": _below(SLOTS),
    "serial": _below(1 << 63),
    "kind": lambda value: type(value) is str and value in _EXPORT_BYTES,
    "base": _below(1 << 64),
    "base_nbytes": _below(1 << 63),
    "base_handle": lambda value: type(value) is bytes,
    "pool": _below(1 << 64),
    "start": _below(1 << 63),
    "nbytes": _below(1 << 63),
    "layout": lambda value: isinstance(value, Layout),
    "event": lambda value: type(value) is bytes and len(value) in (0, HANDLE_BYTES),
    "event_sync_required": lambda value: type(value) is bool,
    "device": lambda value: type(value) is str and len(value) < 256,
}
"""What each attribute of a handle may be."""

_RECORDED = tuple(name for name in _FITS if name not in ("producer", "layout"))
