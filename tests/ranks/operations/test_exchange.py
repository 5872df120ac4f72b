"""all_gather, all_to_all and reduce_scatter against NumPy, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

import numba_symm as ns
from numba_symm.collectives.operations import OPERATIONS
from tests.ranks.helpers import (
    bits,
    get,
    ordinary,
    put,
    reduced,
    same,
    values,
    wait_for_all,
)

FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
DTYPES = [np.dtype(dtype) for dtype in (*FLOATS, np.int32, np.int64)]
NAMES = ("all_gather", "all_to_all", "reduce_scatter")


def inputs_of(name, count, dtype, size, seed):
    whole = count if name == "all_gather" else count * size
    if dtype in DTYPES:
        return [values([seed, rank], whole, dtype) for rank in range(size)]
    random = np.random.default_rng(seed)
    return [
        random.integers(0, 256, whole * dtype.itemsize, np.uint8).view(dtype)
        for _ in range(size)
    ]


def wanted_of(name, inputs, op, rank):
    size = len(inputs)
    if name == "all_gather":
        return np.concatenate(inputs)
    part = inputs[0].size // size
    mine = slice(rank * part, (rank + 1) * part)
    if name == "all_to_all":
        return np.concatenate([each[mine] for each in inputs])
    return reduced([each[mine] for each in inputs], op)


def call(comm, name, x, op="sum", **options):
    reducing = {"op": op} if name == "reduce_scatter" else {}
    return getattr(comm, name)(x, **reducing, **options)


def on_device(host, symmetric, comm):
    x = comm.empty(host.size, host.dtype) if symmetric else None
    if x is None:
        x = ordinary(host.size, host.dtype)
    x.copy_to_device(host) if host.dtype not in DTYPES else put(x, host)
    return x


@pytest.mark.parametrize("algorithm", OPERATIONS["all_gather"].algorithms)
def test_what_is_moved_keeps_every_bit(comm, world, algorithm):
    """The data has a NaN of 64 one bits, which means "empty" in other algorithms."""
    host = np.full(100, -1, np.int64).view(np.float64)
    x = comm.empty(100, np.float64)
    put(x, host)
    out = comm.empty((comm.size, 100), np.float64)
    gathered = comm.all_gather(x, out=out, algorithm=algorithm)
    comm.synchronize()
    assert (bits(get(gathered)) == bits(host)).all()
    wait_for_all(comm, world)


@pytest.mark.parametrize("algorithm", OPERATIONS["all_gather"].algorithms)
def test_elements_of_any_size_are_moved(comm, world, algorithm):
    usable = {
        name: algorithm if algorithm in OPERATIONS[name].algorithms else None
        for name in ("all_to_all", "broadcast")
    }
    for itemsize in (3, 20, 24, 40):
        dtype = np.dtype([("bytes", np.uint8, (itemsize,))])
        inputs = [
            np.random.default_rng([itemsize, rank]).bytes(2 * comm.size * itemsize)
            for rank in range(comm.size)
        ]
        x = comm.empty(2 * comm.size * itemsize, np.uint8)
        put(x, np.frombuffer(inputs[comm.rank], np.uint8))
        moved = [
            comm.all_gather(x.view(dtype), algorithm=algorithm),
            comm.all_to_all(x.view(dtype), algorithm=usable["all_to_all"]),
            comm.broadcast(
                x.view(dtype), root=comm.size - 1, algorithm=usable["broadcast"]
            ),
        ]
        comm.synchronize()
        part = slice(2 * itemsize * comm.rank, 2 * itemsize * (comm.rank + 1))
        wanted = [b"".join(inputs), b"".join(each[part] for each in inputs), inputs[-1]]
        found = [bytes(each.view(np.uint8).copy_to_host()) for each in moved]
        assert found == wanted, itemsize
        wait_for_all(comm, world)


def test_shapes(comm, world):
    x = comm.zeros((2 * comm.size, 3), np.int32)
    assert comm.all_gather(x).shape == (comm.size, 2 * comm.size, 3)
    assert comm.all_to_all(x).shape == (2 * comm.size, 3)
    assert comm.reduce_scatter(x).shape == (2, 3)
    empty = comm.zeros((0, 3), np.int32)
    assert comm.all_gather(empty).shape == (comm.size, 0, 3)
    assert comm.reduce_scatter(empty).shape == (0, 3)
    wait_for_all(comm, world)


def test_bad_calls(comm, world):
    x = comm.zeros(2 * comm.size + 1, np.float32)
    if comm.size > 1:
        for name in ("all_to_all", "reduce_scatter"):
            with pytest.raises(ns.ArgumentError, match="expected x with a multiple of"):
                call(comm, name, x)
    with pytest.raises(ns.ArgumentError, match="Fortran"):
        comm.all_gather(ordinary((3, 4), np.float32, "F"))
    with pytest.raises(ns.ArgumentError, match="expected out of"):
        comm.all_gather(x, out=ordinary(1, np.float32))
    with pytest.raises(ns.ArgumentError, match="got 'fast'"):
        comm.all_gather(x, algorithm="fast")
    whole = comm.zeros((comm.size + 1) * 8, np.float32)
    with pytest.raises(ns.ArgumentError, match="arrays that overlap"):
        comm.all_gather(whole[4:12], out=whole[: comm.size * 8])
    wait_for_all(comm, world)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "all_reduce"])
def test_copy_engines_take_arrays_that_lie_differently(comm, world, name):
    """If one rank's array is at another place, all ranks use the workspace."""
    count = 4 * comm.size * 12
    room = comm.empty((4, comm.size * count + 32), np.float32)
    one = comm.size - 1  # the rank that differs
    for case in ("alike", "elsewhere", "ordinary x", "ordinary out", "in place"):
        inputs = [
            np.arange(count, dtype=np.float32) * (r + 2) for r in range(comm.size)
        ]
        differs = comm.rank == one
        x, out = (
            room[0, :count],
            room[1, : count * (comm.size if "gather" in name else 1)],
        )
        if differs and case == "elsewhere":
            x, out = room[2, 16 : 16 + count], room[3, 32 : 32 + out.size]
        elif differs and case == "ordinary x":
            x = ordinary(count, np.float32)
        elif differs and case == "ordinary out":
            out = ordinary(out.size, np.float32)
        elif differs and case == "in place":
            x = out[comm.rank * count :][:count] if "gather" in name else out
        put(x, inputs[comm.rank])
        if name == "all_to_all":
            x, out = (each.reshape(comm.size, -1) for each in (x, out))
        getattr(comm, name)(x, out=out, algorithm="copy_engine")
        comm.synchronize()
        wanted = sum(inputs)
        if name != "all_reduce":
            wanted = wanted_of(name, inputs, "sum", comm.rank)
        assert same(get(out).ravel(), np.ravel(wanted)), case
        wait_for_all(comm, world)
