"""all_reduce of every dtype by every operator, and by users' own, to the bit."""

import random as lots

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.environment import SIMULATED
from tests.algorithms import those
from tests.operators import ELEMENTS, PAIRS, in_order, random, same, special, wanted
from tests.ranks.helpers import digest, refused


def sampled(lot, ops, size):
    """Return some operators: a GPU's kernel takes seconds to compile.

    (A simulated call takes 10 to 300 ms. tests/host compiles all types and operators.)
    """
    return lot.sample(ops, min(len(ops), 4 if size <= 2 else 2))


def inputs_of(name, count, size, seed):
    """Return every rank's input: any bits, some of them special."""
    found = []
    for rank in range(size):
        array = random(name, count, [seed, rank])
        lot = np.random.default_rng([seed, rank, 1])
        chosen = lot.integers(0, 2, count).astype(bool)
        array[chosen] = lot.choice(special(name), count)[chosen]
        found.append(array)
    return found


def symmetric(comm, host, offset):
    """Return a symmetric array of those elements, ``offset`` elements in."""
    array = comm.empty(len(host) + offset, host.dtype)[offset:]
    array.view(np.uint8).copy_to_device(host.view(np.uint8))
    return array


def get(array):
    return array.view(np.uint8).copy_to_host().view(array.dtype)


def check(comm, world, inputs, op, expected, offset=0, algorithm=None):
    """Reduce and compare; all ranks must have the same bits."""
    x = symmetric(comm, inputs[comm.rank], offset)
    out = symmetric(comm, inputs[comm.rank], 0)
    comm.all_reduce(x, op=op, out=out, algorithm=algorithm)
    comm.synchronize()
    found = get(out)
    wrong = np.flatnonzero(~same(found, expected))
    ranks = world.allgather((digest(found), wrong.size))
    where = f"{inputs[0].dtype} {op} {algorithm}, {len(found)} elements"
    assert not wrong.size, f"{where}: {found} instead of {expected}"
    assert len({bits for bits, _ in ranks}) == 1, where


def algorithms(name):
    return those("all_reduce", lambda made: ELEMENTS[name].floating or not made.floats)


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_dtype_and_operator_gives_numpys_bits(comm, world, name):
    lot = lots.Random(f"{name} {comm.size}")
    ops = [op for dtype, op in PAIRS if dtype == name]
    for op in sampled(lot, ops, comm.size):
        for algorithm in lot.sample(algorithms(name), 1):
            count, offset = lot.choice([1, 16, 17, 48, 77]), lot.choice([0, 1])
            inputs = inputs_of(name, count, comm.size, lot.getrandbits(20))
            check(comm, world, inputs, op, wanted(inputs, op), offset, algorithm)


def larger_magnitude(a, b):
    return a if abs(a) > abs(b) else b


@cuda.jit(device=True)
def difference(a, b):
    return a - b


@pytest.mark.parametrize("name", ["float16", "int8", "float64", "uint64", "complex64"])
def test_a_users_function_reduces_in_rank_order(comm, world, name):
    inputs = inputs_of(name, 21, comm.size, 5)
    for algorithm in algorithms(name)[:: 3 if SIMULATED else 1]:
        kept = [array.astype(ELEMENTS[name].accumulate) for array in inputs]
        with np.errstate(all="ignore"):
            expected = in_order(np.subtract, kept).astype(inputs[0].dtype)
        check(comm, world, inputs, difference, expected, 1, algorithm)


def test_a_plain_function_and_a_lambda_are_operators(comm, world):
    inputs = inputs_of("int32", 9, comm.size, 6)
    wide = np.array(inputs, np.int64)[::-1]  # of equal ones the later rank's
    best = np.argmax(np.abs(wide), axis=0)
    expected = np.take_along_axis(wide, best[None], 0)[0].astype(np.int32)
    check(comm, world, inputs, larger_magnitude, expected)
    check(comm, world, inputs, lambda a, b: a, inputs[0])


@pytest.mark.parametrize("name", ["float32", "float16", "complex64", "int8"])
def test_truth_values_become_numbers(comm, world, name):
    inputs = [array % 2 for array in inputs_of("int8", 21, comm.size, 8)]
    inputs = [array.astype(ELEMENTS[name].dtype) for array in inputs]
    for op, same_of_numpy in (
        (lambda a, b: (a != 0) ^ (b != 0), np.logical_xor),
        (lambda a, b: a != 0 and b != 0, np.logical_and),
    ):
        expected = same_of_numpy.reduce(inputs).astype(inputs[0].dtype)
        check(comm, world, inputs, op, expected)


def test_an_average_divides_once_and_truncates_integers(comm, world):
    size = comm.size
    for dtype in (np.int8, np.int32, np.int64, np.uint8):
        largest = np.iinfo(dtype).max
        values = np.array([0, 1, largest] if size > 1 else [0, 1, 2], dtype)
        if dtype != np.int64:  # 64-bit sums would wrap around
            check(comm, world, [values] * size, "avg", values)
        mine = [np.array([1 if r == 0 else 0], dtype) for r in range(size)]
        check(comm, world, mine, "avg", np.array([1 // size], dtype))
    below = [np.array([-1 if r == 0 else 0], np.int32) for r in range(size)]
    check(comm, world, below, "avg", np.array([-(1 // size)], np.int32))
    halves = [np.full(3, 60000, np.float16)] * size  # their sum is infinite
    check(comm, world, halves, "avg", halves[0])


def test_every_mpi_operator_is_the_named_one(comm, world):
    from mpi4py import MPI

    inputs = inputs_of("uint8", 13, comm.size, 7)
    for op in ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lxor"):
        check(comm, world, inputs, getattr(MPI, op.upper()), wanted(inputs, op))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_arrays_of_types_without_a_buffer_format_copy_host_arrays(comm, name):
    """So do slices, arrays without axes, and new outputs, which bfloat16 shows.

    The 8-bit floats need a recent GPU to be reduced.
    """
    dtype = np.dtype(getattr(ml_dtypes, name))
    host, found = np.arange(6).astype(dtype), np.zeros(6, dtype)
    x, scalar = comm.empty(6, dtype), comm.empty((), dtype)
    x.copy_to_device(host)
    scalar.copy_to_device(host[3].reshape(()))
    assert x.copy_to_host(found) is found
    assert found.tobytes() == x.copy_to_host().tobytes() == host.tobytes()
    x[2:4].copy_to_device(host[:2])
    assert x[1:4].copy_to_host(found[:3]).tolist() == [1, 0, 1]
    assert scalar.copy_to_host(np.zeros((), dtype)) == 3
    if name == "bfloat16":
        for given, wanted in ((x, [0, 1, 0, 1, 4, 5]), (scalar, 3)):
            made = comm.all_reduce(given, op="max")
            room = np.zeros(made.shape, dtype)
            assert made.copy_to_host(room).tolist() == wanted
            made.copy_to_device(room)


def test_an_operator_that_the_dtype_lacks_is_refused_on_every_rank(comm, world):
    for dtype, op in [(np.float32, "band"), (np.complex64, "max"), (np.bool_, "avg")]:
        x = comm.zeros(4, dtype)
        text = f"expected an operator of {np.dtype(dtype).name}, got op={op!r}"
        refused(
            world, ns.ArgumentError, lambda x=x, op=op: comm.all_reduce(x, op=op), text
        )
    x = comm.zeros(4, np.float32)
    one = lambda a: a  # noqa: E731
    refused(world, ns.ArgumentError, lambda: comm.all_reduce(x, op=one), "two scalars")
    refused(world, ns.ArgumentError, lambda: comm.all_reduce(x, op=np.add), "got op=<")
    text = "all_reduce: expected a function that numba.cuda compiles for two float32, "
    for op in (
        *(lambda a, b: None, lambda a, b: a + 1j, lambda a, b: "1"),
        *(lambda a, b: (a, b), lambda a, b: a.absent),
    ):
        refused(world, ns.ArgumentError, lambda op=op: comm.all_reduce(x, op=op), text)


def test_in_debug_mode_functions_are_compared_by_name(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        x = comm.zeros(4, np.float32)
        comm.all_reduce(x, op=larger_magnitude)
        comm.synchronize()
        if comm.size > 1:
            op = larger_magnitude if comm.rank else difference
            texts = refused(
                world, ns.ArgumentError, lambda: comm.all_reduce(x, op=op), "difference"
            )
            assert "larger_magnitude" in texts[0]
