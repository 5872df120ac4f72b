"""An array's place in its memory, and the handle that a producer sends."""

import dataclasses
import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays
from numba_symm.gpu.arrays import ArrayView, Memory, strides_of
from numba_symm.gpu.events import HANDLE_BYTES
from numba_symm.sharing.broker import Address
from numba_symm.sharing.counters import DIGEST_BYTES, SLOTS

_LIMIT = 1 << 63  # of addresses and sizes
_AXES = 64  # NumPy has no more
_PLAIN = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[\d*[a-zA-Z]+\])?")


@dataclass(frozen=True)
class ArrayLayout:
    """An array without its memory.

    Attributes:
        offset: bytes from the memory's beginning to the array's first element.
        shape: elements along each axis.
        strides: bytes from one element to the next, along each axis.
        dtype: the type of the elements.

    Raises:
        ArgumentError: no array can have this layout.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: "np.dtype[Any]"

    def __post_init__(self) -> None:
        if not _is_layout(self.offset, self.shape, self.strides, self.dtype):
            raise ArgumentError(
                f"SharedHandle: an array of offset {shown(self.offset)}, shape "
                f"{shown(self.shape)}, strides {shown(self.strides)} and dtype "
                f"{shown(self.dtype)} cannot be shared"
            )

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte and the end, relative to the first element."""
        if 0 in self.shape:
            return 0, 0
        spans = [
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        ]
        low = sum(span for span in spans if span < 0)
        high = sum(span for span in spans if span > 0)
        return low, high + self.dtype.itemsize

    def at(self, offset: int) -> "ArrayLayout":
        """Return the same layout at another offset."""
        return dataclasses.replace(self, offset=offset)

    def dense(self) -> "ArrayLayout":
        """Return the layout of a C-ordered copy, at the beginning of its memory."""
        strides = arrays.dense_strides(self.shape, self.dtype.itemsize)
        return ArrayLayout(0, self.shape, strides, self.dtype)

    def to_json(self) -> list[Any]:
        """Return it as JSON values."""
        dtype = _dtype_to_json(self.dtype)
        return [self.offset, list(self.shape), list(self.strides), dtype]

    @classmethod
    def from_json(cls, found: list[Any]) -> "ArrayLayout":
        """Return the layout from the values of :meth:`to_json`.

        Raises:
            Exception: of any class, for other values.
        """
        offset, shape, strides, dtype = found
        return cls(offset, tuple(shape), tuple(strides), _dtype_from_json(dtype))


def shown(value: Any) -> str:
    """Return any value as a short text for an error."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an int with more digits than Python prints
        return f"a huge {type(value).__name__}"


def _is_layout(offset: Any, shape: Any, strides: Any, dtype: Any) -> bool:
    numbers = (offset, *shape, *strides) if _are_tuples(shape, strides) else (None,)
    if not all(type(n) is int and -_LIMIT < n < _LIMIT for n in numbers):
        return False
    if len(shape) != len(strides) or len(shape) > _AXES or min(shape, default=0) < 0:
        return False
    if not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.itemsize == 0:
        return False
    if dtype.subdtype is not None:  # NumPy does not have arrays of these
        return False
    return bool(math.prod(filter(None, shape)) * dtype.itemsize < _LIMIT)


def _are_tuples(*found: Any) -> bool:
    return all(type(each) is tuple for each in found)


def _dtype_to_json(dtype: "np.dtype[Any]") -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_dtype_to_json(base), list(shape)]
    if dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        return {
            "names": list(dtype.names),
            "formats": [_dtype_to_json(each[0]) for each in fields],
            "offsets": [each[1] for each in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    # The names of ml_dtypes' types, because their ``str`` is that of void.
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def _dtype_from_json(found: Any) -> "np.dtype[Any]":
    named: Any = None
    if isinstance(found, list):
        base, shape = found
        named = _dtype_from_json(base), tuple(shape)
    elif isinstance(found, dict):
        formats = [_dtype_from_json(each) for each in found["formats"]]
        named = found | {"formats": formats}
    else:
        named = found if _PLAIN.fullmatch(found) else getattr(ml_dtypes, found)
    dtype: np.dtype[Any] = np.dtype(named)
    return dtype


def of(array: Any, view: ArrayView) -> ArrayLayout:
    """Return the layout of an array, with offset 0."""
    shape, itemsize = tuple(map(int, view.shape)), view.dtype.itemsize
    if view.order == "C":
        strides = arrays.dense_strides(shape, itemsize)
    elif view.order == "F":
        strides = arrays.dense_strides(shape, itemsize, "F")
    else:
        strides = strides_of(array)
    return ArrayLayout(0, shape, tuple(map(int, strides)), view.dtype)


def build(memory: Memory, layout: ArrayLayout) -> Any:
    """Return a Numba device array of that layout in ``memory``, which it keeps."""
    shape, dtype = layout.shape, layout.dtype
    if 0 in shape:
        from numba import cuda

        return cuda.device_array(shape, dtype)
    if layout.strides == arrays.dense_strides(shape, dtype.itemsize):
        return memory.array(shape, dtype, layout.offset)
    low, high = layout.extent
    bytes_ = memory.array(high - low, np.uint8, layout.offset + low)
    if SIMULATED:
        host = bytes_._ary  # the simulator's array contains a NumPy array
        strides = layout.strides
        return type(bytes_)(np.ndarray(shape, dtype, host, -low, strides))
    return arrays.device_array(shape, layout.strides, dtype, bytes_.gpu_data.view(-low))


_MAGIC = b"numba_symm handle 1\n"
_NAME = re.compile(rb"\0numba_symm-[0-9a-f]{32}")
_TOKEN_BYTES = 16
_EXPORT_BYTES = {"ipc": 64, "pool": 64, "vmm": 0, "host": 0, "none": 0}


@dataclass(frozen=True)
class SharedHandle:
    """A small value that names a shared array. It can be pickled and copied.

    :func:`numba_symm.sharing.share` returns it. Dropping or pickling a handle does not
    change the number of references. Unpickling may execute any code. If a process that
    you do not trust can write to the file or queue, therefore send the bytes of
    :meth:`to_bytes` instead.

    Attributes:
        producer: the address at which the producer answers requests.
        file: the number of the array's counter file.
        slot: its counter there.
        serial: the number of this use of the slot.
        kind: the kind of memory, see :mod:`numba_symm.sharing.kinds`.
        base: the address of its allocation in the producer, which identifies it.
        base_nbytes: the allocation's size.
        base_handle: the allocation's inter-process handle, if that is bytes.
        pool: identifies the pool of the memory.
        start: the offset of the shared bytes in the allocation.
        nbytes: the number of shared bytes.
        layout: the array's place in the allocation: offset, shape, strides, dtype.
        event: the inter-process handle of the event to wait for, or empty.
        event_sync_required: whether consumers have to wait for it.
        device: the UUID of the array's GPU.

    Raises:
        ArgumentError: an attribute is impossible, or the array is outside of the shared
            bytes.
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
    layout: ArrayLayout
    event: bytes = field(repr=False)
    event_sync_required: bool
    device: str

    # Set by the module ``received``, which knows both sides and imports this one.
    _cancel: ClassVar[Callable[["SharedHandle"], int]]

    def __post_init__(self) -> None:
        for name, fits in _FITS.items():
            value = getattr(self, name)
            if not fits(value):
                raise ArgumentError(
                    f"SharedHandle: {name}={shown(value)} is impossible; pass a handle "
                    "of share()"
                )
        low, high = self.layout.extent
        first = self.layout.offset - self.start
        inside = first + low >= 0 and first + high <= self.nbytes
        if not inside or self.start + self.nbytes > self.base_nbytes:
            raise ArgumentError(
                "SharedHandle: the array is outside of the shared bytes; pass a handle "
                "of share()"
            )
        if len(self.base_handle) != _EXPORT_BYTES[self.kind]:
            raise ArgumentError(
                f"SharedHandle: expected {_EXPORT_BYTES[self.kind]} bytes of "
                f"base_handle for {self.kind!r}, got {len(self.base_handle)}; pass a "
                "handle of share()"
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
        """A digest of all but the layout, by which the producer checks handles."""
        found = [getattr(self, name) for name in _RECORDED]
        return _digest(repr((self.producer.name, self.producer.token, *found)).encode())

    def to_bytes(self) -> bytes:
        """Return the handle as bytes, for :meth:`from_bytes` in another process."""
        text = json.dumps(self._recorded() | {"layout": self.layout.to_json()}).encode()
        return _MAGIC + _digest(text) + text

    @classmethod
    def from_bytes(cls, data: bytes) -> "SharedHandle":
        """Return the handle for the bytes that :meth:`to_bytes` returned.

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
                "version, or they were damaged; pass the bytes of to_bytes()"
            )
        try:
            return cls(**_parsed(json.loads(text)))
        except ArgumentError:
            raise
        except Exception as error:  # a wrong type or number may raise any
            raise ArgumentError(
                f"SharedHandle.from_bytes: these bytes are not a handle ({error}); "
                "pass the bytes of to_bytes()"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedHandle.from_bytes, (self.to_bytes(),)

    def cancel(self) -> int:
        """Give back all references that no ``open_shared`` has taken; return how many.

        All handles of this sharing have these references in common. A later
        ``open_shared`` adds a reference if others remain, and otherwise raises an
        error. Any process may call this.

        Raises:
            ArgumentError: the handle was altered.
            ExchangeError: another process, which is stopped, keeps the counters locked.
        """
        return SharedHandle._cancel(self)

    def _recorded(self) -> dict[str, Any]:
        """Return all attributes but the layout, as JSON values."""
        found = {name: getattr(self, name) for name in _RECORDED}
        producer = self.producer.name.hex(), self.producer.token.hex()
        handles = {name: found[name].hex() for name in ("base_handle", "event")}
        return found | handles | {"producer": producer}


def _parsed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes from the values of :meth:`SharedHandle._recorded`."""
    name, token = map(bytes.fromhex, fields["producer"])
    return fields | {
        "producer": Address(name, token),
        "base_handle": bytes.fromhex(fields["base_handle"]),
        "event": bytes.fromhex(fields["event"]),
        "layout": ArrayLayout.from_json(fields["layout"]),
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
    "layout": lambda value: isinstance(value, ArrayLayout),
    "event": lambda value: type(value) is bytes and len(value) in (0, HANDLE_BYTES),
    "event_sync_required": lambda value: type(value) is bool,
    "device": lambda value: type(value) is str and len(value) < 256,
}
"""For each attribute of a handle, whether a value is possible."""

_RECORDED = tuple(name for name in _FITS if name not in ("producer", "layout"))
