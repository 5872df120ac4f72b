"""Kernels on the arrays of one rank: strided items, and reductions of two arrays.

Items at regular distances, as in vectors and subarrays, are moved by the library's
kernel for strided arrays. The other kernels wait for no rank, so they are plain
``cuda.jit`` kernels.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from numba_symm import arrays, own_arrays, streams
from numba_symm.collectives.kernels import pack as kernel
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.device.intrinsics import device_function
from numba_symm.environment import SIMULATED
from numba_symm.mpi import buffers
from numba_symm.mpi.buffers import Items
from numba_symm.own_arrays import Memory

THREADS = 128
MOST_BLOCKS = 1024

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

PackedStep = Callable[[int], None]
"""Enqueues work on the stream with that handle."""


def _gather(packed: Any, spread: Any, runs: Any, extent: int, words: int) -> None:
    """Copy runs of words from their places to consecutive ones."""
    for index in range(cuda.grid(1), packed.size, cuda.gridsize(1)):
        run = index // words
        item = run // runs.size
        start = item * extent + runs[run - item * runs.size]
        packed[index] = spread[start + index - run * words]


def _scatter(packed: Any, spread: Any, runs: Any, extent: int, words: int) -> None:
    """Copy consecutive runs of words to their places."""
    for index in range(cuda.grid(1), packed.size, cuda.gridsize(1)):
        run = index // words
        item = run // runs.size
        start = item * extent + runs[run - item * runs.size]
        spread[start + index - run * words] = packed[index]


_GATHER, _SCATTER = cuda.jit(_gather), cuda.jit(_scatter)


def pack(message: Items, packed: Any) -> PackedStep:
    """Return the copy of a message's elements to an array of as many bytes."""
    return _moved(True, message, packed)


def unpack(message: Items, packed: Any) -> PackedStep:
    """Return the copy of an array's bytes to a message's elements, or to the first."""
    return _moved(False, message, packed)


def copy_of(found: Items, stream: int) -> Items:
    """Return a copy of a message's elements, without gaps."""
    made = own_arrays.empty((found.nbytes,), np.dtype(np.uint8), "Send")
    copy = buffers.message(made)
    if found.layout.runs is None:
        streams.copy(copy.address, found.address, found.nbytes, stream)
    else:
        pack(found, made)(stream)
    return copy


def _moved(packing: bool, message: Items, packed: Any) -> PackedStep:
    layout = message.layout
    runs = layout.runs
    assert runs is not None  # else there is nothing to pack
    target = arrays.view(packed, "pack")
    whole = target.nbytes == message.nbytes  # else the last item is received in part
    if layout.axes is not None and message.size and whole:
        axes = (message.number, layout.extent), *layout.axes
        lengths, strides = zip(*axes, strict=True)
        place, first = target.address, message.address + runs[0]
        run = layout.run
        launch = kernel.bind(place, int(first), lengths, strides, run, packing)
        return functools.partial(_regular, launch, message.array, packed)
    irregular = _GATHER if packing else _SCATTER
    low = min(layout.low, layout.low + (message.number - 1) * layout.extent)
    high = layout.high + max(0, (message.number - 1) * layout.extent)
    start = message.address + low
    word = math.gcd(
        *(8, layout.run, abs(layout.extent), start, target.address, target.nbytes),
        *(runs - low),
    )
    kind = _WORDS[word]
    spread = Memory(start, high - low, message.array).array(
        (high - low) // word, np.dtype(kind)
    )
    flat = Memory(target.address, target.nbytes, packed).array(
        target.nbytes // word, np.dtype(kind)
    )
    places = _table(((runs - low) // word).tobytes())
    args = flat, spread, places, layout.extent // word, layout.run // word
    return functools.partial(_launch, irregular, flat.size, args)


def _regular(launch: Enqueue, spread: Any, packed: Any, stream: int) -> None:
    """Enqueue a launch, which has the addresses of the arrays only."""
    launch(stream)


@functools.lru_cache(maxsize=64)
def _table(table: bytes) -> Any:
    return on_device(np.frombuffer(table, np.int64).copy())


def on_device(array: Any) -> Any:
    """Return a copy of a host array on the device, which is there on all streams.

    A copy from pageable memory may return before it has reached the device.
    """
    made = cuda.to_device(array)
    cuda.default_stream().synchronize()
    return made


def _launch(kernel: Any, size: int, args: tuple[Any, ...], stream: int) -> None:
    """Enqueue a kernel of a thread for each of ``size`` elements."""
    if not size:
        return
    blocks = min(-(-size // THREADS), MOST_BLOCKS)
    threads = min(size, THREADS) if SIMULATED else THREADS
    _configured(kernel, blocks, threads, stream)(*args)


@functools.lru_cache(maxsize=256)
def _configured(kernel: Any, blocks: int, threads: int, stream: int) -> Any:
    """Return a kernel with its grid, without Numba's advice to launch more blocks."""
    on = 0 if SIMULATED or not stream else cuda.external_stream(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kernel[blocks, threads, on]


def fold(function: Callable[[Any, Any], Any], into: Any, of: Any) -> PackedStep:
    """Return ``into[i] = function(into[i], of[i])``, of arrays of equal size."""
    return functools.partial(_launch, _reducing(function), into.size, (into, of))


@functools.lru_cache(maxsize=64)
def _reducing(function: Callable[[Any, Any], Any]) -> Any:
    reduced = device_function(function)

    def reducing(into: Any, of: Any) -> None:
        for index in range(cuda.grid(1), into.size, cuda.gridsize(1)):
            into[index] = reduced(into[index], of[index])

    return cuda.jit(reducing)


def _swap(target: Any, compare: Any, origin: Any) -> None:
    """Copy ``origin`` to ``target`` if that is equal to ``compare``."""
    equal = True
    for index in range(target.size):
        equal = equal and target[index] == compare[index]
    if equal:
        for index in range(target.size):
            target[index] = origin[index]


_SWAP = cuda.jit(_swap)


def compare_and_swap(target: Any, compare: Any, origin: Any) -> PackedStep:
    """Return the step that does so, for arrays of bytes, by one thread."""
    return functools.partial(_launch, _SWAP, 1, (target, compare, origin))
