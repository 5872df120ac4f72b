"""Device arrays of an explored program: NumPy arrays whose accesses are checked."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from numba_symm.explore import machine
from numba_symm.explore.faults import Fault, Unsupported
from numba_symm.explore.memory import Area

Index = Any
_ARRAYS = (list, np.ndarray)


class Array(np.ndarray[Any, Any]):
    """An array in a region."""

    region: Area | None = None
    _start: int | None = None

    @classmethod
    def of(cls, region: Area, shape: Any, dtype: Any, offset: int = 0) -> "Array":
        """Return the C-contiguous array at an offset of a region."""
        dtype = np.dtype(dtype)
        shape = _tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if offset + nbytes > region.nbytes:
            raise Fault(
                "access", f"an array of {nbytes} bytes reaches beyond {region.name}"
            )
        found: Array = np.ndarray.__new__(cls, shape, dtype, region.buffer, offset)
        found.region, found._start = region, offset
        return found

    def __array_finalize__(self, other: Any) -> None:
        self.region = getattr(other, "region", None)

    def start(self) -> int:
        """Return the array's offset in its region."""
        if self._start is None:
            assert self.region is not None
            start = self.__array_interface__["data"][0] - self.region.origin
            if not 0 <= start <= self.region.nbytes:
                raise unsupported("a copy of a device array by NumPy")
            self._start = start
        return self._start

    @property
    def address(self) -> int:
        """Return the address of the first element."""
        assert self.region is not None
        return self.region.base + self.start()

    @property
    def ctypes(self) -> Any:
        """Return what device functions take the address from."""
        return SimpleNamespace(data=self.address)

    @property
    def memory(self) -> Any:
        """Return the elements without checks."""
        return self.view(np.ndarray)

    def offset_of(self, index: Index) -> int:
        """Return the offset of an element in the region."""
        places = index if isinstance(index, tuple) else (index,)
        offset = self.start()
        for place, length, stride in zip(places, self.shape, self.strides, strict=True):
            offset += (int(place) + length * (place < 0)) * stride
        return offset

    def _part(self, index: Index) -> Any:
        for place in index if isinstance(index, tuple) else (index,):
            if isinstance(place, _ARRAYS):
                raise unsupported("an array as the index of a device array")
        try:
            return np.ndarray.__getitem__(self, index)
        except IndexError as error:
            name = self.region.name if self.region is not None else "an array"
            raise Fault("access", f"{error}, in {name}; a GPU does not check") from None

    def __getitem__(self, index: Index) -> Any:
        part = self._part(index)
        if isinstance(part, np.ndarray) or self.region is None:
            return part
        _check(self.region, self.offset_of(index), self.itemsize, None)
        return np.ndarray.__getitem__(self, index)

    def __setitem__(self, index: Index, value: Any) -> None:
        part = self._part(index)
        if isinstance(part, Array):
            values = value if isinstance(value, Array) else np.asarray(value)
            for place in np.ndindex(part.shape):
                part[place] = _broadcast(values, part.shape, place)
            return
        if isinstance(value, np.ndarray):
            value = value[(0,) * value.ndim]
        value = converted(self.dtype, value)
        if self.region is not None:

            def stored() -> bytes:
                return np.array([value]).astype(self.dtype).tobytes()

            _check(self.region, self.offset_of(index), self.itemsize, stored)
        np.ndarray.__setitem__(self, index, value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **_: Any) -> Any:
        raise unsupported(f"np.{ufunc.__name__} of a device array")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in (np.ndim, np.shape, np.size):
            return func(self.memory)
        raise unsupported(f"np.{func.__name__} of a device array")

    def __contains__(self, item: Any) -> bool:
        raise unsupported("`in` a device array")

    def store(self, values: Any, by: Any = None, site: Any = None) -> None:
        """Store all elements, as one copy that an observer makes; None: a thread."""
        self._touch(True, by, site)
        self.memory[...] = np.asarray(values).reshape(self.shape)

    def load(self, by: Any = None, site: Any = None) -> Any:
        """Return all elements, as one copy."""
        self._touch(False, by, site)
        return np.array(self.memory)

    def _touch(self, write: bool, by: Any, site: Any) -> None:
        execution, region = machine.running(), self.region
        stored = bytes if write else None  # what it stores differs from what is there
        assert region is not None
        spans = [(self.start(), self.nbytes)]
        if not self.flags.c_contiguous:
            places = np.ndindex(self.shape)
            spans = [(self.offset_of(place), self.itemsize) for place in places]
        for offset, nbytes in spans:
            if by is None:
                execution.weak(region, offset, nbytes, stored)
            else:
                execution.memory.weak(by, region, offset, nbytes, stored, site)

    def copy_to_host(self, ary: Any = None, stream: Any = 0) -> Any:
        """Wait for the stream, and return a copy of the elements."""
        machine.running().me().local.drain()
        found = self.load()
        if ary is None:
            return found
        ary[...] = found
        return ary

    def copy_to_device(self, ary: Any, stream: Any = 0) -> None:
        """Wait for the stream, and store a copy of an array."""
        machine.running().me().local.copy_in(self, ary)


def _check(region: Area, offset: int, nbytes: int, stored: Any) -> None:
    execution = machine.running()
    local = execution.me().local
    if execution.me().name.block is None:
        local.drain()
    execution.weak(region, offset, nbytes, stored)


def _broadcast(values: Any, shape: tuple[int, ...], place: tuple[int, ...]) -> Any:
    """Return the element of an array that NumPy stores at a place of a larger one."""
    kept = place[len(shape) - values.ndim :]
    at = tuple(
        0 if length == 1 else i for i, length in zip(kept, values.shape, strict=True)
    )
    return values[at]


def allocated(name: str, rank: int, shape: Any, dtype: Any, *, unset: bool) -> Area:
    """Return new memory of a rank for an array."""
    dtype, shape = np.dtype(dtype), _tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    region = machine.running().memory.allocate(name, nbytes, dtype.itemsize, unset)
    region.rank, region.shape, region.dtype = rank, shape, dtype
    return region


def _tuple(shape: Any) -> tuple[int, ...]:
    return tuple(shape) if isinstance(shape, tuple | list) else (int(shape),)


def converted(dtype: Any, value: Any) -> Any:
    """Return a value as a GPU stores it: integers wrap around."""
    if dtype.kind in "iu" and isinstance(value, int) and not isinstance(value, bool):
        bits = 8 * dtype.itemsize
        value &= (1 << bits) - 1
        if dtype.kind == "i" and value >> (bits - 1):
            value -= 1 << bits
    return value


def unsupported(what: str, instead: str = "") -> Unsupported:
    """Return the error for what has no stand-in; it names the program's line."""
    site = machine.running().site()
    return Unsupported(
        f"explore: {site.file}:{site.line}: expected what explore has a stand-in for, "
        f"got {what}" + f"; {instead}" * bool(instead)
    )
