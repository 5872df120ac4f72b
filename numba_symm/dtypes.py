"""The table of element types and reductions, and what accumulates in what."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from numba_symm.errors import ArgumentError


@dataclass(frozen=True)
class Element:
    """An element type that can be reduced.

    Attributes:
        dtype: NumPy's dtype (bfloat16 is ``ml_dtypes``').
        accumulate: the type partial results are kept in; 16-bit floats add up in
            float32 in every algorithm, integers wrap around as NumPy's do.
    """

    dtype: np.dtype[Any]
    accumulate: np.dtype[Any]

    @property
    def name(self) -> str:
        """The dtype's name."""
        return self.dtype.name

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.dtype.itemsize

    @property
    def lanes(self) -> int:
        """Elements in an 8-byte word."""
        return 8 // self.itemsize


_ACCUMULATE = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
    "int32": "int64",
    "int64": "int64",
}
_ELEMENTS = {
    np.dtype(getattr(ml_dtypes, name, name)): Element(
        np.dtype(getattr(ml_dtypes, name, name)), np.dtype(accumulate)
    )
    for name, accumulate in _ACCUMULATE.items()
}


def element(dtype: Any, what: str) -> Element:
    """Return the table's entry for ``dtype``; ``what`` names the caller in errors."""
    found = _ELEMENTS.get(np.dtype(dtype))
    if found is None:
        known = ", ".join(_ACCUMULATE)
        raise ArgumentError(
            f"{what}: cannot reduce {np.dtype(dtype)}; "
            f"convert the array to one of {known}"
        )
    return found


def _sum(a: Any, b: Any) -> Any:
    return a + b


def _prod(a: Any, b: Any) -> Any:
    return a * b


# A NaN on either side wins, as in numpy.minimum and numpy.maximum.
def _min(a: Any, b: Any) -> Any:
    return a if a < b or a != a else b


def _max(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": _sum,
    "prod": _prod,
    "min": _min,
    "max": _max,
}
"""The function of two elements behind each reduction's name."""


def reduction(op: Any, what: str) -> str:
    """Return the name of a reduction given as a string or an ``MPI.Op``."""
    if isinstance(op, str) and op in REDUCTIONS:
        return op
    mpi = sys.modules.get("mpi4py.MPI")  # an MPI.Op can only exist once imported
    if mpi is not None and isinstance(op, mpi.Op):
        for name in REDUCTIONS:
            if op == getattr(mpi, name.upper()):
                return name
    known = ", ".join(repr(name) for name in REDUCTIONS)
    raise ArgumentError(
        f"{what}: op={op!r} is not known; use {known} or the MPI.Op of that name"
    )
