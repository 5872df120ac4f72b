"""all_reduce, to the bit: counts, types, places, special values, calls in a row."""

import itertools
import time

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives.invocation import Cache
from numba_symm.collectives.operations import ALL_REDUCE
from numba_symm.environment import SIMULATED
from tests.ranks.all_reduce.cases import (
    ALGORITHMS,
    DTYPES,
    FLOATS,
    MAILED,
    OPS,
    Call,
    Case,
    a_dtype,
    named,
    run,
    takes,
)
from tests.ranks.helpers import (
    digest,
    get,
    of_one_island,
    ordinary,
    put,
    reduced,
    refused,
    same,
)

ROUNDS = 1 if SIMULATED else 6
"""A simulated call costs 10 to 300 ms, a GPU's microseconds."""

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


@each_algorithm
def test_algorithms_for_floats_refuse_other_types(comm, world, algorithm):
    x = comm.empty(4, np.int32)
    if takes("all_reduce", algorithm, x.dtype):
        return
    wanted = "got int32; use one of 'one_shot_marked', 'one_shot_ll', "
    for call in (comm.all_reduce, comm.all_reduce_init):
        refused(
            world,
            ns.ArgumentError,
            lambda f=call: f(x, algorithm=algorithm),
            "expected floats for algorithm=",
            wanted,
        )


@pytest.mark.skipif(SIMULATED, reason="counts around tiles go round several times")
@each_algorithm
def test_large_messages_go_round_the_grid_several_times(comm, world, algorithm):
    for count in (999_983, 8_388_593, 4 << 20):
        dtype = a_dtype(algorithm, count)
        run(comm, world, [Case(algorithm, dtype, "sum", count, "out", seed=count)])


def patterns(dtype):
    """Return floats of all kinds, by their bits: vectors of many ones among them."""
    word = np.dtype(f"u{dtype.itemsize}")
    ones, sign = np.iinfo(word).max, 1 << 8 * dtype.itemsize - 1
    lanes = 16 // dtype.itemsize
    random = np.random.default_rng(4).integers(0, ones, 40 * lanes, word, endpoint=True)
    chosen = [ones, sign - 1, ones - 1, sign, 0, 1]  # NaNs, zeros, the least
    mixed = np.random.default_rng(5).choice(np.array(chosen, word), 20 * lanes)
    whole = np.repeat(np.array(chosen, word), lanes)
    return np.concatenate([whole, mixed, random]).view(dtype)


@pytest.mark.parametrize("dtype", [np.dtype(kind) for kind in FLOATS], ids=named)
@pytest.mark.parametrize("algorithm", MAILED)
def test_floats_keep_their_bits_and_nans_stay_nans(comm, world, algorithm, dtype):
    # A maximum with -inf changes nothing, not even the sign of 0.
    wanted = patterns(dtype)
    x = comm.empty(wanted.size, dtype)
    for owner in range(comm.size):
        least = np.full(wanted.size, -np.inf, dtype)
        put(x, wanted if comm.rank == owner else least)
        found = get(comm.all_reduce(x, op="max", algorithm=algorithm))
        assert same(found, wanted)
        # A NaN's bits may have changed, but in the same way on all ranks.
        assert len(set(world.allgather(digest(found)))) == 1


@each_algorithm
def test_min_and_max_treat_nan_and_infinity_as_numpy_does(comm, algorithm):
    choices = [np.nan, np.inf, -np.inf, -0.0, 1.5]
    rows = np.array([*itertools.product(choices, repeat=2)], np.float32).T
    inputs = [np.roll(rows[rank % 2], rank // 2) for rank in range(comm.size)]
    x, out = (comm.empty(rows.shape[1], np.float32) for _ in range(2))
    put(x, inputs[comm.rank])
    for op, numpys in (("min", np.minimum), ("max", np.maximum)):
        found = get(comm.all_reduce(x, op=op, out=out, algorithm=algorithm))
        assert np.array_equal(found, numpys.reduce(inputs), equal_nan=True)


def test_mpi_operators_are_the_named_ones(comm, world):
    from mpi4py import MPI

    for name, op in zip(OPS, (MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX), strict=True):
        call = Call(comm, Case(None, DTYPES[0], name, 13, special=True, seed=3))
        call.enqueue(op)
        call.check()


SHAPES = [(), (1,), (0,), (4, 0, 3), (3, 5), (2, 3, 4), (1, 17, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_shapes_are_kept(comm, shape):
    x = comm.empty(shape, np.int32)
    hosts = [np.arange(x.size, dtype=np.int32).reshape(shape) * 3 + r for r in range(8)]
    put(x, hosts[comm.rank])
    wanted = sum(hosts[: comm.size])
    y = comm.all_reduce(x)
    assert y.shape == shape
    assert np.array_equal(get(y), wanted)
    flat = comm.empty(max(x.size, 1), np.int32)[: x.size]
    assert np.array_equal(get(comm.all_reduce(x, out=flat)), wanted.ravel())


def fortran(comm, shape, first):
    x = ordinary(shape, np.int32, order="F")
    host = np.arange(first, first + x.size, dtype=np.int32).reshape(shape)
    put(x, np.asfortranarray(host * (comm.rank + 1)))
    return x, host * (comm.size * (comm.size + 1) // 2)


def test_fortran_order_is_kept(comm):
    x, wanted = fortran(comm, (3, 5), 1)
    assert np.array_equal(get(comm.all_reduce(x)), wanted)
    out = ordinary((3, 5), np.int32, order="F")
    assert np.array_equal(get(comm.all_reduce(x, out=out)), wanted)
    assert np.array_equal(get(comm.all_reduce(x, out=x)), wanted)


def test_a_c_contiguous_slice_of_many_dimensions(comm):
    whole = comm.empty((4, 3, 2), np.int32)
    host = np.arange(24, dtype=np.int32).reshape(4, 3, 2)
    put(whole, host)
    assert np.array_equal(get(comm.all_reduce(whole[1:3])), host[1:3] * comm.size)
    comm.all_reduce(whole[3], out=whole[0])
    assert np.array_equal(get(whole)[0], host[3] * comm.size)
    assert np.array_equal(get(whole)[1:], host[1:])


def test_one_rank_runs_ahead_as_far_as_it_can(comm, world):
    def be_late(step):
        if comm.rank == comm.size - 1 and step in (0, 5, 6):
            time.sleep(0.2)

    # Large and small messages alternate: some blocks are used in every other call.
    small, large = 3, 70 if SIMULATED else 1 << 18
    cases = [
        Case(
            algorithm,
            a_dtype(algorithm, -1),
            "sum",
            small if step % 2 else large,
            seed=step,
        )
        for algorithm in ALGORITHMS
        for step in range(4)
    ]
    run(comm, world, cases, be_late)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, None])
def test_a_plan_reads_its_input_anew_each_time(comm, algorithm):
    x, y = comm.empty(11, np.float64), comm.empty(11, np.float64)
    plan = comm.all_reduce_init(x, op="sum", out=y, algorithm=algorithm)
    for step in range(4 if SIMULATED else 50):
        case = Case(algorithm, DTYPES[1], "sum", 11, seed=step)
        put(x, case.inputs(comm.size)[comm.rank])
        assert plan() is y
        assert same(get(y), reduced(case.inputs(comm.size), "sum"))


def test_plans_calls_and_barriers_in_turn(comm, world):
    def make(plan_case):
        call = Call(comm, plan_case)
        x, out = call.source.array, call.target.array
        call.plan = comm.all_reduce_init(
            x, op=plan_case.op, out=out, algorithm=plan_case.algorithm
        )
        return call

    first = make(Case("two_shot_sentinel", DTYPES[0], "sum", 33, seed=1))
    second = make(Case("one_shot_ll", DTYPES[5], "prod", 2, seed=2))
    between = Call(comm, Case("chunked", DTYPES[3], "max", 40, "new", seed=3))
    world.barrier()
    for step in range(3 if SIMULATED else 30):
        first.plan()
        if step % 2:
            comm.barrier()
        second.plan()
        between.enqueue()
        first.plan()
    for call in (first, second, between):
        call.check()


def test_a_plan_keeps_its_arrays(comm):
    x = ordinary(6, np.int64)
    put(x, np.arange(6) + comm.rank)
    plan = comm.all_reduce_init(x)
    del x
    junk = [ordinary(6, np.int64) for _ in range(20)]
    for array in junk:
        put(array, np.full(6, -1))
    wanted = np.arange(6) * comm.size + comm.size * (comm.size - 1) // 2
    assert np.array_equal(get(plan()), wanted)


def test_a_plan_in_place_repeats_its_effect(comm):
    x = comm.empty(4, np.int64)
    put(x, np.full(4, comm.rank + 1))
    plan = comm.all_reduce_init(x, out=x, algorithm="chunked")
    for _ in range(3):
        plan()
    total = comm.size * (comm.size + 1) // 2
    assert get(x).tolist() == [total * comm.size**2] * 4


def test_more_different_calls_than_a_communicator_remembers(comm, monkeypatch):
    monkeypatch.setattr(comm._calls, "memory", Cache(4))
    x = comm.empty(12, np.int32)
    put(x, np.full(12, 2, np.int32))
    for count in [*range(1, 9), *range(1, 9)]:
        found = get(comm.all_reduce(x[:count], algorithm="one_shot_ll"))
        assert found.tolist() == [2 * comm.size] * count
    assert len(comm._calls.memory) == 8


@of_one_island
def test_none_takes_the_algorithm_of_the_table(comm, monkeypatch):
    used = []
    for name, found in ALL_REDUCE.algorithms.items():
        spy = lambda *a, b=found.bind, name=name: used.append(name) or b(*a)  # noqa: E731
        spied = found._replace(bind=spy)
        monkeypatch.setitem(ALL_REDUCE.algorithms, name, spied)
    # Two ranks have nothing to do in two shots.
    marked = 1 << (14 if comm.size < 5 else 13)
    calls = [
        (1, np.float32, "one_shot_sentinel"),
        (1, np.int64, "one_shot_ll"),
        (200 if SIMULATED else 1 << 18, np.float64, "two_shot_sentinel"),
        (40 if SIMULATED else marked, np.int64, "one_shot_marked"),
        (400 if SIMULATED else 1 << 21, np.int64, "direct"),
    ]
    if comm.size > 2:
        calls.append((200 if SIMULATED else 1 << 15, np.int64, "two_shot_marked"))
    for count, dtype, _ in calls:
        assert not get(comm.all_reduce(comm.zeros(count, dtype))).any()
    assert used == [name for _, _, name in calls if comm.size > 1]  # one rank copies
