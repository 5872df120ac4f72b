"""Buffers of host types over device memory, as HeAT makes them of a pointer."""

import ctypes

import numpy as np
import pytest
from mpi4py import MPI
from numba import cuda

from numba_symm.environment import SIMULATED

COUNT = 6


def device(value):
    return cuda.to_device(np.full(COUNT, value, "i4"))


def pointer(array):
    if SIMULATED:
        return array._ary.ctypes.data
    return array.__cuda_array_interface__["data"][0]


def of_a_pointer(array):
    return MPI.memory.fromaddress(pointer(array), array.nbytes)


def of_no_bytes(array):
    """HeAT's: the type and the count say how many."""
    return MPI.memory.fromaddress(pointer(array), 0)


def of_ctypes(array):
    return (ctypes.c_char * array.nbytes).from_address(pointer(array))


def of_a_view(array):
    return memoryview(of_ctypes(array))


def of_numpy(array):
    return np.frombuffer(of_ctypes(array), "i4")


KINDS = [of_a_pointer, of_no_bytes, of_ctypes, of_a_view, of_numpy]


@pytest.fixture
def never_mpis(monkeypatch):
    """Fail if mpi4py's own method gets a call."""

    def refuse(*args, **options):
        raise AssertionError("MPI got an address of the device")

    class Refusing:
        def __getattr__(self, name):
            return refuse

    monkeypatch.setattr(MPI.COMM_WORLD, "host", Refusing())


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_makes_calls_with_such_buffers(kind, never_mpis):
    comm = MPI.COMM_WORLD
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = device(comm.rank + 1), device(0)
    first, second = [kind(x), COUNT, MPI.INT], [kind(y), COUNT, MPI.INT]
    comm.Allreduce(first, second)
    total = comm.size * (comm.size + 1) // 2
    assert y.copy_to_host().tolist() == [total] * COUNT
    comm.Allreduce(MPI.IN_PLACE, second)
    assert y.copy_to_host()[0] == total * comm.size
    comm.Sendrecv(first, right, 0, second, left, 0)
    assert y.copy_to_host().tolist() == [left + 1] * COUNT
    sent = device(7)
    requests = [comm.Irecv(second, left), comm.Isend([kind(sent), 1, "i"], right)]
    MPI.Request.Waitall(requests)
    assert y.copy_to_host().tolist() == [7] + [left + 1] * (COUNT - 1)
    gathered = device(0), [1] * comm.size
    comm.Allgatherv([kind(x), 1, MPI.INT], [kind(gathered[0]), gathered[1], MPI.INT])
    ranks = list(range(1, comm.size + 1))
    assert gathered[0].copy_to_host()[: comm.size].tolist() == ranks
    prepared = comm.Allreduce_init(first, second)
    prepared.Start()
    prepared.Wait()
    assert y.copy_to_host().tolist() == [total] * COUNT
    with pytest.raises(MPI.Exception, match="all on the host, got both"):
        comm.Allreduce(first, np.zeros(COUNT, "i4"))


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_the_host_refuse_such_buffers(kind, tmp_path):
    comm = MPI.COMM_WORLD
    win = MPI.Win.Allocate(8, comm=comm)
    file = MPI.File.Open(
        MPI.COMM_SELF, str(tmp_path / "f"), MPI.MODE_CREATE | MPI.MODE_RDWR
    )
    array = device(1)
    x = [kind(array), COUNT, MPI.INT]
    for call in (
        lambda: win.Put(x, comm.rank),
        lambda: file.Write(x),
        lambda: file.Iread_at(0, x),
        lambda: file.Write(device(1)),
    ):
        with pytest.raises(MPI.Exception, match="expected arrays on the host, got "):
            call()
    file.Write(np.arange(3, dtype="i4"))
    found = np.zeros(3, "i4")
    file.Read_at(0, found)
    assert found.tolist() == [0, 1, 2]
    file.Close()
    win.Free()
    memory = comm.communicator.empty(COUNT, "i4")  # as windows of the simulator need
    memory.copy_to_device(np.full(COUNT, comm.rank, "i4"))
    made = MPI.Win.Create(kind(memory), 4, comm=comm)
    assert made.array is not None
    result = np.zeros(1, "i4")
    made.Fence()
    made.Get(result, (comm.rank + 1) % comm.size)
    made.Fence()
    assert result[0] == (comm.rank + 1) % comm.size
    made.Free()


def absolute(array):
    """Return a datatype of six integers at the address of an array."""
    return MPI.INT.Create_hindexed([COUNT], [address_of(array)]).Commit()


def address_of(array):
    on_host = isinstance(array, np.ndarray)
    return MPI.Get_address(array) if on_host else pointer(array)


def test_addresses_of_the_device_with_bottom_are_refused():
    comm, x, y = MPI.COMM_WORLD, device(2), np.full(COUNT, 2, "i4")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    found, ranks = np.zeros(COUNT, "i4"), [1] * comm.size
    there, here = absolute(x), absolute(y)
    apart = [MPI.BOTTOM, (ranks, [address_of(x)] * comm.size), [MPI.INT] * comm.size]
    for call in (
        lambda: comm.Send([MPI.BOTTOM, 1, there], right),
        lambda: comm.Irecv([MPI.BOTTOM, 1, there], left),
        lambda: comm.Bcast([MPI.BOTTOM, there]),
        lambda: comm.Sendrecv([y, MPI.INT], right, 0, [MPI.BOTTOM, 1, there], left),
        lambda: comm.Alltoallw(apart, apart),
    ):
        with pytest.raises(MPI.Exception, match="got one of the device; pass the dev"):
            call()
    comm.Sendrecv([MPI.BOTTOM, 1, here], right, 0, found, left)
    assert found.tolist() == y.tolist()
    for each in (there, here):
        each.Free()
