"""The table of element types, their accumulation types and the operators."""

import contextlib
import functools
import inspect
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import ml_dtypes
import numpy as np

from numba_symm.arguments import meant, shown, without_addresses
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, summary


@dataclass(frozen=True)
class Element:
    """An element type that can be reduced.

    Attributes:
        dtype: NumPy's dtype; bfloat16 and the 8-bit floats are those of ``ml_dtypes``.
        accumulate: the type of partial results, in every algorithm. It is float32 for
            narrower floats. For integers it is a type in which results wrap around as
            in NumPy; it holds any sum of 8- and 16-bit integers without wrapping.
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
        """Whether every element consists of floats.

        If so, 64 one bits contain only NaNs, and still do with the top bit cleared.
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


OVERFLOWS: dict[str, tuple[Any, int]] = {
    # It has no infinity, but NaN.
    "float8_e4m3fn": (np.nextafter(np.float32(464), np.float32(465)), 0x7F),
    "float8_e5m2": (np.float32(61440), 0x7C),
}
"""By 8-bit float, the least float32 that overflows, and the bits of the result."""

_NARROW = tuple(OVERFLOWS)
_NARROW_CAPABILITY = (8, 9)  # the lowest that converts 8-bit floats

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

DTYPES = frozenset(_ELEMENTS)
"""NumPy's dtypes of the types in the table."""


def checked(dtype: Any, what: str) -> np.dtype[Any]:
    """Return NumPy's dtype, or raise ArgumentError if a GPU cannot have it."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except Exception as error:  # NumPy raises errors of many classes
        raise ArgumentError(
            f"{what}: expected a dtype, got dtype={shown(dtype)} "
            f"({without_addresses(str(error))}); pass NumPy's, such as 'float32'"
        ) from error
    if found.hasobject:
        raise ArgumentError(
            f"{what}: expected a dtype without Python objects, got dtype={dtype!r}; "
            "pass one that a GPU can store, such as 'float32'"
        )
    if found.subdtype is not None:
        raise ArgumentError(
            f"{what}: expected a dtype without a shape, got dtype={dtype!r}; pass "
            f"{found.base.name} and append {found.shape} to the array's shape"
        )
    if found.itemsize == 0:
        raise ArgumentError(
            f"{what}: expected a dtype of at least 1 byte, got dtype={dtype!r}; pass "
            "one with a size, such as 'S8'"
        )
    return found


def element(dtype: Any, what: str) -> Element:
    """Return the table's entry for ``dtype``; ``what`` names the caller in errors."""
    found = _ELEMENTS.get(np.dtype(dtype))
    if found is None:
        known = ", ".join(_ACCUMULATE)
        raise ArgumentError(
            f"{what}: expected a dtype that has operators, got {np.dtype(dtype)}; "
            f"convert the array to one of {known}"
        )
    return found


def moved(dtype: np.dtype[Any], count: int) -> tuple[Element, int]:
    """Return an integer type to move ``count`` elements of any type as, and a count."""
    for name in ("int64", "int32", "int16", "int8"):
        known = _ELEMENTS[np.dtype(name)]
        if dtype.itemsize % known.itemsize == 0:
            return known, count * dtype.itemsize // known.itemsize
    raise ArgumentError(f"expected elements of whole bytes, got {dtype}")


def _sum(a: Any, b: Any) -> Any:
    return a + b


def _prod(a: Any, b: Any) -> Any:
    return a * b


# NaN if either is NaN, as in numpy.minimum and numpy.maximum.
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
"""The function of two elements for each operator's name."""


def left_half(number: int) -> int:
    """Return how many of at least two leaves the left half of their tree has.

    It is the largest power of two below their number.
    """
    return 1 << (number - 1).bit_length() - 1


def in_tree(
    reduce: Callable[[Any, Any], Any], leaves: Sequence[Any], first: int
) -> Any:
    """Reduce leaves by a balanced binary tree, such as ((0 + 1) + (2 + 3)) + 4.

    So aligned groups of 2, 4, 8 … leaves can be reduced in advance, for example on an
    island that has them, and the result has the same bits.

    Args:
        reduce: reduces two results; the left one has the lower leaves.
        leaves: at least one.
        first: the number of the first one; those before it are left out.
    """
    if len(leaves) == 1:
        return leaves[0]
    half = left_half(first + len(leaves))
    if first >= half:
        return in_tree(reduce, leaves, first - half)
    left = in_tree(reduce, leaves[: half - first], first)
    return reduce(left, in_tree(reduce, leaves[half - first :], 0))


LOCATED = ("minloc", "maxloc")
"""Operators on pairs of a value and an index; see ``collectives/operations.py``."""

BITWISE = ("band", "bor", "bxor")
LOGICAL = ("land", "lor", "lxor")

_AS_BITS = {"sum": "bor", "prod": "band", "min": "band", "max": "bor"}
_AS_BITS |= {"land": "band", "lor": "bor", "lxor": "bxor"}


@dataclass(frozen=True)
class UserOperator:
    """A user's operator, equal to another one only if the functions are the same.

    Attributes:
        function: a plain Python function of two scalars of the accumulation type,
            which returns one.
        commutative: whether the order of the inputs has no effect on the result.
    """

    function: FunctionType
    commutative: bool = False

    def __repr__(self) -> str:
        # The ranks compare this text, so it contains no address.
        return f"{self} (body {_digest_of(self.function)})"

    def __str__(self) -> str:
        return _named(self.function)


@dataclass(frozen=True)
class UserEpilogue:
    """A user's epilogue, equal to another one only if the functions are the same.

    Attributes:
        function: a plain Python function of scalars, which returns one: of the reduced
            element, the row's sum if there is ``row_sum``, and the further arguments.
        row_sum: such a function, without that sum; its results are added up by row.
    """

    function: FunctionType
    row_sum: FunctionType | None = None

    def __repr__(self) -> str:
        # The ranks compare this text, so it contains no address.
        text = f"{_named(self.function)} (body {_digest_of(self.function)})"
        if self.row_sum is None:
            return text
        more = f"{_named(self.row_sum)} (body {_digest_of(self.row_sum)})"
        return f"{text} with row_sum {more}"


def _named(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


@functools.lru_cache(maxsize=256)
def _digest_of(function: FunctionType) -> str:
    """Return a digest of what a function computes, equal on ranks that agree.

    It covers the code, its constants, and the values and functions that it refers to.
    Of values that are neither scalars nor arrays, it covers the type only.
    """
    words: list[str] = []
    seen: set[int] = set()

    def add(value: Any) -> None:
        value = getattr(value, "py_func", value)  # for a function decorated by Numba
        if isinstance(value, FunctionType):
            if id(value) not in seen:
                seen.add(id(value))
                add(value.__code__)
                add(value.__defaults__)
                names = value.__code__.co_names
                add(tuple(value.__globals__.get(name) for name in names))
                for cell in value.__closure__ or ():
                    with contextlib.suppress(ValueError):  # nothing is in it yet
                        add(cell.cell_contents)
        elif isinstance(value, CodeType):
            words.append(f"{value.co_code.hex()} {value.co_names}")
            add(value.co_consts)
        elif isinstance(value, tuple):
            words.append(f"({len(value)}")
            for each in value:
                add(each)
        elif isinstance(value, np.ndarray):
            words.append(f"{value.dtype} {value.shape} {zlib.crc32(value.tobytes())}")
        elif isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
            words.append(f"{type(value).__name__} {value!r}")
        else:
            words.append(type(value).__qualname__)

    add(function)
    return f"{zlib.crc32(' '.join(words).encode()):08x}"


Op = str | UserOperator
"""A name in ``REDUCTIONS``, or a user's operator."""


OTHERS_NAMES = {"add": "sum", "mul": "prod", "multiply": "prod", "mean": "avg"}
OTHERS_NAMES |= {"average": "avg", "argmin": "minloc", "argmax": "maxloc"}
OTHERS_NAMES |= {f"bitwise_{name}": f"b{name}" for name in ("and", "or", "xor")}
OTHERS_NAMES |= {f"logical_{name}": f"l{name}" for name in ("and", "or", "xor")}
"""By the name of Python's or NumPy's function, the operator."""


def reduction(op: Any, what: str) -> Op:
    """Return the operator for a string, an ``MPI.Op``, a function, or an operator."""
    named = isinstance(op, str) and (op in REDUCTIONS or op in LOCATED)
    if named or isinstance(op, UserOperator):
        return op  # type: ignore[no-any-return]
    mpi = sys.modules.get("mpi4py.MPI")  # without this import, op is not an MPI.Op
    if mpi is not None and isinstance(op, mpi.Op):
        for name in (*REDUCTIONS, *LOCATED):
            if op == getattr(mpi, name.upper(), None):  # MPI has no AVG
                return name
    function = getattr(op, "py_func", op)  # for a function decorated by Numba
    if isinstance(function, FunctionType):
        return UserOperator(function)
    known = ", ".join(repr(name) for name in (*REDUCTIONS, *LOCATED))
    if hasattr(op, "shape"):
        raise ArgumentError(
            f"{what}: expected an operator, got the array op={type(op).__name__}; "
            f"write {what}(x, out=y) for an output"
        )
    name = str(getattr(op, "__name__", op)).lower()
    near = meant(name, (*REDUCTIONS, *LOCATED), OTHERS_NAMES)
    raise ArgumentError(
        f"{what}: expected an operator, got op={shown(op)}{near}; pass one of {known}, "
        "the MPI.Op of that name, or a function of two scalars"
    )


def operators(element: Element) -> tuple[str, ...]:
    """Return the names of an element type's operators."""
    if element.complex:
        return "sum", "prod", "avg"
    lacks = {"b": ("avg",), "f": BITWISE}.get(element.accumulate.kind, ())
    return tuple(name for name in REDUCTIONS if name not in lacks)


def check(op: Op, element: Element, what: str) -> None:
    """Refuse an operator that the element type does not have."""
    known = operators(element)
    if isinstance(op, UserOperator):
        _check_function(op, element, what)
        return
    if op in known:
        return
    names = ", ".join(repr(name) for name in known)
    raise ArgumentError(
        f"{what}: expected an operator of {element.name}, got op={op!r}; pass one of "
        f"{names}, or a function of two scalars"
    )


def _check_function(op: UserOperator, element: Element, what: str) -> None:
    try:
        inspect.signature(op.function).bind(0, 0)
    except TypeError as error:
        raise ArgumentError(
            f"{what}: expected a function of two scalars, got op={op} ({error}); pass "
            "one that takes two and returns one"
        ) from error
    kind = element.accumulate
    why = SIMULATED and unfit(op.function, 2 * (kind.type(1),), (kind.type,))
    if why:
        raise ArgumentError(
            f"{what}: expected a function that numba.cuda compiles for two "
            f"{kind.name}, got op={op}: {why}"
        )


def unfit(function: Any, arguments: Sequence[Any], kinds: Sequence[Any]) -> str:
    """Return why Numba would not compile a function, as a trial call shows; or ""."""
    try:
        with np.errstate(all="ignore"):
            found = function(*arguments)
        results = found if isinstance(found, tuple) and len(kinds) > 1 else (found,)
        if len(results) != len(kinds):
            return f"expected {len(kinds)} numbers as the result, got {shown(found)}"
        for result, kind in zip(results, kinds, strict=True):
            if converted(result, kind).shape:
                return f"expected a number as the result, got {shown(result)}"
    except ArgumentError as error:
        return str(error)
    except (AttributeError, NameError, TypeError) as error:
        return summary(error)
    except Exception:  # of these numbers, which the program may never pass
        pass
    return ""


def converted(result: Any, kind: Any) -> Any:
    """Return what a user's function has returned as a ``kind``, in the simulator.

    Raises:
        ArgumentError: Numba compiles no function with such a result.
    """
    if type(result) is kind:
        return result
    if isinstance(result, bool | int | float | complex | np.generic | np.ndarray):
        # An array's astype accepts values out of range, as a user's Python ints.
        found = np.asarray(result)
        real = found.dtype.kind != "c" or np.dtype(kind).kind in "bc"
        if real and found.dtype in DTYPES:
            return found.astype(kind)[()]
    what = f"a number as the result, to be converted to {kind.__name__}"
    raise ArgumentError(f"expected {what}, got {shown(result)}")


def check_capability(
    element: Element, capability: tuple[int, int], gpu: str, what: str
) -> None:
    """Refuse an element type that the GPU cannot convert."""
    if element.narrow and tuple(capability) < _NARROW_CAPABILITY:
        needed, found = (
            ".".join(map(str, cc)) for cc in (_NARROW_CAPABILITY, capability)
        )
        raise ArgumentError(
            f"{what}: expected compute capability {needed} or higher for "
            f"{element.name}, got {found} of {gpu}; convert the array to float16 or "
            "bfloat16"
        )


def makes_truth(op: Op, element: Element) -> bool:
    """Return whether an operator makes an element 0 or 1, that of one rank, too."""
    return op in LOGICAL and bitwise(op, element) is None


def bitwise(op: Op, element: Element) -> str | None:
    """Return the bitwise operator that is equal to ``op`` on whole words, or None.

    bool has one for every operator, because NumPy stores its elements as 0 or 1.
    """
    if isinstance(op, UserOperator):
        return None
    if op in BITWISE:
        return op
    return _AS_BITS[op] if element.accumulate.kind == "b" else None


def identity(op: Op, dtype: Any) -> Any:
    """Return the identity element of an operator: the reduction of no elements.

    For min and max of floats without infinity, it is the largest or lowest number. For
    sum of floats, it is -0.0, because 0.0 would change a -0.0.

    Args:
        op: an operator of ``reduction``.
        dtype: a type that has the operator.

    Returns:
        A NumPy scalar of the dtype.

    Raises:
        ArgumentError: the type does not have the operator, or the operator is a
            function, whose identity is unknown.
    """
    kind = element(dtype, "identity")
    check(op, kind, "identity")
    if isinstance(op, UserOperator):
        raise ArgumentError(
            f"identity: expected an operator with a known identity, got the function "
            f"{op}; pass at least one element"
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
