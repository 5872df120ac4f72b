"""Arrays of Numba, CuPy and torch are used in place; others are refused."""

from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import dtypes
from numba_symm.gpu import arrays
from tests.gpu.helpers import Pointer, of_ranks, optional, to_device
from tests.ranks.helpers import check_works, refused


@pytest.fixture
def cupy(comm):
    return optional("cupy")


@pytest.fixture
def torch(comm):
    torch = optional("torch")
    torch.cuda.set_device(comm.device.ordinal)
    return torch


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("algorithm", ["two_shot_marked", "chunked"])
def test_cupy_arrays(comm, cupy, dtype, algorithm):
    x = cupy.full((30, 50), comm.rank + 1, dtype)
    y = cupy.zeros_like(x)
    assert comm.all_reduce(x, out=y, algorithm=algorithm) is y
    z = comm.all_reduce(x, algorithm=algorithm)
    comm.all_reduce(x, out=x, algorithm=algorithm)
    cupy.cuda.Device().synchronize()
    comm.check()
    assert type(z) is cupy.ndarray
    for found in (x.get(), y.get(), z.get()):
        assert found.shape == (30, 50)
        assert found.dtype == dtype
        assert (found == of_ranks(comm)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "int64"])
@pytest.mark.parametrize("algorithm", ["two_shot_marked", "chunked"])
def test_torch_tensors(comm, torch, dtype, algorithm):
    x = torch.full((30, 50), comm.rank + 1, dtype=getattr(torch, dtype), device="cuda")
    y = torch.zeros_like(x)
    assert comm.all_reduce(x, out=y, algorithm=algorithm) is y
    z = comm.all_reduce(x, algorithm=algorithm)
    comm.all_reduce(x, out=x, algorithm=algorithm)
    torch.cuda.synchronize()
    comm.check()
    assert type(z) is torch.Tensor
    assert x.shape == y.shape == z.shape == (30, 50)
    assert x.dtype == z.dtype
    for found in (x, y, z):
        assert (found.cpu() == of_ranks(comm)).all()


def test_new_outputs_on_another_stream_and_of_arrays_with_gaps(comm, cupy, torch):
    """They are the caller's library's, which may use dropped memory again."""
    aside = cupy.cuda.Stream(non_blocking=True)
    tensor, array = torch.ones(64, device="cuda"), cupy.ones((8, 8), "f4")
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    for x, kind in (
        (tensor, torch.Tensor),
        (tensor[::2], torch.Tensor),
        (array, cupy.ndarray),
        (array[:, 2:4], cupy.ndarray),
    ):
        for _ in range(50):  # drops each output
            found = comm.all_gather(x, stream=aside.ptr)
            assert type(found) is kind
            later = comm.gather(x, root=0, stream=aside.ptr)
            assert (type(later) is kind) == (comm.rank == 0)
        aside.synchronize()
        comm.check()
        assert tuple(found.shape) == (comm.size, *x.shape)
        assert float(found.sum()) == comm.size * float(x.sum())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool"])
def test_symmetric_arrays_of_other_libraries(comm, cupy, torch, name):
    for library in (cupy, torch):
        dtype = dtypes.checked(getattr(ml_dtypes, name, name), "here")
        if library is cupy and name == "bfloat16":
            with suppress(ns.ArgumentError):  # as recent versions of CuPy have it
                comm.empty(4, dtype, like=cupy)
            continue
        x = comm.zeros((3, 4), dtype, like=library)
        assert type(x) is (cupy.ndarray if library is cupy else torch.Tensor)
        assert tuple(x.shape) == (3, 4)
        x[...] = 1
        assert comm.rendezvous(x).buffer_ptrs[comm.rank] == arrays.view(x, "").address
        found = comm.all_reduce(x, op="max")
        assert type(found) is type(x)
        assert bool((found == 1).all())
        same = comm.empty(4, dtype, like=x)
        assert type(same) is type(x)
        comm.synchronize()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_cupy_shares_symmetric_memory(comm, cupy, dtype):
    x = comm.empty((5, 100), dtype)
    array = cupy.asarray(x)
    assert array.data.ptr == x.device_ctypes_pointer.value
    array[...] = comm.rank + 1
    cupy.cuda.Device().synchronize()
    assert (x.copy_to_host() == comm.rank + 1).all()
    comm.all_reduce(x, out=x)
    comm.synchronize()
    assert (array.get() == of_ranks(comm)).all()
    memory = comm.rendezvous(array)
    assert memory.buffer_ptrs[comm.rank] == array.data.ptr


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_torch_shares_symmetric_memory(comm, torch, dtype):
    x = comm.empty((5, 100), dtype)
    tensor = torch.as_tensor(x, device="cuda")
    assert tensor.data_ptr() == x.device_ctypes_pointer.value
    tensor.fill_(comm.rank + 1)
    torch.cuda.synchronize()
    assert (x.copy_to_host() == comm.rank + 1).all()
    del x  # the tensor keeps the memory
    comm.barrier()
    other = comm.zeros((5, 100), dtype)
    comm.all_reduce(tensor, out=tensor)
    torch.cuda.synchronize()
    assert (tensor.cpu() == of_ranks(comm)).all()
    assert (other.copy_to_host() == 0).all()


def test_a_pointer_with_the_array_interface(comm, world):
    x = to_device(np.full(100, comm.rank + 1, np.float32))
    address = x.device_ctypes_pointer.value
    y = comm.all_reduce(Pointer(address, 100, owner=x))
    comm.synchronize()
    assert (y.copy_to_host() == of_ranks(comm)).all()
    constant = Pointer(address, 100, readonly=True, owner=x)
    comm.all_reduce(constant, out=y)
    comm.synchronize()
    assert (y.copy_to_host() == of_ranks(comm)).all()
    refused(
        world,
        ns.ArgumentError,
        lambda: comm.all_reduce(x, out=constant),
        "expected a writable out",
    )


def test_another_gpu_s_array_is_refused(comm, world):
    visible = world.allgather(len(cuda.gpus))
    if min(visible) < 2:
        pytest.skip("one GPU is visible")
    other = (comm.device.ordinal + 1) % len(cuda.gpus)
    with cuda.gpus[other]:
        x = to_device(np.zeros(100, np.float32))
    refused(
        world,
        ns.ArgumentError,
        lambda: comm.all_reduce(x, out=x),
        "got one on GPU",
        "copy it there",
    )
    refused(world, ns.ArgumentError, lambda: comm.all_reduce(comm.zeros(100), out=x))
    check_works(comm)


def host_arrays():
    """Return arrays in host memory, by the kind of memory."""
    pinned = cuda.pinned_array(100, np.float32)
    mapped = cuda.mapped_array(100, np.float32)
    return {
        "numpy": np.zeros(100, np.float32),
        "pinned": pinned,
        "mapped": mapped,
        "managed": cuda.managed_array(100, np.float32),
        "pinned pointer": Pointer(pinned.ctypes.data, 100, owner=pinned),
        "mapped pointer": Pointer(mapped.ctypes.data, 100, owner=mapped),
    }


def test_host_memory_is_refused(comm, world):
    x = comm.zeros(100)
    for array in host_arrays().values():
        for call in (
            lambda y=array: comm.all_reduce(y),
            lambda y=array: comm.all_reduce(x, out=y),
        ):
            refused(world, ns.ArgumentError, call, "host")
    check_works(comm)


def as_exported(array):
    """Return the view of an array that hides which library's it is."""

    class Exported:
        __dlpack__, __dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    return arrays.view(Exported(), "test")


SHAPES = [(), (1,), (5,), (0, 3), (3, 4), (2, 3, 4), (1, 4), (4, 1)]
VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T if x.ndim == 2 else x,
    "every other": lambda x: x[::2] if x.ndim else x,
    "from the second on": lambda x: x[1:] if x.ndim else x,
    "last axis": lambda x: x[..., :1] if x.ndim else x,
}


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("select", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_array_is_read_as_dlpack_exports_it(request, library, shape, select):
    found = request.getfixturevalue(library)
    for dtype in ("float32", "int64", "uint8", "complex64", "bool", "float16"):
        if library == "torch":
            x = found.ones(shape, dtype=getattr(found, dtype), device="cuda")
        else:
            x = found.ones(shape, dtype)
        view, exported = arrays.view(select(x), "test"), as_exported(select(x))
        if not view.size:
            view = view._replace(address=exported.address)  # of nothing
        assert view == exported
        assert type(view.shape) is tuple


def test_torch_s_eight_bit_floats(comm, torch):
    for name in ("float8_e4m3fn", "float8_e5m2"):
        x = torch.ones(64, device="cuda").to(getattr(torch, name))
        found = comm.all_gather(x)
        torch.cuda.synchronize()
        assert found.dtype == x.dtype
        assert (found.to(torch.float32) == 1).all()


def lazy_tensors(torch):
    """Return tensors that hold other values than their memory, or more."""
    x = torch.ones(8, 8, device="cuda")
    z = torch.ones(8, dtype=torch.complex64, device="cuda")
    return {
        "requires a gradient": x.clone().requires_grad_(),
        "a result with a gradient": x.clone().requires_grad_() * 2,
        "a parameter": torch.nn.Parameter(x),
        "conjugate": z.conj(),
        "negative": torch._neg_view(x),
        "imaginary part of a conjugate": torch.ones_like(z).conj().imag,
        "sparse": x.to_sparse(),
        "compressed": x.to_sparse_csr(),
        "half complex": torch.empty(8, dtype=torch.complex32, device="cuda"),
        "without memory": torch.ones(8, device="meta"),
    }


@pytest.mark.filterwarnings("ignore")  # torch's, of sparse and complex32 tensors
def test_tensors_that_are_more_than_memory_are_refused(comm, world, torch):
    x = torch.zeros(64, device="cuda")
    for tensor in lazy_tensors(torch).values():
        for call in (
            lambda y=tensor: comm.all_reduce(y, out=x),
            lambda y=tensor: comm.all_reduce(x, out=y),
        ):
            refused(world, ns.ArgumentError, call, "expected a device array, got")
    parameter = torch.nn.Parameter(torch.full((64,), comm.rank + 1.0, device="cuda"))
    comm.all_reduce(parameter.detach(), out=parameter.data)
    torch.cuda.synchronize()
    assert (parameter.detach().cpu() == of_ranks(comm)).all()
    check_works(comm)


def test_a_subclass_of_a_tensor_is_reduced_on_torch_s_stream(comm, torch):
    class Mine(torch.Tensor):
        pass

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.full((64,), comm.rank + 1.0, device="cuda").as_subclass(Mine)
        assert arrays.stream_of(x) == stream.cuda_stream
        comm.all_reduce(x, out=x)
    torch.cuda.synchronize()
    assert (x.cpu() == of_ranks(comm)).all()


def test_a_tensor_names_the_current_stream_of_its_gpu(comm, torch):
    x = torch.zeros(64, device="cuda")
    default, stream = torch.cuda.current_stream(x.device), torch.cuda.Stream()
    assert arrays.stream_of(x) == default.cuda_stream
    with torch.cuda.stream(stream):
        assert arrays.stream_of(x) == stream.cuda_stream != default.cuda_stream
    assert arrays.stream_of(x) == default.cuda_stream


def test_a_cupy_array_names_cupy_s_current_stream(comm, cupy):
    x, stream = cupy.zeros(64, "f4"), cupy.cuda.Stream(non_blocking=True)
    assert arrays.stream_of(x) == 0
    with stream:
        assert arrays.stream_of(x) == stream.ptr != 0
        y = cupy.full(64, comm.rank + 1, "f4")
        comm.all_reduce(y, out=y)
    stream.synchronize()
    assert (y.get() == of_ranks(comm)).all()
