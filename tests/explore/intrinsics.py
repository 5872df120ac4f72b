"""The names of ``numba_symm.device.intrinsics``, for threads that a scheduler runs.

What touches memory or other threads is a generator that stops first; arithmetic is the
simulator's. Conditions: no element narrower than 4 bytes; in arrays over addresses,
each element takes 8 bytes, whatever its dtype, and has an integer value.
"""

import math
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from explore import scheduler
from explore.memory import ACQUIRE, RELAXED, RELEASE, WEAK
from explore.scheduler import POLL, STEP, SYNC, VOTES, WAIT
from explore.updates import update
from numba_symm.device.instructions import ATOMIC_ORDERS, ATOMICS, atomic_name
from numba_symm.device.sim import (  # noqa: F401
    bf16_of_f32,
    bits_from,
    bits_of_f32,
    bits_of_f64,
    e4m3x2_of_f32x2,
    e5m2x2_of_f32x2,
    f16_of_f32,
    f32_of_bf16,
    f32_of_bits,
    f32_of_f16,
    f32x2_of_e4m3x2,
    f32x2_of_e5m2x2,
    f64_of_bits,
    fma_rn_f64,
    mul_rn_f32,
    mul_rn_f64,
    ones_of,
    word_of,
)

stepped: set[tuple[str, int]] = set()
"""The files and first lines of the functions whose calls stop (``source.py``)."""


def device_function(function: Any) -> Any:
    """Return a function whose calls stop. Refuse another one, however it is spelled."""
    code = function.__code__
    assert (code.co_filename, code.co_firstlineno) in stepped, (
        f"{function.__qualname__}: expected a function that source.py steps through"
    )
    return function


array_function = device_function


def sliced(form: Any) -> Any:
    """Return a decorator that steps through a loop, whatever the simulator does."""
    return device_function


def _load(address: int, nbytes: int, order: str) -> int:
    machine, thread = scheduler.machine, scheduler.current
    value = machine.memory.load(thread.observer, address, nbytes, order)
    if machine.rule is not None:
        machine.rule.loaded(thread, address, value)
    return value


def _store(address: int, nbytes: int, value: int, order: str) -> None:
    machine, thread = scheduler.machine, scheduler.current
    if machine.rule is not None:
        machine.rule.stores(thread, address)
    machine.memory.store(thread.observer, address, nbytes, int(value), order)


def _access(nbytes: int, order: str) -> tuple[Any, Any]:
    def load(address: int) -> Generator[int, None, int]:
        yield STEP
        value = _load(address, nbytes, order)
        return word_of(value) if nbytes == 8 else value

    def store(address: int, value: int) -> Generator[int, None, None]:
        yield STEP
        _store(address, nbytes, value, order)

    return load, store


ld_u8, st_u8 = _access(1, WEAK)
ld_u16, st_u16 = _access(2, WEAK)
ld_u32, st_u32 = _access(4, WEAK)
ld_u64, st_u64 = _access(8, WEAK)
ld_relaxed_sys_u32, st_relaxed_sys_u32 = _access(4, RELAXED)
ld_relaxed_sys_u64, st_relaxed_sys_u64 = _access(8, RELAXED)
ld_acquire_sys_u32, _ = _access(4, ACQUIRE)
ld_acquire_sys_u64, _ = _access(8, ACQUIRE)
_, st_release_sys_u32 = _access(4, RELEASE)
_, st_release_sys_u64 = _access(8, RELEASE)


def ld_v2_u64(address: int) -> Generator[int, None, tuple[int, int]]:
    yield STEP
    low = word_of(_load(address, 8, WEAK))
    return low, word_of(_load(address + 8, 8, WEAK))


def ld_v4_u32(address: int) -> Generator[int, None, tuple[int, ...]]:
    yield STEP
    return tuple(_load(address + at, 4, WEAK) for at in range(0, 16, 4))


def st_v2_u64(address: int, words: Any) -> Generator[int, None, None]:
    yield STEP
    _store(address, 8, words[0], WEAK)
    _store(address + 8, 8, words[1], WEAK)


def ld_relaxed_sys_v2_u64(address: int) -> Generator[int, None, tuple[int, int]]:
    yield STEP
    low = word_of(_load(address, 8, RELAXED))
    return low, word_of(_load(address + 8, 8, RELAXED))


def st_relaxed_sys_v2_u64(address: int, words: Any) -> Generator[int, None, None]:
    yield STEP
    _store(address, 8, words[0], RELAXED)
    _store(address + 8, 8, words[1], RELAXED)


ld_any_u8, ld_any_u16, ld_any_u32, ld_any_u64 = ld_u8, ld_u16, ld_u32, ld_u64
st_any_u8, st_any_u16, st_any_u32, st_any_u64 = st_u8, st_u16, st_u32, st_u64
ld_any_v2_u64, st_any_v2_u64 = ld_v2_u64, st_v2_u64


def fence_acq_rel_sys() -> Generator[int, None, None]:
    yield STEP
    scheduler.machine.memory.fence(scheduler.current.observer)


def griddepcontrol_wait() -> Generator[int, None, None]:
    if scheduler.machine.must_wait(scheduler.current):
        yield WAIT


def griddepcontrol_launch_dependents() -> None:
    scheduler.machine.permit_next(scheduler.current)


def globaltimer() -> int:
    scheduler.current.has_looked_at_the_clock = True
    return scheduler.machine.clock()


def later_blocks() -> int:
    return 0


def check_slot(*args) -> None:
    """Check nothing, as on a GPU."""


check_peer = check_buffer = check_comparison = check_slot
check_team = check_grid = check_copy = check_mailbox = check_slot
check_exchange = check_shards = check_counts = check_started = check_slot


def tells(ws, thread) -> bool:
    """Compare no calls: as without debug mode."""
    return False


def exit_thread() -> None:
    raise AssertionError("only GPUs in debug mode end a thread")


def poll_pause(polls: int = 0) -> Generator[int, None, None]:
    yield POLL


def syncthreads() -> Generator[int, None, bool]:
    return syncthreads_or(False)


def syncthreads_or(condition: bool) -> Generator[int, None, bool]:
    return bar_red_or(0, block_size(), condition)


def bar_sync(barrier: int, threads: int) -> Generator[int, None, bool]:
    return bar_red_or(barrier, threads, False)


def warp_or(condition: bool) -> Generator[int, None, bool]:
    return bar_red_or(16, block_size(), condition)


def _meet(barrier: int, threads: int, condition: bool) -> Generator[int, None, int]:
    """Return which of the threads at a barrier have a condition that holds, as bits."""
    thread = scheduler.current
    thread.barrier, thread.condition = (barrier, threads), bool(condition)
    yield SYNC
    return thread.conditions


def bar_red_or(
    barrier: int, threads: int, condition: bool
) -> Generator[int, None, bool]:
    return (yield from _meet(barrier, threads, condition)) != 0


def votes(condition: bool) -> Generator[int, None, int]:
    """Of the threads of a block, which are one warp."""
    return _meet(VOTES + thread_index_y(), scheduler.machine.threads, condition)


def max_of_eight(number: int) -> Generator[int, None, int]:
    """Of eight adjacent threads of a block, or of fewer; bit by bit, by barriers."""
    found, largest = 0, True
    threads = min(8, scheduler.machine.threads)
    group = VOTES + thread_index() // threads
    for bit in reversed(range(32)):
        has = largest and number >> bit & 1 != 0
        if (yield from bar_red_or(group, threads, has)):
            found |= 1 << bit
            largest = has
    return found


def thread_index() -> int:
    thread = scheduler.current
    return thread.row * scheduler.machine.threads + thread.index


def thread_index_x() -> int:
    return scheduler.current.index


def thread_index_y() -> int:
    return scheduler.current.row


def block_index() -> int:
    return scheduler.current.block


def grid_size() -> int:
    return scheduler.current.thread_blocks


grid_index = block_index


def block_size() -> int:
    return scheduler.machine.threads * scheduler.current.grid.launch.held


def word_address(array: Any, index: Any) -> int:
    return array._place(index)


def word_kind(array: Any) -> int:
    return 0


def mailbox_of(mailbox: Any) -> int:
    return mailbox._address


def views_of(target: Any, source: Any) -> tuple[int, ...]:
    assert target.shape == source.shape
    planes, rows, columns = (1, 1, *target.shape)[-3:]
    layout = planes, rows, columns, 8 * rows * columns, 8 * columns, 8
    return 8, target._address, *layout, source._address, *layout


class array_at:
    """An array, whose elements ``source.py`` loads and stores by these methods."""

    def __init__(self, address: int, shape: Any, dtype: Any):
        self.shape = shape if isinstance(shape, tuple) else (shape,)
        self.size = math.prod(self.shape)
        self._address = address

    def _place(self, index: Any) -> int:
        index = index if isinstance(index, tuple) else (index,)
        place = 0
        for i, length in zip(index, self.shape, strict=True):
            assert 0 <= i < length, f"index {index} of an array of shape {self.shape}"
            place = place * length + int(i)
        return self._address + 8 * place

    def load(self, index: Any) -> Generator[int, None, int]:
        return ld_u64(self._place(index))

    def store(self, index: Any, value: Any) -> Generator[int, None, None]:
        return st_u64(self._place(index), value)


class _Local(list):
    """An array in registers."""

    @property
    def size(self) -> int:
        return len(self)


def load_bits(array: Any, index: int) -> Any:
    return array[index] if isinstance(array, _Local) else array.load(index)


def store_bits(array: Any, index: int, bits: int) -> Any:
    if not isinstance(array, _Local):
        return array.store(index, bits)
    array[index] = bits
    return None


_CHANGES = {
    "add": lambda old, value: old + value,
    "min": min,
    "max": max,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "cas": lambda old, expected, value: value if old == expected else None,
}


def _updates(verb: str, order: str, nbytes: int) -> Any:
    def atomic(address: int, *values: int) -> Generator[int, None, int]:
        yield STEP
        machine, thread = scheduler.machine, scheduler.current
        if machine.rule is not None:
            machine.rule.stores(thread, address)
        change, words = _CHANGES[verb], [int(value) for value in values]
        given = thread.observer, address, nbytes, lambda old: change(old, *words)
        return update(machine.memory, *given, order)

    return atomic


for _verb, _kinds in ATOMICS.items():
    for _order in ATOMIC_ORDERS:
        for _kind in _kinds:
            _name = atomic_name(_verb, _order, _kind)
            globals()[_name] = _updates(_verb, _order, int(_kind[1:]) // 8)


def _atomic(verb: str) -> Any:
    def atomic(array: Any, index: Any, *values: int, order: str = "relaxed") -> Any:
        return _updates(verb, order, 8)(array._place(index), *values)

    return atomic


atomic_add, atomic_exch, atomic_cas = _atomic("add"), _atomic("exch"), _atomic("cas")


class _Index:
    """An object whose ``x`` is asked of the running thread."""

    def __init__(self, name: str):
        self._name = name

    @property
    def x(self) -> int:
        return getattr(scheduler.current, self._name)


cuda = SimpleNamespace(
    threadIdx=_Index("index"),
    blockIdx=_Index("thread_block"),
    gridDim=_Index("thread_blocks"),
    syncthreads=syncthreads,
    jit=device_function,
    local=SimpleNamespace(array=lambda size, dtype: _Local([None] * size)),
)
"""What kernels use of ``numba.cuda``."""
