"""all_reduce: bits of NaN, what is remembered, and the algorithm that is chosen."""

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from numba_symm.collectives.operations import ALL_REDUCE
from numba_symm.environment import SIMULATED
from tests.algorithms import takes, those
from tests.drivers import calls
from tests.ranks.helpers import (
    array_of,
    digest,
    get,
    of_one_island,
    put,
    same,
)

FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


@of_one_island
@pytest.mark.parametrize("algorithm", ALL_REDUCE.algorithms)
def test_calls_that_are_drawn_by_each_algorithm(comm, algorithm):
    drawn = (calls.drawn(comm, 7, number) for number in itertools.count())
    fit = (
        replace(call, name="all_reduce", algorithm=algorithm)
        for call in drawn
        if call.operation is not None and call.operation.reduces
        if takes("all_reduce", algorithm, calls.DTYPES[call.kind])
    )
    calls.run(comm, itertools.islice(fit, 8))


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


@pytest.mark.parametrize("dtype", [np.dtype(kind) for kind in FLOATS], ids=str)
@pytest.mark.parametrize("algorithm", those("all_reduce", lambda made: made.transport))
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


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex64, np.int8])
def test_truth_values_become_numbers(comm, dtype):
    inputs = [(np.arange(21) >> rank & 1).astype(dtype) for rank in range(comm.size)]
    x = array_of(comm, inputs[comm.rank], True)
    for op, numpys in (
        (lambda a, b: (a != 0) ^ (b != 0), np.logical_xor),
        (lambda a, b: a != 0 and b != 0, np.logical_and),
    ):
        found = get(comm.all_reduce(x, op=op))
        assert same(found, numpys.reduce(inputs).astype(dtype))


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
