"""New arrays of CuPy and torch. Stand-ins have what is called of the libraries.

tests/gpu/test_array_libraries.py has the libraries themselves.
"""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from numba_symm.errors import ArgumentError, BackendError
from numba_symm.gpu import arrays
from numba_symm.gpu.arrays import Memory

CURRENT, OTHER = 7, 8  # streams


class CupyArray:
    def __init__(self, shape, dtype=np.float64, memptr=None, strides=None, order="C"):
        if np.dtype(dtype).kind == "V":
            raise ValueError("a type that it does not have")
        self.shape, self.dtype, self.memptr, self.order = shape, dtype, memptr, order


class Tensor:
    def __init__(self, shape, dtype, strides=None, place="cuda:0"):
        self.shape, self.dtype, self.strides = shape, dtype, strides
        self.device, self.source = place, None

    def get_device(self):
        return 0

    def view(self, what):
        if isinstance(what, tuple):
            self.shape = what
        else:
            self.dtype = what
        return self


@pytest.fixture
def streams():
    """The streams on which arrays were allocated."""
    return []


@pytest.fixture(params=[13, 14])
def cupy(monkeypatch, streams, request):
    current = SimpleNamespace(ptr=CURRENT)

    @contextlib.contextmanager
    def external(handle):
        current.ptr = handle
        yield
        current.ptr = CURRENT

    def empty(shape, dtype, order):
        streams.append(current.ptr)
        if 99 in shape:
            raise MemoryError("out of memory")
        return CupyArray(shape, dtype, order=order)

    made = ModuleType("cupy")
    made.ndarray, made.empty = CupyArray, empty
    made.cuda = SimpleNamespace(
        get_current_stream=lambda: current,
        ExternalStream=external,
        Stream=SimpleNamespace(),
        UnownedMemory=lambda address, nbytes, owner: (address, nbytes, owner),
        MemoryPointer=lambda memory, offset: (memory, offset),
    )
    if request.param > 13:
        of_protocol = lambda stream: external(stream.__cuda_stream__()[1])  # noqa: E731
        made.cuda.Stream.from_external = of_protocol
        del made.cuda.ExternalStream  # deprecated
    return known(monkeypatch, made)


@pytest.fixture
def torch(monkeypatch, streams):
    current = [CURRENT]

    @contextlib.contextmanager
    def stream(handle):
        current[0] = handle
        yield
        current[0] = CURRENT

    def empty_strided(shape, strides, dtype, device):
        streams.append(current[0])
        return Tensor(shape, dtype, strides, device)

    def as_tensor(exported, device):
        interface = exported.__cuda_array_interface__
        found = Tensor(interface["shape"], interface["typestr"], place=device)
        found.source = exported, interface["data"][0]
        return found

    made = ModuleType("torch")
    made.Tensor, made.empty_strided, made.as_tensor = Tensor, empty_strided, as_tensor
    made.empty = lambda shape, dtype, device: Tensor(shape, dtype, place=device)
    made.float32, made.bfloat16 = "torch.float32", "torch.bfloat16"
    made.strided = "strided"
    made._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: current[0])
    made.cuda = SimpleNamespace(
        ExternalStream=lambda handle, device: handle, stream=stream
    )
    return known(monkeypatch, made)


def known(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(arrays, "KINDS", {})
    return module


@pytest.mark.parametrize("stream", [CURRENT, OTHER])
def test_outputs_are_allocated_by_the_callers_library_on_the_calls_stream(
    cupy, torch, streams, stream
):
    x = CupyArray((2, 3), np.float16)
    found = arrays.empty_like(x, (4, 5), "F", stream, "all_gather")
    assert type(found) is CupyArray
    assert (found.shape, found.dtype, found.order) == ((4, 5), np.float16, "F")
    for order, strides in (("C", (15, 5, 1)), ("F", (1, 2, 6))):
        x = Tensor((2, 3), "torch.bfloat16")
        found = arrays.empty_like(x, (2, 3, 5), order, stream, "all_gather")
        assert type(found) is Tensor
        assert (found.shape, found.strides) == ((2, 3, 5), strides)
        assert (found.dtype, found.device) == ("torch.bfloat16", "cuda:0")
    assert streams == [stream] * 3
    arrays.empty_like(x, (2, 0, 5), "C", CURRENT, "all_gather")
    assert streams[-1] == CURRENT  # it is the current one again
    text = r"all_gather: expected room for a new output of shape \(99,\), got out of m"
    with pytest.raises(BackendError, match=text):
        arrays.empty_like(CupyArray((2,)), (99,), "C", stream, "all_gather")


def test_outputs_for_all_other_arrays_are_numbas(cupy, torch):
    class Exporter:
        """With DLPack only."""

    for x in (Exporter(), np.ones(2), None):
        assert arrays.empty_like(x, (3,), "C", CURRENT, "all_gather") is None
    assert arrays.as_that_of(Exporter(), 5) == 5
    assert arrays.as_that_of(CupyArray((2,)), None) is None


def test_a_subclass_has_outputs_of_its_library(cupy):
    class Mine(CupyArray):
        pass

    assert arrays.of(Mine((2,))) is arrays.of(CupyArray((2,))) is not None


def test_arrays_over_memory_keep_it(cupy, torch):
    memory = Memory(4096, 24, object())
    library = arrays.named(cupy, "empty")
    found = library.over(memory, (2, 3), np.dtype(np.float32))
    assert (found.shape, found.memptr) == ((2, 3), ((4096, 24, memory), 0))
    library = arrays.named(torch, "empty")
    found = library.over(memory, (3, 4), np.dtype(np.float32))
    exported, address = found.source
    assert (found.shape, found.dtype, address) == ((3, 4), "torch.float32", 4096)
    assert exported is memory
    nothing = library.over(Memory(4096, 0, None), (0, 4), np.dtype(np.float32))
    assert (nothing.shape, nothing.source) == ((0, 4), None)


def test_like_names_a_library(cupy, torch):
    for like in (cupy, CupyArray((2,))):
        assert arrays.named(like, "empty").name == "cupy"
    for like in (torch, Tensor((2,), "torch.float32")):
        assert arrays.named(like, "empty").name == "torch"
    for like in (None, cuda):
        assert arrays.named(like, "empty") is None
    for like in (np, "cupy", 3, np.ones(2)):
        with pytest.raises(ArgumentError, match="like: expected cupy, torch, or an"):
            arrays.named(like, "empty")


def test_types_that_a_library_lacks_are_refused(cupy, torch):
    for like, dtype in ((cupy, np.dtype("V3")), (torch, np.dtype(np.uint16))):
        library = arrays.named(like, "empty")
        with pytest.raises(ArgumentError, match=f"expected a dtype of {library.name}"):
            arrays.check_type(library, dtype, "empty")
        arrays.check_type(library, np.dtype(np.float32), "empty")
    arrays.check_type(None, np.dtype(np.uint16), "empty")


def test_the_simulator_has_arrays_of_numba_only(cupy, monkeypatch):
    monkeypatch.setattr(arrays, "SIMULATED", True)
    for like in (cupy, CupyArray((2,))):
        with pytest.raises(ArgumentError, match="Numba's, as the simulator has no oth"):
            arrays.named(like, "empty")
