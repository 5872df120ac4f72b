"""Atomic operations of the simulator: on memory that processes share.

A lock would hide a race with a plain store, and would not exclude other processes. So
these are instructions of the CPU. LLVM compiles all of them when the first one is used.
"""

import ctypes
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from numba_symm.device.instructions import ATOMIC_ORDERS, ATOMICS, atomic_name
from numba_symm.device.sim import word_of
from numba_symm.device.sim_views import element_address
from numba_symm.errors import ArgumentError
from numba_symm.gpu.compiled import I64, Emitter, engine_of

_C: dict[str, Any] = {
    "s32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "s64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
_lock = threading.Lock()


@functools.cache
def _function(verb: str, kind: str) -> Callable[..., Any]:
    """Return a function of an address and values, which returns the old value."""
    if kind in _FLOATS and verb in _CHOICES:
        return functools.partial(_swap, _CHOICES[verb], *_FLOATS[kind])
    values = [_C[kind]] * (2 if verb == "cas" else 1)
    made = ctypes.CFUNCTYPE(_C[kind], ctypes.c_int64, *values)
    with _lock:  # otherwise two threads would compile
        return made(_engine().get_function_address(f"{verb}_{kind}"))


_FLOATS = {"f32": (np.float32, np.uint32), "f64": (np.float64, np.uint64)}


def least(old: Any, new: Any) -> Any:
    """Return IEEE 754-2019's minimum: NaN if either is; -0 is less than 0."""
    first = (old, math.copysign(1, old)) < (new, math.copysign(1, new))
    return old if first or old != old else new


def greatest(old: Any, new: Any) -> Any:
    """Return IEEE 754-2019's maximum."""
    first = (old, math.copysign(1, old)) > (new, math.copysign(1, new))
    return old if first or old != old else new


_CHOICES = {"min": least, "max": greatest}


def _swap(choice: Any, of: Any, word: Any, address: int, value: Any) -> Any:
    """Set a float to the minimum or maximum by compare and swap, as a GPU does."""
    swap = _function("cas", f"u{8 * word().itemsize}")
    seen, bits = 0, None
    while seen != bits:
        bits, old = seen, word(seen).view(of)
        seen = swap(address, bits, int(choice(old, of(value)).view(word)))
    return old


@functools.cache
def _engine() -> Any:
    """Compile all functions, which takes some milliseconds."""
    return engine_of(
        *(
            functools.partial(_define, verb=verb, kind=kind)
            for verb in ATOMICS
            for kind in ATOMICS[verb]
            if kind not in _FLOATS or verb not in _CHOICES
        )
    )


def _define(module: ir.Module, verb: str, kind: str) -> None:
    floats = {"f32": ir.FloatType(), "f64": ir.DoubleType()}
    element = floats.get(kind) or ir.IntType(int(kind[1:]))
    values = [element] * (2 if verb == "cas" else 1)
    emitter = Emitter(module, f"{verb}_{kind}", element, I64, *values)
    builder, (at, *values) = emitter.b, emitter.function.args
    pointer = emitter.at(at, 0, element)
    if verb == "cas":
        pair = builder.cmpxchg(pointer, *values, "seq_cst", "seq_cst")
        builder.ret(builder.extract_value(pair, 0))
        return
    name = {"exch": "xchg"}.get(verb, verb)
    if kind[0] == "f":
        name = f"f{name}"
    elif kind[0] == "u" and verb in ("min", "max"):
        name = f"u{name}"
    builder.ret(builder.atomic_rmw(name, pointer, values[0], "seq_cst"))


_KINDS = {
    np.dtype(np.int32): "s32",
    np.dtype(np.uint32): "u32",
    np.dtype(np.int64): "s64",
    np.dtype(np.uint64): "u64",
    np.dtype(np.float32): "f32",
    np.dtype(np.float64): "f64",
}


def _atomic(verb: str) -> Callable[..., Any]:
    """Return a sequentially consistent atomic operation on an array's element."""
    name = f"atomic_{verb}"

    def atomic(array: Any, index: Any, values: Any, order: str) -> Any:
        dtype: Any = getattr(array, "dtype", None)
        kind = _KINDS.get(dtype, "")
        if kind not in ATOMICS[verb]:
            known = [str(d) for d, k in _KINDS.items() if k in ATOMICS[verb]]
            raise ArgumentError(
                f"{name}: expected an array of {', '.join(known)}, got "
                f"{type(array).__name__ if dtype is None else dtype}"
            )
        if order not in ATOMIC_ORDERS:
            orders = ", ".join(map(repr, ATOMIC_ORDERS))
            raise ArgumentError(f"{name}: expected order to be {orders}, got {order!r}")
        at = element_address(array, index, name)
        number = float if kind[0] == "f" else int  # ctypes lets integers wrap around
        return dtype.type(_function(verb, kind)(at, *map(number, values)))

    if verb == "cas":
        return lambda array, index, old, value, order="relaxed": atomic(
            array, index, (old, value), order
        )
    return lambda array, index, value, order="relaxed": atomic(
        array, index, (value,), order
    )


def _update(verb: str, kind: str, address: int, *values: Any) -> Any:
    """Make an atomic operation on the word at an address."""
    old = _function(verb, kind)(address, *values)
    return word_of(old) if kind == "u64" else old


atomic_add, atomic_min, atomic_max = _atomic("add"), _atomic("min"), _atomic("max")
atomic_and, atomic_or, atomic_xor = _atomic("and"), _atomic("or"), _atomic("xor")
atomic_exch, atomic_cas = _atomic("exch"), _atomic("cas")

atom_add_release_sys_u64: Any
"""Declared for type checkers, as are all of these functions that device code calls."""

for _verb, _kinds in ATOMICS.items():
    for _order in ATOMIC_ORDERS:
        for _kind in _kinds:
            _name = atomic_name(_verb, _order, _kind)
            globals()[_name] = functools.partial(_update, _verb, _kind)
