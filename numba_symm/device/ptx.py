"""The intrinsics that Numba makes of PTX instructions, and those of arrays.

The intrinsics that Numba makes of the instructions in ``instructions.py``.

The other intrinsics here concern arrays, indices and what only the simulator checks.
``sim.py`` has the same names for Numba's simulator.

What device functions need of arrays, as intrinsics of Numba.

``sim_views.py`` has the same names for the simulator.
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
from numba.cuda import cgutils, types
from numba.cuda.core.ir_utils import alias_func_extensions
from numba.cuda.extending import intrinsic
from numba.cuda.np import numpy_support
from numba.cuda.np.arrayobj import np_cfarray
from numba.cuda.nvvmutils import call_sreg

from numba_symm.device import compiler, instructions, models
from numba_symm.device.compiler import constant_of
from numba_symm.device.instructions import (
    ATOMIC_ORDERS,
    ATOMICS,
    LOAD_ORDERS,
    MEETS,
    NONE,
    TABLE,
    Instruction,
    atomic_name,
)
from numba_symm.dtypes import DTYPES

F = TypeVar("F", bound=Callable[..., Any])

_I16, _I32, _I64 = types.uint16, types.uint32, types.int64
_F32, _F64 = types.float32, types.float64
_TYPES = {"u16": _I16, "u32": _I32, "s64": _I64, "f32": _F32, "f64": _F64}
_TYPES["pred"] = types.boolean
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


class _DeviceFunction(models.DeviceFunction):
    """A device function that Numba compiles without a GPU.

    Numba's own asks the current GPU for its compute capability.
    """

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        """Compile the function for arguments of these types, once in a process.

        A constant's value is not part of its type here. LLVM finds it when it inlines.
        """
        args = tuple(map(types.unliteral, args))
        models.note_call(self, args)
        if args not in self.overloads:
            with _failing_once((self, args)), self._compiling_counter:
                compiled = compiler.compiled(self.py_func, args, return_type)
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
    """Decorate a function so that kernels can call it; GPU code inlines it.

    The function must not return new arrays, only arrays that were passed to it.
    Decorate a function that returns a new array with ``@cuda.jit(device=True,
    inline="always")`` instead.
    """
    # LLVM inlines it wherever it is called. Numba could, too, but would type and lower
    # it again for every call in every kernel.
    options = cuda.jit(device=True, forceinline=True)(function).targetoptions
    return _DeviceFunction(function, options)


def sliced(form: Any) -> Callable[[F], F]:
    """Return ``device_function``: the simulator calls ``form`` instead."""
    return device_function


def array_function(function: F) -> F:
    """Make ``function``, which returns a new array, callable from kernels.

    Numba inlines it, because a call in Numba returns no arrays but its arguments.
    """
    return cuda.jit(device=True, inline="always")(function)  # type: ignore[no-any-return]


def _type_of(scalars: tuple[str, ...]) -> Any:
    """Return Numba's type of a result or an operand in the table."""
    if not scalars:
        return types.void
    kind = _TYPES[scalars[0]]
    return kind if len(scalars) == 1 else types.UniTuple(kind, len(scalars))


_ATTRIBUTES = {MEETS: ("convergent",), NONE: ("nounwind", "readnone")}
"""By the effect of an instruction, the LLVM attributes of its statement."""


def statement(found: Instruction) -> Callable[..., Any]:
    """Return a function of a builder and scalars that adds one inline PTX statement.

    A statement with an effect is marked as one that has side effects and clobbers
    memory. So the compiler neither drops nor repeats it, and does not move it across
    other memory accesses.
    """
    effective = found.effect != NONE
    results = [_TYPES[each] for each in found.result]
    inputs = [_TYPES[each] for operand in found.operands for each in operand]
    attributes = _ATTRIBUTES.get(found.effect, ())
    constraints = [f"={_CONSTRAINT[t]}" for t in results]
    constraints += [_CONSTRAINT[t] for t in inputs] + ["~{memory}"] * effective
    returned = [_LLVM[t] for t in results]
    if not returned:
        llvm_result: Any = ir.VoidType()
    elif len(returned) == 1:
        llvm_result = returned[0]
    else:
        llvm_result = ir.LiteralStructType(returned)
    function = ir.FunctionType(llvm_result, [_LLVM[t] for t in inputs])

    def add(builder: Any, values: list[Any]) -> Any:
        asm = ir.InlineAsm(
            function, found.template, ",".join(constraints), side_effect=effective
        )
        return builder.call(asm, values, attrs=attributes)

    return add


def code_of(found: Instruction) -> Callable[..., Any]:
    """Return Numba code generation for an instruction."""
    add, number = statement(found), len(found.result)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = []
        for operand, value in zip(found.operands, args, strict=True):
            if len(operand) > 1:
                values += [builder.extract_value(value, k) for k in range(len(operand))]
            else:
                values.append(value)
        out = add(builder, values)
        if number == 0:
            return context.get_dummy_value()
        if found.result == ("pred",):
            return builder.icmp_unsigned("!=", out, out.type(0))
        if number == 1:
            return out
        parts = [builder.extract_value(out, k) for k in range(number)]
        return context.make_tuple(builder, signature.return_type, parts)

    return codegen


def _intrinsic(found: Instruction) -> Any:
    """Return the intrinsic of an instruction, which has at most three operands."""
    operands = [_type_of(each) for each in found.operands]
    made = _type_of(found.result)(*operands), code_of(found)
    if not operands:
        return intrinsic(lambda typingctx: made)
    if len(operands) == 1:
        return intrinsic(lambda typingctx, a: made)
    if len(operands) == 2:
        return intrinsic(lambda typingctx, a, b: made)
    return intrinsic(lambda typingctx, a, b, c: made)


for _each in TABLE.values():
    globals()[_each.name] = _intrinsic(_each)


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

_of_first_lane = code_of(TABLE["of_first_lane"])


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


@device_function
def grid_size() -> int:
    """Return the number of blocks in the grid."""
    return cuda.gridDim.x * cuda.gridDim.y * cuda.gridDim.z  # type: ignore[no-any-return]


@device_function
def grid_index() -> int:
    """Return the block's index in the grid, counted through all dimensions."""
    row = cuda.blockIdx.y + cuda.gridDim.y * cuda.blockIdx.z
    return cuda.blockIdx.x + cuda.gridDim.x * row  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def word_of(typingctx: Any, bits: Any) -> Any:
    """Return bits as an 8-byte word: a signed integer, as all data words."""
    return _I64(_I64), lambda context, builder, signature, args: args[0]


def _nothing(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def is_checked(typingctx: Any, ctx: Any) -> Any:
    """Return whether a context asks for checks; a constant, so others cost nothing."""
    found = getattr(getattr(ctx, "instance_class", None), "checked", False)
    constant = ir.Constant(ir.IntType(1), int(found))
    return types.boolean(ctx), lambda context, builder, signature, args: constant


@intrinsic  # type: ignore[untyped-decorator]
def check_grid(typingctx: Any) -> Any:
    """Check nothing: a grid that does not fit ends by its deadline."""
    return types.void(), _nothing


def _field(ctx: Any, name: str) -> Any:
    """Return the definition of a field that only contexts of debug mode have."""
    fields = getattr(ctx, "fields", ())

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if name not in fields:
            return ir.Constant(_LLVM[_I64], 0)
        return builder.extract_value(args[0], fields.index(name))

    return _I64(ctx), codegen


@intrinsic  # type: ignore[untyped-decorator]
def size_of(typingctx: Any, ctx: Any) -> Any:
    """Return the bytes of the buffers; 0 if the context does not have them."""
    return _field(ctx, "nbytes")


@intrinsic  # type: ignore[untyped-decorator]
def channels_of(typingctx: Any, ctx: Any) -> Any:
    """Return the channels of a pad; 0 if the context does not have them."""
    return _field(ctx, "pad_channels")


@intrinsic  # type: ignore[untyped-decorator]
def later_blocks(typingctx: Any) -> Any:
    """Return 0: blocks run together."""
    return _I64(), lambda context, builder, signature, args: ir.Constant(_LLVM[_I64], 0)


@intrinsic  # type: ignore[untyped-decorator]
def poll_pause(typingctx: Any, polls: Any) -> Any:
    """Let other threads run between two polls; a GPU does so by itself."""
    return types.void(polls), _nothing


def _lengths(shape: Any, dtype: Any) -> Any:
    """Return the types of an array's lengths, or raise TypingError."""
    lengths = shape.types if isinstance(shape, types.BaseTuple) else (shape,)
    if not all(isinstance(types.unliteral(each), types.Integer) for each in lengths):
        raise TypingError(
            f"expected shape to be an int or a tuple of ints, got {shape}"
        )
    if not isinstance(dtype, types.DTypeSpec):
        raise TypingError(
            f"expected dtype to be a NumPy scalar type such as np.float32, got {dtype}"
        )
    return lengths


@intrinsic  # type: ignore[untyped-decorator]
def nbytes_of(typingctx: Any, shape: Any, dtype: Any) -> Any:
    """Return the bytes of an array of ``shape`` and ``dtype``."""
    several = isinstance(shape, types.BaseTuple)
    number = len(_lengths(shape, dtype))
    lengths = types.UniTuple(_I64, number) if several else _I64

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        itemsize = context.get_abi_sizeof(context.get_data_type(dtype.dtype))
        total = ir.Constant(_LLVM[_I64], itemsize)
        for each in cgutils.unpack_tuple(builder, args[0]) if several else [args[0]]:
            total = builder.mul(total, each)
        return total

    return _I64(lengths, dtype), codegen


@intrinsic  # type: ignore[untyped-decorator]
def array_at(typingctx: Any, address: Any, shape: Any, dtype: Any) -> Any:
    """Return a C-contiguous array of ``shape`` and ``dtype`` at ``address``."""
    lengths = _lengths(shape, dtype)
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


_I64 = types.int64
_WORD = ir.IntType(64)
_SIZES = (1, 2, 4, 8, 16)


def _number(value: int) -> Any:
    return ir.Constant(_WORD, value)


def _layout(context: Any, builder: Any, array: Any, value: Any) -> list[Any]:
    """Return an array's address, its three lengths, and bytes from each to the next."""
    made = context.make_array(array)(context, builder, value)
    lengths = cgutils.unpack_tuple(builder, made.shape, array.ndim)
    strides = cgutils.unpack_tuple(builder, made.strides, array.ndim)
    more = 3 - array.ndim
    lengths, strides = [_number(1)] * more + lengths, [_number(0)] * more + strides
    address = builder.ptrtoint(made.data, ir.IntType(64))
    return [address, *lengths, *strides]


@intrinsic  # type: ignore[untyped-decorator]
def views_of(typingctx: Any, target: Any, source: Any) -> Any:
    """Return an element's bytes, and the layouts of a copy's target and source.

    A layout is an address, the numbers of planes, rows of a plane and columns, and the
    bytes from one plane, one row and one column to the next.
    """
    arrays = [each for each in (target, source) if isinstance(each, types.Array)]
    same = len({(each.dtype, each.ndim) for each in arrays}) == 1
    if (
        len(arrays) < 2
        or not same
        or source.ndim not in (1, 2, 3)
        or not target.mutable
    ):
        raise TypingError(
            "a copy: expected two arrays of one to three dimensions and of the same "
            f"dtype, the first one to write to, got {target} and {source}"
        )

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = context.get_abi_sizeof(context.get_data_type(source.dtype))
        if size not in _SIZES:
            raise TypingError(
                f"a copy: expected elements of 1, 2, 4, 8 or 16 bytes, got {source}"
            )
        found = [_number(size)]
        for each, value in zip((target, source), args, strict=True):
            found += _layout(context, builder, each, value)
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(_I64, 15)(target, source), codegen


@intrinsic  # type: ignore[untyped-decorator]
def mailbox_of(typingctx: Any, mailbox: Any) -> Any:
    """Return the address of a mailbox of packets."""
    if not (
        isinstance(mailbox, types.Array)
        and (mailbox.dtype, mailbox.ndim) == (types.uint64, 1)
        and mailbox.layout == "C"
        and mailbox.mutable
    ):
        raise TypingError(
            "a copy with packets: expected a contiguous array of one dimension of "
            f"uint64 as the mailbox, got {mailbox}"
        )

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _layout(context, builder, mailbox, args[0])[0]

    return _I64(mailbox), codegen


def dtype_of(element: Any) -> np.dtype[Any] | None:
    """Return NumPy's dtype of Numba's type of an element; None: of no known one."""
    for dtype in DTYPES:
        if numpy_support.from_dtype(dtype) == element:
            return dtype
    return None


def _unit(array: Any) -> tuple[int, int]:
    """Return the bytes that an element is accessed by, and their alignment."""
    dtype = dtype_of(getattr(array, "dtype", None))
    if dtype is None or array.layout != "C":
        raise TypingError(f"expected a contiguous array of known elements, got {array}")
    parts = 2 if dtype.kind == "c" else 1
    return min(8, dtype.itemsize), min(8, dtype.itemsize // parts)


def _place(context: Any, builder: Any, array: Any, args: Any, width: Any) -> Any:
    """Return code for the pointer to an element, as an integer's."""
    made = context.make_array(array)(context, builder, args[0])
    first = builder.bitcast(made.data, width.as_pointer())
    return builder.gep(first, [args[1]])


@intrinsic  # type: ignore[untyped-decorator]
def load_bits(typingctx: Any, array: Any, index: Any) -> Any:
    """Return a contiguous array's element as bits; one of 16 bytes is two elements."""
    nbytes, alignment = _unit(array)
    width = ir.IntType(8 * nbytes)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, array, args, width)
        bits = builder.load(place, align=alignment)
        return bits if nbytes == 8 else builder.zext(bits, _WORD)

    return types.int64(array, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_bits(typingctx: Any, array: Any, index: Any, bits: Any) -> Any:
    """Store an element that is given as bits."""
    nbytes, alignment = _unit(array)
    width = ir.IntType(8 * nbytes)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, array, args, width)
        value = args[2] if nbytes == 8 else builder.trunc(args[2], width)
        builder.store(value, place, align=alignment)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


_KINDS = {
    types.int32: "s32",
    types.uint32: "u32",
    types.int64: "s64",
    types.uint64: "u64",
    types.float32: "f32",
    types.float64: "f64",
}


def _index_type(array: Any, index: Any, name: str) -> Any:
    """Return the type of an element's index, or raise TypingError."""
    places = index.types if isinstance(index, types.BaseTuple) else (index,)
    integers = all(isinstance(types.unliteral(each), types.Integer) for each in places)
    if not integers or len(places) != array.ndim:
        raise TypingError(
            f"{name}: expected {array.ndim} integers as the index, got {index}"
        )
    if isinstance(index, types.BaseTuple):
        return types.UniTuple(types.intp, len(places))
    return types.intp


def _address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return code for the address of an element of an array."""
    array, index = signature.args[:2]
    made = context.make_array(array)(context, builder, args[0])
    at = [args[1]]
    if isinstance(index, types.UniTuple):
        at = cgutils.unpack_tuple(builder, args[1], array.ndim)
    pointer = cgutils.get_item_pointer(
        context, builder, array, made, at, wraparound=True
    )
    return builder.ptrtoint(pointer, _WORD)


def _atomic(verb: str) -> Any:
    """Return the intrinsic of an atomic operation on an array's element."""
    name = f"atomic_{verb}"

    def typed(array: Any, index: Any, given: Any, *values: Any) -> Any:
        refusal = instructions.refusal(name)
        if refusal:
            raise TypingError(refusal)
        kind = _KINDS.get(getattr(array, "dtype", None))
        if kind not in ATOMICS[verb]:
            known = ", ".join(str(t) for t in _KINDS if _KINDS[t] in ATOMICS[verb])
            raise TypingError(f"{name}: expected an array of {known}, got {array}")
        if not array.mutable:
            raise TypingError(f"{name}: expected an array to write to, got {array}")
        order = constant_of(given)  # Numba tries a literal type second
        if order not in ATOMIC_ORDERS:
            known = ", ".join(map(repr, ATOMIC_ORDERS))
            raise TypingError(f"{name}: expected order to be {known}, got {given}")
        emit = code_of(TABLE[atomic_name(verb, order, kind)])
        indices = _index_type(array, index, name)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = _address(context, builder, signature, args)
            return emit(context, builder, signature, [address, *args[2:-1]])

        operands = *[array.dtype] * len(values), types.literal(order)
        return array.dtype(array, indices, *operands), codegen

    if verb == "cas":
        return intrinsic(
            lambda typingctx, array, index, old, value, order="relaxed": typed(
                array, index, order, old, value
            )
        )
    return intrinsic(
        lambda typingctx, array, index, value, order="relaxed": typed(
            array, index, order, value
        )
    )


for _verb in ATOMICS:
    globals()[f"atomic_{_verb}"] = _atomic(_verb)


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typingctx: Any, array: Any, index: Any, order: Any = "relaxed") -> Any:
    """Return an array's element, loaded with an order."""
    kind: Any = getattr(array, "dtype", None)
    given = constant_of(order)
    if kind not in _KINDS:
        known = ", ".join(map(str, _KINDS))
        raise TypingError(f"atomic_load: expected an array of {known}, got {array}")
    if given not in LOAD_ORDERS:
        known = ", ".join(map(repr, LOAD_ORDERS))
        raise TypingError(f"atomic_load: expected order to be {known}, got {order}")
    emit = code_of(TABLE[f"ld_{given}_sys_u{kind.bitwidth}"])

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature, args)
        word = emit(context, builder, signature, [address])
        return builder.bitcast(word, context.get_value_type(kind))

    indices = _index_type(array, index, "atomic_load")
    return kind(array, indices, types.literal(given)), codegen


_WORDS = {types.int64: 0, types.uint64: 0, types.int32: 1, types.uint32: 2}
"""The kinds of words in ``device/signals.py``."""


@intrinsic  # type: ignore[untyped-decorator]
def word_address(typingctx: Any, array: Any, index: Any) -> Any:
    """Return the address of an element of 32 or 64 bits."""
    if getattr(array, "dtype", None) not in _WORDS:
        raise TypingError(
            f"wait_until_at: expected an array of {', '.join(map(str, _WORDS))}, got "
            f"{array}"
        )
    return _I64(array, _index_type(array, index, "wait_until_at")), _address


@intrinsic  # type: ignore[untyped-decorator]
def word_kind(typingctx: Any, array: Any) -> Any:
    """Return which kind of word its elements are."""
    kind = _number(_WORDS[array.dtype])
    return _I64(array), lambda context, builder, signature, args: kind
