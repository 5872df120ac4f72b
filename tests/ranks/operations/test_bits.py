"""The promise of docs/bits.md, and the digests of arrays."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.environment import SIMULATED
from tests.algorithms import takes, those
from tests.digests import hashes
from tests.ranks.helpers import (
    Window,
    get,
    needs_peers,
    on_few_numbers,
    ordinary,
    put,
    refused,
    same,
    transposed,
    values,
    wait_for_all,
)

pytestmark = on_few_numbers

SHARES = ("all_reduce", "reduce", "reduce_scatter")  # of the reduction over all ranks
SCANS = ("scan", "exscan", "reverse_scan")
COUNTS = (24, 24 * 12)  # elements; the shorter input is the start of the longer one


def uneven(a, b):
    """An operator that is neither commutative nor associative."""
    return a - b * a


@pytest.fixture
def lean(world):
    """A communicator with other layouts, and another history."""
    with ns.Communicator(world, multiprocessors=1, timeout=120) as made:
        made.barrier()
        yield made


def ways(comm, lean, name, dtype, host, options):
    """Yield the ways to make a call that may not change its bits, and the outputs."""

    def result(comm=comm, new=ordinary, offset=0, call=name, **more):
        buffer = new(host.size + offset + Window.MARGIN, dtype)
        window = Window(buffer, offset, host.size)
        window.fill(host)
        made = getattr(comm, call)(window.array, **options, **more)
        out = made if call == name else made()
        comm.synchronize(more.get("stream"))
        assert same(window.read(), host)
        return out

    def in_place():
        x = ordinary(host.size, dtype)
        put(x, host)
        out, share = x, host.size // comm.size
        if name == "reduce_scatter":
            out = x[comm.rank * share : (comm.rank + 1) * share]
        return getattr(comm, name)(x, out=out, **options)

    def replayed():
        from cuda.core import Device

        from tests.gpu.helpers import capturing

        x, stream = ordinary(host.size, dtype), Device().create_stream()
        put(x, host)  # Numba's to_device takes no bfloat16
        out = ordinary(
            host.size // (comm.size if name == "reduce_scatter" else 1), dtype
        )
        call = functools.partial(getattr(comm, name), x, out=out, **options)
        call(stream=stream)  # compiled
        with capturing(stream) as (builder, graphs):
            made = call(stream=builder.stream)
        put(out, np.zeros(out.size, dtype))
        cuda.default_stream().synchronize()  # the copy may end after the call
        graphs[0].launch(stream)
        comm.synchronize(stream)
        return made

    yield "again", result()
    yield "off a boundary", result(offset=comm.rank % 2 + 1)
    yield "between symmetric arrays", result(new=comm.empty)
    yield "in place", in_place()
    yield "by a plan", result(call=f"{name}_init")
    yield "on one multiprocessor", result(comm=lean)
    for algorithm in those(name, lambda made: made.fewest <= comm.size):
        if takes(name, algorithm, dtype):
            yield algorithm, result(new=comm.empty, algorithm=algorithm)
    if not SIMULATED:
        yield "on another stream", result(stream=cuda.stream())
        yield "in a graph", replayed()


@pytest.mark.parametrize(
    ("op", "dtype", "names"),
    [
        ("sum", ml_dtypes.bfloat16, SHARES + SCANS),
        ("avg", np.float32, SHARES),
        (uneven, np.complex64, SHARES + SCANS[:1]),
    ],
    ids=["sum", "avg", "uneven"],
)
def test_only_inputs_and_the_order_of_ranks_matter(comm, lean, world, op, dtype, names):
    if op is uneven and len(comm.islands) > 1:
        pytest.skip("between islands, operators must be associative")
    dtype = np.dtype(dtype)
    longest = values([7, comm.rank], COUNTS[-1] * comm.size, dtype)
    x = ordinary(longest.size, dtype)
    put(x, longest)
    whole = comm.all_reduce(x, op=op)
    comm.check_equal(whole)
    references = {name: get(getattr(comm, name)(x, op=op)) for name in names[3:]}
    for name, count in zip(names, itertools.cycle(COUNTS), strict=False):
        options = {"op": op} | ({"root": 0} if name == "reduce" else {})
        host = longest[: count * comm.size]
        wanted = references.get(name, get(whole))[: host.size]
        if name == "reduce_scatter":
            wanted = wanted[comm.rank * count : (comm.rank + 1) * count]
        for way, out in ways(comm, lean, name, dtype, host, options):
            if name != "reduce" or comm.rank == 0:
                assert same(get(out), wanted), (name, way, count)
    wait_for_all(comm, world)


def test_equal_bits_have_equal_digests(comm, world):
    host = values([3], 4001, np.float32)
    held = {
        "an array": cuda.to_device(host),
        "another type": cuda.to_device(host.view(np.int32)),
        "off a boundary": ordinary(4002, np.float32)[1:],
        "with gaps": cuda.to_device(np.repeat(host, 2))[::2],
    }
    put(held["off a boundary"], host)
    found = {name: comm.digest(x) for name, x in held.items()}
    words = np.append(host, np.zeros(3, np.float32)).view(np.uint64)
    wanted = int(hashes(words).sum(dtype=np.uint64))
    assert set(found.values()) == {wanted}, found
    square = host[:3600].reshape(60, 60)
    turned = transposed(cuda.to_device(np.ascontiguousarray(square.T)))
    assert comm.digest(turned) == comm.digest(cuda.to_device(square))
    # A change of any bit, a move, a shorter array.
    others = [host[:-1], np.roll(host, 1), host[::-1].copy()]
    for place in (0, 17, 4000):
        others.append(host.copy())
        others[-1].view(np.uint32)[place] ^= 1 << place % 32
    digests_of = {comm.digest(cuda.to_device(each)) for each in others}
    assert len(digests_of | {*found.values()}) == len(others) + 1
    assert comm.digest(ordinary(0, np.float32)) == 0
    wait_for_all(comm, world)


@needs_peers
@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.complex128], ids=str)
def test_who_differs_and_where(comm, world, dtype):
    shape = 37, 53
    same_host = values([3], 37 * 53, np.float32).astype(dtype).reshape(shape)
    comm.check_equal(cuda.to_device(same_host))
    last = comm.size - 1
    for index in [(0, 0), (11, 52), (36, 52)]:
        host = same_host.copy()
        if comm.rank == last:
            host[index] += 1
            host[-1, -1] += 1
        for x in (cuda.to_device(host), cuda.to_device(np.asfortranarray(host))):
            text, *_ = refused(
                world,
                ns.ArraysDiffer,
                lambda x=x: comm.check_equal(x),
                f"at index {index}:",
            )
            usual = same_host[index]
            assert f"have {usual} (0x" in text or f"has {usual} (0x" in text
            if comm.size > 2:
                assert f"different ones on rank {last} " in text
    with pytest.raises(ns.ArraysDiffer) as caught:
        comm.check_equal(cuda.to_device(np.full(9, comm.rank == 0, dtype)))
    assert caught.value.index == (0,)
    assert caught.value.ranks == ((1,) if comm.size == 2 else (0,))
    text, *_ = refused(
        world,
        ns.ArgumentError,
        lambda: comm.check_equal(ordinary(3 + comm.rank, dtype)),
        "rank 0 has shape (3,)",
    )
    refused(world, ns.ArgumentError, lambda: comm.check_equal(same_host), "copy it to")
    comm.check_equal(cuda.to_device(same_host))  # the communicator still works
