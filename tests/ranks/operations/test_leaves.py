"""Reductions of leaves: equal bits however many ranks share the leaves."""

import functools
from contextlib import suppress

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from tests import operators
from tests.ranks.helpers import array_of, check_works, get, needs_peers, refused

ALL = 16  # leaves, if the ranks divide them


def leaves_of(comm, name, count, each):
    """Return all leaves, and a device array of this rank's."""
    every = [
        operators.random(name, count, [11, leaf, count])
        for leaf in range(comm.size * each)
    ]
    mine = np.array(every[comm.rank * each :][:each])
    return every, array_of(comm, mine.ravel(), False).reshape(each, count)


def subtracted(a, b):
    return a - b


@pytest.mark.parametrize(("each", "count"), [(1, 21), (2, 64), (None, 1)])
@pytest.mark.parametrize("op", ["sum", "avg", "min", subtracted])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "int8"])
def test_the_bits_are_those_of_the_tree_of_all_leaves(comm, name, op, each, count):
    each = each or (ALL // comm.size if ALL % comm.size == 0 else 32)
    every, x = leaves_of(comm, name, count * comm.size, each)
    total = comm.all_reduce(x, op=op, leaves=True)
    shard = comm.reduce_scatter(x, op=op, leaves=True)
    comm.synchronize()
    if op is subtracted:
        kept = operators.ELEMENTS[name].accumulate
        wide = {number: leaf.astype(kept) for number, leaf in enumerate(every)}
        with np.errstate(all="ignore"):
            expected = operators.in_tree(subtracted, wide).astype(x.dtype)
    else:
        expected = operators.wanted(every, op)
    assert total.shape == x.shape[1:]
    assert operators.same(get(total), expected).all()
    mine = expected[comm.rank * count :][:count]
    assert operators.same(get(shard), mine).all()
    # The input is as it was.
    own = np.array(every[comm.rank * each :][:each])
    assert operators.same(get(x.reshape(x.size)), own.ravel()).all()


def test_several_islands(world, monkeypatch):
    if world.size == 1:
        pytest.skip("needs several ranks")
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    with ns.Communicator(world) as comm:
        every, x = leaves_of(comm, "float32", 40, 2)
        total = comm.all_reduce(x, op="avg", leaves=True)
        comm.synchronize()
        monkeypatch.delenv("NUMBA_SYMM_ISLAND_SIZE")
        assert operators.same(get(total), operators.wanted(every, "avg")).all()


def test_wrong_leaves_are_refused_on_every_rank(comm, world):
    zeros = cuda.to_device(np.zeros((3, 4), "f4"))
    turned = cuda.to_device(np.asfortranarray(np.zeros((2, 4), "f4")))
    good = cuda.to_device(np.zeros((2, 4), "f4"))
    for x, options, text in (
        (zeros, {}, "expected x with 1, 2, 4, 8"),
        (cuda.to_device(np.zeros((0, 4), "f4")), {}, "got shape"),
        (turned, {}, "expected x in C order with leaves=True"),
        (good, {"wire": "int8"}, "expected wire, epilogue and algorithm to be None"),
        (good, {"algorithm": "chunked"}, "expected wire, epilogue and algorithm"),
        (good, {"out": good}, "expected out"),
    ):
        refused(
            world,
            ns.ArgumentError,
            lambda x=x, o=options: comm.all_reduce(x, leaves=True, **o),
            text,
        )
    check_works(comm)


def test_a_remembered_call_stands_for_arrays_of_its_shape_only(comm, world):
    out = comm.zeros((40,), np.float32)
    one = cuda.to_device(np.ones((1, 40), "f4"))
    for _ in range(2):
        comm.all_reduce(one, out=out, leaves=True)
    wrong = one.reshape(4, 10)
    refused(
        world,
        ns.ArgumentError,
        lambda: comm.all_reduce(wrong, out=out, leaves=True),
        "expected out",
    )
    for _ in range(4):
        comm.all_reduce(wrong, out=out[:10], leaves=8)
    comm.synchronize()
    assert get(out)[:11].tolist() == [4 * comm.size] * 10 + [comm.size]


@needs_peers
def test_different_numbers_of_leaves_are_found(world):
    with suppress(ns.CollectiveError), ns.Communicator(world) as comm:
        x = cuda.to_device(np.zeros((2 if comm.rank else 4, 10), "f4"))
        comm.all_reduce(x, leaves=True)
        world.barrier()  # both have recorded the call
        with pytest.raises(ns.CallMismatch, match="leaves"):
            comm.synchronize()
    with ns.Communicator(world, debug=True) as comm:
        out, x = cuda.to_device(np.ones(10, "f4")), x[:2] if comm.rank > 1 else x
        call = functools.partial(comm.all_reduce, x, out=out, leaves=True)
        refused(world, ns.ArgumentError, call, "4 leaves", "2 leaves")
        comm.synchronize()
        assert get(out).tolist() == [1] * 10
