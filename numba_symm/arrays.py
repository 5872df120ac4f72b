"""Reads a caller's device arrays.

For arrays of Numba, torch and CuPy, it reads their attributes, which takes less time.
cuda.core reads any other array with DLPack or ``__cuda_array_interface__``. In the
simulator, arrays are those of Numba's simulator, which have neither interface. No other
module depends on the kind of array.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from numba_symm import dtypes, streams
from numba_symm.arguments import is_integer
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, GapsError


class ArrayView(NamedTuple):
    """The location and type of an array.

    Attributes:
        address: of its first element.
        shape: its shape.
        dtype: NumPy's dtype.
        order: ``"C"`` or ``"F"`` if the array is contiguous in that order, ``"C"`` if
            in both orders; None if it has gaps.
        readonly: whether it must not be written.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str | None
    readonly: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of its elements in bytes."""
        return self.size * self.dtype.itemsize


Fields = tuple[int, tuple[int, ...], np.dtype[Any], str | None, bool]
"""The fields of an :class:`ArrayView`, equal to it and faster to make."""


def view(array: Any, what: str) -> ArrayView:
    """Return the location and type of a device array.

    Raises:
        ArgumentError: it is a host array, or not an array.
    """
    return ArrayView(*fields(array, what))


def fields(array: Any, what: str) -> Fields:
    """Do what :func:`view` does, for a call that may be remembered."""
    kind = KINDS.get(type(array)) or _kind_of(array)
    return kind.read(array, what)


def stream_of(array: Any) -> int | None:
    """Return the handle of the stream that an array names, or None.

    It is the current stream of torch or CuPy for their arrays.
    """
    kind = KINDS.get(type(array)) or _kind_of(array)
    return None if kind.stream is None else kind.stream(array)


def strides_of(array: Any) -> tuple[int, ...]:
    """Return the strides, in bytes, of an array that :func:`view` has read."""
    kind = KINDS.get(type(array)) or _kind_of(array)
    return kind.strides(array)


def on_device(array: Any) -> bool:
    """Return whether an object is an array on a GPU; :func:`view` reads it then."""
    if SIMULATED:
        return is_simulated(array)
    kind = KINDS.get(type(array))
    if kind is not None and kind.always:  # CuPy's interface is a new dictionary
        return True
    if isinstance(array, _NUMBAS):
        return True
    of_torch = getattr(array, "is_cuda", None)
    if of_torch is not None:
        return bool(of_torch)
    return hasattr(array, "__cuda_array_interface__") or (
        hasattr(array, "__dlpack_device__")
        and array.__dlpack_device__()[0] == _DLPACK_CUDA
    )


_DLPACK_CUDA = 2  # kDLCUDA


class _ArrayClass(NamedTuple):
    """How arrays of a class are read.

    Attributes:
        read: returns the fields of an array; its second argument names the caller.
        stream: returns the handle of the stream that an array names, or None. None: the
            arrays name no streams.
        strides: returns the strides of an array, in bytes.
        always: whether each array of the class is on a GPU.
    """

    read: Callable[[Any, str], Fields]
    stream: Callable[[Any], int | None] | None
    strides: Callable[[Any], tuple[int, ...]]
    always: bool = False


KINDS: dict[type, _ArrayClass] = {}
"""Arrays that are read by their own attributes: by exact class, once seen."""


def _kind_of(array: Any) -> _ArrayClass:
    """Return how to read an array of a class that is not in ``KINDS``."""
    if SIMULATED:
        found = _SIMULATED if is_simulated(array) else _UNREADABLE
        return KINDS.setdefault(type(array), found)
    if isinstance(array, _NUMBAS):
        return KINDS.setdefault(type(array), _NUMBA)
    for name, attribute, kinds in (
        ("torch", "Tensor", _torch),
        ("cupy", "ndarray", _cupy),
    ):
        library = sys.modules.get(name)  # None if it is not imported
        known = getattr(library, attribute, ())
        if type(array) is known:
            return KINDS.setdefault(known, kinds(library)[0])
        if isinstance(array, known):  # a subclass may change every attribute
            return kinds(library)[1]
    return _FOREIGN


_NUMBAS: Any = () if SIMULATED else cuda.cudadrv.devicearray.DeviceNDArray


def _read_numba(array: Any, what: str) -> Fields:
    order: str | None = "C"
    if not array.is_c_contiguous():  # Numba compares strides of axes of length 1, too
        width = array.dtype.itemsize
        strides = [n // width if n % width == 0 else -1 for n in array.strides]
        order = _order_of(array.shape, tuple(strides))
    address = array.gpu_data.device_pointer_value or 0
    return address, array.shape, array.dtype, order, False


def _stream_of_numbas(array: Any) -> int | None:
    if not array.stream:
        return None
    handle = array.stream.handle
    return int(getattr(handle, "value", handle) or 0)


def _own_strides(array: Any) -> tuple[int, ...]:
    return tuple(array.strides)


_NUMBA = _ArrayClass(_read_numba, _stream_of_numbas, _own_strides, always=True)


@functools.cache
def _torch(torch: Any) -> tuple[_ArrayClass, _ArrayClass]:
    """Return how to read torch's tensors, and those of subclasses."""
    known = [dtype for dtype in dtypes.DTYPES if hasattr(torch, dtype.name)]
    by_torch = {getattr(torch, dtype.name): dtype for dtype in known}
    strided = torch.strided

    def read(tensor: Any, what: str) -> Fields:
        dtype = by_torch.get(tensor.dtype)
        if (
            not (tensor.is_cuda and tensor.layout is strided)
            or dtype is None
            or tensor.requires_grad
            or (dtype.kind == "c" and tensor.is_conj())
            or tensor.is_neg()
        ):
            return _read_exported(tensor, what)
        try:
            address = tensor.data_ptr()
        except RuntimeError as error:  # in one of torch's transformations
            raise _not_an_array(tensor, what, error) from error
        shape = tuple(tensor.shape)
        order = "C" if tensor.is_contiguous() else _order_of(shape, tensor.stride())
        return address, shape, dtype, order, False

    def stream(tensor: Any) -> int:
        # As Triton does; torch.cuda.current_stream makes an object, in 2 µs.
        return int(torch._C._cuda_getCurrentRawStream(tensor.get_device()))

    def strides(tensor: Any) -> tuple[int, ...]:
        return tuple(stride * tensor.element_size() for stride in tensor.stride())

    return _ArrayClass(read, stream, strides), _ArrayClass(
        _read_exported, stream, strides
    )


def _read_exported(tensor: Any, what: str) -> Fields:
    """Read a tensor that may have more than memory, a shape and a type.

    torch exports none that requires a gradient, has its conjugate bit set or is sparse.
    cuda.core may read it without asking torch.
    """
    try:
        if tensor.is_neg():  # torch would export it as if it were positive
            raise BufferError("its negative bit is set; pass x.resolve_neg()")
        tensor.__dlpack__(stream=-1)
    except Exception as error:
        raise _not_an_array(tensor, what, error) from error
    return _read_foreign(tensor, what)


@functools.cache
def _cupy(cupy: Any) -> tuple[_ArrayClass, _ArrayClass]:
    """Return how to read CuPy's arrays, and those of subclasses."""
    known = dtypes.DTYPES

    def read(array: Any, what: str) -> Fields:
        dtype = array.dtype
        if dtype not in known:
            return _read_foreign(array, what)
        # The public ``flags`` is a new object, which takes longer than all the rest.
        c, fortran = array._c_contiguous, array._f_contiguous
        order = "C" if c else "F" if fortran else None
        return array.data.ptr, array.shape, dtype, order, False

    def stream(array: Any) -> int:
        return int(cupy.cuda.get_current_stream().ptr)

    return (
        _ArrayClass(read, stream, _own_strides, always=True),
        _ArrayClass(_read_foreign, stream, _own_strides),
    )


def _read_foreign(array: Any, what: str) -> Fields:
    from cuda.core.utils import StridedMemoryView

    if isinstance(array, np.ndarray):
        raise _host_array(array, what)
    try:
        # -1: no synchronization here; a call is ordered on its own stream.
        found = StridedMemoryView.from_any_interface(array, stream_ptr=-1)
        dtype = np.dtype(found.dtype)
    except Exception as error:  # a foreign object's methods may raise anything
        raise _not_an_array(array, what, error) from error
    if not found.is_device_accessible or found.device_id < 0:
        raise _host_array(array, what)
    shape = tuple(found.shape)
    order = _order_of(shape, found.strides)
    return int(found.ptr), shape, dtype, order, bool(found.readonly)


def _not_an_array(array: Any, what: str, error: Exception) -> ArgumentError:
    return ArgumentError(
        f"{what}: expected a device array, got {type(array).__name__} ({error}); "
        "pass one with __cuda_array_interface__ or DLPack, such as Numba's, CuPy's "
        "or torch's"
    )


def _stream_of_foreign(array: Any) -> int | None:
    interface = getattr(array, "__cuda_array_interface__", {})
    stream = interface.get("stream")
    return None if stream is None else streams.handle_of(stream)


def _strides_of_foreign(array: Any) -> tuple[int, ...]:
    from cuda.core.utils import StridedMemoryView

    found = StridedMemoryView.from_any_interface(array, stream_ptr=-1)
    return tuple(stride * found.dtype.itemsize for stride in found.strides)


_FOREIGN = _ArrayClass(_read_foreign, _stream_of_foreign, _strides_of_foreign)


def _order(in_c: bool, in_fortran: bool) -> str | None:
    return "C" if in_c else "F" if in_fortran else None


def _order_of(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> str | None:
    """Return the order of strides in elements: ``"C"``, ``"F"`` or None."""
    if strides is None or 0 in shape:
        return "C"

    def filled(axes: Any) -> bool:
        expected = 1
        for axis in axes:
            if shape[axis] > 1 and strides[axis] != expected:
                return False
            expected *= shape[axis]
        return True

    axes = range(len(shape))
    return _order(filled(reversed(axes)), filled(axes))


def _refuse_simulated(array: Any, what: str) -> Fields:
    if isinstance(array, np.ndarray):
        raise _host_array(array, what)
    raise ArgumentError(
        f"{what}: expected a device array, got {type(array).__name__}; pass an "
        "array of Numba's simulator, such as of comm.empty or cuda.to_device"
    )


def _read_simulated(array: Any, what: str) -> Fields:
    dtype, flags = array.dtype, array.flags  # each is a call of Python
    if dtype.hasobject or not dtype.itemsize:  # impossible on a GPU
        dtypes.checked(dtype, what)
    order = "C" if flags.c_contiguous else "F" if flags.f_contiguous else None
    address, shape = array.ctypes.data, tuple(array.shape)
    return address, shape, dtype, order, not flags.writeable


_SIMULATED = _ArrayClass(_read_simulated, None, _own_strides, always=True)
_UNREADABLE = _SIMULATED._replace(read=_refuse_simulated, always=False)


def is_simulated(array: Any) -> bool:
    """Return whether ``array`` is an array of Numba's simulator."""
    return type(array).__name__ == "FakeCUDAArray"


def _host_array(array: Any, what: str) -> ArgumentError:
    advice = (
        "copy it to the device first: x = cuda.to_device(array), or x = "
        "comm.empty(array.shape, array.dtype) and x.copy_to_device(array)"
    )
    if what.endswith("out"):
        advice = (
            "pass out=cuda.device_array(array.shape, array.dtype), or omit out= and "
            "use the result's copy_to_host()"
        )
    name = type(array).__name__
    memory = "host memory"
    if name == "ManagedNDArray":  # Numba's
        memory = "managed memory, which the host shares"
    return ArgumentError(
        f"{what}: expected a device array, got {name} in {memory}; {advice}"
    )


def dense(array: ArrayView, what: str) -> ArrayView:
    """Return ``array``, or refuse one that is strided or misaligned."""
    if array.order is None:
        raise GapsError(
            f"{what}: expected a contiguous array, got a strided one of shape "
            f"{array.shape}; pass a contiguous copy (cupy.ascontiguousarray, or "
            ".contiguous() in torch; with Numba, copy in a kernel or through the host)"
        )
    check_aligned(array, what)
    return array


def check_aligned(array: ArrayView, what: str) -> None:
    """Refuse misaligned elements."""
    # The unit that kernels move: 4 bytes for 12-byte elements, 8 for 16-byte ones.
    unit = min(8, array.dtype.itemsize & -array.dtype.itemsize) or 1
    if array.address % unit:
        raise ArgumentError(
            f"{what}: expected an array aligned to its {array.dtype.itemsize}-byte "
            f"elements, got address {array.address:#x}; pass an aligned copy"
        )


def checked_shape(shape: Any, dtype: np.dtype[Any], what: str) -> tuple[int, ...]:
    """Return a shape as a tuple of integers, or refuse it.

    NumPy can describe an array of this shape and dtype, but it may exceed all memory.
    """
    several = isinstance(shape, Sequence | np.ndarray) and np.ndim(shape) != 0
    axes = tuple(shape) if several else (shape,)
    if any(not is_integer(n) or n < 0 for n in axes):
        raise ArgumentError(
            f"{what}: expected integers from 0, got shape={shape!r}; pass the length "
            "of each axis"
        )
    found = tuple(int(n) for n in axes)
    if len(found) > _MOST_AXES:
        raise ArgumentError(
            f"{what}: expected at most {_MOST_AXES} axes, got {len(found)}; "
            "reshape the array"
        )
    # NumPy's limit leaves out axes of length 0.
    if math.prod(n or 1 for n in found) * dtype.itemsize >= 1 << 63:
        raise ArgumentError(
            f"{what}: expected less than 2**63 bytes, got shape={found} of "
            f"{dtype.name}; pass a smaller shape"
        )
    return found


_MOST_AXES = 64  # NumPy's


def check_device(array: ArrayView, ordinal: int, what: str) -> None:
    """Refuse memory that is not on the GPU of that ordinal."""
    if SIMULATED or array.size == 0:
        return
    from cuda.core import Buffer

    # cuda-bindings' cuPointerGetAttribute returns device 0 always (cuda-python#2928).
    memory = Buffer.from_handle(array.address, array.nbytes)
    if memory.is_host_accessible:
        raise ArgumentError(
            f"{what}: expected memory of the device, got host or managed memory at "
            f"{array.address:#x}; copy the array to the device first"
        )
    if memory.device_id != ordinal:
        raise ArgumentError(
            f"{what}: expected an array on GPU {ordinal}, to which this rank is bound, "
            f"got one on GPU {memory.device_id}; copy it there, or make the "
            f"communicator with device={memory.device_id}"
        )
