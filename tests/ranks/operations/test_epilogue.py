"""Epilogues: the bits of a NumPy model on all ranks, by every algorithm and form."""

import functools
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.environment import SIMULATED
from numba_symm.gpu.kernels import bound
from tests import operators
from tests.algorithms import takes, those
from tests.finished import finished
from tests.ranks.helpers import (
    get,
    needs_peers,
    of_one_island,
    ordinary,
    put,
    refused,
    same,
    wait_for_all,
)

BF16 = ml_dtypes.bfloat16


def cast(value):
    return value


def add(value, other):
    return value + other


@cuda.jit(device=True)
def affine(value, factors, offsets, shift, negative):
    return (-value if negative else value) * factors + offsets + shift


def square(value, residual, weight, epsilon, width):
    return (value + residual) * (value + residual)


def make_normalize(sqrt):
    def normalize(value, total, residual, weight, epsilon, width):
        scale = np.float32(sqrt(np.float32(total / np.float32(width)) + epsilon))
        return (value + residual) * weight / scale, value + residual

    return normalize


normalize = make_normalize(math.sqrt)  # on a GPU, kernels have no np.sqrt


def both_of(value, other):
    return 2 * (value + other), value + other


def itself(value):
    return value


def share(value, total):
    return value / total


def pair(value):
    return value, value


UNCOMPILED = [
    *(pair, lambda value: None, lambda value: value + 1j, lambda value: "1"),
    lambda value: value.absent,
]
"""Functions that Numba does not compile for the results, or at all."""


class Case(NamedTuple):
    """A call, of rows of any number.

    Attributes:
        dtype: of ``x``.
        target: of ``out``, or a pair of those of two outputs.
        columns: elements of a row; 0: an array of one axis.
        function: the epilogue.
        row_sum: its row's sum, or None.
        args: a dtype for each array that has an element for each, a pair of a dtype and
            a shape, whose -1 is the number of rows, or a number.
    """

    dtype: type
    target: type | tuple[type, type]
    columns: int
    function: object
    row_sum: object = None
    args: tuple = ()


CASES = {
    "cast": Case(np.float32, BF16, 0, cast),
    "narrow": Case(np.float16, ml_dtypes.float8_e5m2, 0, add, None, (BF16,)),
    "wide": Case(np.int32, np.float64, 0, add, None, ((np.float64, ()),)),
    "complex": Case(np.complex128, np.complex128, 0, add, None, (np.complex64,)),
    "affine": Case(
        *(np.float16, np.float32, 24, getattr(affine, "py_func", affine), None),
        ((np.float32, (24,)), (np.int8, (-1, 1)), 0.1, True),
    ),
    "rows": Case(
        *(BF16, (BF16, np.float32), 80, normalize, square),
        (BF16, (np.float32, (80,)), 1e-6, 80),
    ),
    "uneven rows": Case(np.float64, np.float32, 37, share, itself),
}
ROWS = 2 if SIMULATED else 33


def made(case, comm, lead):
    """Return the arguments on the host, equal on all ranks, and on the device."""
    shape = (lead, case.columns) if case.columns else (37 * lead,)
    host, device = [], []
    for i, each in enumerate(case.args):
        if isinstance(each, (bool, int, float)):
            host.append(each)
            device.append(each)
            continue
        dtype, its = each if isinstance(each, tuple) else (each, shape)
        its = tuple(lead if n == -1 else n for n in its)
        flat = np.random.default_rng([i, lead]).standard_normal(int(np.prod(its)))
        host.append((4 * flat).astype(dtype).reshape(its))
        device.append(ordinary(its, dtype))
        put(device[-1], host[-1])
    return shape, host, device


def inputs_of(case, comm, shape):
    count = int(np.prod(shape))
    found = [np.random.default_rng([7, rank]) for rank in range(comm.size)]
    dtype = np.dtype(case.dtype)
    flat = [(8 * each.standard_normal(count)).astype(dtype) for each in found]
    return [each.reshape(shape) for each in flat]


def sums(inputs):
    """Return the reduced elements."""
    found = operators.wanted([each.ravel() for each in inputs], "sum")
    return found.reshape(inputs[0].shape)


def model(case, elements, host):
    of_arrays = make_normalize(np.sqrt) if case.function is normalize else case.function
    return finished(elements, case.target, of_arrays, case.row_sum, host)


def outputs(case, shape, make):
    """Return new outputs, filled with zeros, as a call takes them."""
    if isinstance(case.target, tuple):
        return tuple(outputs(case._replace(target=t), shape, make) for t in case.target)
    out = make(shape, case.target)
    put(out, np.zeros(shape, case.target))
    return out


def equal(outs, wanted):
    """Return whether outputs have the bits of what was wanted."""
    if isinstance(outs, tuple):
        return all(map(equal, outs, wanted))
    return same(real(get(outs)), real(wanted))


def real(array):
    """Return an array of complex128 as one of float64."""
    return array.view(np.float64) if array.dtype == np.complex128 else array


def odd(shape, dtype):
    """Return an array off 16-byte boundaries."""
    return ordinary(1 + int(np.prod(shape)), dtype)[1:].reshape(shape)


def device_array(host):
    x = ordinary(host.shape, host.dtype)
    put(x, host)
    return x


@pytest.mark.parametrize("name", CASES)
def test_all_algorithms_and_forms_have_the_bits_of_the_model(comm, world, name):
    case = CASES[name]
    shape, host, device = made(case, comm, ROWS)
    inputs = inputs_of(case, comm, shape)
    wanted = model(case, sums(inputs), host)
    x = comm.empty(shape, case.dtype)
    put(x, inputs[comm.rank])
    given = {"epilogue": case.function, "row_sum": case.row_sum, "args": device}
    for algorithm in [None, *those("all_reduce", lambda made: True)]:
        if not takes("all_reduce", algorithm, case.dtype):
            continue
        out = outputs(case, shape, comm.empty)
        result = comm.all_reduce(x, out=out, algorithm=algorithm, **given)
        assert result is out or result == out
        assert equal(out, wanted), algorithm
    assert same(real(get(x)), real(inputs[comm.rank]))
    plan = comm.all_reduce_init(x, out=out, **given)
    put(x, inputs[0])  # the arrays may change between two calls
    again = model(case, sums([inputs[0]] * comm.size), host)
    assert equal(plan(), again)
    # Off boundaries, and strided.
    off = outputs(case, shape, odd)
    comm.all_reduce(x, out=off, **given)
    assert equal(off, again)
    spread = ordinary((shape[0], 2, *shape[1:]), case.dtype)
    put(spread, np.stack([inputs[0], inputs[0]], 1))
    comm.all_reduce(spread[:, 1], out=out, **given)
    assert equal(out, again)
    wait_for_all(comm, world)


@pytest.mark.parametrize("name", ["cast", "affine", "rows"])
def test_shards_and_gathered_arrays_have_them_too(comm, world, name):
    case, size = CASES[name], comm.size
    lead = 2
    shape, host, device = made(case, comm, lead)
    inputs = inputs_of(case, comm, (size * shape[0], *shape[1:]))
    given = {"epilogue": case.function, "row_sum": case.row_sum, "args": device}
    mine = slice(comm.rank * shape[0], (comm.rank + 1) * shape[0])
    wanted = model(case, sums(inputs)[mine], host)
    x, out = device_array(inputs[comm.rank]), outputs(case, shape, ordinary)
    for algorithm in (None, *those("reduce_scatter", lambda made: True)):
        comm.reduce_scatter(x, out=out, algorithm=algorithm, **given)
        assert equal(out, wanted), algorithm
    assert equal(comm.reduce_scatter_init(x, out=out, **given)(), wanted)
    # Of the gathered shape: each rank's rows, one after another.
    parts = [each[: shape[0]] for each in inputs]
    if name == "affine":  # its offsets are those of rows
        offsets = np.arange(size * lead, dtype=np.int8).reshape(size, lead, 1)
        host = [host[0], offsets, *host[2:]]
        device = [device[0], device_array(offsets), *device[2:]]
    if name == "rows":  # its residual has an element for each
        residual = np.stack([host[0]] * size)
        host, device = [residual, *host[1:]], [device_array(residual), *device[1:]]
    given["args"] = device
    wanted = model(case, np.stack(parts), host)
    x = device_array(parts[comm.rank])
    gathered = outputs(case, (size, *shape), ordinary)
    for algorithm in (None, "chunked", "copy_engine"):
        comm.all_gather(x, out=gathered, algorithm=algorithm, **given)
        assert equal(gathered, wanted), algorithm
    assert equal(comm.all_gather_init(x, out=gathered, **given)(), wanted)
    wait_for_all(comm, world)


def test_an_argument_may_be_the_output_and_x_too(comm, world):
    inputs = [np.arange(12, dtype=np.float32).reshape(3, 4) + r for r in range(4)]
    total = sum(inputs[: comm.size])
    before = np.full((3, 4), 100, np.float32)
    residual = device_array(before)
    x = device_array(inputs[comm.rank])
    y = comm.all_reduce(x, out=residual, epilogue=add, args=(residual,))
    assert y is residual
    assert same(get(y), before + total)
    # So may be a second output, here of a new first one.
    double, kept = comm.all_reduce(
        x, out=(None, residual), epilogue=both_of, args=(residual,)
    )
    assert kept is residual
    assert same(get(kept), before + 2 * total)
    assert same(get(double), 2 * (before + 2 * total))
    # In place, with an argument that is in that place, too.
    comm.all_reduce(x, out=x, epilogue=add, args=(x,))
    assert same(get(x), total + inputs[comm.rank])
    # Of an average by codes, and a new output.
    ones = device_array(np.ones(130, np.float32))
    coded = comm.all_reduce(ones, wire="int8", epilogue=add, args=(0.5,))
    assert same(get(coded), np.full(130, comm.size + 0.5, np.float32))
    mean = comm.all_reduce(ones, op="avg", epilogue=add, args=(1,))
    assert same(get(mean), np.full(130, 2, np.float32))
    empty = comm.all_reduce(ordinary((0, 4), np.float32), epilogue=cast)
    assert empty.shape == (0, 4)
    with comm.group():
        comm.all_reduce(ones, out=coded, epilogue=add, args=(ones,))
    assert same(get(coded), np.full(130, comm.size + 1, np.float32))
    wait_for_all(comm, world)


def test_equal_numbers_of_other_types_are_other_calls(comm, world):
    x, out = device_array(np.full(4, 3, np.float32)), ordinary(4, np.float64)
    whole, third = np.float32(3 * comm.size), 1 / 3
    for number, wanted in (
        (third, whole + np.float32(third)),
        (np.float64(third), np.float64(whole) + third),
        (1, whole + 1),
        (True, whole + 1),
    ):
        comm.all_reduce(x, out=out, epilogue=add, args=(number,))
        assert get(out).tolist() == [wanted] * 4
    for zero in (0.0, -0.0):
        put(x, np.full(4, -0.0, np.float32))
        y = comm.all_reduce(x, epilogue=add, args=(zero,))
        assert np.signbit(get(y)).all() == np.signbit(zero)
    wait_for_all(comm, world)


def test_what_an_epilogue_cannot_be_is_refused(comm, world):
    x, y, z = (comm.zeros((4 * comm.size, 6), np.float32) for _ in range(3))
    weight, odd = comm.zeros(6, np.float32), comm.zeros((12, 6), np.float32)
    other, half = comm.zeros((5, 6), np.float32), ordinary(8, np.float16)
    integers, turned = comm.zeros(4, np.int32), ordinary((2, 3), np.float32, "F")
    by_add = {"epilogue": add}
    both = {"epilogue": normalize, "row_sum": cast}
    nothing = "expected epilogue= with args= and row_sum="
    uncompiled = "expected functions that numba.cuda compiles"
    for array, given, text in [
        (x, {"epilogue": 3}, "expected epilogue to be a function of scalars, got 3"),
        (x, {"args": (y,)}, nothing),
        (x, {"row_sum": cast}, nothing),
        (x, by_add | {"row_sum": "sum"}, "expected row_sum to be a function"),
        (x, by_add | {"args": y}, "expected args to be a tuple of device arrays"),
        (x, by_add | {"args": (1,) * 9}, "expected at most 8 args, got 9"),
        (x, by_add, "take 1 scalars (the element, and 0 of args), got add(value, o"),
        (x, both | {"args": (1, 2, 3)}, "(the element, the row's sum, and 3 of args)"),
        (x, both | {"args": (1, 2, 3, 4)}, "expected row_sum to take 5 scalars"),
        (x, by_add | {"args": (other,)}, "args[0]: expected an array of the output's"),
        (x, by_add | {"args": (np.zeros(6),)}, "args[0]: expected a device array"),
        (x, by_add | {"args": (odd[::2],)}, "args[0]: expected a contiguous array"),
        (x, by_add | {"args": (1 << 70,)}, "args[0]: expected an int of 64 bits"),
        (x, by_add | {"args": (1j,)}, "args[0]: expected a device array, got complex"),
        (x, by_add | {"args": (np.complex128(1),)}, "a number of at most 8 bytes"),
        (x[1:], by_add | {"args": (y[1:],), "out": y[:-1]}, "overlap otherwise"),
        (x[1:], by_add | {"args": (weight,), "out": x[:-1]}, "overlap otherwise"),
        (half, {"epilogue": cast, "out": half.view(np.int16)}, "overlap otherwise"),
        (half, {"epilogue": cast, "out": weight}, "expected out of 8 float16"),
        (x, {"epilogue": cast, "out": (y,)}, "expected out of one array, or of two"),
        (x, {"epilogue": cast, "out": (y, None)}, "pass out=(y, z)"),
        (x, {"out": (y, x)}, "out: expected a device array, got tuple"),
        (x, {"epilogue": cast, "out": (y, x)}, "out[1]: expected an array apart from"),
        (x[:, ::2], {"epilogue": cast, "out": (y[:, ::2], y[: len(y) // 2])}, "apart"),
        (x, {"epilogue": cast, "out": (y, half)}, "out[1]: expected a contiguous arra"),
        (x, {"epilogue": cast, "out": (y, 3)}, "out[1]: expected a device array"),
        (x, {"epilogue": cast, "out": (y, z)}, uncompiled),
        *((x, {"epilogue": function}, uncompiled) for function in UNCOMPILED),
        (x, {"epilogue": add, "row_sum": UNCOMPILED[1], "args": ()}, uncompiled),
        (integers, by_add | {"row_sum": cast}, "expected x of floats with row_sum="),
        (turned, {"epilogue": cast}, "expected x in C order with epilogue="),
    ]:
        call = functools.partial(comm.all_reduce, array, **given)
        refused(world, ns.ArgumentError, call, text)
    assert not get(comm.all_reduce(x, epilogue=add, args=(weight,))).any()


def later(a, b):
    return b


@of_one_island
@needs_peers
def test_small_reductions_are_one_launch(comm):
    x, weight = comm.zeros((2, 16), np.float32), comm.zeros(16, np.float32)
    by_row = {"epilogue": share, "row_sum": itself}
    for array, given, number in [
        (x, {"epilogue": add, "args": (weight,)}, 1),
        (x, by_row, 1),
        (x, by_row | {"op": later}, 2),  # other kernels may contract its operations
        (x, by_row | {"algorithm": "chunked"}, 2),
        (comm.zeros((2, 15), np.float32), by_row, 2),  # a vector has parts of two rows
        (comm.zeros((1, 15), np.float32), by_row, 1),
    ]:
        with bound(loading=True) as launches:
            comm.all_reduce_init(array, **given)
        check_launches(launches, number)
    for columns, number in ((16, 1), (15, 2)):
        x = comm.zeros((2 * comm.size, columns), np.float32)
        with bound(loading=True) as launches:
            comm.reduce_scatter_init(x, **by_row)
        check_launches(launches, number)


def check_launches(launches, number):
    names = [each.kernel.name for each in launches]
    assert len(names) == number, names
    assert ("mailed_epilogue" in names) == (number == 1)


@needs_peers
def test_ranks_pass_the_same_epilogue(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        x = comm.zeros(8, np.float32)
        mine = cast if comm.rank == 0 else itself
        text = f"epilogue {cast.__module__}.cast (body "
        refused(
            world, ns.ArgumentError, lambda: comm.all_reduce(x, epilogue=mine), text
        )


@needs_peers
def test_ranks_pass_numbers_and_outputs_of_the_same_dtypes(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        x = comm.zeros(8, np.float32)
        number = (2, 2.0)[comm.rank == 0]
        refused(
            world,
            ns.ArgumentError,
            lambda: comm.all_reduce(x, epilogue=lambda v, a: v * a, args=(number,)),
            "), float, rank",
            "), int64",
        )
        z = ordinary(8, (np.float32, np.float16)[comm.rank == 0])
        pair = {"out": (None, z), "epilogue": both_of, "args": (1,)}
        text = "int64, with a second output of float16, rank"
        refused(world, ns.ArgumentError, lambda: comm.all_reduce(x, **pair), text)
        rows = x.reshape((2, 4) if comm.rank == 0 else (4, 2))
        of_rows = {"epilogue": share, "row_sum": itself}
        call = functools.partial(comm.all_reduce, rows, **of_rows)
        refused(world, ns.ArgumentError, call, "rows of 4, rank", "rows of 2")
