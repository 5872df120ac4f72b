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


def waited(name):
    """Return calls of a method: blocking, by a request, and persistent, twice."""

    def started(comm, *args, **options):
        getattr(comm, f"I{name.lower()}")(*args, **options).Wait()

    def prepared(comm, *args, **options):
        request = getattr(comm, f"{name}_init")(*args, **options)
        for _ in range(2):
            request.Start()
            request.Wait()
        request.Free()

    def blocking(comm, *args, **options):
        getattr(comm, name)(*args, **options)

    return [blocking, started, prepared]


@pytest.mark.parametrize("form", range(3), ids=["blocking", "request", "persistent"])
def test_data_movement(both, form):
    def of(name):
        return waited(name)[form]

    size, rank, root = both.size, both.rank, both.size - 1
    at_root = rank == root
    x, all_of = both.values(2, 3), both.empty(size, 2, 3)
    both(lambda comm, x: of("Bcast")(comm, x, root), x.copy())
    both(lambda comm, x: of("Bcast")(comm, [x, MPI.INT], root=root), x.copy())
    gather, scatter = of("Gather"), of("Scatter")
    both(lambda c, x, y: gather(c, x, y if at_root else None, root), x, all_of)
    every = both.values(size, 4)
    out = both.empty(4)
    both(lambda c, x, y: scatter(c, x if at_root else None, y, root), every, out)
    both(lambda c, x, y: of("Allgather")(c, x, y), x, both.empty(size * 6))
    both(lambda c, x, y: of("Allgather")(c, [x, MPI.BYTE], y), x, both.empty(size, 6))
    # A first axis that is not a multiple of the number of ranks.
    x, y = both.values(1, 3, size), both.empty(size * 3)
    both(lambda c, x, y: of("Alltoall")(c, x, [y, 3, MPI.INT]), x, y)
    # In place.
    mine = both.values(size, 2)
    both(lambda c, x: of("Allgather")(c, IN_PLACE, x), mine.copy())
    both(lambda c, x: of("Alltoall")(c, IN_PLACE, x), mine.copy())
    both(
        lambda c, x, y: gather(c, None if at_root else x, y if at_root else None, root),
        both.values(2),
        mine.copy(),
    )
    both(
        lambda c, x, y: scatter(
            c, x if at_root else None, IN_PLACE if at_root else y, root
        ),
        mine,
        both.empty(2),
    )


@pytest.mark.parametrize("form", range(3), ids=["blocking", "request", "persistent"])
def test_vector_forms(both, form):
    def of(name):
        return waited(name)[form]

    size, rank = both.size, both.rank
    counts = [1 + r % 3 for r in range(size)]
    displs = [5 * (size - 1 - r) + 1 for r in range(size)]  # backwards, with gaps
    x, room = both.values(counts[rank]), both.empty(5 * size + 3)
    place = counts, displs
    gather, scatter = of("Gatherv"), of("Scatterv")

    def recv(y):
        return [y, place, MPI.INT] if rank == 0 else None

    both(lambda c, x, y: gather(c, x, recv(y)), x, room.copy())
    both(lambda c, x, y: scatter(c, recv(y), x), x.copy(), both.values(5 * size + 3))
    spread = of("Allgatherv")
    both(lambda c, x, y: spread(c, x, [y, counts, displs, MPI.INT]), x, room.copy())
    both(lambda c, y: spread(c, IN_PLACE, [y, place]), both.values(5 * size + 3))
    both(lambda c, x, y: spread(c, x, [y, counts]), x, both.empty(sum(counts)))
    # Rank r sends (r + s) % 3 items to rank s.
    sent = [(rank + s) % 3 for s in range(size)]
    every = [4 * s for s in range(size)]
    x, y = both.values(4 * size), both.empty(5 * size + 3)
    exchange, typed = of("Alltoallv"), of("Alltoallw")
    both(lambda c, x, y: exchange(c, [x, (sent, every)], [y, (sent, displs)]), x, y)
    both(lambda c, y: exchange(c, IN_PLACE, [y, (sent, displs)]), x[:1].repeat(90))
    # In place, and the parts lie one after another.
    both(lambda c, y: exchange(c, IN_PLACE, [y, [2] * size]), both.values(2 * size))
    ints, twos = [MPI.INT] * size, ([2] * size, [8 * s for s in range(size)])
    both(lambda c, y: typed(c, IN_PLACE, (y, twos, ints)), both.values(2 * size))
    places = [4 * each for each in every], [4 * each for each in displs]
    both(
        lambda c, x, y: typed(
            c, (x, (sent, places[0]), ints), (y, (sent, places[1]), ints)
        ),
        x,
        y,
    )


@pytest.mark.parametrize("form", range(3), ids=["blocking", "request", "persistent"])
def test_reductions(both, form):
    def of(name):
        return waited(name)[form]

    size, rank = both.size, both.rank
    at_root = rank == size - 1
    reduce, every = of("Reduce"), of("Allreduce")
    x = both.values(2, 4, dtype="f4")
    for op in (MPI.SUM, MPI.MAX):
        both(
            lambda c, x, y, op=op: reduce(c, x, y if at_root else None, op, size - 1),
            x,
            both.empty(8, dtype="f4"),
        )
        both(
            lambda c, x, y, op=op: every(c, x, [y, MPI.FLOAT], op=op),
            x,
            both.empty(8, dtype="f4"),
        )
    if form < 2:  # a second start reduces the result again, on host and device
        both(lambda c, x: every(c, IN_PLACE, x, MPI.PROD), x.copy())
        both(
            lambda c, x: (
                reduce(c, IN_PLACE, x, root=size - 1)
                if at_root
                else reduce(c, x, None, root=size - 1)
            ),
            x.copy(),
        )
        both(lambda c, x: of("Scan")(c, IN_PLACE, x), x.copy())
        both(lambda c, x: of("Exscan")(c, IN_PLACE, x), x.copy())
    both(lambda c, x, y: of("Scan")(c, x, y, op=MPI.MIN), x, both.empty(8, dtype="f4"))

    def exscan(comm, x, y):
        of("Exscan")(comm, x, y)
        if rank == 0:  # undefined there
            y[:] = 0

    both(exscan, x, both.empty(8, dtype="f4"))
    whole, part = both.values(size, 3), both.empty(3)
    both(lambda c, x, y: of("Reduce_scatter_block")(c, x, y), whole, part)
    counts = [r + 1 for r in range(size)]
    whole, part = both.values(sum(counts)), both.empty(rank + 1)
    scatter = of("Reduce_scatter")
    both(lambda c, x, y: scatter(c, x, y, counts, MPI.BOR), whole, part)
    both(lambda c, x, y: scatter(c, x, y), whole, part)
    if form == 0:

        def in_place(comm, x):
            comm.Reduce_scatter(IN_PLACE, x, counts)
            x[rank + 1 :] = 0  # undefined

        both(in_place, whole.copy())


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


OPERATORS = {  # those that MPI has, by the kind of a type
    "i": "BAND BOR BXOR LAND LOR LXOR SUM PROD MIN MAX",
    "u": "BAND BOR BXOR LAND LOR LXOR SUM PROD MIN MAX",
    "f": "SUM PROD MIN MAX",
    "c": "SUM PROD",
    "b": "LAND LOR LXOR",
}


def test_every_operator_and_type(both):
    for dtype in ("i1", "u2", "i8", "f8", "c16", "?"):
        for name in OPERATORS[np.dtype(dtype).kind].split():
            x, out, op = *both.values(2, 5, dtype=dtype), getattr(MPI, name)
            both(lambda c, x, y, op=op: c.Allreduce(x, y, op), x, out)
            if name[0] == "L":  # the items of one rank are not made 0 or 1
                both(lambda c, x, y, op=op: c.Scan(x, y, op), x, out)
                both(lambda c, x, op=op: c.Exscan(IN_PLACE, x, op), x)


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


def test_derived_datatypes(both):
    size, rank, root = both.size, both.rank, 0
    for datatype, room in derived():
        datatype.Commit()
        x, y = both.values(room), both.empty(room)
        both(lambda c, x, t=datatype: c.Bcast([x, 2, t], root), x.copy())
        for nbytes in (2, datatype.size + 3):  # the last item in part

            def part(comm, x, y, n=nbytes, t=datatype):
                comm.Sendrecv([x, n, MPI.BYTE], rank, 0, [y, 2, t], rank)

            both(part, x, y.copy())
        # MPI itself reduces no derived types.
        mask, ones = np.zeros(room, "i4"), np.ones(room, "i4")
        spec = [ones, 2, datatype], [mask, 2, datatype]
        MPI.COMM_SELF.Sendrecv(spec[0], 0, recvbuf=spec[1], source=0)
        into, of = cuda.to_device(y), cuda.to_device(ones)
        both.comm.Allreduce([of, 2, datatype], [into, 2, datatype])
        assert np.array_equal(into.copy_to_host(), np.where(mask, size, y))
        both.comm.Allreduce(IN_PLACE, [of, 2, datatype])
        assert np.array_equal(of.copy_to_host(), np.where(mask, size, 1))
        many = both.empty(room * size)
        both(lambda c, x, y, t=datatype: c.Allgather([x, 1, t], [y, 1, t]), x, many)
        many = both.values(room * size)
        both(lambda c, y, t=datatype: c.Allgather(IN_PLACE, [y, 1, t]), many.copy())
        both(lambda c, y, t=datatype: c.Alltoall(IN_PLACE, [y, 1, t]), many.copy())
        places = ([1] * size, [2 * r for r in range(size)]), datatype

        def gathered(comm, x, y, t=datatype, places=places):
            comm.Gatherv([x, 1, t], [y, *places] if rank == 0 else 0)

        both(gathered, x, both.empty(2 * room * size))
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
    half.Free()
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


def test_requests(comm):
    x = cuda.to_device(np.full(2, 1.0))
    y, z, one = cuda.to_device(np.zeros(2)), np.zeros(1), np.ones(1)
    requests = [comm.Iallreduce(x, y), comm.Iallreduce(one, z)]
    requests.append(comm.Iallreduce(MPI.IN_PLACE, x))
    statuses = []
    assert MPI.Request.Waitall(requests, statuses)
    assert len(statuses) == 3
    assert (y.copy_to_host()[0], z[0], x.copy_to_host()[0]) == (comm.size,) * 3
    assert not any(requests)
    assert requests[0] == MPI.REQUEST_NULL
    assert MPI.Request.Waitany(requests) == MPI.UNDEFINED
    assert MPI.Request.Waitsome(requests) is None
    again = [comm.Iallreduce(x, y), comm.Iallreduce(MPI.IN_PLACE, x)]
    done = []
    while len(done) < 2:
        done.append(MPI.Request.Waitany(again))
    assert sorted(done) == [0, 1]
    again = [comm.Iallreduce(x, y) for _ in range(2)]
    while not MPI.Request.Testall(again):
        pass
    prepared = comm.Allreduce_init(x, y)
    assert prepared.Test()  # it was not started
    MPI.Prequest.Startall([prepared])
    prepared.Wait()
    prepared.Free()
    with pytest.raises(MPI.Exception, match="persistent"):
        prepared.Start()


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
