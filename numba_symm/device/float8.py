"""Numba's types of the 8-bit floats of ``ml_dtypes``, as elements of arrays.

A kernel loads an element as a float32, and computes with float32. It rounds when it
stores the element or converts to its type: to nearest even, and beyond the largest
number as ``ml_dtypes`` does. The conversions need compute capability 8.9.

Numba itself has bfloat16, whose arithmetic it compiles from NVIDIA's headers.
"""

from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.datamodel.models import PrimitiveModel
from numba.cuda.extending import lower_cast, register_model
from numba.cuda.np import numpy_support
from numba.cuda.typeconv import Conversion

from numba_symm.device.instructions import TABLE
from numba_symm.device.ptx import statement
from numba_symm.dtypes import OVERFLOWS

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_INFINITY = 0x7F800000  # bits of a float32


class Float8(types.Number):  # type: ignore[misc]  # Numba is untyped
    """An 8-bit float.

    Args:
        dtype: NumPy's dtype.
        kind: its name in PTX.
        limit: the least float32 that overflows.
        beyond: the bits of the result of an overflow.
    """

    def __init__(self, dtype: np.dtype[Any], kind: str, limit: Any, beyond: int):
        super().__init__(name=dtype.name)
        self.bitwidth = 8
        self.kind = kind
        self.limit = int(np.float32(limit).view(np.uint32))
        self.beyond = beyond

    def can_convert_to(self, typingctx: Any, other: Any) -> Any:
        """Return how good a conversion to another type is, or None."""
        if other == types.float32:
            return Conversion.promote
        return Conversion.safe if other == types.float64 else None

    def can_convert_from(self, typingctx: Any, other: Any) -> Any:
        """Return how good a conversion from another type is, or None."""
        known = types.Float | types.Integer | types.Boolean
        return Conversion.unsafe if isinstance(other, known) else None


@register_model(Float8)
class _Float8Model(PrimitiveModel):  # type: ignore[misc]
    """A float32 in registers, a byte in memory."""

    def __init__(self, dmm: Any, fe_type: Any):
        super().__init__(dmm, fe_type, _F32)

    def get_data_type(self) -> Any:
        """Return the type in memory."""
        return _I8

    def as_data(self, builder: Any, value: Any) -> Any:
        """Round a float32."""
        return _rounded(builder, value, self._fe_type)

    def from_data(self, builder: Any, value: Any) -> Any:
        """Widen a byte."""
        return _widened(builder, value, self._fe_type)


def _rounded(builder: Any, value: Any, kind: Float8) -> Any:
    rounding = statement(TABLE[f"{kind.kind}x2_of_f32x2"])
    pair = rounding(builder, [value, ir.Constant(_F32, 0.0)])
    bits = builder.trunc(pair, _I8)
    # The instruction makes the largest number of what overflows.
    size = builder.and_(builder.bitcast(value, _I32), ir.Constant(_I32, 0x7FFFFFFF))
    over = builder.and_(
        builder.icmp_unsigned(">=", size, ir.Constant(_I32, kind.limit)),
        builder.icmp_unsigned("<=", size, ir.Constant(_I32, _INFINITY)),
    )
    sign = builder.and_(bits, ir.Constant(_I8, 0x80))
    beyond = builder.or_(sign, ir.Constant(_I8, kind.beyond))
    return builder.select(over, beyond, bits)


def _widened(builder: Any, value: Any, kind: Float8) -> Any:
    widening = statement(TABLE[f"f32x2_of_{kind.kind}x2"])
    pair = widening(builder, [builder.zext(value, _I16)])
    return builder.extract_value(pair, 0)


@lower_cast(Float8, types.Float)  # type: ignore[untyped-decorator]
def _to_float(context: Any, builder: Any, kind: Any, other: Any, value: Any) -> Any:
    return context.cast(builder, value, types.float32, other)


@lower_cast(types.Float, Float8)  # type: ignore[untyped-decorator]
@lower_cast(types.Integer, Float8)  # type: ignore[untyped-decorator]
@lower_cast(types.Boolean, Float8)  # type: ignore[untyped-decorator]
def _of_number(context: Any, builder: Any, other: Any, kind: Any, value: Any) -> Any:
    wide = context.cast(builder, value, other, types.float32)
    return _widened(builder, _rounded(builder, wide, kind), kind)


for _name, _kind in (("float8_e4m3fn", "e4m3"), ("float8_e5m2", "e5m2")):
    _dtype = np.dtype(getattr(ml_dtypes, _name))
    numpy_support.FROM_DTYPE[_dtype] = Float8(_dtype, _kind, *OVERFLOWS[_name])
