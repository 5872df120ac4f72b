"""Arrays on the device: reading what a caller passed, and making Numba's.

Anything with DLPack or ``__cuda_array_interface__`` is read through cuda.core. Under
the simulator, arrays are Numba's simulator arrays, which have neither; this module
is the one place that knows.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError


class ArrayView(NamedTuple):
    """Where an array lies and what it holds.

    Attributes:
        address: of its first element.
        shape: as given.
        size: number of elements.
        dtype: NumPy's dtype.
        order: ``"C"`` or ``"F"`` if its elements fill its memory without gaps in that
            order, ``"C"`` if in both; None if there are gaps.
        readonly: whether it must not be written.
        stream: handle of the stream its owner uses, or None if it names none.
    """

    address: int
    shape: tuple[int, ...]
    size: int
    dtype: np.dtype[Any]
    order: str | None
    readonly: bool
    stream: int | None

    @property
    def nbytes(self) -> int:
        """Number of bytes its elements take."""
        return self.size * self.dtype.itemsize


def view(array: Any, what: str) -> ArrayView:
    """Read a device array.

    Raises:
        ArgumentError: it is a host array, or no array at all.
    """
    if SIMULATED:
        return _view_simulated(array, what)
    if isinstance(array, _NUMBAS):
        return _view_numba(array)
    if isinstance(array, np.ndarray):
        raise _host_array(array, what)
    return _view_foreign(array, what)


_NUMBAS: Any = () if SIMULATED else cuda.cudadrv.devicearray.DeviceNDArray


def _view_numba(array: Any) -> ArrayView:
    in_c = array.is_c_contiguous()
    order = "C" if in_c else _order(False, array.is_f_contiguous())
    address = array.device_ctypes_pointer.value or 0
    stream = _numba_stream(array.stream) if array.stream else None
    # Every call comes here twice; keywords take half as long again.
    return ArrayView(
        *(address, tuple(array.shape), array.size, array.dtype, order, False, stream)
    )


def _numba_stream(stream: Any) -> int:
    return int(getattr(stream.handle, "value", stream.handle) or 0)


def _view_foreign(array: Any, what: str) -> ArrayView:
    from cuda.core.utils import StridedMemoryView

    try:
        # -1: no synchronisation here; calls are ordered on the stream they run on.
        found = StridedMemoryView.from_any_interface(array, stream_ptr=-1)
        dtype = np.dtype(found.dtype)
    except Exception as error:  # whatever a foreign object's own methods raise
        raise ArgumentError(
            f"{what}: {type(array).__name__} is no device array ({error}); pass one "
            "with __cuda_array_interface__ or DLPack, such as Numba's, CuPy's or "
            "torch's"
        ) from error
    if not found.is_device_accessible or found.device_id < 0:
        raise _host_array(array, what)
    return ArrayView(
        address=int(found.ptr),
        shape=tuple(found.shape),
        size=math.prod(found.shape),
        dtype=dtype,
        order=_order_of(tuple(found.shape), found.strides),
        readonly=bool(found.readonly),
        stream=_foreign_stream(array),
    )


def _order(in_c: bool, in_fortran: bool) -> str | None:
    return "C" if in_c else "F" if in_fortran else None


def _order_of(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> str | None:
    """Return the order that strides (in elements) are of, None if of neither."""
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


def _foreign_stream(array: Any) -> int | None:
    """Return the current stream of the array's library, or the one it names."""
    library = type(array).__module__.partition(".")[0]
    if library == "torch":
        import torch

        return int(torch.cuda.current_stream(array.device).cuda_stream)
    if library == "cupy":
        import cupy

        return int(cupy.cuda.get_current_stream().ptr)
    interface = getattr(array, "__cuda_array_interface__", {})
    return interface.get("stream")


def _view_simulated(array: Any, what: str) -> ArrayView:
    if not is_simulated(array):
        if isinstance(array, np.ndarray):
            raise _host_array(array, what)
        raise ArgumentError(
            f"{what}: {type(array).__name__} is no device array; under Numba's "
            "simulator pass its arrays (comm.empty, cuda.to_device)"
        )
    flags = array.flags
    return ArrayView(
        address=array.ctypes.data,
        shape=tuple(array.shape),
        size=int(array.size),
        dtype=array.dtype,
        order=_order(flags.c_contiguous, flags.f_contiguous),
        readonly=not flags.writeable,
        stream=None,
    )


def is_simulated(array: Any) -> bool:
    """Return whether ``array`` is one of Numba's simulator."""
    return type(array).__name__ == "FakeCUDAArray"


def _host_array(array: Any, what: str) -> ArgumentError:
    advice = (
        "copy it to the device first: x = cuda.to_device(array), or x = "
        "comm.empty(array.shape, array.dtype) and x.copy_to_device(array)"
    )
    if what.endswith("out"):
        advice = (
            "pass out=cuda.device_array(array.shape, array.dtype), or out=None, and "
            "then the result's copy_to_host()"
        )
    name = type(array).__name__
    memory = "host memory"
    if name == "ManagedNDArray":  # Numba's
        memory = "managed memory, which the host shares"
    return ArgumentError(f"{what}: {name} lies in {memory}; {advice}")


def dense(array: ArrayView, what: str) -> ArrayView:
    """Return ``array``, or refuse one with gaps or off its elements' alignment."""
    if array.order is None:
        raise ArgumentError(
            f"{what}: the array of shape {array.shape} is strided; pass a contiguous "
            "copy (cupy.ascontiguousarray, .contiguous() in torch; with Numba copy it "
            "in a kernel, or by way of the host)"
        )
    # What kernels move at a time: 12-byte elements as 4 bytes, 16-byte ones as 8.
    unit = min(8, array.dtype.itemsize & -array.dtype.itemsize) or 1
    if array.address % unit:
        raise ArgumentError(
            f"{what}: the array at {array.address:#x} is not aligned to its "
            f"{array.dtype.itemsize}-byte elements"
        )
    return array


class Memory:
    """Memory that arrays view; it lives as long as any of them.

    Attributes:
        owner: what keeps the memory mapped.
    """

    def __init__(self, address: int, nbytes: int, owner: Any):
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def _interface(self) -> dict[str, Any]:
        return {
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def array(self, shape: Any, dtype: Any, offset: int = 0) -> Any:
        """Return a C-contiguous Numba device array, ``offset`` bytes in."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if SIMULATED:
            flat = np.asarray(_HostView(self))[offset : offset + nbytes]
            return _simulator_array(flat.view(dtype).reshape(shape))
        return _device_array(self, shape, dtype, offset)


class _HostView:
    """The array interface of host memory; NumPy keeps it, and so the memory."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.__array_interface__ = memory._interface()


def _simulator_array(array: Any) -> Any:
    """Wrap host memory, without a copy, in the simulator's array."""
    kind = type(cuda.device_array(0, np.uint8))
    return kind(array)


def _device_array(memory: Memory, shape: Any, dtype: Any, offset: int) -> Any:
    """Return Numba's array; built directly, as bfloat16 has no interface typestr."""
    from cuda.bindings import driver
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.cudadrv.driver import MemoryPointer

    strides = tuple(
        int(np.prod(shape[axis + 1 :], dtype=np.int64)) * dtype.itemsize
        for axis in range(len(shape))
    )
    nbytes = max(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 1)
    pointer = MemoryPointer(
        cuda.current_context(),
        driver.CUdeviceptr(memory.address + offset),
        nbytes,
        owner=memory,
    )
    return DeviceNDArray(shape, strides, dtype, gpu_data=pointer)


def empty_like(array: ArrayView) -> Any:
    """Return a new Numba array of that shape and order in ordinary device memory."""
    return empty(array.shape, array.dtype, array.order or "C")


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], order: str = "C") -> Any:
    """Return a new Numba array in ordinary device memory."""
    if shape == () and not SIMULATED:  # numba-cuda 0.30 cannot make those
        from numba.cuda.cudadrv.devicearray import DeviceNDArray

        return DeviceNDArray((), (), dtype)
    return cuda.device_array(shape, dtype, order=order)


def checked_dtype(dtype: Any, what: str) -> np.dtype[Any]:
    """Return NumPy's dtype, or raise ArgumentError if a GPU can hold none such."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"{what}: dtype={dtype!r}; {error}") from error
    if found.hasobject:
        raise ArgumentError(f"{what}: dtype={dtype!r}; a GPU has no Python objects")
    return found


def check_device(array: ArrayView, ordinal: int, what: str) -> None:
    """Refuse memory that is not on the GPU of that ordinal."""
    if SIMULATED or array.size == 0:
        return
    from cuda.core import Buffer

    # cuda-bindings' cuPointerGetAttribute calls every device 0 (cuda-python#2928).
    memory = Buffer.from_handle(array.address, array.nbytes)
    if memory.is_host_accessible:
        raise ArgumentError(
            f"{what}: the array at {array.address:#x} lies in host or managed memory; "
            "copy it to memory of the device first"
        )
    if memory.device_id != ordinal:
        raise ArgumentError(
            f"{what}: the array lies on GPU {memory.device_id}, and this rank is bound "
            f"to GPU {ordinal}; copy it there, or make the communicator with "
            f"device={memory.device_id}"
        )
