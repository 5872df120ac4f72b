import functools

import numpy as np
import pytest

from numba_symm.bench import bench_operations as measured
from numba_symm.bench.bench_operations import (
    CHUNK,
    OPERATIONS,
    PERIOD,
    REDUCTIONS,
    TYPES,
    Tiled,
    reducible,
)
from numba_symm.collectives import operations

ALL_REDUCE = OPERATIONS["all_reduce"]
UFUNC = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
UFUNC["avg"] = np.add


def pattern(dtype=np.int32):
    random = np.random.default_rng(3)
    return random.integers(-999, 999, PERIOD).astype(dtype)


def filled(contents):
    array = np.zeros(contents.count * contents.itemsize, np.uint8)
    measured.fill(array, contents)
    return array


def test_the_period_is_prime():
    assert all(PERIOD % divisor for divisor in range(2, int(PERIOD**0.5) + 1))


@pytest.mark.parametrize("count", [1, 1000, PERIOD - 1, PERIOD, 3 * PERIOD + 5])
@pytest.mark.parametrize("start", [0, 17, PERIOD - 1, 5 * PERIOD + 3])
def test_filling_repeats_the_pattern_from_its_start(count, start):
    elements = pattern()
    found = filled(Tiled(elements, start, count)).view(np.int32)
    assert (found == elements[(start + np.arange(count)) % PERIOD]).all()


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_filled_elements_are_right_and_poisoned_ones_wrong(dtype):
    contents = Tiled(pattern(dtype), 5, 1000)
    array = filled(contents)
    assert measured.count_wrong(array, [contents]) == 0
    measured.poison(array)
    assert measured.count_wrong(array, [contents]) == 1000


@pytest.mark.parametrize("index", [0, 1, CHUNK - 1, CHUNK, CHUNK + PERIOD + 1])
def test_one_wrong_bit_is_found_at_any_index(index):
    contents = Tiled(pattern(np.float16), 9, CHUNK + PERIOD + 2)
    array = filled(contents)
    array[2 * index + 1] ^= 1
    assert measured.count_wrong(array, [contents]) == 1


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_results_are_exact_in_any_order(type_, op, ranks):
    """Partial results may be rounded to the dtype."""
    dtype = TYPES[type_]
    patterns = reducible(np.random.default_rng(1), ranks, op, dtype)
    assert patterns.shape == (ranks, PERIOD)
    assert patterns.dtype == dtype
    everyone = [Tiled(each, 11, 2000) for each in patterns]
    (wanted,) = ALL_REDUCE.expected(everyone, op, 0)
    assert (wanted.start, wanted.count) == (11, 2000)
    shuffled = np.random.default_rng(2)
    for _ in range(4):
        order = shuffled.permutation(ranks)
        total = functools.reduce(UFUNC[op], (patterns[rank] for rank in order))
        if op == "avg" and dtype.kind == "i":
            total = np.sign(total) * (np.abs(total) // ranks)
        elif op == "avg":
            total = total / ranks
        assert total.astype(dtype).tobytes() == wanted.pattern.tobytes()


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("type_", TYPES)
def test_leaving_out_a_rank_changes_the_result(type_, op):
    patterns = reducible(np.random.default_rng(1), 4, op, TYPES[type_])
    total = ALL_REDUCE.expected([Tiled(each, 0, 9) for each in patterns], op, 0)
    without = ALL_REDUCE.expected([Tiled(each, 0, 9) for each in patterns[1:]], op, 0)
    differing = np.count_nonzero(total[0].pattern != without[0].pattern)
    # A rank has a quarter of the minima and maxima, and few of its factors are 1.
    assert differing > PERIOD / 5


@pytest.mark.parametrize("type_", ["half", "bfloat16", "float", "double"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_an_average_is_exact_if_inputs_are_divided_first(type_, ranks):
    """NCCL multiplies each input by a reciprocal in the element type."""
    dtype = TYPES[type_]
    patterns = reducible(np.random.default_rng(1), ranks, "avg", dtype)
    everyone = [Tiled(each, 0, PERIOD) for each in patterns]
    (wanted,) = ALL_REDUCE.expected(everyone, "avg", 0)
    divided = patterns * np.array(1 / ranks).astype(dtype)
    total = functools.reduce(np.add, divided)
    assert total.astype(dtype).tobytes() == wanted.pattern.tobytes()


@pytest.mark.parametrize(("name", "own"), [("scan", 1), ("exscan", 0)])
def test_a_scan_reduces_the_ranks_up_to_its_own(name, own):
    patterns = np.arange(3 * PERIOD, dtype=np.int64).reshape(3, PERIOD)
    inputs = [Tiled(each, 5, 9) for each in patterns]
    for rank in range(3):
        (wanted,) = OPERATIONS[name].expected(inputs, "sum", rank)
        used = patterns[: rank + own]
        assert wanted.count == 9
        assert (wanted.pattern == used.sum(axis=0)).all()
        assert wanted.start == 5 or len(used) == 0


def test_a_sum_of_nothing_is_minus_0():
    inputs = [Tiled(np.ones(PERIOD, np.float32), 0, 9)] * 2
    (wanted,) = OPERATIONS["exscan"].expected(inputs, "sum", 0)
    assert np.signbit(wanted.pattern).all()
    assert not wanted.pattern.any()


def test_every_operation_of_the_library_is_measured():
    assert operations.OPERATIONS.keys() <= OPERATIONS.keys()


@pytest.mark.parametrize(("ranks", "wanted"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_follows_nccl_tests(ranks, wanted):
    assert ALL_REDUCE.bus(ranks) == wanted
