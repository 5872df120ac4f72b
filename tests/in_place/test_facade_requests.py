"""Requests of device arrays and of host arrays, together and apart."""

import numpy as np
import pytest
from mpi4py import MPI
from numba import cuda

from numba_symm.mpi import host_only

OWN = host_only.MPI  # mpi4py's module


def started():
    """Start receives and sends of both kinds; return all requests and what arrives.

    The last three are persistent ones of the host, of which the last is not active.
    """
    comm = MPI.COMM_WORLD
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    device, host = cuda.to_device(np.zeros(2)), np.zeros(2)
    requests = [MPI.REQUEST_NULL, comm.Irecv(device, left, 1)]
    requests += [comm.Irecv(host, left, 2), comm.irecv(source=left, tag=3)]
    requests += [MPI.Request()]
    sent = np.full(2, comm.rank + 1.0)
    requests += [comm.Isend(cuda.to_device(sent), right, 1), comm.Isend(sent, right, 2)]
    requests += [comm.isend("text", right, 3)]
    again = np.zeros(2)
    requests += [comm.Recv_init(again, left, 4), comm.Send_init(sent, right, 4)]
    MPI.Prequest.Startall(requests[8:])
    requests += [comm.Recv_init(again, left, 4)]
    return requests, device, host, left + 1


def singly(wait, requests):
    """Call a method that ends one request, or some, until all have ended."""
    objects = {}
    while True:
        found = wait(requests)
        ends, values = found if isinstance(found, tuple) else (found, None)
        if ends is None or ends == MPI.UNDEFINED:
            return objects
        if isinstance(ends, int):
            ends, values = [ends], [values]
        for index, value in zip(ends, values or [None] * len(ends), strict=True):
            assert index not in objects
            objects[index] = value


def polled(test):
    """Return a method that waits, made of one that tests."""

    def wait(requests):
        while True:
            found = test(requests)
            if isinstance(found, tuple) and len(found) == 3:
                found = (found[0], found[2]) if found[1] else False
            elif isinstance(found, tuple) and isinstance(found[1], bool):
                found = found[0] if found[1] else False
            if found is False or found == [] or found == ([], []):
                continue
            return found

    return wait


@pytest.mark.parametrize(
    "name", ["Waitall", "waitall", "Testall", "testall", "Get_status_all"]
)
def test_all_together(name):
    requests, device, host, expected = started()
    statuses = [MPI.Status() for _ in requests]
    objects = None
    if name[:4].lower() == "wait":
        objects = getattr(MPI.Request, name)(requests, statuses)
    elif name == "testall":
        while not (found := MPI.Request.testall(requests, statuses))[0]:
            assert found == (False, None)
        objects = found[1]
    else:
        while not getattr(MPI.Request, name)(requests, statuses):
            pass
    left = expected - 1
    assert [each.source for each in statuses[1:4]] == [left] * 3
    assert [each.tag for each in statuses[1:4]] == [1, 2, 3]
    assert statuses[1].Get_count(MPI.DOUBLE) == statuses[2].Get_count(MPI.DOUBLE) == 2
    if name.islower():
        assert objects[3] == "text"
        assert objects[1] is objects[5] is None
    MPI.Request.Waitall(requests)
    assert device.copy_to_host().tolist() == host.tolist() == [expected] * 2
    assert not any(requests[:8])


@pytest.mark.parametrize("kind", ["any", "some"])
@pytest.mark.parametrize("case", [str.title, str.lower])
@pytest.mark.parametrize("how", ["wait", "test"])
def test_one_after_another(how, case, kind):
    requests, device, host, expected = started()
    method = getattr(MPI.Request, case(how) + kind)
    objects = singly(method if how == "wait" else polled(method), requests)
    assert sorted(objects) == [1, 2, 3, 5, 6, 7, 8, 9]
    if case is str.lower:
        assert objects[3] == "text"
    assert device.copy_to_host().tolist() == host.tolist() == [expected] * 2


def test_one_is_seen_to_be_done_and_stays():
    requests, *_ = started()
    for request in requests:
        request.Wait() if request is requests[2] else None
    while not (found := MPI.Request.Get_status_any(requests))[1]:
        pass
    assert found[0] in (1, 3, 5, 6, 7, 8, 9)
    assert requests[found[0]]
    assert found[0] in MPI.Request.Get_status_some(requests)
    assert requests[5].get_status()
    MPI.Request.Waitall(requests)
    none = MPI.Request.Get_status_some([MPI.Request(), MPI.REQUEST_NULL])
    assert none is None
    for none in ([MPI.Request()], requests):
        assert MPI.Request.Get_status_any(none) == (MPI.UNDEFINED, True)
        assert MPI.Request.Get_status_some(none) is None
    assert MPI.Request.get_status_all([MPI.Request()])
    assert MPI.Request.get_status_any([MPI.Request()]) == (MPI.UNDEFINED, True)
    assert MPI.Request.get_status_some([MPI.Request()]) is None


def test_another_object_of_a_request():
    comm, x = MPI.COMM_SELF, cuda.to_device(np.zeros(2))
    for array, other in ((x, cuda.to_device(np.ones(2))), (np.zeros(2), np.ones(2))):
        request = comm.Irecv(array, 0)
        same = MPI.Request(request)
        assert same
        assert same == request
        assert same == MPI.Request(request)
        assert same.__eq__("text") is NotImplemented
        assert request != MPI.Request(comm.Isend(x, MPI.PROC_NULL))
        assert not same.Test()
        comm.Send(other, 0)
        same.Wait()
        assert not same
        assert not same.Cancel()
    assert x.copy_to_host().tolist() == [1, 1]
    assert MPI.Request() == MPI.Request(MPI.REQUEST_NULL) == MPI.REQUEST_NULL

    class Mine(MPI.Request):
        pass

    assert Mine() == MPI.REQUEST_NULL
    assert Mine(comm.Isend(x, MPI.PROC_NULL)).Wait()

    class New(MPI.Request):
        def __new__(cls, request=None):
            return super().__new__(cls, request)

    assert New(comm.Isend(x, MPI.PROC_NULL)).Wait()
    with pytest.raises(TypeError):
        MPI.Prequest(comm.Isend(x, MPI.PROC_NULL))
    prepared = comm.Send_init([MPI.BOTTOM, 0, MPI.BYTE], MPI.PROC_NULL)
    assert MPI.Prequest(prepared) == prepared
    prepared.Free()
    one = (MPI.Status(),)
    one[0].source = 5
    requests = [comm.Isend(x, MPI.PROC_NULL), comm.Isend(np.ones(2), MPI.PROC_NULL)]
    MPI.Request.Waitall(requests, one)
    assert one[0].source != 5


CLASS_METHODS = [
    *("Waitall", "Waitany", "Waitsome", "Testall", "Testany", "Testsome"),
    *("waitall", "waitany", "waitsome", "testall", "testany", "testsome"),
    *("Get_status_all", "Get_status_any", "Get_status_some"),
]


def test_mpi4pys_own_class_says_what_to_do_with_these():
    """A library that has imported mpi4py before calls it."""
    x = cuda.to_device(np.zeros(2))
    request = MPI.COMM_SELF.Irecv(x, 0)
    prepared = MPI.COMM_SELF.Send_init(cuda.to_device(np.ones(2)), 0)
    text = r"Cannot convert a request of numba_symm\.mpi \(import numba_symm\.mpi as "
    text += r"MPI there, or call its install\(\) first; .* kinds\) to mpi4py\.MPI\."
    for name in CLASS_METHODS:
        with pytest.raises(TypeError, match=text):
            getattr(OWN.Request, name)([OWN.REQUEST_NULL, request])
    with pytest.raises(TypeError, match=text):
        OWN.Prequest.Startall([prepared])
    assert request
    MPI.Prequest.Startall([prepared])
    MPI.Request.Waitall([request, prepared])
    assert x.copy_to_host().tolist() == [1, 1]


def test_what_is_not_a_request_is_refused_by_every_method():
    for name in CLASS_METHODS:
        for wrong in (None, 3, MPI.COMM_SELF):
            method = getattr(MPI.Request, name)
            with pytest.raises(TypeError, match=f"{name}: expected requests of num"):
                method([MPI.REQUEST_NULL, wrong])
    with pytest.raises(TypeError, match="Startall: expected requests of numba_symm"):
        MPI.Prequest.Startall([None])
    with pytest.raises(TypeError, match="Request: expected requests of numba_symm"):
        MPI.Request("x")
