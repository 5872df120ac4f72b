"""Threads of kernels, their device arrays, and atomic updates of these."""

import dis
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from numba_symm.device.host_atomics import greatest, least
from numba_symm.explore import machine
from numba_symm.explore.machine import Fiber, Name, running
from numba_symm.explore.memory import (
    Area,
    Fault,
    Files,
    Unsupported,
    frame_of,
)

Index = Any
_ARRAYS = (list, np.ndarray)


class Array(np.ndarray[Any, Any]):
    """An array in a region."""

    region: Area | None = None
    _start: int | None = None

    @classmethod
    def at(cls, address: int, shape: Any, dtype: Any) -> "Array":
        """Return the C-contiguous array at an address."""
        region, offset = machine.running().memory.at(int(address), 0)
        return cls.of(region, shape, dtype, offset)

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

    def address_of(self, index: Index) -> int:
        """Return the address of an element."""
        self._part(index)  # checks it
        assert self.region is not None
        return self.region.base + self.offset_of(index)

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

    def store(self, values: Any, by: Any, site: Any) -> None:
        """Store all elements, as one copy that an observer makes."""
        self._touch(True, by, site)
        self.memory[...] = np.asarray(values).reshape(self.shape)

    def load(self, by: Any, site: Any) -> Any:
        """Return all elements, as one copy."""
        self._touch(False, by, site)
        return np.array(self.memory)

    def _touch(self, write: bool, by: Any, site: Any) -> None:
        memory, region = machine.running().memory, self.region
        stored = bytes if write else None  # what it stores differs from what is there
        assert region is not None
        spans = [(self.start(), self.nbytes)]
        if not self.flags.c_contiguous:
            places = np.ndindex(self.shape)
            spans = [(self.offset_of(place), self.itemsize) for place in places]
        for offset, nbytes in spans:
            memory.weak(by, region, offset, nbytes, stored, site)

    def copy_to_host(self, ary: Any = None, stream: Any = 0) -> Any:
        """Wait for the stream, and return a copy of the elements."""
        execution = machine.running()
        execution.me().local.drain()
        found = self.load(execution.me(), execution.site())
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


def converted(dtype: np.dtype[Any], value: Any) -> Any:
    """Return a value as a GPU stores it: integers wrap around."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return element(dtype, value) if whole and dtype.kind in "iu" else value


def unsupported(what: str, instead: str = "") -> Unsupported:
    """Return the error for what has no stand-in; it names the program's line."""
    site = machine.running().site()
    return Unsupported(
        f"explore: {site.file}:{site.line}: expected what explore has a stand-in for, "
        f"got {what}" + f"; {instead}" * bool(instead)
    )


WARP = 32
MOST_THREADS = 1024


class Grid:
    """A launch of a kernel on a stream; ``at_end`` is called after the last thread.

    Attributes:
        dim, block: the numbers of blocks and of a block's threads, in 3 dimensions.
        blocks, threads: all of them.
        shared: the shared arrays, by block and place in the program.
        number: which launch of the stream it is, from 1 on.
    """

    def __init__(
        self,
        function: Any,
        launch: Any,
        args: Any,
        dynamic: int,
        clock: Any,
        at_end: Callable[[], None],
    ):
        self._function, self._args, self._clock = function, args, clock
        self.dim, self.block = (_three(each) for each in launch)
        self.blocks, self.threads = math.prod(self.dim), math.prod(self.block)
        self.dynamic = dynamic
        self.shared: dict[Any, Area] = {}
        self.number, self._at_end = 0, at_end
        self._left = self.blocks * self.threads
        if not 0 < self.threads <= MOST_THREADS or not self.blocks:
            raise Fault(
                "error",
                f"a launch of {self.blocks} blocks of {self.threads} threads; a GPU "
                f"takes 1 block or more, of 1 to {MOST_THREADS} threads",
            )

    def start(self, stream: Any) -> None:
        """Start all threads, after what the stream and the launching host know."""
        self._stream, self.number = stream, next(stream.launches)
        execution = running()
        clock = np.maximum(stream.clock, self._clock)
        for block in range(self.blocks):
            for index in range(self.threads):
                text = f"rank {stream.rank} block {block} thread {index}"
                name = Name(stream.rank, block, index, text)
                place = KernelThread(self, block, index)
                execution.start(name, clock.copy(), self._body, place)

    def _body(self) -> None:
        self._function(*self._args)

    def ended(self, thread: Fiber) -> None:
        """Note that a thread has ended; go on with the stream after the last one."""
        self._left -= 1
        self._stream.learn(thread.clock)
        if not self._left:
            self._at_end()
            self._stream.finish()


def _three(numbers: Any) -> tuple[int, int, int]:
    given = numbers if isinstance(numbers, tuple | list) else (numbers,)
    return tuple(int(each) for each in (*given, 1, 1)[:3])  # type: ignore[return-value]


class KernelThread:
    """The place of a thread in its grid.

    Attributes:
        grid: the grid.
        block_index, index: of its block, and of the thread in the block.
        at, thread: the same in 3 dimensions.
        own: its local arrays, by their places in the program.
    """

    def __init__(self, grid: Grid, block: int, index: int):
        self.grid, self.block_index, self.index = grid, block, index
        self.at, self.thread = _split(block, grid.dim), _split(index, grid.block)
        self.own: dict[Any, Area] = {}

    def ended(self, thread: Fiber) -> None:
        """Note that the thread has ended."""
        self.grid.ended(thread)


def _split(number: int, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    x, y, _ = sizes
    return number % x, number // x % y, number // (x * y)


def me() -> KernelThread:
    """Return the place of the thread that runs."""
    local = running().me().local
    if not isinstance(local, KernelThread):
        raise unsupported("a device function outside of a kernel")
    return local


def _meet(place: Any, count: int, value: Any, what: str, orders: bool = True) -> Any:
    """Wait for threads of the block at one of its barriers; return all values."""
    mine = me()
    key = id(mine.grid), mine.block_index, place
    return running().meet(key, count, value, what, orders=orders)


def sync(value: Any = None) -> Any:
    """Wait for the block's threads; return the values of all."""
    return _meet("block", me().grid.threads, value, "syncthreads")


def bar_sync(bar: int, count: int, value: Any = None) -> Any:
    """Wait for some of the block's threads."""
    return _meet(int(bar), int(count), value, f"barrier {bar}")


def warp(value: Any = None, *, orders: bool = True) -> Any:
    """Wait for the threads of the warp; return the values of all."""
    mine = me()
    number = mine.index // WARP
    width = min(WARP, mine.grid.threads - WARP * number)
    return _meet(("warp", number), width, value, "syncwarp", orders)


def lane() -> int:
    """Return the thread's index in its warp."""
    return me().index % WARP


def caller(files: Files) -> tuple[CodeType, int]:
    """Return the place in the program that calls a stand-in."""
    frame = frame_of(files)
    assert frame is not None
    return frame.f_code, frame.f_lasti


def drops_result() -> bool:
    """Return whether the function that calls a stand-in drops the result."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_STAND_INS):
        frame = frame.f_back
    return frame is not None and frame.f_lasti in _dropped(frame.f_code)


@functools.cache
def _dropped(code: CodeType) -> set[int]:
    """Return the places of instructions, and of their caches, before a POP_TOP."""
    return {
        place
        for one, other in itertools.pairwise(dis.get_instructions(code))
        if other.opname == "POP_TOP"
        for place in range(one.offset, other.offset, 2)
    }


@functools.cache
def _positions(code: CodeType) -> Sequence[Any]:
    """Return the place in the source of each instruction.

    Python compiles the condition of a loop twice: these places are equal.
    """
    return list(code.co_positions())


def state(files: Files) -> Any:
    """Return all on which the next steps of the thread depend, besides memory.

    These are, of each of its functions, the place and the variables.
    """
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Grid._body.__code__:
        code = frame.f_code
        if not code.co_filename.startswith(_STAND_INS):
            place = _positions(code)[frame.f_lasti // 2]
            found.append((code, place, _frozen(dict(frame.f_locals), 0)))
        frame = frame.f_back
    return tuple(found)


_STAND_INS = str(Path(__file__).parent)
_CONSTANT: Any = (int, float, complex, str, bytes, range, type, type(None), np.dtype)
_CONSTANT += (ModuleType, BuiltinFunctionType, functools.partial)


def _frozen(value: Any, depth: int) -> Any:
    """Return a value that is equal only if a variable has not changed."""
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, Array):
        assert value.region is not None
        return value.address, value.shape, value.strides
    if isinstance(value, tuple | list) and depth < 4:
        return tuple(_frozen(each, depth + 1) for each in value)
    if isinstance(value, dict):
        return tuple((str(k), _frozen(v, depth + 1)) for k, v in value.items())
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    return getattr(value, "__code__", object())  # of an iterator, nothing is known


def shared_array(shape: Any, dtype: Any) -> Array:
    """Return the block's array of a call's place in the program."""
    mine, execution = me(), running()
    place: Any = caller(execution.files)
    if shape == 0:  # all of these arrays are the launch's dynamic shared memory
        place, shape = "dynamic", mine.grid.dynamic // np.dtype(dtype).itemsize
    rank, block = execution.me().rank, mine.block_index
    name = f"a shared array of rank {rank} block {block}"
    return _kept(mine.grid.shared, (block, place), name, shape, dtype)


def local_array(shape: Any, dtype: Any) -> Array:
    """Return the thread's own array of a call's place in the program."""
    execution = running()
    name = f"a local array of {execution.me().name.text}"
    return _kept(me().own, caller(execution.files), name, shape, dtype)


def _kept(
    arrays: dict[Any, Area], key: Any, name: str, shape: Any, dtype: Any
) -> Array:
    """Return an array in memory that is allocated once."""
    if key not in arrays:
        arrays[key] = allocated(name, running().me().rank, shape, dtype, unset=True)
    return Array.of(arrays[key], shape, dtype)


UPDATES: dict[str, Callable[..., Any]] = {
    "add": lambda old, value: old + value,
    "sub": lambda old, value: old - value,
    "min": least,
    "max": greatest,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "cas": lambda old, expected, value: value if old == expected else old,
    "inc": lambda old, most: old * 0 if old >= most else old + old.dtype.type(1),
    "dec": lambda old, most: most if old == 0 or old > most else old - 1,
}


def of_bits(dtype: np.dtype[Any], bits: int) -> Any:
    """Return the element of some bits."""
    return np.frombuffer(int(bits).to_bytes(dtype.itemsize, "little"), dtype)[0]


def element(dtype: np.dtype[Any], value: Any) -> Any:
    """Return a value in a dtype; integers wrap around."""
    if dtype.kind in "iu":
        return of_bits(dtype, int(value) & (1 << 8 * dtype.itemsize) - 1)
    return dtype.type(value)


def changed(verb: str, dtype: np.dtype[Any], values: Any) -> Callable[[int], int]:
    """Return the function of the bits of an update."""
    given = [element(dtype, value) for value in values]

    def change(bits: int) -> int:
        with np.errstate(all="ignore"):
            new = dtype.type(UPDATES[verb](of_bits(dtype, bits), *given))
        return int.from_bytes(new.tobytes(), "little")

    return change
