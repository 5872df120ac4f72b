"""Memory of others becomes symmetric: cudaMalloc's, wherever in an allocation."""

import gc

import numpy as np
import pytest
from cuda.core import Device
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from tests.gpu.helpers import Pointer, add, fill, of_ranks, optional, to_device
from tests.ranks.helpers import check_works, refused

COUNT = 2 << 20  # float32: 8 MiB, an allocation of its own


@pytest.fixture(params=["vmm", "ipc"], autouse=True)
def backend(request, monkeypatch):
    """Set the communicator's own kind of memory; what it registers is another's."""
    monkeypatch.setenv("NUMBA_SYMM_BACKEND", request.param)
    return request.param


@cuda.jit
def write_to_right(ctx, count, value):
    """Write into the right neighbour's buffer, and wait for all ranks."""
    there = symm.peer_array(ctx, (ctx.rank + 1) % ctx.size, count, np.float32)
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        there[i] = value
    symm.barrier(ctx, 0)


def check_shared(comm, array, view):
    """Check that every rank reads and writes what ``array`` holds on each."""
    memory = comm.rendezvous(array)
    fill(view, comm.rank + 1)
    comm.barrier()
    comm.synchronize()
    for rank in range(comm.size):
        found = memory.get_buffer(rank, (view.size,), np.float32).copy_to_host()
        assert (found == rank + 1).all(), rank
    comm.barrier()
    comm.synchronize()
    write_to_right[1, 256](memory.ctx, view.size, np.float32(100 + comm.rank))
    comm.synchronize()
    left = (comm.rank - 1) % comm.size
    assert (view.copy_to_host() == 100 + left).all()
    comm.all_reduce(view, out=view)
    comm.synchronize()
    assert (view.copy_to_host() == 100 * comm.size + of_ranks(comm) - comm.size).all()
    return memory


@pytest.mark.parametrize("start", [0, 1000, COUNT // 2 + 7])
def test_an_array_of_numba_s(comm, start):
    array = cuda.device_array(COUNT, np.float32)[start : start + 5000]
    memory = check_shared(comm, array, array)
    assert memory.buffer_ptrs[comm.rank] == array.device_ctypes_pointer.value
    assert memory.buffer_size == 4 * (COUNT - start)


def test_a_registered_array_is_kept(comm):
    """Its memory is not freed while peers have it mapped."""
    array = cuda.device_array(COUNT, np.float32)
    memory = comm.rendezvous(array)
    fill(array, comm.rank)
    cuda.synchronize()
    del array
    gc.collect()
    cuda.current_context().deallocations.clear()
    others = [to_device(np.full(COUNT, -1, np.float32)) for _ in range(4)]
    comm.barrier()
    comm.synchronize()
    for rank in range(comm.size):
        assert (memory.get_buffer(rank, COUNT, np.float32).copy_to_host() == rank).all()
    comm.barrier()
    comm.synchronize()
    del others


def test_two_arrays_of_one_allocation_share_a_registration(comm):
    whole = cuda.device_array(COUNT, np.float32)
    first, second = comm.rendezvous(whole[:100]), comm.rendezvous(whole[1000:1100])
    assert second.buffer_ptrs == [address + 4000 for address in first.buffer_ptrs]
    assert second.signal_pad_ptrs == first.signal_pad_ptrs


def test_cupy_s_pool(comm):
    cupy = optional("cupy")
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        before, array = cupy.empty(3000, "f4"), cupy.empty(COUNT, "f4")
        check_shared(comm, array[123:9000], cuda.as_cuda_array(array[123:9000]))
        del before


def test_torch_s_allocator(comm):
    """By default, its blocks are within allocations of cudaMalloc, too."""
    torch = optional("torch")
    torch.cuda.set_device(comm.device.ordinal)
    torch.cuda.empty_cache()
    tensor = torch.empty(COUNT * 8, device="cuda")
    view = tensor[77:8000]
    check_shared(comm, view, cuda.as_cuda_array(view))


def test_memory_of_a_stream_ordered_pool_is_refused(comm, world):
    stream = Device().create_stream()
    buffer = Device().allocate(4 * COUNT, stream=stream)
    stream.sync()
    array = Pointer(int(buffer.handle), COUNT, owner=buffer)
    refused(
        world,
        ns.BackendError,
        lambda: comm.rendezvous(array),
        "cannot be shared between processes",
        "expected memory of cudaMalloc",
        "comm.empty()",
    )
    y = comm.all_reduce(array, op="max")  # it is good for all that needs no mapping
    comm.synchronize()
    assert y.size == COUNT
    check_works(comm)


def test_cupy_s_asynchronous_pool_is_refused(comm, world):
    cupy = optional("cupy")
    pool = cupy.cuda.MemoryAsyncPool()
    with cupy.cuda.using_allocator(pool.malloc):
        array = cupy.zeros(COUNT, "f4")
    refused(
        world,
        ns.BackendError,
        lambda: comm.rendezvous(array),
        "expected memory of cudaMalloc",
    )
    check_works(comm)


def test_host_and_managed_memory_are_refused(comm, world):
    arrays = (
        np.zeros(COUNT, np.float32),
        cuda.pinned_array(COUNT, np.float32),
        cuda.managed_array(COUNT, np.float32),
    )
    for array in arrays:
        refused(world, ns.ArgumentError, lambda x=array: comm.rendezvous(x), "host")
    managed = Pointer(arrays[2].ctypes.data, COUNT, owner=arrays[2])
    refused(world, ns.ArgumentError, lambda: comm.rendezvous(managed), "managed memory")
    check_works(comm)


def test_other_offsets_on_other_ranks_are_refused(comm, world):
    if comm.size == 1:
        pytest.skip("one rank")
    whole = cuda.device_array(COUNT, np.float32)
    refused(
        world,
        ns.ArgumentError,
        lambda: comm.rendezvous(whole[comm.rank :]),
        "every rank must pass the same",
    )
    add(whole, 0)
    check_works(comm)
