"""Quantized sums: the bits of a NumPy model, on all ranks, in every form."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives import composed
from numba_symm.environment import SIMULATED
from tests.coded import bound, coded_sum
from tests.ranks.helpers import (
    Window,
    get,
    needs_peers,
    on_few_numbers,
    ordinary,
    put,
    refused,
    same,
    values,
    wait_for_all,
)

WIRES = ("int8", "fp8")
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
COUNTS = (1, 129, 1543) if SIMULATED else (1, 127, 4096, 100_003, 1 << 20)


def normal(seed, count, dtype):
    """Return elements of like magnitudes, whose sums do not overflow."""
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


def with_specials(seed, count, dtype):
    """Return elements of all sizes; groups with NaN or infinity, and of zeros."""
    found = values(seed, count, dtype)
    chosen = np.random.default_rng(seed).integers(0, count, 3)
    found[chosen[0]], found[chosen[1]] = np.nan, -np.inf
    found[:128] = [-0.0, 0.0][seed[1] % 2]
    found[128:256] = ml_dtypes.finfo(dtype).smallest_subnormal * seed[1]
    found[256:384] = ml_dtypes.finfo(dtype).max
    return found


def inputs_of(comm, make, count, dtype):
    return [make([5, rank], count, np.dtype(dtype)) for rank in range(comm.size)]


def every_form(comm, host, wire):
    """Yield the forms of a call, with their results."""
    for form, offset in (("plain", 0), ("off a boundary", 1 + comm.rank % 2)):
        whole = ordinary(host.size + offset + Window.MARGIN, host.dtype)
        window = Window(whole, offset, host.size)
        window.fill(host)
        yield form, get(comm.all_reduce(window.array, wire=wire))
        assert same(window.read(), host)
    x, spread = comm.empty(host.size, host.dtype), ordinary(2 * host.size, host.dtype)
    put(x, host)
    plan = comm.all_reduce_init(x, wire=wire)
    for form in ("by a plan", "by a plan, again"):
        yield form, get(plan())
    comm.all_reduce(x, out=spread[::2], wire=wire)
    yield "with gaps", get(spread)[::2]
    yield "in place", get(comm.all_reduce(x, out=x, wire=wire))


@on_few_numbers
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", WIRES)
def test_the_bits_are_those_of_the_model_in_every_form(comm, world, wire, dtype, count):
    if SIMULATED and (count == 129) != (dtype is not np.float32):
        pytest.skip("float32 of two sizes and the others of one, for the sake of time")
    inputs = inputs_of(comm, normal, count, dtype)
    wanted = coded_sum(inputs, wire)
    exact = sum(each.astype(np.float64) for each in inputs)
    # What the output's type rounds comes in addition.
    off = np.abs(wanted.astype(np.float64) - exact)
    own = np.abs(exact) * float(ml_dtypes.finfo(dtype).eps)
    assert (off <= bound(inputs, wire) * (1 + own) + own).all()
    for form, found in every_form(comm, inputs[comm.rank], wire):
        assert same(found, wanted), form
    wait_for_all(comm, world)


@on_few_numbers
@pytest.mark.parametrize("wire", WIRES)
def test_nan_infinity_zeros_and_the_ends_of_the_range(comm, world, wire):
    inputs = inputs_of(comm, with_specials, 1031, np.float32)
    x = ordinary(1031, np.float32)
    put(x, inputs[comm.rank])
    result = comm.all_reduce(x, wire=wire)
    found, wanted = get(result), coded_sum(inputs, wire)
    assert same(found, wanted)
    assert np.isnan(wanted).any()
    assert (found[:128] == 0).all()
    texts = world.allgather(found.tobytes())  # of NaN, too
    assert set(texts) == {texts[0]}


@needs_peers
def test_ranks_pass_the_same_wire(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        x = comm.zeros(8, np.float32)
        wire = "int8" if comm.rank == 0 else "fp8"
        text = "8 float32 in C order, op 'sum', wire 'int8'"
        refused(world, ns.ArgumentError, lambda: comm.all_reduce(x, wire=wire), text)


def test_old_gpus_are_told_to_use_int8():
    gpu = SimpleNamespace(compute_capability=(8, 0), name="an A100")
    with pytest.raises(ns.ArgumentError, match="of an A100; pass wire='int8'"):
        composed.check_capability("fp8", gpu, "all_reduce")
    composed.check_capability("int8", gpu, "all_reduce")


def test_what_a_wire_cannot_do_is_refused(comm, world):
    x = comm.zeros(8, np.float32)
    for options, text in [
        ({"wire": "int4"}, "expected wire to be 'fp8', 'int8', or None"),
        ({"wire": np.int8}, "expected wire to be"),
        ({"wire": "int8", "op": "avg"}, "expected op='sum' with wire='int8'"),
        ({"wire": "int8", "algorithm": "chunked"}, "expected algorithm=None"),
    ]:
        refused(
            world, ns.ArgumentError, lambda o=options: comm.all_reduce(x, **o), text
        )
    text = "expected x of float32, bfloat16, float16 with wire='fp8', got float64"
    y = comm.zeros(8, np.float64)
    refused(world, ns.ArgumentError, lambda: comm.all_reduce(y, wire="fp8"), text)
    assert not get(comm.all_reduce(x, wire="int8")).any()
    assert comm.all_reduce(ordinary(0, np.float32), wire="int8").size == 0
