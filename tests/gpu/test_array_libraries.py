"""Arrays of Numba, CuPy and torch are taken as they are; what is elsewhere is not."""

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from tests.gpu.helpers import Pointer, of_ranks, optional, to_device
from tests.ranks.helpers import bits, check_works, refused


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
    for found in (x.get(), y.get(), z.copy_to_host()):
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
    assert x.shape == y.shape == tuple(z.shape) == (30, 50)
    assert z.dtype.name == dtype
    assert (x.cpu() == of_ranks(comm)).all()
    assert (y.cpu() == of_ranks(comm)).all()
    numbers = bits(z).copy_to_host().view(z.dtype).astype(np.float64)
    assert (numbers == of_ranks(comm)).all()


def test_torch_tensors_of_odd_views(comm, torch):
    """A slice begins anywhere; a transposed tensor has gaps for nobody."""
    whole = torch.full((1001,), comm.rank + 1.0, device="cuda")
    comm.all_reduce(whole[3:], out=whole[3:])
    plane = torch.full((40, 20), comm.rank + 1.0, device="cuda").T
    comm.all_reduce(plane, out=plane)
    torch.cuda.synchronize()
    assert (whole.cpu()[3:] == of_ranks(comm)).all()
    assert (whole.cpu()[:3] == comm.rank + 1).all()
    assert (plane.cpu() == of_ranks(comm)).all()


def test_strided_arrays_are_refused(comm, world, torch, cupy):
    tensor, array = torch.zeros(20, device="cuda"), cupy.zeros((4, 6), "f4")
    for strided in (tensor[::2], array[:, 1:3]):
        refused(world, ns.ArgumentError, lambda x=strided: comm.all_reduce(x), "contig")


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
        "out is read-only",
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


def test_torch_s_host_memory_is_refused(comm, world, torch):
    for tensor in (torch.zeros(100), torch.zeros(100).pin_memory()):
        refused(world, ns.ArgumentError, lambda x=tensor: comm.all_reduce(x))
    check_works(comm)
