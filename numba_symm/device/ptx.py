"""The instructions that a kernel may use, named after their PTX.

Addresses are ``int64``. Device addresses fit, and Numba would make a float of
``uint64 + int64``. Flags are ``uint32``. Data words are ``int64`` bit patterns. A
``.sys`` access is atomic and ordered with accesses by every GPU and the host.
``sim.py`` has the same names for Numba's simulator.

Sources: `ld
    <https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld>`_,
`st
<https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st>`_,
`memory consistency model
<https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model>`_.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.core.errors import NumbaError, TypingError
from numba.cuda import types
from numba.cuda.compiler import compile_cuda
from numba.cuda.core.ir_utils import alias_func_extensions
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import intrinsic
from numba.cuda.np.arrayobj import np_cfarray
from numba.cuda.nvvmutils import call_sreg

F = TypeVar("F", bound=Callable[..., Any])

OLDEST = (8, 0)
"""The lowest compute capability of the GPUs that kernels run on."""

_I16, _I32, _I64 = types.uint16, types.uint32, types.int64
_F32, _F64 = types.float32, types.float64
_CONSTRAINT = {_I16: "h", _I32: "r", _I64: "l", _F32: "f", _F64: "d"}
_CONSTRAINT[types.boolean] = "r"  # a result is 0 or 1
_LLVM = {
    types.boolean: ir.IntType(32),
    _I16: ir.IntType(16),
    _I32: ir.IntType(32),
    _I64: ir.IntType(64),
    _F32: ir.FloatType(),
    _F64: ir.DoubleType(),
}


class Stopped(BaseException):
    """Compiling has ended before a device function; those before it are kept.

    Numba takes an Exception for a reason to try other types.
    """


is_stopped: ContextVar[Callable[[], bool]] = ContextVar(
    "is_stopped", default=lambda: False
)
"""Whether to compile no further device function, but raise :class:`Stopped`."""


class _DeviceFunction(CUDADispatcher):  # type: ignore[misc]
    """A device function that Numba compiles without a GPU.

    Numba's own asks the current GPU for its compute capability. Of all capabilities
    from ``OLDEST`` on, the result is the same code of LLVM, compiled with the kernel.
    """

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        """Compile the function for arguments of these types, once in a process.

        A constant's value is not part of its type here. LLVM finds it when it inlines.
        """
        args = tuple(map(types.unliteral, args))
        if args not in self.overloads:
            if is_stopped.get()():
                raise Stopped
            with _failing_once((self, args)), self._compiling_counter:
                compiled = compile_cuda(
                    self.py_func,
                    return_type,
                    args,
                    forceinline=True,
                    nvvm_options={"opt": 3},
                    cc=OLDEST,
                )
            self.overloads[args] = compiled
            compiled.target_context.insert_user_function(
                compiled.entry_point, compiled.fndesc, [compiled.library]
            )
        return self.overloads[args]


_failures: ContextVar[dict[Any, NumbaError] | None] = ContextVar(
    "_failures", default=None
)


@contextmanager
def _failing_once(key: Any) -> Iterator[None]:
    """Compile a device function unless that has failed within the same caller.

    Numba compiles each callee twice before it reports an error: 1024 times, ten
    functions deep.
    """
    failures = _failures.get()
    token = _failures.set({}) if failures is None else None
    try:
        if failures and key in failures:
            raise copy.copy(failures[key])
        yield
    except NumbaError as error:
        if failures is not None:
            failures[key] = copy.copy(error)  # the callers extend its text
        raise
    finally:
        if token is not None:
            _failures.reset(token)


def device_function(function: F) -> F:
    """Make ``function`` callable from kernels.

    LLVM inlines it wherever it is called. Numba could, too (``inline="always"``), but
    would type and lower it again for every call in every kernel.
    """
    options = cuda.jit(device=True, forceinline=True)(function).targetoptions
    return _DeviceFunction(function, options)


def array_function(function: F) -> F:
    """Make ``function``, which returns a new array, callable from kernels.

    Numba inlines it, because a call in Numba returns no arrays but its arguments.
    """
    return cuda.jit(device=True, inline="always")(function)  # type: ignore[no-any-return]


def _flat(numba_type: Any) -> list[Any]:
    """Return the scalars that make up a scalar, a tuple or ``void``."""
    if numba_type == types.void:
        return []
    return list(numba_type) if isinstance(numba_type, types.UniTuple) else [numba_type]


def _emit(
    asm: str, result: Any, operands: list[Any], attributes: tuple[str, ...]
) -> Callable[..., Any]:
    """Return Numba code generation for one inline PTX statement.

    It is marked to have side effects and to clobber memory. So the compiler does not
    drop it, repeat it, or move it across other memory accesses.
    """
    results, inputs = _flat(result), [s for o in operands for s in _flat(o)]
    constraints = [f"={_CONSTRAINT[t]}" for t in results]
    constraints += [_CONSTRAINT[t] for t in inputs] + ["~{memory}"]
    returned = [_LLVM[t] for t in results]
    if not returned:
        llvm_result: Any = ir.VoidType()
    elif len(returned) == 1:
        llvm_result = returned[0]
    else:
        llvm_result = ir.LiteralStructType(returned)
    function = ir.FunctionType(llvm_result, [_LLVM[t] for t in inputs])

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = []
        for operand, value in zip(operands, args, strict=True):
            if isinstance(operand, types.UniTuple):
                values += [builder.extract_value(value, k) for k in range(len(operand))]
            else:
                values.append(value)
        statement = ir.InlineAsm(function, asm, ",".join(constraints), side_effect=True)
        out = builder.call(statement, values, attrs=attributes)
        if not results:
            return context.get_dummy_value()
        if result == types.boolean:
            return builder.icmp_unsigned("!=", out, out.type(0))
        if len(results) == 1:
            return out
        parts = [builder.extract_value(out, k) for k in range(len(results))]
        return context.make_tuple(builder, signature.return_type, parts)

    return codegen


def _instruction(asm: str, result: Any, *operands: Any, together: bool = False) -> Any:
    """Return an intrinsic for ``asm`` with at most three operands.

    ``together``: threads execute it together, so the compiler may not copy it into both
    branches of a condition.
    """
    signature = result(*operands)
    attributes = ("convergent",) if together else ()
    codegen = _emit(asm, result, list(operands), attributes)
    if not operands:
        return intrinsic(lambda typingctx: (signature, codegen))
    if len(operands) == 1:
        return intrinsic(lambda typingctx, a: (signature, codegen))
    if len(operands) == 2:
        return intrinsic(lambda typingctx, a, b: (signature, codegen))
    return intrinsic(lambda typingctx, a, b, c: (signature, codegen))


_V2_I64 = types.UniTuple(_I64, 2)
_V2_F32 = types.UniTuple(_F32, 2)

# Flags and records, shared with other GPUs and the host while kernels run.
ld_relaxed_sys_u32 = _instruction("ld.relaxed.sys.global.u32 $0, [$1];", _I32, _I64)
ld_acquire_sys_u32 = _instruction("ld.acquire.sys.global.u32 $0, [$1];", _I32, _I64)
ld_relaxed_sys_u64 = _instruction("ld.relaxed.sys.global.u64 $0, [$1];", _I64, _I64)
ld_acquire_sys_u64 = _instruction("ld.acquire.sys.global.u64 $0, [$1];", _I64, _I64)
st_relaxed_sys_u32 = _instruction(
    "st.relaxed.sys.global.u32 [$0], $1;", types.void, _I64, _I32
)
st_release_sys_u32 = _instruction(
    "st.release.sys.global.u32 [$0], $1;", types.void, _I64, _I32
)
st_relaxed_sys_u64 = _instruction(
    "st.relaxed.sys.global.u64 [$0], $1;", types.void, _I64, _I64
)
st_release_sys_u64 = _instruction(
    "st.release.sys.global.u64 [$0], $1;", types.void, _I64, _I64
)

# Packets: 16 bytes, of which each 8 arrive whole; as fast as the hardware moves them.
ld_relaxed_sys_v2_u64 = _instruction(
    "ld.relaxed.sys.global.v2.u64 {$0,$1}, [$2];", _V2_I64, _I64
)
st_relaxed_sys_v2_u64 = _instruction(
    "st.relaxed.sys.global.v2.u64 [$0], {$1,$2};", types.void, _I64, _V2_I64
)

# Data, ordered by the flags around it.
ld_v2_u64 = _instruction("ld.global.v2.u64 {$0,$1}, [$2];", _V2_I64, _I64)
st_v2_u64 = _instruction("st.global.v2.u64 [$0], {$1,$2};", types.void, _I64, _V2_I64)
ld_u64 = _instruction("ld.global.u64 $0, [$1];", _I64, _I64)
st_u64 = _instruction("st.global.u64 [$0], $1;", types.void, _I64, _I64)
ld_u32 = _instruction("ld.global.u32 $0, [$1];", _I32, _I64)
st_u32 = _instruction("st.global.u32 [$0], $1;", types.void, _I64, _I32)
ld_u16 = _instruction("ld.global.u16 $0, [$1];", _I16, _I64)
st_u16 = _instruction("st.global.u16 [$0], $1;", types.void, _I64, _I16)
ld_u8 = _instruction("ld.global.u8 $0, [$1];", _I16, _I64)
st_u8 = _instruction("st.global.u8 [$0], $1;", types.void, _I64, _I16)

fence_acq_rel_sys = _instruction("fence.acq_rel.sys;", types.void)
griddepcontrol_wait = _instruction("griddepcontrol.wait;", types.void)
griddepcontrol_launch_dependents = _instruction(
    "griddepcontrol.launch_dependents;", types.void
)
globaltimer = _instruction("mov.u64 $0, %globaltimer;", _I64)


def _rounded_to(kind: str) -> Any:
    """Return what rounds a float32 to 16 bits.

    It is converted as one of a pair. Where a float is a predicate's 0 or 1, ptxas
    (13.0) loses the conversion of one alone, and stores the integer's bits.
    """
    return _instruction(
        "{.reg .b32 pair; .reg .b16 high;"
        f" cvt.rn.{kind}x2.f32 pair, 0f00000000, $1;"
        " mov.b32 {$0, high}, pair;}",
        *(_I16, _F32),
    )


# Conversions between bits and numbers.
f32_of_bits = _instruction("mov.b32 $0, $1;", _F32, _I32)
bits_of_f32 = _instruction("mov.b32 $0, $1;", _I32, _F32)
f64_of_bits = _instruction("mov.b64 $0, $1;", _F64, _I64)
bits_of_f64 = _instruction("mov.b64 $0, $1;", _I64, _F64)
f32_of_f16 = _instruction("cvt.f32.f16 $0, $1;", _F32, _I16)
f16_of_f32 = _rounded_to("f16")
f32_of_bf16 = _instruction(
    "{.reg .b16 zero; mov.u16 zero, 0; mov.b32 $0, {zero, $1};}", _F32, _I16
)
bf16_of_f32 = _rounded_to("bf16")


def _f32x2_of(kind: str) -> Any:
    """Return what widens two 8-bit floats, the lower one first; from sm_89 on."""
    return _instruction(
        "{.reg .b32 pair; .reg .b16 low, high;"
        f" cvt.rn.f16x2.{kind}x2 pair, $2; mov.b32 {{low, high}}, pair;"
        " cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}",
        *(_V2_F32, _I16),
    )


def _of_f32x2(kind: str) -> Any:
    """Return what rounds two floats, the lower one first; from sm_89 on.

    What is too large becomes the largest number, because the instruction has no other
    mode.
    """
    asm = f"cvt.rn.satfinite.{kind}x2.f32 $0, $2, $1;"
    return _instruction(asm, _I16, _F32, _F32)


f32x2_of_e4m3x2, f32x2_of_e5m2x2 = _f32x2_of("e4m3"), _f32x2_of("e5m2")
e4m3x2_of_f32x2, e5m2x2_of_f32x2 = _of_f32x2("e4m3"), _of_f32x2("e5m2")

# Products that are rounded before they are added to, as NumPy's are. With ``.rn``, no
# compiler makes a fused multiply-add of them, which might differ between kernels.
mul_rn_f32 = _instruction("mul.rn.f32 $0, $1, $2;", _F32, _F32, _F32)
mul_rn_f64 = _instruction("mul.rn.f64 $0, $1, $2;", _F64, _F64, _F64)


# Barriers of some of a block's threads: which barrier, and how many threads.
bar_sync = _instruction("bar.sync $0, $1;", types.void, _I32, _I32, together=True)
bar_red_or = _instruction(
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; bar.red.or.pred p, $1, $2, p; "
    "selp.u32 $0, 1, 0, p; }",
    *(types.boolean, _I32, _I32, _I32),
    together=True,
)


@device_function
def syncthreads() -> None:
    """`bar.sync 0`: synchronizes the block's threads, and orders their accesses."""
    cuda.syncthreads()


@device_function
def syncthreads_or(condition: bool) -> bool:
    """`bar.red.or.pred`: as ``syncthreads``; return whether any thread's holds."""
    return cuda.syncthreads_or(np.int32(condition)) != 0  # type: ignore[no-any-return]


@device_function
def thread_index() -> int:
    """Return the thread's index in its block, counted through all dimensions."""
    row = cuda.threadIdx.y + cuda.blockDim.y * cuda.threadIdx.z
    return cuda.threadIdx.x + cuda.blockDim.x * row  # type: ignore[no-any-return]


def _register(name: str) -> Any:
    """Return an intrinsic that reads a special register, such as ``tid.x``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call_sreg(builder, name)

    return intrinsic(lambda typingctx: (types.int32(), codegen))


thread_index_x = _register("tid.x")
thread_index_y = _register("tid.y")

_of_first_lane = _emit(
    "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", _I32, [_I32], ("convergent",)
)


@intrinsic  # type: ignore[untyped-decorator]
def block_index(typingctx: Any) -> Any:
    """Return the index of the thread's logical block among those of the launch.

    A logical block is the threads of a thread block with the same y index: whole warps.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # It is read from one lane, so that the compiler keeps it, and what follows from
        # it, once a warp. Otherwise kernels need up to 12 registers more.
        x, held, y = (call_sreg(builder, r) for r in ("ctaid.x", "ntid.y", "tid.y"))
        block = builder.add(builder.mul(x, held), y)
        return _of_first_lane(context, builder, signature, [block])

    return types.int32(), codegen


@device_function
def block_size() -> int:
    """Return the number of threads in a block."""
    return cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def word_of(typingctx: Any, bits: Any) -> Any:
    """Return bits as an 8-byte word: a signed integer, as all data words."""
    return _I64(_I64), lambda context, builder, signature, args: args[0]


def _nothing(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def check_slot(
    typingctx: Any, ctx: Any, owner: Any, channel: Any, source: Any, channels: Any
) -> Any:
    """Check nothing, to save time on a GPU."""
    return types.void(ctx, owner, channel, source, channels), _nothing


@intrinsic  # type: ignore[untyped-decorator]
def check_peer(typingctx: Any, ctx: Any, rank: Any) -> Any:
    """Check nothing, either."""
    return types.void(ctx, rank), _nothing


@intrinsic  # type: ignore[untyped-decorator]
def check_buffer(typingctx: Any, ctx: Any, shape: Any, dtype: Any) -> Any:
    """Check nothing, either."""
    return types.void(ctx, shape, dtype), _nothing


@intrinsic  # type: ignore[untyped-decorator]
def later_blocks(typingctx: Any) -> Any:
    """Return 0: blocks run together."""
    return _I64(), lambda context, builder, signature, args: ir.Constant(_LLVM[_I64], 0)


@intrinsic  # type: ignore[untyped-decorator]
def poll_pause(typingctx: Any, polls: Any) -> Any:
    """Let other threads run between two polls; a GPU does so by itself."""
    return types.void(polls), _nothing


@intrinsic  # type: ignore[untyped-decorator]
def array_at(typingctx: Any, address: Any, shape: Any, dtype: Any) -> Any:
    """Return a C-contiguous array of ``shape`` and ``dtype`` over ``address``."""
    lengths = shape.types if isinstance(shape, types.BaseTuple) else (shape,)
    if not all(isinstance(types.unliteral(each), types.Integer) for each in lengths):
        raise TypingError(
            f"expected shape to be an int or a tuple of ints, got {shape}"
        )
    if not isinstance(dtype, types.DTypeSpec):
        raise TypingError(
            f"expected dtype to be a NumPy scalar type such as np.float32, got {dtype}"
        )
    ndim = len(lengths)
    array = types.Array(dtype.dtype, ndim, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        over_pointer = array(types.voidptr, shape)
        return np_cfarray(context, builder, over_pointer, (pointer, args[1]))

    return array(_I64, shape, dtype), codegen


def _escapes(array: str, args: Any, aliases: Any, reachable: set[str]) -> None:
    """Mark an array that was made from an address as visible outside of the kernel.

    Otherwise, Numba assumes that only the kernel reads an array that the kernel has
    made. It then drops stores that the kernel does not read back.
    """
    reachable.add(array)


# By every name by which a kernel may call them.
for _module in ("", ".intrinsics", ".ptx", ".signals"):
    for _name in ("array_at", "peer_array"):
        alias_func_extensions[_name, f"numba_symm.device{_module}"] = _escapes
