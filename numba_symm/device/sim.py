"""The instructions of ``ptx.py`` on host memory, for Numba's CUDA simulator.

Addresses are host addresses, the ranks' memory is shared between processes, and the
ranks' threads are operating-system threads. Aligned loads and stores of up to 8 bytes
are single host instructions. x86-64 keeps a core's stores in order, and its loads in
order. The protocols need no more of acquire and release.

Device functions are plain Python. They use no ``cuda.*`` name, so the simulator need
not replace ``cuda`` while they run (which is not safe between threads).
"""

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from numba_symm.arguments import refuse_misaligned

F = TypeVar("F", bound=Callable[..., Any])

_POLL_PAUSE = 100e-6  # seconds, in which the peers can get the core
_LONGEST_PAUSE = 1e-3  # of a long wait, so that all threads of a rank poll little


cuda = SimpleNamespace(local=SimpleNamespace(array=lambda size, dtype: [0] * size))
"""What device functions of ``numba.cuda`` use in kernels of a program.

Numba's own works in the modules of kernels only.
"""


def device_function(function: F) -> F:
    """Decorate a function so that kernels can call it; GPU code inlines it.

    The function must not return new arrays, only those that were passed to it. Decorate
    a function that returns a new array with ``@cuda.jit(device=True, inline="always")``
    instead.
    """
    return function


def sliced(form: F) -> Callable[[Callable[..., Any]], F]:
    """Return a decorator that returns ``form``: NumPy slices replace a loop."""
    return lambda function: form


def array_function(function: F) -> F:
    """Return ``function``, too."""
    return function


def _load(ctype: Any) -> Callable[[int], int]:
    at, size = ctype.from_address, ctypes.sizeof(ctype)

    def load(address: int) -> int:
        if address % size:
            refuse_misaligned(address, size)
        return at(address).value  # type: ignore[no-any-return]

    return load


def _store(ctype: Any) -> Callable[[int, int], None]:
    at, size = ctype.from_address, ctypes.sizeof(ctype)

    def store(address: int, value: int) -> None:
        if address % size:
            refuse_misaligned(address, size)
        at(address).value = int(value)

    return store


ld_u8, st_u8 = _load(ctypes.c_uint8), _store(ctypes.c_uint8)
ld_u16, st_u16 = _load(ctypes.c_uint16), _store(ctypes.c_uint16)
ld_u32, st_u32 = _load(ctypes.c_uint32), _store(ctypes.c_uint32)
ld_u64, st_u64 = _load(ctypes.c_int64), _store(ctypes.c_uint64)
ld_relaxed_sys_u32, ld_acquire_sys_u32 = map(_load, 2 * [ctypes.c_uint32])
st_relaxed_sys_u32, st_release_sys_u32 = map(_store, 2 * [ctypes.c_uint32])
ld_relaxed_sys_u64, ld_acquire_sys_u64 = map(_load, 2 * [ctypes.c_int64])
st_relaxed_sys_u64, st_release_sys_u64 = map(_store, 2 * [ctypes.c_uint64])


_Pair = ctypes.c_int64 * 2


def _pair_at(address: int) -> Any:
    if address % 16:
        refuse_misaligned(address, 16)
    return _Pair.from_address(address)


def ld_v2_u64(address: int) -> tuple[int, int]:
    """Load two 8-byte words, each atomically."""
    pair = _pair_at(address)
    return pair[0], pair[1]


def ld_v4_u32(address: int) -> tuple[int, ...]:
    """Load four 4-byte words, each atomically."""
    words = ld_v2_u64(address)
    return tuple(word >> at & 0xFFFFFFFF for word in words for at in (0, 32))


def st_v2_u64(address: int, words: tuple[int, int]) -> None:
    """Store two 8-byte words, each atomically, the first one first."""
    pair = _pair_at(address)
    pair[0], pair[1] = int(words[0]), int(words[1])


# Functions of their own, because intrinsics.py sets a docstring for each.
ld_relaxed_sys_v2_u64 = FunctionType(ld_v2_u64.__code__, globals())
st_relaxed_sys_v2_u64 = FunctionType(st_v2_u64.__code__, globals())
ld_any_u8, ld_any_u16, ld_any_u32, ld_any_u64 = ld_u8, ld_u16, ld_u32, ld_u64
st_any_u8, st_any_u16, st_any_u32, st_any_u64 = st_u8, st_u16, st_u32, st_u64
ld_any_v2_u64, st_any_v2_u64 = ld_v2_u64, st_v2_u64


def bits_from(low: int, high: int, first: int) -> int:
    """Return the 64 bits of two words, the lower one first, from a bit on."""
    both = (int(high) & 0xFFFFFFFFFFFFFFFF) << 64 | int(low) & 0xFFFFFFFFFFFFFFFF
    return word_of(both >> first)


def fence_acq_rel_sys() -> None:
    """Do nothing: see the module's docstring."""


def griddepcontrol_wait() -> None:
    """Do nothing: the simulator runs one grid after another."""


def griddepcontrol_launch_dependents() -> None:
    """Do nothing."""


def globaltimer() -> int:
    """Return the nanoseconds of a clock that never steps back."""
    return time.monotonic_ns()


def f32_of_bits(bits: int) -> Any:
    return np.uint32(bits & 0xFFFFFFFF).view(np.float32)


def f64_of_bits(word: int) -> Any:
    return np.int64(word).view(np.float64)


def bits_of_f32(value: Any) -> int:
    return int(np.float32(value).view(np.uint32))


def bits_of_f64(value: Any) -> int:
    return int(np.float64(value).view(np.uint64))


def f32_of_f16(bits: int) -> Any:
    """Widen the bits of a float16."""
    return np.float32(np.uint16(bits).view(np.float16))


def f16_of_f32(value: Any) -> int:
    """Round to float16, to nearest even; an overflow is infinite, as on a GPU."""
    with np.errstate(over="ignore", invalid="ignore"):
        return int(np.float32(value).astype(np.float16).view(np.uint16))


def f32_of_bf16(bits: int) -> Any:
    """Widen the bits of a bfloat16."""
    return f32_of_bits(int(bits) << 16)


def bf16_of_f32(value: Any) -> int:
    """Round to bfloat16, to nearest even; every NaN is the canonical one."""
    value = np.float32(value)
    if value != value:
        return 0x7FFF
    bits = bits_of_f32(value)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _f32x2_of(kind: Any) -> Callable[[int], tuple[Any, Any]]:
    def widened(bits: int) -> tuple[Any, Any]:
        """Widen two 8-bit floats, the lower one first."""
        low, high = np.uint8(bits & 0xFF), np.uint8(bits >> 8 & 0xFF)
        return np.float32(low.view(kind)), np.float32(high.view(kind))

    return widened


def _of_f32x2(kind: Any) -> Callable[[Any, Any], int]:
    limits: Any = ml_dtypes.finfo
    largest = np.float32(limits(kind).max)

    def narrowed(low: Any, high: Any) -> int:
        """Round two floats, the lower one first; what is too large to the largest."""
        bits = []
        for value in (low, high):
            if value == value:
                value = kind(min(max(value, -largest), largest))
                bits.append(int(value.view(np.uint8)))
            else:
                bits.append(0x7F)  # the canonical NaN
        return bits[0] | bits[1] << 8

    return narrowed


f32x2_of_e4m3x2 = _f32x2_of(ml_dtypes.float8_e4m3fn)
f32x2_of_e5m2x2 = _f32x2_of(ml_dtypes.float8_e5m2)
e4m3x2_of_f32x2 = _of_f32x2(ml_dtypes.float8_e4m3fn)
e5m2x2_of_f32x2 = _of_f32x2(ml_dtypes.float8_e5m2)


def mul_rn_f32(a: Any, b: Any) -> Any:
    return a * b


def mul_rn_f64(a: Any, b: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):  # as on a GPU
        return a * b


ones_of = int.bit_count


def fma_rn_f64(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of finite numbers, rounded once."""
    total = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    return np.float64(total.numerator / total.denominator)


def _thread() -> Any:
    return threading.current_thread()


def syncthreads() -> None:
    """Wait until all threads of the block have called it."""
    _thread().syncthreads()


def syncthreads_or(condition: bool) -> bool:
    """Wait as ``syncthreads`` does; return whether any thread's condition holds."""
    return bool(_thread().syncthreads_or(condition))


def bar_sync(barrier: int, threads: int) -> None:
    """Wait until that many threads of the block have called it with that barrier."""
    _thread().wait_at(barrier, threads, False)


def bar_red_or(barrier: int, threads: int, condition: bool) -> bool:
    """Wait as ``bar_sync`` does; return whether any thread's condition holds."""
    return bool(_thread().wait_at(barrier, threads, bool(condition)))


def warp_or(condition: bool) -> bool:
    """Wait for the other threads of the warp; return whether any condition holds."""
    warp = thread_index() // 32
    threads = min(32, block_size() - 32 * warp)
    barrier = 16 + warp  # those of a block are below 16
    return bool(_thread().wait_at(barrier, threads, bool(condition)))


def _values(first: int, threads: int, value: int) -> list[int]:
    """Return the values of adjacent threads of a block, all of which call it."""
    values = _thread()._manager.__dict__
    values["of", thread_index()] = value
    bar_sync(1000 + first, threads)  # those of blocks and warps are below 1000
    found = [values["of", first + i] for i in range(threads)]
    bar_sync(1000 + first, threads)  # all have read before one stores again
    return found


def votes(condition: bool) -> int:
    """Return where a condition holds in a warp, as bits; here a row is a warp."""
    held, width = bool(condition), _thread()._manager._block_dim[0]
    first = thread_index() - thread_index_x()
    return sum(value << i for i, value in enumerate(_values(first, width, held)))


def max_of_eight(number: int) -> int:
    """Return the maximum of the numbers of 8 adjacent threads, which call it."""
    return int(max(_values(thread_index() & ~7, 8, number)))


def thread_index() -> int:
    """Return the thread's index in its block, counted through all dimensions."""
    return _thread().thread_id  # type: ignore[no-any-return]


def thread_index_x() -> int:
    return _thread().threadIdx.x  # type: ignore[no-any-return]


def thread_index_y() -> int:
    return _thread().threadIdx.y  # type: ignore[no-any-return]


def block_index() -> int:
    """Return the index of the thread's logical block among those of the launch."""
    thread = _thread()
    held = thread._manager._block_dim[1]
    return thread.blockIdx.x * held + thread.threadIdx.y  # type: ignore[no-any-return]


def block_size() -> int:
    return math.prod(_thread()._manager._block_dim)


def grid_size() -> int:
    return int(math.prod(_thread()._manager._grid_dim))


def grid_index() -> int:
    """Return the block's index in the grid, counted through all dimensions."""
    thread = _thread()
    x, y, _ = thread._manager._grid_dim
    block = thread.blockIdx
    return block.x + x * (block.y + y * block.z)  # type: ignore[no-any-return]


def word_of(bits: int) -> int:
    """Return bits as an 8-byte word: a signed integer, as ``ptx.py`` has them."""
    return ((int(bits) & 0xFFFFFFFFFFFFFFFF) ^ 1 << 63) - (1 << 63)


def nbytes_of(shape: Any, dtype: Any) -> int:
    """Return the bytes of an array of ``shape`` and ``dtype``."""
    return int(math.prod(map(int, np.ravel(shape))) * np.dtype(dtype).itemsize)


def is_checked(ctx: Any) -> bool:
    """Return True: the simulator checks arguments. Refuse memory that was unmapped."""
    if ctx.check_mapped is not None:
        ctx.check_mapped()
    return True


def check_grid() -> None:
    """Refuse a barrier of a grid whose blocks cannot run together."""
    _thread()._manager.launch.check_size("grid_barrier")


def size_of(ctx: Any) -> int:
    """Return the bytes of the buffers, if they are known."""
    return sys.maxsize if ctx.buffer_size is None else int(ctx.buffer_size)


def channels_of(ctx: Any) -> int:
    """Return the channels of a pad."""
    return int(ctx.channels)


def exit_thread() -> None:
    """Do nothing: the simulator raises errors instead."""


def later_blocks() -> int:
    """Return how many of the grid's blocks start only after others have ended."""
    return _thread()._manager.launch.later  # type: ignore[no-any-return]


def poll_pause(polls: int) -> None:
    """Let the peers' threads run, because they share few cores.

    Args:
        polls: how often the thread has polled; the pauses of a long wait are longer.

    Raises:
        RuntimeError: another thread of the block has failed. So the launch has failed,
            and the polled memory may be unmapped.
    """
    thread = _thread()
    thread.polled = time.monotonic()
    time.sleep(min(_POLL_PAUSE * (1 + polls / 4), _LONGEST_PAUSE))
    team = getattr(thread, "_manager", None)
    if team is not None:
        team.check()
