"""Reads tensors by the table of C functions that their library has for DLPack.

Each attribute of a tensor takes a tenth of a microsecond. Compiled code asks the
library once for all of them (``__dlpack_c_exchange_api__``), and makes the fields.
"""

import ctypes
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from llvmlite import ir

from numba_symm.gpu.compiled import (
    ANY,
    I32,
    I64,
    Emitter,
    definition,
    engine_of,
    new_function,
    struct,
)

CPU, CUDA = 1, 2
"""DLPack's numbers of kinds of devices."""

_VERSION = 1
"""The major version of the table."""

_Table = struct(
    "Table",
    major=ctypes.c_uint32,
    minor=ctypes.c_uint32,
    others=ctypes.c_void_p * 4,
    fill=ctypes.c_void_p,  # describes an object: fills in a ``_Tensor``
    stream=ctypes.c_void_p,
)

_Tensor = struct(
    "Tensor",
    data=ctypes.c_void_p,
    kind=ctypes.c_int32,  # of the device
    device=ctypes.c_int32,
    axes=ctypes.c_int32,
    type=ctypes.c_uint32,  # code, bits and lanes
    shape=ctypes.c_void_p,
    strides=ctypes.c_void_p,  # in elements
    offset=ctypes.c_int64,  # bytes
)


def reader(
    tensors: type,
    samples: Iterable[tuple[Any, Any]],
    otherwise: Callable[..., Any],
    kind: int = CUDA,
) -> Callable[..., Any]:
    """Return a function that returns the fields of a tensor; ``arrays`` has them.

    Args:
        tensors: the class of the tensors.
        samples: by pairs, an element type as the fields have it, and a tensor of it.
        otherwise: what reads a tensor that is not contiguous or not of these types,
            that requires a gradient, has its negative bit set, or is elsewhere. If the
            class has no table, all are read by it.
        kind: where the tensors are.
    """
    capsule = getattr(tensors, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return otherwise
    table = _Table.from_address(_pointer_of(capsule, b"dlpack_exchange_api"))
    if table.major != _VERSION or not table.fill:
        return otherwise
    found, types = _Tensor(), {}
    fill = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
        table.fill
    )
    for dtype, sample in samples:
        with suppress(Exception):  # DLPack may lack the type
            fill(sample, ctypes.addressof(found))
            types[found.type] = dtype
    kept = types, "C", "requires_grad", "is_neg"
    engine = engine_of(lambda module: _Reader(module, table.fill, kind, *kept))
    method = definition(engine, "read")
    owned = engine, method, kept
    made: Callable[..., Any] = new_function(ctypes.addressof(method), otherwise, owned)
    return made


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = ctypes.py_object, ctypes.c_char_p


class _Reader(Emitter):
    """Emits ``read(tensor, what)``, with ``otherwise`` as self.

    Objects are constants, which the function owns.
    """

    def __init__(self, module: ir.Module, fill: int, kind: int, *kept: Any):
        super().__init__(module, "read", ANY, ANY, ANY.as_pointer(), I64)
        self.other = self.function.append_basic_block()
        otherwise, args, count = self.function.args
        types, c, requires_grad, is_neg = map(self.object, kept)
        b = self.b
        self.found = b.ptrtoint(b.alloca(I64, ctypes.sizeof(_Tensor) // 8), I64)
        self.lengths = b.alloca(ANY)  # the tuple, as soon as there is one
        b.store(ANY(None), self.lengths)
        call = ir.FunctionType(I32, [ANY, I64]).as_pointer()
        status = b.call(b.inttoptr(I64(fill), call), [b.load(args), self.found])
        self.go_on_if(b.icmp_signed("==", status, I32(0)))
        self.go_on_if(b.icmp_signed("==", self.field("kind", I32), I32(kind)))
        number = self.new("PyLong_FromLong", b.zext(self.field("type", I32), I64))
        dtype = self.python("PyDict_GetItemWithError", ANY, types, number)
        self.drop(number)
        self.go_on_if(self.exists(dtype))
        self.shape()  # the lengths are valid until torch has control again
        self.go_on_unless("PyObject_GetAttr", b.load(args), requires_grad)
        alone = args, I64(1), ANY(None)
        self.go_on_unless("PyObject_VectorcallMethod", is_neg, *alone)
        shape = b.load(self.lengths)
        address = b.add(self.field("data"), self.field("offset"))
        number = self.new("PyLong_FromLong", address)
        kept_on = map(self.keep, (dtype, c, self.object(False)))
        b.ret(self.tuple_of(number, shape, *kept_on))
        b.position_at_end(self.other)
        self.drop(b.load(self.lengths))
        self.python("PyErr_Clear", ir.VoidType())
        b.ret(
            self.python("PyObject_Vectorcall", ANY, otherwise, args, count, ANY(None))
        )

    def object(self, value: Any) -> Any:
        """Return an object as a constant; the function must own it."""
        return I64(id(value)).inttoptr(ANY)

    def exists(self, value: Any) -> Any:
        """Return whether there is an object."""
        return self.b.icmp_unsigned("!=", value, ANY(None))

    def new(self, name: str, *args: Any) -> Any:
        """Return a new object, or leave with Python's error."""
        made = self.python(name, ANY, *args)
        with self.b.if_then(self.b.not_(self.exists(made)), likely=False):
            self.b.ret(ANY(None))
        return made

    def drop(self, value: Any) -> None:
        """Drop a reference, if there is an object."""
        self.python("Py_DecRef", ir.VoidType(), value)

    def keep(self, value: Any) -> Any:
        """Return an object with another reference."""
        self.python("Py_IncRef", ir.VoidType(), value)
        return value

    def tuple_of(self, *items: Any) -> Any:
        """Return a tuple, which takes over a reference to each item."""
        made = self.new("PyTuple_New", I64(len(items)))
        for n, item in enumerate(items):
            self.python("PyTuple_SetItem", I32, made, I64(n), item)
        return made

    def go_on_if(self, condition: Any) -> None:
        """Leave the rest to the other function unless a condition holds."""
        further = self.function.append_basic_block()
        self.b.cbranch(condition, further, self.other)
        self.b.position_at_end(further)

    def field(self, name: str, kind: Any = I64) -> Any:
        """Return a field of the description."""
        return self.load(self.found, getattr(_Tensor, name).offset, kind)

    def go_on_unless(self, name: str, *args: Any) -> None:
        """Go on if a function of CPython answers False."""
        answer = self.python(name, ANY, *args)
        self.drop(answer)
        self.go_on_if(self.b.icmp_unsigned("==", answer, self.object(False)))

    def shape(self) -> None:
        """Make the tuple of lengths, and go on if the tensor is contiguous."""
        b, axes = self.b, self.b.sext(self.field("axes", I32), I64)
        made = self.new("PyTuple_New", axes)
        b.store(made, self.lengths)
        left, filled, expected = (b.alloca(I64) for _ in range(3))
        b.store(axes, left)
        b.store(I64(1), filled)
        b.store(I64(1), expected)
        head, body, end = (self.function.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        b.cbranch(self.is_(">", b.load(left), 0), body, end)
        b.position_at_end(body)
        axis = b.sub(b.load(left), I64(1))
        b.store(axis, left)
        at = b.shl(axis, I64(3))
        length = self.load(b.add(self.field("shape"), at))
        stride = self.load(b.add(self.field("strides"), at))
        same = b.icmp_signed("==", stride, b.load(expected))
        fits = b.or_(same, self.is_("==", length, 1))
        b.store(b.and_(b.load(filled), b.zext(fits, I64)), filled)
        b.store(b.mul(b.load(expected), length), expected)
        number = self.new("PyLong_FromLong", length)
        self.python("PyTuple_SetItem", I32, made, axis, number)
        b.branch(head)
        b.position_at_end(end)
        dense = b.or_(
            self.is_("!=", b.load(filled), 0), self.is_("==", b.load(expected), 0)
        )
        self.go_on_if(dense)
