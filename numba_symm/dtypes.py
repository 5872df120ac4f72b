"""The table of element types and operators, and what accumulates in what."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np

from numba_symm.errors import ArgumentError


@dataclass(frozen=True)
class Element:
    """An element type that can be reduced.

    Attributes:
        dtype: NumPy's dtype (bfloat16 and the 8-bit floats are ``ml_dtypes``').
        accumulate: the type partial results are kept in, in every algorithm: float32
            for narrower floats; for integers one in which they wrap around as NumPy's
            do, which holds any sum of 8- and 16-bit ones without wrapping.
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
        """Elements in a vector of 16 bytes."""
        return 16 // self.itemsize

    @property
    def floating(self) -> bool:
        """Whether every element is made of floats.

        64 ones hold only NaNs of all of them then, and still do without the top bit.
        """
        return self.accumulate.kind in "fc"

    @property
    def complex(self) -> bool:
        """Whether an element has a real and an imaginary part."""
        return self.accumulate.kind == "c"

    @property
    def narrow(self) -> bool:
        """Whether this is one of the 8-bit floats."""
        return self.name in _NARROW


_NARROW = ("float8_e4m3fn", "float8_e5m2")
_NARROW_CAPABILITY = (8, 9)  # from where on GPUs convert 8-bit floats

_ACCUMULATE = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
    "bool": "bool",
    "int8": "int32",
    "int16": "int32",
    "int32": "int64",
    "int64": "int64",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "uint64",
    "float8_e4m3fn": "float32",
    "float8_e5m2": "float32",
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


def moved(dtype: np.dtype[Any], count: int) -> tuple[Element, int]:
    """Return a known type as which to move ``count`` of any type, and their number."""
    for name in ("int64", "int32", "int16", "int8"):
        known = _ELEMENTS[np.dtype(name)]
        if dtype.itemsize % known.itemsize == 0:
            return known, count * dtype.itemsize // known.itemsize
    raise ArgumentError(f"{dtype}: elements of {dtype.itemsize} bytes cannot be moved")


def _sum(a: Any, b: Any) -> Any:
    return a + b


def _prod(a: Any, b: Any) -> Any:
    return a * b


# A NaN on either side wins, as in numpy.minimum and numpy.maximum.
def _min(a: Any, b: Any) -> Any:
    return a if a < b or a != a else b


def _max(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


def _band(a: Any, b: Any) -> Any:
    return a & b


def _bor(a: Any, b: Any) -> Any:
    return a | b


def _bxor(a: Any, b: Any) -> Any:
    return a ^ b


def _land(a: Any, b: Any) -> Any:
    return (a != 0) & (b != 0)


def _lor(a: Any, b: Any) -> Any:
    return (a != 0) | (b != 0)


def _lxor(a: Any, b: Any) -> Any:
    return (a != 0) ^ (b != 0)


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": _sum,
    "prod": _prod,
    "min": _min,
    "max": _max,
    "avg": _sum,  # ``device/lanes.py`` divides by the number of ranks at the end
    "band": _band,
    "bor": _bor,
    "bxor": _bxor,
    "land": _land,
    "lor": _lor,
    "lxor": _lxor,
}
"""The function of two elements behind each operator's name."""

BITWISE = ("band", "bor", "bxor")
LOGICAL = ("land", "lor", "lxor")

_AS_BITS = {"sum": "bor", "prod": "band", "min": "band", "max": "bor"}
_AS_BITS |= {"land": "band", "lor": "bor", "lxor": "bxor"}


@dataclass(frozen=True)
class UserOperator:
    """A user's own operator: equal to itself only, as its function is.

    Attributes:
        function: plain Python, of two scalars of the accumulation type, to one.
    """

    function: Callable[[Any, Any], Any]

    def __repr__(self) -> str:
        # The same on every rank: the ranks compare it.
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"{getattr(self.function, '__module__', '')}.{name}"


Op = str | UserOperator
"""A name in ``REDUCTIONS``, or a user's operator."""


def reduction(op: Any, what: str) -> Op:
    """Return the operator given as a string, an ``MPI.Op`` or a function."""
    if isinstance(op, str) and op in REDUCTIONS:
        return op
    mpi = sys.modules.get("mpi4py.MPI")  # an MPI.Op can only exist once imported
    if mpi is not None and isinstance(op, mpi.Op):
        for name in REDUCTIONS:
            if op == getattr(mpi, name.upper(), None):  # there is no MPI.AVG
                return name
    function = getattr(op, "py_func", op)  # of what Numba has compiled, or will
    if isinstance(function, FunctionType):
        return UserOperator(function)
    known = ", ".join(repr(name) for name in REDUCTIONS)
    raise ArgumentError(
        f"{what}: op={op!r} is not known; use {known}, the MPI.Op of that name, or a "
        "function of two scalars"
    )


def operators(element: Element) -> tuple[str, ...]:
    """Return the names of the operators that an element type has."""
    if element.complex:
        return "sum", "prod", "avg"
    lacks = {"b": ("avg",), "f": BITWISE}.get(element.accumulate.kind, ())
    return tuple(name for name in REDUCTIONS if name not in lacks)


def check(op: Op, element: Element, what: str) -> None:
    """Refuse an operator that the element type does not have."""
    known = operators(element)
    if isinstance(op, UserOperator):
        _check_function(op, what)
        return
    if op in known:
        return
    names = ", ".join(repr(name) for name in known)
    raise ArgumentError(
        f"{what}: op={op!r} means nothing for {element.name}; it has {names} and "
        "functions of two scalars"
    )


def _check_function(op: UserOperator, what: str) -> None:
    try:
        inspect.signature(op.function).bind(0, 0)
    except TypeError as error:
        raise ArgumentError(
            f"{what}: op={op} cannot be called with two scalars ({error}); pass a "
            "function of two scalars that returns one"
        ) from error


def check_capability(
    element: Element, capability: tuple[int, int], gpu: str, what: str
) -> None:
    """Refuse an element type that a GPU has no conversions for."""
    if element.narrow and tuple(capability) < _NARROW_CAPABILITY:
        needed, found = (
            ".".join(map(str, cc)) for cc in (_NARROW_CAPABILITY, capability)
        )
        raise ArgumentError(
            f"{what}: {element.name} needs a GPU of compute capability {needed}, and "
            f"{gpu} has {found}; convert the array to float16 or bfloat16"
        )


def bitwise(op: Op, element: Element) -> str | None:
    """Return the bitwise operator that does the same for whole words, if there is one.

    For bool these are all: its elements are 0 or 1, as NumPy keeps them.
    """
    if isinstance(op, UserOperator):
        return None
    if op in BITWISE:
        return op
    return _AS_BITS[op] if element.accumulate.kind == "b" else None


def identity(op: Op, dtype: Any) -> Any:
    """Return the element that leaves any other as it is: what nothing reduces to.

    For min and max of floats without infinity it is their largest; for sum of floats
    -0.0, as 0.0 would change a -0.0.

    Args:
        op: what ``reduction`` returned.
        dtype: a type that has the operator.

    Returns:
        A NumPy scalar of the dtype.

    Raises:
        ArgumentError: the type has no such operator, or it is a function: nobody can
            know its identity.
    """
    kind = element(dtype, "identity")
    check(op, kind, "identity")
    if isinstance(op, UserOperator):
        raise ArgumentError(
            f"identity: op={op} is a function, whose identity is not known; pass at "
            "least one element"
        )
    if op in ("sum", "avg"):
        zero = complex(-0.0, -0.0) if kind.complex else -0.0
        found = zero if kind.floating else 0
    elif op in ("min", "max"):
        lowest, highest = _limits(kind)
        found = highest if op == "min" else lowest
    elif op == "band":
        found = True if kind.accumulate.kind == "b" else _limits(kind)[1]
        if kind.dtype.kind == "i":
            found = -1
    else:
        found = 1 if op in ("prod", "land") else 0
    return kind.dtype.type(found)


def _limits(kind: Element) -> tuple[Any, Any]:
    """Return the least and the greatest element."""
    if kind.accumulate.kind == "b":
        return False, True
    if not kind.floating:
        integers = np.iinfo(kind.dtype)
        return integers.min, integers.max
    infinity = kind.dtype.type(np.inf)
    if np.isinf(np.float32(infinity)):
        return -infinity, infinity
    limits: Any = ml_dtypes.finfo
    return limits(kind.dtype).min, limits(kind.dtype).max
