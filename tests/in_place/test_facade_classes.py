"""Classes, objects and names in the place of mpi4py's behave as mpi4py's do."""

import gc

import numpy as np
import pytest
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor
from mpi4py.util import pkl5
from numba import cuda

from numba_symm.mpi import host_only

OWN = host_only.MPI  # mpi4py's module


def ones(count=4):
    return cuda.to_device(np.ones(count))


def is_sum(comm):
    """Return whether an Allreduce of device arrays is right."""
    x = ones()
    comm.Allreduce(MPI.IN_PLACE, x)
    return x.copy_to_host().tolist() == [comm.size] * 4


def test_objects_of_both_kinds_are_instances_of_the_classes():
    comm = MPI.COMM_WORLD
    grid = comm.Create_cart([comm.size])
    win = MPI.Win.Allocate(8, comm=comm)
    instances = {
        MPI.Comm: [comm, MPI.COMM_SELF, grid, MPI.COMM_NULL, comm.Split(MPI.UNDEFINED)],
        MPI.Intracomm: [comm, MPI.COMM_SELF, grid, OWN.COMM_SELF],
        MPI.Topocomm: [grid],
        MPI.Cartcomm: [grid],
        MPI.Win: [win, MPI.WIN_NULL],
        MPI.Group: [comm.group],
        MPI.Message: [MPI.MESSAGE_NULL],
        MPI.Request: [MPI.REQUEST_NULL, comm.irecv(source=MPI.PROC_NULL)],
    }
    instances[MPI.Request] += [comm.Isend(ones(), MPI.PROC_NULL), MPI.Grequest()]
    for kind, objects in instances.items():
        assert all(isinstance(each, kind) for each in objects), kind
        assert not isinstance(None, kind)
    assert not isinstance(comm, MPI.Topocomm)
    assert not isinstance(comm, MPI.Intercomm)
    assert not isinstance(grid, MPI.Graphcomm)
    for kind, base in (
        (MPI.Cartcomm, MPI.Topocomm),
        (MPI.Intercomm, MPI.Comm),
        (MPI.Intracomm, MPI.Comm),
        (MPI.Prequest, MPI.Request),
        (MPI.Grequest, MPI.Request),
    ):
        assert issubclass(kind, base)
        assert not issubclass(base, kind)
    for name, kind in vars(OWN).items():
        if isinstance(kind, type) and hasattr(kind, "Free"):
            assert MPI._sizeof(getattr(MPI, name)) == OWN._sizeof(kind), name
    win.Free()
    grid.Free()


class Plain(MPI.Intracomm):
    """As programs of mpi4py write it: its __init__ does not call the base class's."""

    def __new__(cls, comm=None, more=0):
        return super().__new__(cls, comm)

    def __init__(self, comm=None, more=0):
        self.more = more


class OfACopy(MPI.Comm):
    def __new__(cls, comm=None):
        return super().__new__(cls, comm.Clone() if comm else None)


class OfAGrid(MPI.Cartcomm):
    def __new__(cls, comm=None):
        return super().__new__(cls, comm.Create_cart([comm.size]) if comm else None)


def test_subclasses_keep_their_type_where_mpi4pys_do():
    comm = MPI.COMM_WORLD
    plain = Plain(comm, more=7)
    assert plain.more == 7
    assert plain == comm
    assert is_sum(plain)
    for kind in (Plain, OfACopy, OfAGrid):
        first = kind(comm)
        second = first.Dup()
        third, request = second.Idup()
        request.Wait()
        fourth = third.Clone()
        for each in (first, second, third, fourth):
            assert type(each) is kind
            assert is_sum(each)
        for each in (second, third, fourth):
            MPI.Comm.Free(each)
            assert not each
        if kind is not Plain:
            first.Free()
    part = plain.Split(comm.rank)
    assert type(part) is MPI.Intracomm  # as mpi4py's
    assert is_sum(part)
    part.Free()
    assert is_sum(comm)


def test_another_object_of_a_communicator_is_the_same_communicator():
    comm = MPI.COMM_WORLD.Dup()
    same = MPI.Intracomm(comm)
    assert same == comm
    assert same is not comm
    assert same.communicator is comm.communicator
    other = {"timeout": 3}
    with pytest.raises(MPI.Exception, match="expected the options of the first MPI"):
        MPI.Intracomm(comm, **other)
    for handle in (comm.py2f(), comm.handle):
        found = MPI.Comm.f2py if handle == comm.py2f() else MPI.Comm.fromhandle
        assert found(handle).communicator is comm.communicator
    for wrong, kind, text in (
        ((1, 2), MPI.Comm, "Comm: expected a communicator of mpi4py, got"),
        (comm, MPI.Intercomm, "Intercomm: expected an intercommunicator"),
        (comm, MPI.Cartcomm, "expecting a topology communicator"),
        (OWN.COMM_SELF, MPI.Graphcomm, "expecting a topology communicator"),
    ):
        with pytest.raises(TypeError, match=text):
            kind(wrong)
    MPI.COMM_WORLD.free()  # does nothing, as mpi4py's
    same.free()
    same.free()
    with pytest.raises(MPI.Exception, match="Free was called"):
        comm.Allreduce(MPI.IN_PLACE, ones())
    with pytest.raises(MPI.Exception, match="got COMM_WORLD, which lives as long"):
        MPI.COMM_WORLD.Free()
    assert is_sum(MPI.COMM_WORLD)


def test_methods_read_from_a_class_take_objects_of_both_kinds():
    comm, host = MPI.COMM_SELF, np.arange(3.0)
    MPI.Comm.Isend(OWN.COMM_SELF, host, 0).Free()
    found = np.zeros(3)
    MPI.Comm.Recv(OWN.COMM_SELF, found, 0)
    assert found.tolist() == host.tolist()
    MPI.Request.Wait(MPI.Comm.Isend(comm, cuda.to_device(host), 0))
    x = ones(3)
    MPI.Message.Recv(MPI.Comm.Mprobe(comm), x)
    assert x.copy_to_host().tolist() == host.tolist()
    MPI.Message.Recv(MPI.MESSAGE_NO_PROC, (None, 0, MPI.BYTE))


def test_mpi4pys_own_packages_are_of_these_classes():
    comm = pkl5.Intracomm(MPI.COMM_WORLD)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    request = comm.isend(np.full(5, comm.rank), right, 3)
    assert comm.recv(source=left, tag=3).tolist() == [left] * 5
    request.wait()
    assert comm.bcast({"a": np.ones(2)}, 0)["a"].tolist() == [1, 1]
    assert comm.allgather(comm.rank) == list(range(comm.size))
    assert is_sum(comm)
    low = comm.rank < 1
    part = MPI.COMM_WORLD.Split(low, comm.rank)
    both = part.Create_intercomm(0, MPI.COMM_WORLD, 1 if low else 0)
    found = pkl5.Intercomm(both).allgather(comm.rank)
    assert found == ([each for each in range(comm.size) if each] if low else [0])
    both.Free()
    part.Free()
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        assert (executor is None) == (comm.rank > 0)
        if executor:
            assert list(executor.map(abs, range(-9, 0))) == list(range(9, 0, -1))


def test_intercommunicators_take_host_arrays_and_merge_for_others():
    comm = MPI.COMM_WORLD
    side = int(comm.rank > 0)
    half = comm.Split(side)
    inter = half.Create_intercomm(0, comm, 1 - side, 5)
    assert isinstance(inter, MPI.Intercomm)
    for call in (
        lambda: inter.Send(ones(), 0),
        lambda: inter.Irecv(ones(), 0),
        lambda: inter.Bcast(ones(), MPI.PROC_NULL),
        lambda: inter.Allreduce(ones(), ones()),
    ):
        with pytest.raises(MPI.Exception, match="expected arrays on the host, got "):
            call()
    assert sorted(inter.allgather(side)) == [1 - side] * inter.Get_remote_size()
    received = np.zeros(1, "i4")
    if half.rank == 0:
        inter.Sendrecv(np.full(1, comm.rank, "i4"), 0, 0, received, 0)
        assert received[0] == 1 - side
    with pytest.raises(TypeError, match=r"pass comm\.Merge\(\)"):
        MPI.Intracomm(inter)
    assert type(MPI.Comm.fromhandle(inter.handle)) is MPI.Intercomm
    copy = inter.Dup()
    assert type(copy) is MPI.Intercomm
    whole = copy.Merge(side)
    assert is_sum(whole)
    for each in (whole, copy, inter, half):
        each.Free()
        assert not each


def test_every_name_of_mpi4py_is_there():
    names = {}
    exec("from numba_symm.mpi import *", names)
    missing = {name for name in dir(OWN) if name[0] != "_"} - names.keys()
    assert not missing
    assert names["Comm"] is MPI.Comm is not OWN.Comm
    assert names["COMM_WORLD"] is MPI.COMM_WORLD
    assert not {"buffers", "comm", "started"} & names.keys()
    assert {name for name in dir(OWN) if name[0] != "_"} <= set(dir(MPI))
    assert MPI._typecode(MPI.DOUBLE) == "d"


def test_windows_are_over_host_memory_unless_asked_for():
    comm = MPI.COMM_WORLD
    win = MPI.Win.Allocate(8, 8, comm=comm)
    memory = win.tomemory()
    memory[:] = np.full(1, comm.rank, "i8").tobytes()  # as nxtval of mpi4py's demos
    found, right = np.zeros(1, "i8"), (comm.rank + 1) % comm.size
    win.Fence()
    win.Get(found, right)
    win.Fence()
    assert found[0] == right
    for call in (
        lambda: win.Put(ones(1), right),
        lambda: win.Get([ones(1), MPI.DOUBLE], right),
        lambda: win.Accumulate(ones(1), right),
        lambda: win.Get_accumulate(found, ones(1), right),
        lambda: win.Fetch_and_op(ones(1), found, right),
        lambda: win.Compare_and_swap(found, ones(1), found, right),
        lambda: win.Rput(ones(1), right),
    ):
        with pytest.raises(MPI.Exception, match="expected arrays on the host, got "):
            call()
    same = MPI.Win(win)
    assert same == win
    assert same.attrs[1:] == win.attrs[1:] == (8, 8)
    win.Free()
    dynamic = MPI.Win.Create_dynamic(comm=comm)
    with pytest.raises(MPI.Exception, match="Attach: expected arrays on the host"):
        dynamic.Attach(ones())
    dynamic.Free()
    assert MPI.Win.Create(bytearray(8), comm=comm).Free() is None
    with pytest.raises(MPI.Exception, match="Allocate_device: expected a communicator"):
        MPI.Win.Allocate_device(8, comm=OWN.COMM_SELF)
    device = MPI.Win.Allocate_device(8, 8, comm=comm)
    device.Fence()
    MPI.Win(device).Put(ones(1), right)
    device.Fence()
    assert device.tomemory().view("f8").copy_to_host().tolist() == [1]
    device.Free()
    gc.collect()
