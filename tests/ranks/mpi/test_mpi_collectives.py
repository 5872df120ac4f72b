"""The collectives in mpi4py's spelling: as mpi4py's own, whose arrays are on the host.

Every call is made twice, with host arrays by mpi4py and with device arrays by
``numba_symm.mpi``, and all arrays are compared afterwards.
"""

import copy
import os
import pickle
from functools import partial

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import mpi as MPI
from numba_symm.environment import SIMULATED

IN_PLACE = MPI.IN_PLACE
PAIRS = {
    "FLOAT_INT": [("f0", "f4"), ("f1", "i4")],
    "SHORT_INT": {"names": ["f0", "f1"], "formats": ["i2", "i4"], "offsets": [0, 4]},
}


class Both:
    """Makes calls by mpi4py and by the library."""

    def __init__(self, world, comm):
        self.world, self.comm = world, comm
        self.rank, self.size = world.rank, world.size

    def __call__(self, call, *arrays):
        device = [cuda.to_device(array) for array in arrays]
        call(self.comm, *device)
        call(self.world, *arrays)
        for index, (host, there) in enumerate(zip(arrays, device, strict=True)):
            found = there.copy_to_host()
            assert np.array_equal(found, host), f"array {index}: {found} {host}"

    def values(self, *shape, dtype="i4"):
        """Return small integers, different on each rank."""
        number = int(np.prod(shape))
        found = (np.arange(number) * 7 + 3 * self.rank + 1) % 11
        return found.astype(dtype).reshape(shape)

    def empty(self, *shape, dtype="i4"):
        return np.full(shape, 99, dtype)


@pytest.fixture
def both(world, comm):
    return Both(world, comm)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("op", [MPI.MINLOC, MPI.MAXLOC], ids=["minloc", "maxloc"])
def test_pairs(both, name, op):
    """Values repeat, so the lowest index counts."""
    datatype, size, rank = getattr(MPI, name), both.size, both.rank
    x = np.zeros((size, 3), np.dtype(PAIRS[name]))
    x["f0"], x["f1"] = (np.arange(3) + rank) % 2, 10 - rank
    flat, out = x.reshape(-1), np.zeros_like(x)

    def spec(array):
        return [array, datatype]

    both(lambda c, x, y: c.Allreduce(spec(x), spec(y), op), x, out)
    both(lambda c, x: c.Allreduce(IN_PLACE, spec(x), op), x.copy())
    both(lambda c, x, y: c.Reduce(spec(x), spec(y), op, 0), x, out)
    both(lambda c, x, y: c.Scan(spec(x), spec(y), op), x, out)
    both(
        lambda c, x, y: c.Reduce_scatter_block(spec(x), spec(y), op), flat, x[0].copy()
    )
    counts = [(each % 2) * 3 for each in range(size)]
    part = np.zeros(counts[rank], x.dtype)
    most = flat[: sum(counts)]
    both(lambda c, x, y: c.Reduce_scatter(spec(x), spec(y), counts, op), most, part)
    with pytest.raises(MPI.Exception, match="need pairs"):
        both.comm.Allreduce(MPI.IN_PLACE, cuda.to_device(both.values(2)), op)


def derived():
    """Return datatypes of int32 with gaps, and the elements that two items span."""
    yield MPI.INT.Create_vector(3, 2, 5), 40
    yield MPI.INT.Create_hvector(2, 1, 12), 40
    yield MPI.INT.Create_contiguous(3), 40
    yield MPI.INT.Create_indexed([2, 1, 3], [7, 0, 2]), 40
    yield MPI.INT.Create_indexed_block(2, [4, 0]), 40
    yield MPI.INT.Create_hindexed([1, 2], [16, 0]), 40
    yield MPI.INT.Create_hindexed_block(1, [16, 4]), 40
    yield MPI.INT.Create_subarray([4, 5], [2, 3], [1, 1]), 40
    yield MPI.INT.Create_subarray([4, 5], [2, 3], [1, 1], MPI.ORDER_F), 40
    yield MPI.INT.Create_struct([1, 2], [8, 0], [MPI.INT, MPI.INT]), 40
    yield MPI.INT.Create_resized(0, 8), 40
    yield MPI.INT.Create_vector(2, 1, 2).Create_resized(0, 16), 40
    yield MPI.INT.Create_vector(2, 1, 2).Create_contiguous(2), 40
    yield MPI.INT.Dup(), 40


def test_reductions_of_derived_datatypes(comm):
    """MPI itself reduces none."""
    for datatype, room in derived():
        datatype.Commit()
        y, mask, ones = (
            np.full(room, 99, "i4"),
            np.zeros(room, "i4"),
            np.ones(room, "i4"),
        )
        spec = [ones, 2, datatype], [mask, 2, datatype]
        MPI.COMM_SELF.Sendrecv(spec[0], 0, recvbuf=spec[1], source=0)
        into, of = cuda.to_device(y), cuda.to_device(ones)
        comm.Allreduce([of, 2, datatype], [into, 2, datatype])
        assert np.array_equal(into.copy_to_host(), np.where(mask, comm.size, y))
        comm.Allreduce(IN_PLACE, [of, 2, datatype])
        assert np.array_equal(of.copy_to_host(), np.where(mask, comm.size, 1))
        datatype.Free()


def refusals(comm, x):
    """Yield calls that are refused, MPI's error class, and words of the text."""
    host, vector = np.zeros(4, np.int32), MPI.INT.Create_vector(2, 1, 2)
    mixed = MPI.INT.Create_struct([1, 1], [0, 4], [MPI.INT, MPI.FLOAT])
    yield lambda: comm.Bcast(x, comm.size), MPI.ERR_ROOT, "expected a root"
    yield lambda: comm.Bcast([x, 5]), MPI.ERR_COUNT, "within the array's 16 bytes"
    yield lambda: comm.Bcast([x, -1]), MPI.ERR_COUNT, "negative count"
    yield lambda: comm.Bcast([x, (1, 9)]), MPI.ERR_DISP, "out of bounds"
    yield lambda: comm.Bcast([x, vector]), MPI.ERR_COUNT, "cannot infer count"
    yield lambda: comm.Bcast([x, 1, 2, 3, 4]), MPI.ERR_ARG, "2 to 4 items"
    yield lambda: comm.Alltoallw(x, []), MPI.ERR_ARG, "2 to 4 items"
    yield lambda: comm.Bcast([x, MPI.DATATYPE_NULL]), MPI.ERR_TYPE, "DATATYPE_NULL"
    yield lambda: comm.Bcast([x, 1, 7]), MPI.ERR_TYPE, "MPI.Datatype"
    kinds = f"on the device, or all on the host, got both: {type(x).__name__} and nd"
    yield lambda: comm.Allreduce(x, host), MPI.ERR_BUFFER, kinds
    yield lambda: comm.Allreduce(x, [x, MPI.FLOAT]), MPI.ERR_TYPE, "mismatch"
    yield lambda: comm.Allreduce(x, [x, 1]), MPI.ERR_COUNT, "mismatch"
    yield lambda: comm.Allreduce(x, x, MPI.OP_NULL), MPI.ERR_OP, "OP_NULL"
    yield lambda: comm.Allreduce(x, x, MPI.REPLACE), MPI.ERR_OP, "one-sided"
    yield lambda: comm.Allreduce(x, x, "avf"), MPI.ERR_ARG, "operator"
    once = [MPI.BOTTOM, 1, MPI.INT]
    yield lambda: comm.Allreduce(once, x), MPI.ERR_BUFFER, "MPI.BOTTOM"
    both = [x, 1, mixed]
    yield lambda: comm.Allreduce(IN_PLACE, both), MPI.ERR_TYPE, "one type"
    counts = [9] * comm.size
    yield lambda: comm.Reduce_scatter(x, x, counts), MPI.ERR_COUNT, "sum"
    yield lambda: comm.Gatherv(x, [x, [1]], comm.rank), MPI.ERR_COUNT, "expecting"
    own = f"expected 4 bytes, which are counts[{comm.rank}] items, got 16"
    ones, none = [x, [1] * comm.size], [x, [0] * comm.size]
    yield lambda: comm.Gatherv(x, ones, comm.rank), MPI.ERR_COUNT, own
    yield lambda: comm.Scatterv(ones, x, comm.rank), MPI.ERR_COUNT, own
    yield lambda: comm.Allgatherv(x, ones), MPI.ERR_COUNT, own
    yield lambda: comm.Alltoallv(ones, none), MPI.ERR_COUNT, "sends itself 4 bytes"
    other = (comm.rank + 1) % comm.size
    for name in ("Gather", "Gatherv", "Reduce"):
        call = partial(getattr(comm, name), IN_PLACE, None, root=other)
        yield call, MPI.ERR_BUFFER, f"is for the root, rank {other}"
    for name in ("Scatter", "Scatterv"):
        call = partial(getattr(comm, name), None, IN_PLACE, root=other)
        yield call, MPI.ERR_BUFFER, f"is for the root, rank {other}"
    for name in ("allreduce", "bcast", "recv", "scan"):
        yield partial(getattr(comm, name), x), MPI.ERR_BUFFER, f"{name.capitalize()}, "
    yield lambda: comm.send([x], dest=other), MPI.ERR_BUFFER, "pass x.copy_to_host()"
    strided = x[::2]
    yield lambda: comm.Bcast(strided), MPI.ERR_ARG, "contiguous"
    long = [x, MPI.LONG_DOUBLE]
    yield lambda: comm.Bcast(long), MPI.ERR_UNSUPPORTED_OPERATION, "MPI.DOUBLE"


def test_refusals_are_errors_of_mpi(comm):
    if comm.size == 1:
        pytest.skip("with one rank some of them are right")
    x = cuda.to_device(np.arange(4, dtype=np.int32))
    for call, code, words in refusals(comm, x):
        with pytest.raises(MPI.Exception) as found:
            call()
        assert words in str(found.value)
        assert found.value.Get_error_class() == code, found.value
        unknown = code == MPI.ERR_UNSUPPORTED_OPERATION
        assert isinstance(found.value, NotImplementedError if unknown else ValueError)
    comm.Barrier()


def test_host_arrays_and_objects_are_mpi4pys(comm, world):
    host = np.full(3, comm.rank)
    out = np.zeros(3, host.dtype)
    comm.Allreduce(host, out)
    assert out[0] == sum(range(comm.size))
    comm.Iallreduce(host, out).Wait()
    assert comm.allgather(comm.rank) == list(range(comm.size))
    assert comm == world
    assert (comm.rank, comm.size) == (comm.Get_rank(), comm.Get_size())
    assert isinstance(comm, type(world))
    assert MPI.Compute_dims(4, 2) == [2, 2]
    assert MPI.Comm.Allreduce.__name__ == "Allreduce"


def test_copies_of_a_communicator_are_the_communicator(comm):
    """In mpi4py, copies of COMM_WORLD have its handle, too."""
    grid = comm.Create_cart([comm.size])
    for each in (comm, grid):
        assert copy.copy(each) is each
        assert copy.deepcopy({"comm": each})["comm"] is each
        with pytest.raises(ValueError, match="cannot pickle a communicator"):
            pickle.dumps(each)
    grid.Free()


def test_an_own_function_and_avg(both):
    x = cuda.to_device(both.values(4, dtype="f8"))
    out = cuda.to_device(np.zeros(4))
    both.comm.Allreduce(x, out, "avg")
    everyone = both.world.allgather(both.values(4, dtype="f8"))
    assert np.allclose(out.copy_to_host(), np.mean(everyone, axis=0))
    both.comm.Allreduce(x, out, op=later)
    assert np.array_equal(out.copy_to_host(), everyone[-1])
    made = MPI.Op.Create(lambda a, b, t: None)
    with pytest.raises(NotImplementedError, match="function of two scalars"):
        both.comm.Allreduce(x, out, made)
    made.Free()


def later(a, b):
    return b


def test_communicators_of_some_ranks(comm, world):
    if int(os.environ.get("NUMBA_SYMM_ISLAND_SIZE", "1")) > world.size // 2 > 0:
        pytest.skip("an island may not have more ranks than a half")
    half = comm.Split(comm.rank % 2, -comm.rank)
    wanted = [r for r in range(comm.size) if r % 2 == comm.rank % 2]
    x = cuda.to_device(np.full(2, comm.rank, np.int64))
    half.Allreduce(IN_PLACE, x)
    assert x.copy_to_host()[0] == sum(wanted)
    assert half.rank == wanted[::-1].index(comm.rank)
    what = f"<numba_symm.mpi.Intracomm: rank {half.rank} of {half.size}"
    assert repr(half) == f"{what}>"
    half.Free()
    assert repr(half) == f"{what}, which was freed>"
    assert repr(ns.mpi.Intracomm()) == "<numba_symm.mpi.Intracomm>"
    assert half == MPI.COMM_NULL
    none = comm.Split(MPI.UNDEFINED if comm.rank else 0)
    assert bool(none) == (comm.rank == 0)
    if none:
        none.Free()
    same = comm.Dup()
    assert type(same) is MPI.Intracomm
    group = comm.Get_group()
    again = same.Create_group(group)
    again.Barrier()
    y = cuda.to_device(np.full(2, 1.0))
    again.Allreduce(MPI.IN_PLACE, y)
    assert y.copy_to_host()[0] == comm.size
    again.Barrier()
    again.Free()
    same.Free()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert node.size == comm.size
    node.Free()


def test_arrays_in_fortran_order_and_of_no_axis(both):
    x = np.asfortranarray(both.values(2, 3))
    y = cuda.to_device(both.empty(2, 3))
    both.comm.Allreduce(cuda.to_device(x), y)
    both.world.Allreduce(x.ravel("K"), out := both.empty(6))
    assert np.array_equal(y.copy_to_host().ravel(), out)


def test_enqueued_calls(apart):
    """With ``synchronize=False``, only work of the stream may use the arrays."""
    made = MPI.Comm(apart, timeout=20, synchronize=False)
    x = cuda.to_device(np.ones(4))
    made.Allreduce(MPI.IN_PLACE, x)
    made.Allreduce(MPI.IN_PLACE, x)
    made.communicator.synchronize()
    assert x.copy_to_host()[0] == made.size**2
    part = made.Dup()
    assert not part.synchronizes
    part.Free()
    made.Free()
    with pytest.raises(MPI.Exception, match="expected a communicator, got MPI"):
        ns.mpi.Comm(MPI.COMM_NULL).Allreduce(MPI.IN_PLACE, x)
    assert SIMULATED in (True, False)
