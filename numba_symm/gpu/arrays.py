"""Device arrays: the caller's, of any library, and those that this library makes.

Reads a caller's device arrays.

For arrays of Numba, torch and CuPy, it reads their attributes, which takes less time.
cuda.core reads any other array with DLPack or ``__cuda_array_interface__``. In the
simulator, arrays are those of Numba's simulator, which have neither interface. No other
module depends on the kind of array.

Numba's device arrays, of all types that the library reduces.

Numba reads host arrays through Python's buffer protocol, which has no format for
bfloat16 and floats of 8 bits. So it can copy such a type neither from a host array to
the device, nor into a given host array. The arrays of this module copy the bits
instead.

Makes Numba's device arrays: over given memory, and new ones.

In the simulator, arrays are those of Numba's simulator, over host memory.

New arrays of the library of a caller's array: CuPy's or torch's.

CuPy or torch allocates an output, in the order of the call's stream. So the output is
an array of the caller's kind, and that library reuses its memory as it does for all
arrays. Symmetric memory is numba_symm's own; an array of CuPy or torch only views it.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import cuda

from numba_symm import dtypes
from numba_symm.arguments import is_integer, shown
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, BackendError, GapsError
from numba_symm.gpu import exchange, loads, streams


class DeviceArray(Protocol):
    """An array of Numba, CuPy, torch, or another library, in this rank's GPU.

    It is what the calls of a :class:`Communicator` read: an array with DLPack or
    ``__cuda_array_interface__``, or one of Numba's simulator. A type checker accepts
    all that has these two attributes.
    """

    @property
    def shape(self) -> Any:
        """The length of each axis."""

    @property
    def dtype(self) -> Any:
        """The type of the elements, an object of the array's library."""


DeviceArray.__module__ = "numba_symm"  # shorter in help()


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
    kind = KINDS.get(type(array)) or kind_of(array)
    return kind.read(array, what)


def stream_of(array: Any) -> int | None:
    """Return the handle of the stream that an array names, or None.

    It is the current stream of torch or CuPy for their arrays.
    """
    kind = KINDS.get(type(array)) or kind_of(array)
    return None if kind.stream is None else kind.stream(array)


def strides_of(array: Any) -> tuple[int, ...]:
    """Return the strides, in bytes, of an array that :func:`view` has read."""
    kind = KINDS.get(type(array)) or kind_of(array)
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


@dataclass(frozen=True)
class _ArrayClass:
    """How arrays of a class are read.

    Attributes:
        read: returns the fields of an array; its second argument names the caller.
        stream: returns the handle of the stream that an array names, or None. None: the
            arrays name no streams.
        strides: returns the strides of an array, in bytes.
        always: whether each array of the class is on a GPU.
        library: what makes outputs of the class; None: they are Numba's.
    """

    read: Callable[[Any, str], Fields]
    stream: Callable[[Any], int | None] | None
    strides: Callable[[Any], tuple[int, ...]]
    always: bool = False
    library: "Library | None" = None


KINDS: dict[type, _ArrayClass] = {}
"""Arrays that are read by their own attributes: by exact class, once seen."""


def kind_of(array: Any) -> _ArrayClass:
    """Return how to read an array of a class that is not in ``KINDS``."""
    if SIMULATED:
        found = _SIMULATED if is_simulated(array) else _UNREADABLE
        return KINDS.setdefault(type(array), found)
    if isinstance(array, _NUMBAS):
        return KINDS.setdefault(type(array), _NUMBA)
    for name, attribute, kinds in (
        ("torch", "Tensor", _torch_classes),
        ("cupy", "ndarray", _cupy_classes),
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
def _torch_classes(torch: Any) -> tuple[_ArrayClass, _ArrayClass]:
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
        found: int = torch._C._cuda_getCurrentRawStream(tensor.get_device())
        return found

    def strides(tensor: Any) -> tuple[int, ...]:
        return tuple(stride * tensor.element_size() for stride in tensor.stride())

    samples = (
        (dtype, torch.empty(0, dtype=kind))
        for kind, dtype in by_torch.items()
        if dtype.kind != "c"  # compiled code does not ask for the conjugate bit
    )
    plain = exchange.reader(torch.Tensor, samples, read)
    found = _ArrayClass(plain, stream, strides, library=_torch_library(torch))
    return found, replace(found, read=_read_exported)


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
def _cupy_classes(cupy: Any) -> tuple[_ArrayClass, _ArrayClass]:
    """Return how to read CuPy's arrays, and those of subclasses."""
    known, current = dtypes.DTYPES, cupy.cuda.get_current_stream

    def read(array: Any, what: str) -> Fields:
        dtype = array.dtype
        if dtype not in known:
            return _read_foreign(array, what)
        # The public ``flags`` is a new object, which takes longer than all the rest.
        order = "C" if array._c_contiguous else "F" if array._f_contiguous else None
        return array.data.ptr, array.shape, dtype, order, False

    def stream(array: Any) -> Any:
        return current().ptr

    found = _ArrayClass(read, stream, _own_strides, True, _cupy_library(cupy))
    return found, replace(found, read=_read_foreign, always=False)


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
    return None if stream is None else streams.handle_or_default(stream)


def _strides_of_foreign(array: Any) -> tuple[int, ...]:
    from cuda.core.utils import StridedMemoryView

    found = StridedMemoryView.from_any_interface(array, stream_ptr=-1)
    return tuple(stride * found.dtype.itemsize for stride in found.strides)


_FOREIGN = _ArrayClass(_read_foreign, _stream_of_foreign, _strides_of_foreign)


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
    return "C" if filled(reversed(axes)) else "F" if filled(axes) else None


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
_UNREADABLE = replace(_SIMULATED, read=_refuse_simulated, always=False)


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


def device_array(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    gpu_data: Any,
) -> Any:
    """Return Numba's array over memory."""
    kind = _kinds()[_lacks_a_format(dtype)]
    return kind(shape, strides, dtype, gpu_data=gpu_data)


@functools.cache
def _lacks_a_format(dtype: np.dtype[Any]) -> bool:
    """Return whether Python's buffers cannot describe the type."""
    try:
        memoryview(np.empty(0, dtype))  # type: ignore[arg-type]
    except ValueError:
        return True
    return False


def dense_strides(
    shape: tuple[int, ...], itemsize: int, order: str = "C"
) -> tuple[int, ...]:
    """Return the strides, in bytes, of a contiguous array of that order."""
    if order == "F":
        return dense_strides(shape[::-1], itemsize)[::-1]
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


@functools.cache
def _kinds() -> tuple[Any, Any]:
    """Return Numba's class, and the class of arrays whose bits are copied."""
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    class BitsNDArray(DeviceNDArray):  # type: ignore[misc]  # Numba is untyped
        """An array that copies host arrays of its type as unsigned integers."""

        def copy_to_device(self, ary: Any, stream: Any = 0) -> None:
            """Copy ``ary`` to this array; see Numba's."""
            if self._can_view(ary):
                bits = self._bits()
                bits.copy_to_device(np.asarray(ary).view(bits.dtype), stream)
            else:  # a device array, or a mistake
                super().copy_to_device(ary, stream)

        def copy_to_host(self, ary: Any = None, stream: Any = 0) -> Any:
            """Copy this array to ``ary`` or a new host array; see Numba's."""
            if not self._can_view(ary):
                return super().copy_to_host(ary, stream)
            bits = self._bits()
            bits.copy_to_host(ary.view(bits.dtype), stream)
            return ary

        def _can_view(self, ary: Any) -> bool:
            return isinstance(ary, np.ndarray | np.generic) and ary.dtype == self.dtype

        def _bits(self) -> Any:
            # Numba's view fails for arrays without axes.
            dtype = f"u{self.dtype.itemsize}"
            shape, strides = self.shape, self.strides
            return DeviceNDArray(shape, strides, dtype, self.stream, self.gpu_data)

    return DeviceNDArray, BitsNDArray


class Memory:
    """Memory that arrays view; each of them holds a reference to it.

    Attributes:
        owner: the object that keeps the memory mapped.
    """

    def __init__(self, address: int, nbytes: int, owner: Any):
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def array(self, shape: Any, dtype: Any, offset: int = 0) -> Any:
        """Return a C-contiguous Numba device array at ``offset`` bytes."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if SIMULATED:
            view = SimpleNamespace(  # to which NumPy's array holds a reference
                memory=self, __array_interface__=self.__cuda_array_interface__
            )
            flat = np.asarray(view)[offset : offset + nbytes]
            return _simulator_array(flat.view(dtype).reshape(shape))
        return _device_array(self, shape, dtype, offset)


def _simulator_array(array: Any) -> Any:
    """Return the simulator's array over host memory, without a copy."""
    kind = type(cuda.device_array(0, np.uint8))
    return kind(array)


def _device_array(
    memory: Memory, shape: Any, dtype: Any, offset: int, order: str = "C"
) -> Any:
    """Return Numba's array, made directly because bfloat16 has no typestr."""
    from cuda.bindings import driver

    pointer = cuda.MemoryPointer(
        cuda.current_context(),
        driver.CUdeviceptr(memory.address + offset),
        max(math.prod(shape) * dtype.itemsize, 1),
        owner=memory,
    )
    strides = dense_strides(shape, dtype.itemsize, order)
    return device_array(shape, strides, dtype, pointer)


def empty(
    shape: tuple[int, ...], dtype: np.dtype[Any], what: str, order: str = "C"
) -> Any:
    """Return a new Numba array in ordinary device memory.

    Raises:
        ArgumentError: no memory can hold it, or a stream is being captured.
        BackendError: there is not enough memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= 1 << 63:
        checked_shape(shape, dtype, what)
    try:
        if SIMULATED or nbytes == 0:
            return cuda.device_array(shape, dtype, order=order)
        kept = loads.current()
        memory = _NewOutput(*kept.take(nbytes), kept)
        return _device_array(memory, shape, dtype, 0, order)
    except ArgumentError as error:
        raise ArgumentError(f"{what}: {error}") from error
    except Exception as error:  # Numba's and NumPy's have no common class
        raise BackendError(
            f"{what}: expected room for a new output of {nbytes} bytes, got {error}; "
            "pass out=, or free memory"
        ) from error


class _NewOutput(Memory):
    """The memory of a new output, which the reserve gets back."""

    def __del__(self) -> None:
        self.owner.drop((self.address, self.nbytes))


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
def _cupy_library(cupy: Any) -> Library:
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
def _torch_library(torch: Any) -> Library:
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


_MAKERS = {"cupy": _cupy_library, "torch": _torch_library}
"""What makes arrays, by the name of the module."""


def of(array: Any) -> Library | None:
    """Return the library of an array, None if outputs for it are Numba's."""
    kind = KINDS.get(type(array)) or kind_of(array)
    return kind.library


def named(like: Any, what: str) -> Library | None:
    """Return the library that ``like=`` names: a module, or an array of one.

    None, ``numba.cuda`` and Numba's arrays name no other library.

    Raises:
        ArgumentError: it is something else, or this is the simulator.
    """
    if isinstance(like, ModuleType):
        name = like.__name__
        found = _MAKERS[name](like) if name in _MAKERS else None
        known = found is not None or name in ("numba", "numba.cuda")
    else:
        found = None if like is None else of(like)
        known = like is None or found is not None or on_device(like)
    if SIMULATED and (found is not None or not known):
        raise ArgumentError(
            f"{what}: like: expected an array of Numba's, as the simulator has no "
            f"others, got {shown(like)}; omit it"
        )
    if not known:
        raise ArgumentError(
            f"{what}: like: expected cupy, torch, or an array of theirs, got "
            f"{shown(like)}; omit it for an array of Numba's"
        )
    return found


def check_type(library: Library | None, dtype: np.dtype[Any], what: str) -> None:
    """Refuse a type that the library does not have."""
    if library is not None and not library.knows(dtype):
        raise ArgumentError(
            f"{what}: expected a dtype of {library.name}, got {dtype.name}; pass "
            "another one, or omit like="
        )


def empty_like(
    like: Any, shape: tuple[int, ...], order: str, stream: int, what: str
) -> Any:
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
    seen = view(array, "out")
    memory = Memory(seen.address, seen.nbytes, array)
    return library.over(memory, seen.shape, seen.dtype)
