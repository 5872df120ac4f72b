"""Kinds of GPU memory: how they are shared, and the errors of those that cannot be."""

import re
import weakref

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.gpu import driver
from tests.sharing.work import (
    are,
    becomes,
    copied,
    error_of,
    fill,
    nothing_is_shared,
    numbers,
    say,
)
from tests.spawned import run_ranks

pytestmark = pytest.mark.usefixtures("gpus")

SIZE = 1000
NBYTES = 4 * SIZE


class Pointer:
    """An array of another library: an address and ``__cuda_array_interface__``."""

    def __init__(self, address, owner=None):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (int(address), False),
            "shape": (SIZE,),
            "typestr": "<f4",
            "version": 3,
        }


def of_kind(kind, comm):
    """Return an array of float32 in memory of a kind."""
    cuda.current_context()
    if kind == "ipc":
        return numbers(SIZE)
    if kind == "inside":
        return numbers(3 * SIZE, -SIZE)[SIZE : 2 * SIZE]
    if kind == "vmm":
        own = ns.Communicator(comm.among([comm.rank]), timeout=60)
        x = own.empty(SIZE, np.float32)
        own.close()
    else:
        from cuda.core import Device, DeviceMemoryResource, DeviceMemoryResourceOptions

        device = Device(0)
        device.set_current()
        options = DeviceMemoryResourceOptions(ipc_enabled=True)
        pool = DeviceMemoryResource(device, options)
        buffer = pool.allocate(NBYTES, stream=device.default_stream)
        x = Pointer(int(buffer.handle), buffer)
    cuda.as_cuda_array(x).copy_to_device(np.arange(SIZE, dtype=np.float32))
    cuda.synchronize()
    return x


def passes(comm, kind):
    if comm.rank == 0:
        x = of_kind(kind, comm)
        handle = say(comm, ns.share(x, opens=2))
        y = ns.open_shared(handle)
        del x
        comm.barrier()
        seen = y[3:5].copy_to_host().tolist()
        del y
        return handle.kind, seen, becomes(nothing_is_shared)
    x = ns.open_shared(say(comm))
    right = are(x, SIZE)
    fill(x[3:4], 77)
    cuda.synchronize()
    x.close()
    comm.barrier()
    return right, nothing_is_shared()


@pytest.mark.parametrize("kind", ["ipc", "inside", "vmm", "pool"])
def test_kinds_that_can_be_shared(kind):
    producer, consumer = run_ranks(2, passes, kind)
    assert producer == ("ipc" if kind == "inside" else kind, [77, 4], True)
    assert consumer == (True, True)


def pools(comm):
    """Many arrays of one pool, opened and dropped in another order."""
    if comm.rank == 0:
        arrays = [of_kind("pool", comm) for _ in range(3)]
        say(comm, [ns.share(x) for x in arrays * 4])
        del arrays
        comm.barrier()
        return becomes(nothing_is_shared)
    opened = [ns.open_shared(handle) for handle in say(comm)]
    mappings = ns.sharing.stats().mappings
    right = all(are(x, SIZE) for x in opened)
    while opened:
        opened.pop(len(opened) // 2)
    comm.barrier()
    return right, mappings, nothing_is_shared()


def test_several_arrays_of_pools():
    assert run_ranks(2, pools) == [True, (True, 3, True)]


def refused(comm):
    from numba_symm.memory.backends import create

    cuda.current_context()
    foreign = create("vmm", 0)
    block = foreign.allocate(NBYTES)
    addresses = {
        "default pool": driver.call("cuMemAllocAsync", NBYTES, 0),
        "managed": driver.call("cuMemAllocManaged", NBYTES, 1),
        "pinned": driver.call("cuMemHostAlloc", NBYTES, 0),
        "another's blocks": block.address,
    }
    cuda.synchronize()
    return {
        kind: error_of(ns.share, Pointer(address))
        for kind, address in addresses.items()
    }


def test_other_kinds_are_refused_with_a_sentence():
    (errors,) = run_ranks(1, refused)
    for kind, error in errors.items():
        assert re.match("ArgumentError: share: ", error), (kind, error)
    assert (
        "of a pool that cannot be exported (cuMemPoolExportPointer"
        in errors["default pool"]
    )
    assert "ipc_enabled=True" in errors["default pool"]
    assert "neither from cudaMalloc nor from this library" in errors["another's blocks"]
    assert "copy" in errors["managed"]
    assert "copy" in errors["pinned"]


def captures(comm):
    stream = ns.Stream()
    x = numbers(SIZE)
    handle = ns.share(x, opens=3)
    y = ns.open_shared(handle, stream=stream)
    z = ns.open_shared(handle, stream=stream)
    copied(x, stream)
    driver.call("cuStreamBeginCapture", stream.handle, 2)  # relaxed
    errors = [
        error_of(ns.share, x, stream=stream),
        error_of(ns.open_shared, handle, stream=stream),
        error_of(y.close),
    ]
    kept = are(y, SIZE)
    del z  # given back when it can be
    driver.call("cuGraphDestroy", driver.call("cuStreamEndCapture", stream.handle))
    handle.cancel()
    y.close()
    del x
    return errors, kept, nothing_is_shared()


def test_a_stream_that_is_being_captured():
    ((errors, kept, clean),) = run_ranks(1, captures)
    assert errors[0].startswith("ArgumentError: share: the stream is being captured")
    assert errors[1].startswith("ArgumentError: open_shared: the stream is being")
    assert errors[2].startswith("ArgumentError: close: the array's stream is being")
    assert kept
    assert clean


def keeps_streams(comm):
    """An array outlives all that its opener knew of its stream."""
    x = numbers(SIZE)
    handle = ns.share(x)
    stream = ns.Stream()
    y = ns.open_shared(handle, stream=stream)
    gone = weakref.ref(stream)
    del stream
    kept = gone() is not None
    y.close()
    del y, x
    return kept, gone() is None, nothing_is_shared()


def test_the_stream_lives_as_long_as_the_array():
    assert run_ranks(1, keeps_streams) == [(True, True, True)]


def frees(comm):
    """Memory of a dropped array is the GPU's again once its consumer is done."""
    nbytes = 256 << 20
    if comm.rank == 0:
        context = cuda.current_context()
        x = cuda.device_array(nbytes, np.uint8)
        say(comm, ns.share(x))
        comm.barrier()  # opened: the consumer's context has taken what it needs
        before = context.get_memory_info().free
        del x
        context.memory_manager.deallocations.clear()
        held = context.get_memory_info().free < before + nbytes // 2
        comm.barrier()
        comm.barrier()
        ns.sharing.collect()
        context.memory_manager.deallocations.clear()
        return held, context.get_memory_info().free > before + nbytes // 2
    x = ns.open_shared(say(comm))
    comm.barrier()
    comm.barrier()
    x.close()
    comm.barrier()
    return nothing_is_shared(), error_of(x.copy_to_host).startswith("ClosedError")


def test_memory_is_freed_in_the_end():
    assert run_ranks(2, frees) == [(True, True)] * 2
