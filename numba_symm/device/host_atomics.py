"""Atomic operations of the simulator: on memory that processes share.

A lock would hide a race with a plain store, and would not exclude other processes. So
these are instructions of the CPU. LLVM compiles all of them when the first one is used.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir

from numba_symm.device.instructions import ATOMICS

_C: dict[str, Any] = {
    "s32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "s64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
_ADDRESS = ir.IntType(64)
_lock = threading.Lock()
_keep: list[Any] = []  # the compiler, which owns the code


def function(verb: str, kind: str) -> Callable[..., Any]:
    """Return a function of an address and values, which returns the old value.

    Args:
        verb: a key of ``ATOMICS``.
        kind: the kind of element.
    """
    with _lock:  # otherwise two threads would compile
        return _functions()[verb, kind]


@functools.cache
def _functions() -> dict[tuple[str, str], Callable[..., Any]]:
    """Compile all functions, which takes some milliseconds."""
    module = ir.Module()
    every = [(verb, kind) for verb in ATOMICS for kind in ATOMICS[verb]]
    for verb, kind in every:
        _define(module, verb, kind)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    code = binding.parse_assembly(str(module))
    compiler = binding.create_mcjit_compiler(code, target.create_target_machine())
    compiler.finalize_object()
    _keep.append(compiler)
    found: dict[tuple[str, str], Callable[..., Any]] = {}
    for verb, kind in every:
        values = [_C[kind]] * (2 if verb == "cas" else 1)
        made = ctypes.CFUNCTYPE(_C[kind], ctypes.c_int64, *values)
        address = compiler.get_function_address(f"{verb}_{kind}")
        found[verb, kind] = made(address)
    return found


def _define(module: ir.Module, verb: str, kind: str) -> None:
    floats = {"f32": ir.FloatType(), "f64": ir.DoubleType()}
    element = floats.get(kind) or ir.IntType(int(kind[1:]))
    values = [element] * (2 if verb == "cas" else 1)
    signature = ir.FunctionType(element, [_ADDRESS, *values])
    made = ir.Function(module, signature, f"{verb}_{kind}")
    builder = ir.IRBuilder(made.append_basic_block())
    at, *values = made.args
    pointer = builder.inttoptr(at, element.as_pointer())
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
