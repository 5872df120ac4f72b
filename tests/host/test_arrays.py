import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver
from hypothesis import given
from hypothesis import strategies as st
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numba.cuda.cudadrv.driver import MemoryPointer

from numba_symm import arguments
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, entry, streams

HOST, CUDA, ROCM = (1, 0), (2, 1), (10, 0)  # DLPack's devices
BFLOAT16, FLOAT8 = 4, 10  # DLPack's type codes
DEFAULT_STREAMS = [0, 1]  # the legacy one's two handles

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


@pytest.fixture(autouse=True)
def fake_driver(monkeypatch):
    """Let the driver report every address as memory of a device."""
    success = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda *args: (success, 1))
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (success, 1))


class Interface:
    """An array of six float32 with __cuda_array_interface__."""

    def __init__(self, **changes):
        fields = {"data": (4096, False), "shape": (6,), "typestr": "<f4", "version": 3}
        self.__cuda_array_interface__ = fields | changes


class DLPack:
    """A NumPy array that DLPack exports as memory of another device."""

    def __init__(self, array, device=CUDA, code=None):
        self._array = array
        self._device = device
        self._code = code
        self.streams = []

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, stream=None, **options):
        self.streams.append(stream)
        capsule = self._array.__dlpack__(**options)
        tensor = _pointer_of(capsule, b"dltensor_versioned") + 32
        (ctypes.c_int32 * 2).from_address(tensor + 8)[:] = self._device
        if self._code is not None:
            ctypes.c_uint8.from_address(tensor + 20).value = self._code
        return capsule


def numba_array(shape, strides, dtype=np.float32, stream=0):
    memory = MemoryPointer(None, driver.CUdeviceptr(4096), 64)
    return DeviceNDArray(shape, strides, np.dtype(dtype), stream, memory)


def view(array):
    return arrays.view(array, "here")


def dense(array):
    return arrays.dense(view(array), "here")


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((2, 3), None, "C"),
        ((2, 3), (12, 4), "C"),
        ((2, 3), (4, 8), "F"),
        ((2, 3), (24, 4), None),  # every other row
        ((6,), (8,), None),
        ((6,), (-4,), None),
        ((6,), (0,), None),  # broadcast
        ((1, 3), (400, 4), "C"),  # the stride of an axis of length 1 is ignored
        ((), None, "C"),
        ((0, 5), (80, 8), "C"),
    ],
)
def test_an_interfaces_order_follows_from_its_strides(shape, strides, order):
    array = Interface(shape=shape, strides=strides)
    assert view(array).order == order
    if order is None:
        with pytest.raises(ArgumentError, match=r"^here: expected a contiguous arra"):
            dense(array)
    else:
        assert dense(array).shape == shape


@pytest.mark.parametrize("address", [0, 4096])
def test_an_empty_interface_has_no_elements(address):
    found = dense(Interface(data=(address, False), shape=(3, 0)))
    assert (found.size, found.nbytes) == (0, 0)


def test_an_interface_without_dimensions_has_one_element():
    found = dense(Interface(shape=(), typestr="<f8"))
    assert (found.size, found.nbytes) == (1, 8)


def test_an_interface_may_be_read_only():
    assert view(Interface(data=(4096, True))).readonly


@pytest.mark.parametrize("named", [{"stream": 7}, {"stream": None}, {}])
def test_an_interface_may_have_a_stream(named):
    assert arrays.stream_of(Interface(**named)) == named.get("stream")


@pytest.mark.parametrize(("typestr", "offset"), [("<f2", 1), ("<f4", 2), ("<f8", 4)])
def test_misaligned_elements_are_refused(typestr, offset):
    aligned = 4096 + np.dtype(typestr).itemsize
    assert dense(Interface(data=(aligned, False), typestr=typestr)).address == aligned
    with pytest.raises(ArgumentError, match=rf"aligned .* got .* {4096 + offset:#x};"):
        dense(Interface(data=(4096 + offset, False), typestr=typestr))


def test_a_pointer_unknown_to_the_driver_is_refused(monkeypatch):
    invalid = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda *args: (invalid, None))
    with pytest.raises(ArgumentError, match=r"^here: .* device array, got Interface"):
        view(Interface())


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"typestr": "rubbish"},
        {"strides": (2,)},
        {"mask": object()},
        {"data": None},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_a_broken_interface_is_refused(changes):
    with pytest.raises(ArgumentError, match=r"^here: .* device array, got Interface"):
        view(Interface(**changes))


@pytest.mark.parametrize(
    ("select", "order"),
    [
        (lambda a: a, "C"),
        (lambda a: a.T, "F"),
        (lambda a: a[:, ::2], None),
        (lambda a: a[:0], "C"),
        (lambda a: a[1, 1:2].reshape(()), "C"),
    ],
)
def test_dlpack_is_read(select, order):
    array = select(np.arange(12, dtype=np.float32).reshape(3, 4))
    found = view(DLPack(array))
    assert (found.shape, found.dtype, found.order) == (array.shape, array.dtype, order)
    assert not found.readonly
    if array.size:
        assert found.address == array.ctypes.data


def test_dlpack_may_be_of_bfloat16():
    found = view(DLPack(np.arange(4, dtype=np.uint16), code=BFLOAT16))
    assert (found.dtype, found.nbytes) == (ml_dtypes.bfloat16, 8)


def test_an_array_of_dlpack_may_be_read_only():
    array = np.arange(4)
    array.flags.writeable = False
    assert view(DLPack(array)).readonly


def test_an_exporter_of_dlpack_does_not_synchronize():
    array = DLPack(np.arange(4))
    view(array)
    assert array.streams == [-1]


def test_a_type_that_cuda_core_does_not_know_is_refused():
    array = DLPack(np.arange(4, dtype=np.uint8), code=FLOAT8)
    with pytest.raises(
        ArgumentError, match=r"^here: .* device array, got DLPack .*dtype"
    ):
        view(array)


def test_memory_of_a_gpu_without_cuda_is_refused():
    with pytest.raises(ArgumentError, match=r"^here: .* device array, got DLPack"):
        view(DLPack(np.arange(4), ROCM))


def test_an_error_while_exporting_is_part_of_the_refusal():
    class Detached(DLPack):
        def __dlpack__(self, **options):
            raise LookupError("call detach() first")

    with pytest.raises(ArgumentError, match=r"got Detached \(call detach\(\) first\)"):
        view(Detached(np.arange(4)))


@pytest.mark.parametrize(
    "array",
    [np.zeros(3), np.zeros(()), DLPack(np.zeros(3), HOST)],
    ids=["array", "0-d", "DLPack"],
)
def test_host_arrays_are_refused_with_advice(array):
    with pytest.raises(ArgumentError, match=r"^here: .* in host memory; copy it to"):
        view(array)


@pytest.mark.parametrize("rubbish", [None, 3, [1.0], b"bytes", np.float32(1), object()])
def test_an_object_that_is_not_an_array_is_refused_with_its_type(rubbish):
    kind = type(rubbish).__name__
    with pytest.raises(ArgumentError, match=rf"^here: .*device array, got {kind} "):
        view(rubbish)


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((2, 3), (12, 4), "C"),
        ((2, 3), (4, 8), "F"),
        ((3,), (8,), None),
        ((), (), "C"),
    ],
)
def test_numbas_array_is_read(shape, strides, order):
    found = view(numba_array(shape, strides))
    assert (found.address, found.shape, found.dtype) == (4096, shape, np.float32)
    assert (found.order, found.readonly) == (order, False)


@pytest.mark.parametrize("handle", [7, ctypes.c_void_p(7)])
def test_numbas_array_may_have_a_stream(handle):
    stream = SimpleNamespace(handle=handle)
    assert arrays.stream_of(numba_array((2,), (4,), stream=stream)) == 7


@st.composite
def strided(draw):
    """Draw a view of a small array, made by basic indexing."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    array = np.zeros(shape, np.int8, order=draw(st.sampled_from("CF")))
    steps = st.integers(-2, 2).filter(bool)
    array = array[tuple(slice(None, None, draw(steps)) for _ in shape)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(1, 2)), *array.shape))
    return array


@given(strided())
def test_the_order_of_strides_agrees_with_numpys_flags(array):
    found = arrays._order_of(array.shape, array.strides)  # of 1-byte elements
    flags = array.flags
    wanted = "C" if flags.c_contiguous else "F" if flags.f_contiguous else None
    assert found == wanted


class Protocol:
    def __cuda_stream__(self):
        return (0, 11)


class Attribute:
    __cuda_stream__ = (0, 12)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (123, 123),
        (Protocol(), 11),
        (Attribute(), 12),
        (SimpleNamespace(cuda_stream=13), 13),  # torch's
        (SimpleNamespace(ptr=14), 14),  # CuPy's
        (SimpleNamespace(ptr=0), 0),
        (SimpleNamespace(handle=15), 15),  # Numba's
        (SimpleNamespace(handle=ctypes.c_void_p(16)), 16),
        (SimpleNamespace(handle=ctypes.c_void_p(None)), 0),
    ],
)
def test_a_streams_handle_is_found(stream, handle):
    assert streams.handle_or_default(stream) == handle


@pytest.mark.parametrize("rubbish", ["stream", 1.0, object(), [1]])
def test_an_object_that_is_not_a_stream_is_refused(rubbish):
    with pytest.raises(ArgumentError) as raised:
        streams.handle_or_default(rubbish)
    assert str(raised.value) == (
        f"expected a stream, got {arguments.without_addresses(repr(rubbish))}; pass a "
        "stream of Numba, cuda.core, CuPy or torch, or its handle as an int"
    )


@pytest.mark.parametrize("stream", [*DEFAULT_STREAMS, 7])
def test_the_default_stream_is_never_queried_for_a_capture(stream, monkeypatch):
    asked = []

    def is_capturing(handle, found, nothing):
        asked.append(handle)
        ctypes.c_int.from_address(found).value = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
        return 0

    monkeypatch.setattr(entry, "driver_function", lambda name: is_capturing)
    ordinary = stream not in DEFAULT_STREAMS
    assert streams.is_capturing(stream) is ordinary
    assert asked == [stream] * ordinary
