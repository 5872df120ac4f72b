"""Calls of operations that are refused, and how a broadcast gets its algorithm."""

import functools

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm.collectives import operations, select
from numba_symm.environment import SIMULATED
from tests.algorithms import those
from tests.ranks.helpers import (
    array_of,
    check_works,
    get,
    ordinary,
    put,
    refused,
    values,
    wait_for_all,
)


def wrong_calls(comm):
    """Yield calls that every rank refuses, and words of the texts."""
    x, short = comm.zeros(8 * comm.size), ordinary(7, np.float32)
    uneven, turned = comm.zeros(2 * comm.size + 1), ordinary((3, 4), np.float32, "F")
    for root in (-1, comm.size, 0.0, None, "0"):
        text = f"root: expected a rank from 0 to {comm.size - 1}, got {root!r}"
        for call in (comm.reduce, comm.broadcast):
            yield functools.partial(call, x, root=root), f"{call.__name__}: {text}"
    sentinel = "one_shot_sentinel"
    yield functools.partial(comm.broadcast, x, algorithm=sentinel), f"got '{sentinel}'"
    yield functools.partial(comm.broadcast, np.zeros(3)), "host"
    yield functools.partial(comm.reduce, x, root=comm.rank, out=short), "got 7"
    for scan in (comm.scan, comm.exscan, comm.reverse_scan):
        yield functools.partial(scan, x, op="avg"), "op='avg' is not defined"
        yield functools.partial(scan, x, op="band"), "got op='band'"
        yield functools.partial(scan, x, out=short), "got 7"
        yield functools.partial(scan, x, algorithm="pull"), "got 'pull'"
    if comm.size > 1:
        for call in (comm.all_to_all, comm.reduce_scatter):
            yield functools.partial(call, uneven), "expected x with a multiple of"
        counted = functools.partial(comm.reduce_scatter_v, x, counts=[1])
        yield counted, "one for each rank"
    counted = functools.partial(comm.reduce_scatter_v, x, counts=[7] * comm.size)
    yield counted, "the sum of counts"
    yield functools.partial(comm.all_gather, turned), "Fortran"
    yield functools.partial(comm.all_gather, x, out=short), "expected out of"
    yield functools.partial(comm.all_gather, x, algorithm="fast"), "got 'fast'"
    whole = comm.zeros((comm.size + 1) * 8)
    gather = functools.partial(comm.all_gather, whole[4:12])
    overlapping = functools.partial(gather, out=whole[: comm.size * 8])
    yield overlapping, "arrays that overlap"


def wrong_reductions(x, y):
    """Yield arrays and options that no all-reduce takes, and words of the texts."""
    given = x[:8]
    for array, text in (
        (np.zeros(8, np.float32), "got ndarray in host memory"),
        ([1.0, 2.0], "a device array, got list"),
        (None, "a device array, got NoneType"),
        (ordinary(4, "M8[s]"), "operators, got datetime64"),
        (ordinary(4, [("a", "f4")]), "expected a dtype that has operators"),
        *((x.view(np.uint8)[n : n + 8].view("f4"), "aligned to") for n in (1, 2, 3)),
    ):
        yield array, {}, text
    whole = "expected out of 8 float32 for x of 8, got "
    apart = "expected out to be x, this rank's shard of it, or apart"
    for out, text in (
        (y[:7], f"{whole}7 float32"),
        (ordinary(9, np.float32), f"{whole}9 float32"),
        (y[:8].view(np.int32), f"{whole}8 int32"),
        (np.zeros(8, np.float32), "out: expected a device array, got ndarray"),
        (x[1:8], "got 7"),
        (x[1:9], apart),
    ):
        yield given, {"out": out}, text
    turned = ordinary((2, 4), np.float32, order="F")
    for array, out in ((turned, y[:8]), (given.reshape(2, 4), turned)):
        yield array, {"out": out}, "expected x and out in the same order"
    if SIMULATED:  # on a GPU, Numba's arrays cannot be read-only
        constant = cuda.to_device(np.zeros(8, np.float32))
        constant._ary.flags.writeable = False
        yield given, {"out": constant}, "read-only"
    for op in ("mean", "SUM", "", None, 3, np.add, sum):
        yield given, {"op": op}, "; pass one of 'sum', 'prod', 'min', 'max', "
    for op in (MPI.REPLACE, MPI.NO_OP, MPI.OP_NULL):
        yield given, {"op": op}, "expected an operator, got"
    yield given, {"op": lambda a: a}, "expected a function of two scalars"
    text = "expected a function that numba.cuda compiles for two float32, "
    for op in (
        *(lambda a, b: None, lambda a, b: a + 1j, lambda a, b: "1"),
        *(lambda a, b: (a, b), lambda a, b: a.absent),
    ):
        yield given, {"op": op}, text
    for kind, op in (("float32", "band"), ("complex64", "max"), ("bool", "avg")):
        text = f"expected an operator of {kind}, got op={op!r}"
        yield x.view(np.uint8)[:8].view(kind), {"op": op}, text
    for name in ("ring", "ONE_SHOT_LL", "", 1):
        text = "expected algorithm to be 'one_shot_sentinel', "
        yield given, {"algorithm": name}, text
    yield given, {"algorithm": "one_shotll"}, "did you mean 'one_shot_ll'"
    text = "got int32; use one of 'one_shot_marked', 'one_shot_ll', "
    for name in those("all_reduce", lambda made: made.floats):
        yield given.view(np.int32), {"algorithm": name}, text
    for stream in ("0", 1.5, object()):
        yield given, {"stream": stream}, "expected a stream, got"


def test_wrong_reductions_are_refused_on_every_rank(comm, world):
    """Also if calls with arrays at the same addresses are remembered."""
    x, y = comm.zeros(20, np.float32), comm.zeros(20, np.float32)
    comm.all_reduce(x[:8], out=y[:8])
    for array, options, text in wrong_reductions(x, y):
        call = functools.partial(comm.all_reduce, array, **options)
        refused(world, ns.ArgumentError, call, text)
        if "stream" not in options:  # a plan gets it later
            plan = functools.partial(comm.all_reduce_init, array, **options)
            refused(world, ns.ArgumentError, plan, "all_reduce: ", text)
    plan = comm.all_reduce_init(x, out=x)
    texts = "all_reduce: expected a stream, got ", "; a plan keeps its arrays: copy"
    refused(world, ns.ArgumentError, lambda: plan(x), *texts)
    assert plan() is x
    comm.all_reduce(x[:10], out=x[10:])  # beside it is far enough
    check_works(comm)


def test_wrong_calls_are_refused_on_every_rank(comm, world):
    for call, text in wrong_calls(comm):
        refused(world, ns.ArgumentError, call, text)
    check_works(comm)


def test_outputs_that_cannot_be_unpacked_are_refused(comm, world):
    x, whole = comm.zeros(24), ordinary((4, 6), np.float32)
    if SIMULATED:
        same = np.broadcast_to(whole[0], (4, 6))
        kind = type(whole)
        out = kind(same) if not isinstance(same, kind) else same
        refused(world, ns.ArgumentError, lambda: comm.all_reduce(x, out=out), "all_red")
        # NumPy's and CuPy's stride of a new axis is 0.
        half, added = ordinary(12, np.float32), whole[None, :, ::2]
        put(half, np.ones(12, np.float32))
        assert comm.all_reduce(half, out=added) is added
        assert (whole.copy_to_host()[:, ::2] == comm.size).all()
    short = whole[:, ::2]
    refused(world, ns.ArgumentError, lambda: comm.all_reduce(x, out=short), "got 12")
    check_works(comm)


def test_debug_mode_compares_what_arrays_with_gaps_have(world):
    with ns.Communicator(world, timeout=60, debug=True) as comm:
        x = comm.zeros(48).reshape(4, 12)[:, ::2]
        y = comm.zeros(24)
        total = comm.all_reduce(x if comm.rank % 2 else y.reshape(4, 6))
        gathered = comm.gather(x)
        assert total.shape == (4, 6)
        assert (gathered is None) == (comm.rank > 0)


def test_the_algorithm_follows_from_the_size(world, monkeypatch):
    if SIMULATED:  # there, chunks are for up to MiB, which take seconds
        steps = select.CHOICES["broadcast"].floats
        few = [s._replace(most=tuple(min(m, 16 << 10) for m in s.most)) for s in steps]
        steps = (*few[:-2], *steps[-2:])  # the last two are for all that is larger
        monkeypatch.setitem(select.CHOICES, "broadcast", select.Choice(steps, steps))
    bound, bind = [], operations.Operation.bind

    def noting(operation, algorithm, *given):
        bound.append(algorithm)
        return bind(operation, algorithm, *given)

    monkeypatch.setattr(operations.Operation, "bind", noting)
    with ns.Communicator(world, timeout=60) as comm:
        root = comm.size - 1
        for symmetric in (True, False):
            for kilobytes in (0, 1, 8, 20) if SIMULATED else (0, 768, 49152):
                count = 256 * kilobytes + 1
                x = array_of(comm, values(comm.rank, count, np.int32), symmetric)
                comm.broadcast(x, root=root)
                comm.synchronize()
                assert (get(x) == values(root, count, np.int32)).all()
        wait_for_all(comm, world)
    assert len(set(bound)) >= (3 if SIMULATED else 2) or comm.size == 1
