"""What device functions need of arrays, as intrinsics of Numba.

``sim_views.py`` has the same names for the simulator.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core.errors import TypingError
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic
from numba.cuda.np import numpy_support

from numba_symm.device import links
from numba_symm.device.compiler import constant_of
from numba_symm.device.instructions import ATOMIC_ORDERS, ATOMICS, TABLE, atomic_name
from numba_symm.device.ptx import code_of
from numba_symm.dtypes import DTYPES

_I64 = types.int64
_WORD = ir.IntType(64)
_SIZES = (1, 2, 4, 8, 16)


def _number(value: int) -> Any:
    return ir.Constant(_WORD, value)


def _layout(context: Any, builder: Any, array: Any, value: Any) -> list[Any]:
    """Return an array's address, rows, columns, and bytes from each to the next."""
    made = context.make_array(array)(context, builder, value)
    lengths = cgutils.unpack_tuple(builder, made.shape, array.ndim)
    strides = cgutils.unpack_tuple(builder, made.strides, array.ndim)
    if array.ndim == 1:
        lengths, strides = [_number(1), *lengths], [_number(0), *strides]
    address = builder.ptrtoint(made.data, ir.IntType(64))
    return [address, *lengths, *strides]


@intrinsic  # type: ignore[untyped-decorator]
def views_of(typingctx: Any, target: Any, source: Any) -> Any:
    """Return an element's bytes, and the layouts of a copy's target and source.

    A layout is an address, the numbers of rows and columns, and the bytes from one row
    and from one column to the next.
    """
    arrays = [each for each in (target, source) if isinstance(each, types.Array)]
    same = len({(each.dtype, each.ndim) for each in arrays}) == 1
    if len(arrays) < 2 or not same or source.ndim not in (1, 2) or not target.mutable:
        raise TypingError(
            "a copy: expected two arrays of one or two dimensions and of the same "
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

    return types.UniTuple(_I64, 11)(target, source), codegen


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
        refusal = links.refusal(name)
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


_WORDS = {types.int64: 0, types.uint64: 0, types.int32: 1, types.uint32: 2}
"""The kinds of words in ``counting.py``."""


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
