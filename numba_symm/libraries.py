"""New arrays of the library of a caller's array: CuPy's or torch's.

CuPy or torch allocates an output, in the order of the call's stream. So the output is
an array of the caller's kind, and that library reuses its memory as it does for all
arrays. Symmetric memory is numba_symm's own; an array of CuPy or torch only views it.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from numba_symm import arrays
from numba_symm.arguments import shown
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, BackendError
from numba_symm.numba_arrays import dense_strides
from numba_symm.own_arrays import Memory


class Library(NamedTuple):
    """What makes arrays of a library.

    Attributes:
        name: of its module.
        empty: returns a new array of another one's type, of a shape and an order, for
            work on a stream.
        over: returns an array of a shape and a dtype over memory, which it keeps.
        knows: returns whether the library has arrays of a dtype.
    """

    name: str
    empty: Callable[[Any, tuple[int, ...], str, int], Any]
    over: Callable[[Memory, tuple[int, ...], np.dtype[Any]], Any]
    knows: Callable[[np.dtype[Any]], bool]


@functools.cache
def _cupy(cupy: Any) -> Library:
    def empty(like: Any, shape: tuple[int, ...], order: str, stream: int) -> Any:
        if stream == cupy.cuda.get_current_stream().ptr:
            return cupy.empty(shape, like.dtype, order)
        # CuPy gives memory to later arrays of the stream that was current here.
        with other(stream):
            return cupy.empty(shape, like.dtype, order)

    def other(stream: int) -> Any:
        if hasattr(cupy.cuda.Stream, "from_external"):  # from CuPy 14 on
            return cupy.cuda.Stream.from_external(_ExternalStream(stream))
        return cupy.cuda.ExternalStream(stream)

    def over(memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        place = cupy.cuda.UnownedMemory(memory.address, memory.nbytes, memory)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(place, 0))

    def knows(dtype: np.dtype[Any]) -> bool:
        try:
            cupy.ndarray(0, dtype)
        except Exception:  # ValueError or TypeError, by the version of CuPy
            return False
        return True

    return Library("cupy", empty, over, knows)


@functools.cache
def _torch(torch: Any) -> Library:
    def empty(like: Any, shape: tuple[int, ...], order: str, stream: int) -> Any:
        lengths = tuple(max(length, 1) for length in shape)
        strides = dense_strides(lengths, 1, order)
        options = {"dtype": like.dtype, "device": like.device}
        current = torch._C._cuda_getCurrentRawStream(like.get_device())
        if stream == current:
            return torch.empty_strided(shape, strides, **options)
        # torch gives memory to later tensors of the stream that was current here.
        other = torch.cuda.ExternalStream(stream, device=like.device)
        with torch.cuda.stream(other):
            return torch.empty_strided(shape, strides, **options)

    def over(memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        kind = getattr(torch, dtype.name)
        if not memory.nbytes:
            return torch.empty(shape, dtype=kind, device="cuda")
        # Bytes, because the interface has no name for some types.
        found = torch.as_tensor(memory, device="cuda")
        return found.view(kind).view(shape)

    def knows(dtype: np.dtype[Any]) -> bool:
        return hasattr(torch, dtype.name)

    return Library("torch", empty, over, knows)


class _ExternalStream:
    """A stream, for libraries that read ``__cuda_stream__``."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle  # the protocol's version, and the stream


_MAKERS = {"cupy": ("ndarray", _cupy), "torch": ("Tensor", _torch)}
"""By the name of the module: the name of its arrays' class, and what returns both."""

_KNOWN: dict[type, Library | None] = {}
"""The libraries of classes of arrays that were seen; None: outputs are Numba's."""


def of(array: Any) -> Library | None:
    """Return the library of an array, None if outputs for it are Numba's."""
    kind = type(array)
    try:
        return _KNOWN[kind]
    except KeyError:
        return _KNOWN.setdefault(kind, _found(kind))


def _found(kind: type) -> Library | None:
    for name, (arrays_class, make) in _MAKERS.items():
        module = sys.modules.get(name)  # None if it is not imported
        known = getattr(module, arrays_class, None)
        if known is not None and issubclass(kind, known):
            return make(module)
    return None


def named(like: Any, what: str) -> Library | None:
    """Return the library that ``like=`` names: a module, or an array of one.

    None, ``numba.cuda`` and Numba's arrays name no other library.

    Raises:
        ArgumentError: it is something else, or this is the simulator.
    """
    if isinstance(like, ModuleType):
        name = like.__name__
        found = _MAKERS[name][1](like) if name in _MAKERS else None
        known = found is not None or name in ("numba", "numba.cuda")
    else:
        found = None if like is None else of(like)
        known = like is None or found is not None or arrays.on_device(like)
    if not known:
        raise ArgumentError(
            f"{what}: like: expected cupy, torch, or an array of theirs, got "
            f"{shown(like)}; omit it for an array of Numba's"
        )
    if found is not None and SIMULATED:
        raise ArgumentError(
            f"{what}: like: expected no {found.name}, because arrays of the simulator "
            "are Numba's; omit it"
        )
    return found


def check_type(library: Library | None, dtype: np.dtype[Any], what: str) -> None:
    """Refuse a type that the library does not have."""
    if library is not None and not library.knows(dtype):
        raise ArgumentError(
            f"{what}: expected a dtype of {library.name}, got {dtype.name}; pass "
            "another one, or omit like="
        )


def empty(like: Any, shape: tuple[int, ...], order: str, stream: int, what: str) -> Any:
    """Return a new array of the library and the type of ``like``; None: of Numba's.

    Raises:
        BackendError: there is not enough memory.
    """
    library = of(like)
    if library is None:
        return None
    try:
        return library.empty(like, shape, order, stream)
    except Exception as error:  # the libraries' have no common class
        raise BackendError(
            f"{what}: expected room for a new output of shape {shape}, got {error}; "
            "pass out=, or free memory"
        ) from error


def as_that_of(like: Any, array: Any) -> Any:
    """Return Numba's array as one of the library of ``like``, over the same memory."""
    library = of(like)
    if library is None or array is None:
        return array
    view = arrays.view(array, "out")
    memory = Memory(view.address, view.nbytes, array)
    return library.over(memory, view.shape, view.dtype)
