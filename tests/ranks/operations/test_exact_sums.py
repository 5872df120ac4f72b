"""Sums of divided arrays: the bits of a model, whatever the ranks, in every form."""

import functools
import math

import ml_dtypes
import numpy as np
import pytest

import numba_symm as ns
from numba_symm.environment import SIMULATED
from tests.exact import DTYPES, NAMES, drawn, model, result_type
from tests.ranks.helpers import (
    get,
    on_few_numbers,
    ordinary,
    put,
    refused,
    same,
    wait_for_all,
)

COUNTS = (0, 1, 7, 61, 300) if SIMULATED else (0, 1, 61, 5000, 20_000)
"""Elements of all ranks. The last ones take several blocks."""


def on_device(host, offset=0):
    """Return an array off a boundary by some elements."""
    whole = ordinary(host.size + offset, host.dtype)
    put(whole[offset:], host)
    return whole[offset:]


def arguments(name, x, y):
    return (x, y) if name == "dot" else (x,)


def mine_of(comm, arrays, seed):
    """Return this rank's part of a random division of arrays in a random order."""
    random, count = np.random.default_rng([seed, comm.size]), arrays[0].size
    order = random.permutation(count)
    inner = sorted(random.integers(0, count, comm.size - 1, endpoint=True))
    cuts = [0, *inner, count]
    part = slice(cuts[comm.rank], cuts[comm.rank + 1])
    return [array[order][part] for array in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_neither_ranks_nor_division_nor_order_matter(comm, world, name, dtype):
    for seed, count in enumerate(COUNTS):
        for specials in (False, True)[: 2 if count > 1 else 1]:
            whole = [drawn([seed, i], count, dtype, specials) for i in (0, 1)]
            mine = mine_of(comm, whole, seed)
            x, y = (on_device(each, i + seed % 2) for i, each in enumerate(mine))
            found = getattr(comm, name)(*arguments(name, x, y))
            assert found.shape == ()
            wanted = np.array([model(name, *arguments(name, *whole))])
            made = get(found).reshape(1)
            assert same(made, wanted), f"seed {seed}: {made}, not {wanted}"
    wait_for_all(comm, world)


def forms(comm, name, dtype, x, y):
    """Yield the forms of a call of two-dimensional host arrays, with their results."""
    given = [comm.empty(each.shape, dtype) for each in (x, y)]
    for array, host in zip(given, (x, y), strict=True):
        put(array, host)
    method = getattr(comm, name)
    yield "symmetric", get(method(*arguments(name, *given)))
    out = ordinary(1, result_type(dtype))
    assert method(*arguments(name, *given), out=out) is out
    yield "into out", get(out)[0]
    plan = getattr(comm, f"{name}_init")(*arguments(name, *given))
    yield "by a plan", get(plan())
    put(out, np.full(1, 7, out.dtype))
    yield "by a plan, again", get(plan())
    spread = ordinary((x.shape[0], 2 * x.shape[1]), dtype)
    bits = np.zeros(spread.shape, dtype)
    bits[:, ::2] = x
    put(spread, bits)
    yield "with gaps", get(method(*arguments(name, spread[:, ::2], given[1])))
    turned = ordinary(y.shape[::-1], dtype)
    put(turned, np.ascontiguousarray(y.T))
    yield "in two orders", get(method(*arguments(name, given[0], turned.T)))
    with comm.group():
        grouped = method(*arguments(name, *given))
    yield "in a group", get(grouped)
    if not SIMULATED:
        yield "in a graph", replayed(method, arguments(name, *given), out)


def replayed(method, given, out):
    from cuda.core import Device

    from tests.gpu.helpers import capturing

    stream = Device().create_stream()
    call = functools.partial(method, *given, out=out)
    call(stream=stream)  # compiled
    with capturing(stream) as (builder, graphs):
        call(stream=builder.stream)
    put(out, np.zeros(1, out.dtype))
    graphs[0].launch(stream)
    stream.sync()
    return get(out)[0]


@on_few_numbers
@pytest.mark.parametrize("dtype", DTYPES[::3])
@pytest.mark.parametrize("name", NAMES)
def test_every_form_has_the_same_bits(comm, world, name, dtype):
    shape = 3, 5
    whole = [
        [drawn([9, i, rank], 15, dtype).reshape(shape) for i in (0, 1)]
        for rank in range(comm.size)
    ]
    both = [np.concatenate([each[i].ravel() for each in whole]) for i in (0, 1)]
    wanted = model(name, *arguments(name, *both))
    for form, found in forms(comm, name, np.dtype(dtype), *whole[comm.rank]):
        assert same(np.array([found]), np.array([wanted])), form
    wait_for_all(comm, world)


def test_only_the_result_may_overflow(comm, world):
    most, rest = np.finfo(np.float64).max, 2.0**964
    x = on_device(np.array([most, most, -most, -most, rest]))
    assert float(get(comm.sum(x))) == comm.size * rest
    assert float(get(comm.norm(x[:1]))) == (most if comm.size == 1 else math.inf)
    assert float(get(comm.sum(x[:2]))) == math.inf
    assert float(get(comm.sum(x[2:4]))) == -math.inf
    x = on_device(np.array([2.0**600, 2.0**600, 2.0**-60, 2.0**-600]))
    y = on_device(np.array([2.0**430, -(2.0**430), 2.0**1023, 2.0**-600]))
    assert float(get(comm.dot(x, y))) == comm.size * 2.0**963
    assert float(get(comm.dot(x[:1], y[:1]))) == math.inf
    assert float(get(comm.dot(x[3:], y[3:]))) == 0
    assert float(get(comm.norm(x[3:]))) == math.sqrt(comm.size) * 2.0**-600
    wait_for_all(comm, world)


@on_few_numbers
def test_wrong_arrays_are_refused(comm, world):
    x, y = comm.zeros(4, np.float64), comm.zeros(4, np.float32)
    wrong = (np.int64, np.complex128, np.bool_, ml_dtypes.float8_e5m2, np.dtype("V8"))
    for name in NAMES:
        method = getattr(comm, name)
        for dtype in wrong:
            bad = ordinary(4, dtype)
            text = f"{name}: expected x of float64, float32, bfloat16, float16, got"
            call = functools.partial(method, *arguments(name, bad, bad))
            refused(world, ns.ArgumentError, call, text)
        for out, text in (
            (ordinary(2, np.float64), "expected 1 elements"),
            (ordinary(1, np.float32), "expected out of float64 for x of float64"),
            (np.zeros(1), "expected a device array"),
        ):
            call = functools.partial(method, *arguments(name, x, x), out=out)
            refused(world, ns.ArgumentError, call, name, text)
    refused(world, ns.ArgumentError, lambda: comm.dot(x, y), "dot: expected y of x's")
    refused(world, ns.ArgumentError, lambda: comm.dot(x, x[:3]), "shape (4,)", "(3,)")
    refused(world, ns.ArgumentError, lambda: comm.dot(x, None), "dot: y", "a device")
    refused(world, ns.ArgumentError, lambda: comm.sum(np.zeros(3)), "a device array")
    assert get(comm.sum(x)) == 0
    wait_for_all(comm, world)


def test_in_debug_mode_lengths_may_differ_but_types_may_not(world):
    with ns.Communicator(world, debug=True) as comm:
        x = on_device(np.ones(comm.rank + 1))
        assert float(get(comm.sum(x))) == comm.size * (comm.size + 1) / 2
        if comm.size > 1:
            mixed = ordinary(1, np.float64 if comm.rank else np.float32)
            refused(world, ns.ArgumentError, lambda: comm.sum(mixed), "sum")
