"""Reductions of pairs of a value and an index."""

import numpy as np
import pytest
from mpi4py import MPI

import numba_symm as ns
from tests.ranks.helpers import check_works, get, needs_peers, ordinary, put, refused

PAIRS = {
    "FLOAT_INT": [("value", "f4"), ("index", "i4")],
    "DOUBLE_INT": np.dtype([("value", "f8"), ("index", "i4")], align=True),
    "SHORT_INT": np.dtype([("value", "i2"), ("index", "i4")], align=True),
    "2INT": [("value", "i4"), ("index", "i4")],
    "LONG_INT": [("value", "i8"), ("index", "i8")],
    "UNSIGNED": [("value", "u4"), ("index", "u4")],
}
COUNT = 37


def inputs_of(size, dtype):
    """Return each rank's pairs: with equal values, NaN, and indices of all ranks."""
    random = np.random.default_rng(5)
    found = []
    for _ in range(size):
        pairs = np.zeros(COUNT, dtype)
        values = random.integers(0, 4, COUNT).astype(pairs["value"].dtype)
        if values.dtype.kind == "i":
            values -= 2
        if values.dtype.kind == "f":
            values[random.random(COUNT) < 0.1] = np.nan
        pairs["value"] = values
        pairs["index"] = random.permutation(COUNT)
        pairs["index"][:3] = pairs["index"][:3] - (pairs["index"].dtype.kind == "i")
        found.append(pairs)
    return found


def best(pairs, op):
    """Return the pair that NumPy finds in a sequence of them."""
    values = np.array([pair["value"] for pair in pairs])
    least = values[(np.argmin if op == "minloc" else np.argmax)(values)]
    equal = [
        p
        for p in pairs
        if p["value"] == least or (least != least and p["value"] != p["value"])
    ]
    return min(equal, key=lambda pair: pair["index"])


def same(found, wanted):
    values = found["value"], wanted["value"]
    return np.array_equal(*values, equal_nan=values[0].dtype.kind == "f") and (
        np.array_equal(found["index"], wanted["index"])
    )


@pytest.mark.parametrize("op", ["minloc", "maxloc"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_least_and_the_greatest_pair(comm, world, name, op):
    check_pairs(comm, world, name, op)


@needs_peers
@pytest.mark.parametrize("name", ["FLOAT_INT", "LONG_INT"])
def test_pairs_over_islands_in_any_order(world, monkeypatch, name):
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", str(max(1, world.size - 1)))
    with (
        ns.Communicator(world) as comm,
        comm.split(0, key=comm.rank % 2) as others_between,
    ):
        check_pairs(others_between, world, name, "minloc")


def check_pairs(comm, world, name, op):
    """Compare reductions of pairs with NumPy's. Collective."""
    dtype = np.dtype(PAIRS[name])
    inputs = inputs_of(comm.size, dtype)
    x = ordinary(COUNT, dtype)
    put(x, inputs[comm.rank])
    total = np.array([best(column, op) for column in zip(*inputs, strict=True)], dtype)
    calls = [comm.all_reduce(x, op=op, algorithm=a) for a in (None, "chunked")]
    calls.append(
        comm.all_reduce(x, op=getattr(MPI, op.upper()), algorithm="one_shot_ll")
    )
    root = comm.size - 1
    rooted = comm.reduce(x, op=op, root=root)
    scanned = comm.scan(x, op=op)
    for found in [*calls, *([rooted] if comm.rank == root else [])]:
        assert same(get(found), total)
    before = list(zip(*inputs[: comm.rank + 1], strict=True))
    assert same(get(scanned), np.array([best(each, op) for each in before], dtype))
    world.barrier()


@pytest.mark.parametrize("kind", ["f4", "i4", "f8", "i8"])
def test_columns_of_values_and_indices(comm, world, kind):
    x = ordinary((3, 2), kind)
    put(
        x,
        np.array(
            [[comm.rank, comm.rank], [-comm.rank, comm.rank], [7, comm.rank]], kind
        ),
    )
    last = comm.size - 1
    assert get(comm.all_reduce(x, op="minloc")).tolist() == [
        [0, 0],
        [-last, last],
        [7, 0],
    ]
    comm.all_reduce(x, op="maxloc", out=x)
    assert get(x).tolist() == [[last, last], [0, 0], [7, 0]]
    world.barrier()


def test_elements_that_are_not_pairs_are_refused(comm, world):
    for x in (
        comm.zeros(4),
        comm.zeros((2, 2), np.int8),
        comm.zeros(2, np.dtype([("a", "f4"), ("b", "i4"), ("c", "f8")])),
        comm.zeros(2, np.dtype([("a", "f8"), ("b", "i4")])),
        comm.zeros(2, np.dtype([("a", "c8"), ("b", "i8")])),
    ):
        for call in (comm.all_reduce, comm.all_reduce_init, comm.scan):
            wrong = lambda f=call, x=x: f(x, op="minloc")  # noqa: E731
            text = "expected pairs of a value and an index for op='minloc'"
            refused(world, ns.ArgumentError, wrong, text)
    check_works(comm)
