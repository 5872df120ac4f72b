"""No callable of mpi4py.MPI that takes a buffer gets an address of the GPU.

The list is mpi4py's own: the annotations in the docstrings of its classes.
"""

import copy
import pickle
import re
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI
from numba import cuda

from numba_symm.environment import SIMULATED
from numba_symm.mpi import host_only

OWN = host_only.MPI  # mpi4py's module
BUFFER = re.compile(r"\bBufSpec\w*|\b[Bb]uffer\b")
CLASSES = [
    name
    for name in dir(OWN)
    if isinstance(getattr(OWN, name), type)
    and getattr(OWN, name).__module__ == OWN.__name__
]
ADDRESS = "only stores or returns the address"
PYTHONS = "reads the memory by Python's buffer protocol, as bytes(x) does"
LEFT_OUT = {
    "Get_address": ADDRESS,
    "buffer.frombuffer": ADDRESS,
    "Pickle.loads": PYTHONS,
    "Pickle.loads_oob": PYTHONS,
}
"""The callables that are neither this library's nor guarded, with the reason."""


def parameters(text):
    """Return the annotations by the names of the parameters in a signature.

    Those of functions that MPI calls are left out: MPI passes memory of the host.
    """
    inside = text.partition("(")[2].rpartition(") ->")[0]
    inside = re.sub(r"Callable\[\[.*?\], [^\]]*\]", "Callable", inside)
    return dict(re.findall(r"(\w+): ([^=]*?)(?:=[^,]*)?(?:, |$)", inside))


def taking_buffers():
    """Yield the name, the owner and the parameters for buffers of each callable."""
    for name in [*CLASSES, ""]:
        owner = getattr(OWN, name) if name else OWN
        for each in vars(owner):
            text = (getattr(owner, each).__doc__ or "").partition("\n")[0]
            if each[0] != "_" and "->" in text:
                given = parameters(text)
                buffers = [key for key in given if BUFFER.search(given[key])]
                if buffers:
                    yield ".".join(filter(None, (name, each))), given, buffers


CALLABLES = {name: (given, found) for name, given, found in taking_buffers()}


@pytest.fixture(params=["array", "address"])
def x(request):
    """Return six ones on the device, as an array or as a buffer over its address."""
    array = cuda.to_device(np.ones(6, "i4"))
    if request.param == "array":
        yield array
    else:
        given = array._ary.ctypes if SIMULATED else array.__cuda_array_interface__
        address = given.data if SIMULATED else given["data"][0]
        yield MPI.memory.fromaddress(address, array.nbytes)
    assert array.copy_to_host().tolist() == [1] * 6


def test_the_signatures_are_read():
    assert len(CALLABLES) > 150
    assert CALLABLES["Datatype.Pack"][1] == ["inbuf", "outbuf"]
    assert CALLABLES["Comm.sendrecv"][1] == ["recvbuf"]
    assert CALLABLES["Win.Get"][1] == ["origin"]
    assert CALLABLES["Free_mem"][1] == ["mem"]
    assert "Op.Create" not in CALLABLES


def test_each_is_of_this_library_or_left_out_with_a_reason():
    found = set()
    for name in CLASSES:
        kind, own = getattr(MPI, name), getattr(OWN, name)
        for each in dir(own):
            definer = next(base for base in own.__mro__ if each in vars(base))
            listed = f"{definer.__name__}.{each}"
            if listed in CALLABLES and getattr(kind, each) == getattr(own, each):
                found.add(listed)
    functions = {name for name in CALLABLES if "." not in name}
    found |= {name for name in functions if getattr(MPI, name) == getattr(OWN, name)}
    assert found == LEFT_OUT.keys()


def test_mpi_gets_none_for_an_object_of_its_own(x):
    for name in CALLABLES.keys() - LEFT_OUT.keys():
        owner, _, method = name.rpartition(".")
        if not owner or method[0].islower() or name == "Win.Create":
            continue
        given, buffers = CALLABLES[name]
        for buffer in buffers:
            args = [x if key == buffer else None for key in given]
            with pytest.raises(MPI.Exception, match=f"{method}: expected arrays on th"):
                getattr(getattr(MPI, owner), method)(getattr(OWN, owner)(), *args)


def test_what_mpi_does_refuses_them(x):
    comm, host = MPI.COMM_WORLD, np.zeros(6, "i4")
    vector = MPI.INT.Create_vector(2, 1, 2).Commit()
    derived = vector, vector.Dup(), copy.copy(vector), vector.decode()[0]
    derived += MPI.Datatype.fromcode("i"), MPI._typedict["i"]
    derived += MPI.Datatype.fromhandle(MPI.INT.handle), MPI.INT
    summed = MPI.Op.Create(lambda a, b, datatype: None)
    session = MPI.Session.Init()
    for each in (vector, summed, session):
        again = type(each).fromhandle(each.handle)
        assert again == each
        assert type(again) is type(each)
    calls = [
        *(partial(each.Pack, [x, MPI.INT], host, 0, comm) for each in derived),
        *(partial(each.Unpack, host, 0, [x, MPI.INT], comm) for each in derived),
        partial(MPI.INT.Pack_external, "external32", host, x, 0),
        partial(MPI.INT.Unpack_external, "external32", x, 0, host),
        partial(MPI.SUM.Reduce_local, [x, MPI.INT], host),
        partial(MPI.SUM.Reduce_local, host, [x, MPI.INT]),
        partial(summed.Reduce_local, host, [x, MPI.INT]),
        partial(MPI.Free_mem, x),
        partial(session.Attach_buffer, x),
        partial(comm.Attach_buffer, x),
        partial(comm.Psend_init, x, 1, 0),
        partial(comm.Precv_init, [x, MPI.INT], 1, 0),
        partial(comm.Iagree, x),
        partial(comm.recv, x, comm.rank),
        partial(comm.irecv, source=comm.rank, buf=x),
        partial(comm.sendrecv, 1, comm.rank, 0, x),
        partial(comm.sendrecv, 1, comm.rank, recvbuf=x),
    ]
    for call in calls:
        with pytest.raises(MPI.Exception, match=r"expected .*on the "):
            call()
    for each in (*derived[:3], summed):
        each.Free()
    session.Finalize()


def test_arrays_of_the_device_are_reduced_locally(x):
    twos = cuda.to_device(np.full(6, 2, "i4"))
    every_second = MPI.INT.Create_vector(3, 1, 2).Commit()
    MPI.SUM.Reduce_local([x, MPI.INT], twos)
    assert twos.copy_to_host().tolist() == [3] * 6
    MPI.SUM.Reduce_local([x, 1, every_second], [twos, 1, every_second])
    assert twos.copy_to_host().tolist() == [4, 3] * 3
    MPI.MIN.Reduce_local(twos[:0], twos[:0])
    summed = MPI.Op.Create(lambda a, b, datatype: None)
    for op, given, words in (
        (MPI.SUM, [x, 2, MPI.INT], "mismatch in inbuf count 2 and inoutbuf count 6"),
        (MPI.SUM, [x, MPI.FLOAT], "expected elements of one type"),
        (MPI.MINLOC, [x, MPI.INT], "pass .x, MPI.FLOAT_INT"),
        (summed, [x, MPI.INT], "works on host buffers"),
        (MPI.OP_NULL, [x, MPI.INT], "got MPI.OP_NULL"),
    ):
        with pytest.raises(MPI.Exception, match=f"Reduce_local: .*{words}"):
            op.Reduce_local(given, twos)
    every_second.Free()
    summed.Free()


def test_constants_are_objects_of_the_classes_and_of_mpi4pys():
    for name in dir(OWN):
        own = getattr(OWN, name)
        if isinstance(own, OWN.Datatype | OWN.Op | OWN.Session):
            ours = getattr(MPI, name)
            assert type(ours) is getattr(MPI, type(own).__name__)
            assert isinstance(ours, type(own))
            assert isinstance(own, type(ours))
            assert ours == own
            if isinstance(own, OWN.Session):
                continue  # mpi4py's own are not copied either
            assert copy.deepcopy(ours) is ours
            assert pickle.loads(pickle.dumps(ours)) is ours
            assert copy.copy(type(ours)(ours)) == ours
    assert MPI._typedict["d"] is MPI.Datatype.fromcode("d") is MPI.DOUBLE
    assert MPI.INT.Create_vector(1, 1, 1).decode()[0] is MPI.INT


def add(a, b, datatype):
    pass
