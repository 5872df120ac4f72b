"""Arrays of torch and CuPy are read by their attributes, all others by DLPack.

Stand-ins have the attributes; tests/gpu/test_array_libraries.py has the libraries.
"""

import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from numba_symm import dtypes
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays

ADDRESS, STREAM = 4096, 77


class Exporter:
    """An array with DLPack only; NumPy's memory takes the place of the device's."""

    refusal = None

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, stream=None, **options):
        self.exports.append(stream)
        raise BufferError(self.refusal or "exported")


class Tensor(Exporter):
    """What torch's tensors have."""

    def __init__(self, shape=(2, 3), dtype="float32", strides=None, **changes):
        self.exports = []
        self.shape = Size(shape)
        self.dtype = dtype
        self.strides = np.empty(shape, np.int8).strides if strides is None else strides
        self.is_cuda = True
        self.layout = "strided"
        self.requires_grad = False
        self.conjugate = self.negative = False
        vars(self).update(changes)

    def is_conj(self):
        return self.conjugate

    def is_neg(self):
        return self.negative

    def is_contiguous(self):
        return arrays._order_of(tuple(self.shape), self.strides) == "C"

    def stride(self):
        return self.strides

    def element_size(self):
        return np.dtype(self.dtype).itemsize

    def data_ptr(self):
        return ADDRESS

    def get_device(self):
        return 3


class Size(tuple):
    """A subclass of tuple, as torch's shapes are."""


class CupyArray(Exporter):
    """What CuPy's arrays have."""

    def __init__(self, array):
        self.exports = []
        self.data = SimpleNamespace(ptr=ADDRESS)
        self.shape, self.dtype = array.shape, array.dtype
        self._c_contiguous = array.flags.c_contiguous
        self._f_contiguous = array.flags.f_contiguous
        self.strides = array.strides


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """Let both libraries be imported, as far as arrays and streams go."""
    torch = ModuleType("torch")
    torch.Tensor, torch.strided = Tensor, "strided"
    for dtype in dtypes.DTYPES:
        setattr(torch, dtype.name, dtype.name)
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda gpu: STREAM + gpu)
    cupy = ModuleType("cupy")
    current = SimpleNamespace(ptr=STREAM)
    cupy.ndarray = CupyArray
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: current)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(arrays, "KINDS", {})


def view(array):
    found = arrays.view(array, "here")
    assert not array.exports
    assert arrays.view(array, "here") == found  # the class is known now
    return found


STRIDED = pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((2, 3), (3, 1), "C"),
        ((2, 3), (1, 2), "F"),
        ((2, 3), (6, 1), None),
        ((6,), (2,), None),
        ((6,), (0,), None),
        ((1, 3), (9, 1), "C"),
        ((), (), "C"),
        ((0, 5), (5, 1), "C"),
    ],
)


@STRIDED
def test_a_tensor_is_read(shape, strides, order):
    found = view(Tensor(shape, strides=strides))
    assert found == (ADDRESS, shape, np.float32, order, False)
    assert found.size == np.prod(shape)
    assert type(found.shape) is tuple
    assert arrays.strides_of(Tensor(shape, strides=strides)) == tuple(
        4 * n for n in strides
    )


@STRIDED
def test_a_cupy_array_is_read(shape, strides, order):
    array = np.lib.stride_tricks.as_strided(np.zeros(20, np.int8), shape, strides)
    found = view(CupyArray(array))
    assert found == (ADDRESS, shape, np.int8, order, False)
    assert arrays.strides_of(CupyArray(array)) == strides


@pytest.mark.parametrize("dtype", sorted(dtypes.DTYPES, key=str), ids=str)
def test_every_type_of_reductions_is_read(dtype):
    assert view(Tensor(dtype=dtype.name)).dtype is dtype
    assert view(CupyArray(np.zeros(3, dtype))).dtype == dtype


@pytest.mark.parametrize(
    "changes",
    [
        {"requires_grad": True},
        {"conjugate": True, "dtype": "complex64"},
        {"layout": "sparse_coo"},
        {"is_cuda": False},
        {"dtype": "quint8"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_else_a_tensor_may_have_is_left_to_dlpack(changes):
    tensor = Tensor(**changes)
    tensor.refusal = "use detach()"
    with pytest.raises(
        ArgumentError, match=r"^here: .* device array, got Tensor \(use detach\(\)\)"
    ):
        arrays.view(tensor, "here")
    assert tensor.exports == [-1]


def test_a_tensor_with_a_negative_bit_is_refused():
    with pytest.raises(ArgumentError, match=r"negative bit is set; pass x\.resolve"):
        arrays.view(Tensor(negative=True), "here")


def test_a_tensor_without_an_address_is_refused():
    class Broken(Tensor):
        def data_ptr(self):
            raise RuntimeError("no storage")

    sys.modules["torch"].Tensor = Broken
    with pytest.raises(ArgumentError, match=r"got Broken \(no storage\)"):
        arrays.view(Broken(), "here")


def test_a_type_that_cupy_alone_has_is_left_to_dlpack():
    array = CupyArray(np.zeros(3, [("a", "f4")]))
    with pytest.raises(ArgumentError, match="exported"):
        arrays.view(array, "here")
    assert array.exports == [-1]


@pytest.mark.parametrize("base", [Tensor, CupyArray])
def test_a_subclass_is_left_to_dlpack_with_the_stream_of_its_library(base):
    subclass = type("Subclass", (base,), {})
    array = subclass(np.zeros(3)) if base is CupyArray else subclass()
    with pytest.raises(ArgumentError, match=r"got Subclass \(exported\)"):
        arrays.view(array, "here")
    assert array.exports == [-1]
    assert arrays.stream_of(array) == STREAM + 3 * (base is Tensor)


def test_the_current_stream_is_that_of_a_tensor_s_gpu():
    assert arrays.stream_of(Tensor()) == STREAM + 3
    assert arrays.stream_of(CupyArray(np.zeros(3))) == STREAM


def test_no_library_is_imported(monkeypatch):
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    tensor = Tensor()
    with pytest.raises(ArgumentError, match="exported"):
        arrays.view(tensor, "here")
    assert arrays.stream_of(tensor) is None


def test_bfloat16_is_that_of_ml_dtypes():
    assert view(Tensor(dtype="bfloat16")).dtype == ml_dtypes.bfloat16


def test_a_known_array_of_cupy_is_on_the_device_by_its_class(monkeypatch):
    """Its interface would be a new dictionary in each call."""
    monkeypatch.setattr(arrays, "SIMULATED", False)
    read = []
    CupyArray.__cuda_array_interface__ = property(lambda self: read.append(self) or {})
    try:
        array = CupyArray(np.zeros(3, "f4"))
        assert arrays.on_device(array)
        view(array)
        assert len(read) == 1
        assert arrays.on_device(array)
        assert len(read) == 1
    finally:
        del CupyArray.__cuda_array_interface__
    tensor = Tensor(is_cuda=False)
    arrays.kind_of(Tensor())
    assert not arrays.on_device(tensor)
