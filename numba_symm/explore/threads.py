"""Threads of kernels: their indices, their barriers, and what they depend on."""

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any

import numpy as np

from numba_symm.explore.arrays import Array, allocated, unsupported
from numba_symm.explore.faults import Fault, Files
from numba_symm.explore.machine import running
from numba_symm.explore.memory import Area
from numba_symm.explore.observers import Fiber, Name

WARP = 32
MOST_THREADS = 1024


class Grid:
    """A launch of a kernel on a stream.

    Attributes:
        dim, block: the numbers of blocks and of a block's threads, in 3 dimensions.
        blocks, threads: all of them.
        shared: the shared arrays, by block and place in the program.
        number: which launch of the stream it is, from 1 on.
    """

    def __init__(self, function: Any, launch: Any, args: Any, dynamic: int, clock: Any):
        self._function, self._args, self._clock = function, args, clock
        self.dim, self.block = (_three(each) for each in launch)
        self.blocks, self.threads = math.prod(self.dim), math.prod(self.block)
        self.dynamic = dynamic
        self.shared: dict[Any, Area] = {}
        self.number = 0
        self._left = self.blocks * self.threads
        if not 0 < self.threads <= MOST_THREADS or not self.blocks:
            raise Fault(
                "error",
                f"a launch of {self.blocks} blocks of {self.threads} threads; a GPU "
                f"takes 1 block or more, of 1 to {MOST_THREADS} threads",
            )

    def start(self, stream: Any) -> None:
        """Start all threads, after what the stream and the launching host know."""
        self._stream, self.number = stream, stream.count()
        execution = running()
        clock = np.maximum(stream.clock, self._clock)
        for block in range(self.blocks):
            for index in range(self.threads):
                text = f"rank {stream.rank} block {block} thread {index}"
                name = Name(stream.rank, block, index, text)
                thread = execution.start(name, clock.copy(), self._body)
                thread.local = KernelThread(self, block, index)

    def _body(self) -> None:
        self._function(*self._args)

    def ended(self, thread: Fiber) -> None:
        """Note that a thread has ended; go on with the stream after the last one."""
        self._left -= 1
        self._stream.learn(thread.clock)
        if not self._left:
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


def sync(value: Any = None) -> list[Any]:
    """Wait for the block's threads; return the values of all."""
    mine = me()
    key = id(mine.grid), mine.block_index, "block"
    return running().meet(key, mine.grid.threads, value, "syncthreads")


def syncthreads() -> None:
    """Wait for the block's threads."""
    sync()


def bar_sync(bar: int, count: int, value: Any = None) -> list[Any]:
    """Wait for some of the block's threads."""
    mine = me()
    key = id(mine.grid), mine.block_index, int(bar)
    return running().meet(key, int(count), value, f"barrier {bar}")


def warp(value: Any = None, *, orders: bool = True) -> list[Any]:
    """Wait for the threads of the warp; return the values of all."""
    mine = me()
    number = mine.index // WARP
    width = min(WARP, mine.grid.threads - WARP * number)
    key = id(mine.grid), mine.block_index, "warp", number
    return running().meet(key, width, value, "syncwarp", orders=orders)


def lane() -> int:
    """Return the thread's index in its warp."""
    return me().index % WARP


def caller(files: Files) -> tuple[CodeType, int]:
    """Return the place in the program that calls a stand-in."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in files:
        frame = frame.f_back
    assert frame is not None
    return frame.f_code, frame.f_lasti


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
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, Array):
        assert value.region is not None
        return value.address, value.shape, value.strides
    if isinstance(value, tuple | list) and depth < 4:
        return tuple(_frozen(each, depth + 1) for each in value)
    if isinstance(value, dict):
        return tuple((str(k), _frozen(v, depth + 1)) for k, v in value.items())
    if isinstance(value, np.ndarray):
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
