"""The kernels that are listed beforehand are those that calls bind."""

import dataclasses
import math
import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from numba_symm import dtypes
from numba_symm.collectives import composed, kernel_set, select
from numba_symm.collectives.binder import Binder
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.islands.construction import STEPS
from numba_symm.collectives.kernel_set import (
    COUNTS,
    GAPS,
    MESSAGES,
    NAMES,
    REQUESTS,
    SIGNALS,
    endpoint,
)
from numba_symm.collectives.kernels import direct, pack, transfer
from numba_symm.collectives.operations import OPERATIONS, REDUCE_SHARD
from numba_symm.collectives.protocols.binding import Call
from numba_symm.collectives.protocols.credit import Message, Span
from numba_symm.collectives.protocols.handshake import make_handshake
from numba_symm.collectives.requests import Requests
from numba_symm.collectives.select import GENERAL
from numba_symm.collectives.staging import Transfers
from numba_symm.device import compiler
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays
from numba_symm.gpu.arrays import ArrayView
from numba_symm.gpu.kernels import Kernel
from numba_symm.launch.failures import BARRIER
from tests.kernels import bound_kernels, every_kernel, listed, named
from tests.whole import WHOLE

GPU = SimpleNamespace(ordinal=0, compute_capability=(9, 0), name="a GPU")
FOUND = {**OPERATIONS, "reduce_scatter_v": REDUCE_SHARD}
REDUCED = [
    *(("float32", "max"), ("bfloat16", "sum"), ("int64", "prod"), ("bool", "land")),
    *(("complex128", "sum"), ("float8_e5m2", "min")),
    *((np.dtype("f4, i4"), "minloc"), (np.dtype("i8, i8"), "maxloc")),
]
MOVED = [("float32", "sum"), ("bfloat16", "sum"), ("complex128", "sum"), ("V3", "sum")]
CALLS = 120 if WHOLE else 40  # for each type and number of ranks


def listing(name, dtype="float32", op="sum", size=4, max_blocks=256):
    return kernel_set.kernels([name], [dtype], [op], endpoint(size, max_blocks), "test")


def an_array(chance, count, dtype, base):
    """Return an array on a 16-byte boundary, or off it by some elements."""
    offset = chance.choice([0, 0, 16, chance.randrange(16)]) * dtype.itemsize
    return ArrayView(base + offset, (count,), dtype, "C", False)


def make_a_call(chance, operation, dtype, op, end):
    """Bind one call as a program might make it, of up to 2 GiB."""
    dtype = dtypes.checked(dtype, "test")
    shards = operation.shards(end.size)
    count = int(2 ** chance.uniform(0, 31)) // dtype.itemsize
    if chance.random() < 0.5:
        whole = chance.choice([16, 1024, 128 * end.size, 2**20])
        count = max(1, count // whole) * whole
    count = max(1, count // shards) * shards
    x = an_array(chance, count, dtype, 1 << 44)
    wanted = math.prod(operation.shape(x, end.size))
    out = an_array(chance, wanted, dtype, 1 << 45)
    root = chance.randrange(end.size) if operation.rooted else None
    if operation.in_place or (wanted == count and chance.random() < 0.3):
        out = x
    if operation.at_root and root != end.rank:
        out = None
    if chance.random() < 0.3:
        end = dataclasses.replace(end, place=lambda address, nbytes: None)
    given = Invocation(operation, op=op, root=root)
    name, call = operation.work(given, x, out, end, GPU)
    operation.bind(name, end, call)


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_calls_of_any_size_and_alignment_bind_kernels_that_are_listed(name, size):
    chance = random.Random(f"{name} {size}")
    operation = FOUND[name]
    max_blocks = chance.choice([256, 248, 200, 31])
    for dtype, op in REDUCED if operation.reduces else MOVED:
        rank = chance.randrange(size)
        end = dataclasses.replace(endpoint(size, max_blocks), rank=rank)
        known = kernel_set.kernels([name], [dtype], [op], end, "test")
        with listed() as bound, mock.patch.object(arrays, "check_device"):
            for _ in range(CALLS):
                make_a_call(chance, operation, dtype, op, end)
        # One rank copies; the result of an exscan there is the identity.
        assert bool(bound) == bool(known) == (size > 1 or name == "exscan")
        assert not bound.keys() - set(known)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_messages_of_any_size_and_alignment_bind_kernels_that_are_listed(size):
    chance = random.Random(size)
    for dtype, _ in MOVED:
        end = dataclasses.replace(endpoint(size), rank=chance.randrange(size))
        names = [chance.choice(["recv", *MESSAGES])]
        known = kernel_set.kernels(names, [dtype], ["sum"], end, "test")
        kind = dtypes.checked(dtype, "test")
        with listed() as bound:
            for _ in range(CALLS):
                count = int(2 ** chance.uniform(0, 31)) // kind.itemsize
                x = an_array(chance, count, kind, 1 << 44)
                peer = (end.rank + chance.randrange(1, size)) % size
                message = Message(peer, x.address, x.nbytes)
                Transfers([message], []).packed(Binder(end).messages, "test")
                Transfers([], [message]).packed(Binder(end).messages, "test")
                if names[0] in ("recv", "sendrecv"):
                    counted = message._replace(count_at=8, itemsize=kind.itemsize)
                    Transfers([], [counted]).packed(Binder(end).messages, "test")
        assert not bound.keys() - set(known)


@pytest.mark.parametrize("counted", [False, True])
def test_a_communicator_with_requests_has_all_their_kernels(monkeypatch, counted):
    """They are for any type and alignment. Loading one may wait for a request."""
    loaded, chance = {}, random.Random(0)
    monkeypatch.setattr(Kernel, "load", lambda kernel: loaded.setdefault(kernel))
    end = endpoint(3)
    made = Requests(end, (10, 20, 30), None, 8)
    with listed() as bound:
        for _ in range(CALLS):
            kind = np.dtype(chance.choice(["V1", "V2", "V3", "f4", "f8", "c16"]))
            x = an_array(chance, int(2 ** chance.uniform(0, 20)), kind, 1 << 44)
            message = Message(1, x.address, x.nbytes)
            if counted:
                message = message._replace(count_at=8, itemsize=kind.itemsize)
            made.bind(message, receiving=counted or chance.random() < 0.5)
    assert len(bound) > 3
    assert not bound.keys() - loaded.keys()


def test_arrays_with_gaps_bind_kernels_that_are_listed():
    """This includes arrays of more axes than a kernel has."""
    known, chance = set(listing(GAPS)), random.Random(0)
    for axes in range(1, 7):
        for _ in range(CALLS):
            shape = [2, *(chance.randrange(1, 4) for _ in range(axes - 1))]
            strides = [chance.randrange(9, 1 << 20) for _ in range(axes)]
            place = chance.randrange(1 << 30)
            with listed() as bound:
                pack.bind(1 << 40, place, shape, strides, 8, chance.random() < 0.5)
            assert not bound.keys() - known
    assert len(known) == 3


def test_calls_with_counts_on_the_gpu_bind_kernels_that_are_listed():
    known, chance = set(listing(COUNTS, "float32", size=3)), random.Random(0)
    end = endpoint(3)
    for _ in range(CALLS):
        place = 4 * chance.randrange(1 << 40)
        capacity, counts = 4 * chance.randrange(1, 1 << 20), 8 << 50
        span = Span(0, 0, 1 << 30)
        sends = [Message(k, place, capacity, counts, 4, span) for k in range(3)]
        receives = [Message(k, place + 64, capacity, counts, 4) for k in range(3)]
        with listed() as bound:
            Binder(end).messages(sends, receives)
        assert bound.keys() <= known
    assert len(known) == 4  # of two widths
    assert len(listing(COUNTS, "float32", size=1)) == 2


def test_sums_by_codes_bind_kernels_that_are_listed():
    known, chance = set(listing("wire_int8", "float16", size=3)), random.Random(0)
    element = dtypes.element("float16", "test")
    end, bound = endpoint(3), {}
    for _ in range(CALLS):
        count = int(2 ** chance.uniform(0, 26))
        places = (chance.choice([16, 2]) + (k << 30) for k in (1, 2))
        with listed() as found:
            call = Call(*places, count, element, "sum")
            composed.bind_codes(end, Binder(end), "int8", call, 1 << 40)
        bound |= found
    assert len(bound) > 6
    assert bound.keys() <= known


@pytest.mark.parametrize("name", kernel_set.EXACT)
def test_exact_sums_of_any_size_and_alignment_bind_kernels_that_are_listed(name):
    chance, bound = random.Random(name), {}
    end = endpoint(3)
    known = kernel_set.kernels([name], ["float16", "float64"], ["sum"], end, "test")
    for dtype in (np.float16, np.float64):
        element = dtypes.element(dtype, "test")
        with listed() as found:
            for _ in range(CALLS):
                count = int(2 ** chance.uniform(0, 30)) - 1
                x, y = (an_array(chance, count, element.dtype, k << 40) for k in (1, 2))
                places = x.address, y.address if name == "dot" else x.address, 1 << 45
                given = name, element, places, count, 1 << 46
                composed.bind_exact_sum(end, Binder(end), *given)
        bound |= found
    assert len(bound) > 10
    assert bound.keys() <= set(known)


def test_pairs_may_be_two_columns():
    assert set(listing("all_reduce", "int32", "minloc")) == set(
        listing("all_reduce", np.dtype("i4, i4"), "minloc")
    )
    with pytest.raises(ArgumentError, match="expected pairs"):
        listing("all_reduce", "int8", "minloc")


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_of_any_size_and_alignment_bind_kernels_that_are_listed(name):
    chance = random.Random(name)
    end = endpoint(3)
    kind = np.dtype(np.float32)
    known = kernel_set.kernels([name], [kind], ["sum"], end, "test")
    with listed() as bound:
        for _ in range(CALLS):
            x = an_array(chance, int(2 ** chance.uniform(0, 29)), kind, 1 << 44)
            message = Message(chance.choice([1, 2]), x.address, x.nbytes)
            counted = message._replace(count_at=8, itemsize=kind.itemsize)
            transfer.bind_request(end, 0, message, receiving=False)
            if name == "irecv":
                transfer.bind_request(end, 0, counted, receiving=True)
    assert len(bound) > 1
    assert not bound.keys() - set(known)


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_listed_for_far_larger_calls_than_the_limits(name):
    """All-reduces of many GiB consist of thousands of launches of the same kernels."""
    operation, element = OPERATIONS[name], dtypes.element(np.dtype("float32"), "test")
    for size in (2, 4, 8):
        ends = select.limits(operation.limits_of, size, element)
        counts = kernel_set._counts(operation, element, size, select.CHOICES)
        assert element.itemsize * max(counts) < 7 * max(ends)


def test_every_operation_has_steps_over_several_islands():
    assert STEPS.keys() == FOUND.keys()


def test_all_names_together_are_all_kernels_of_the_package():
    found = {
        named(kernel.factory)
        for size in (2, 3)
        for kernel in kernel_set.kernels(
            NAMES, ["float32"], ["sum"], endpoint(size), "test"
        )
    }
    # A call has to name their algorithms, which are never chosen. Epilogues are a
    # user's.
    others = every_kernel() - found - bound_kernels(2).keys() - bound_kernels(3).keys()
    islands = {"make_convert", "make_mark"}
    finishing = {"make_apply", "make_apply_to_rows", "make_mailed_epilogue"}
    messages = {"make_message_copy"}
    expected = islands | finishing | messages
    assert {name.rpartition(".")[2] for name in others} == expected


def test_a_name_has_the_kernels_of_that_call_alone():
    assert [each.constants for each in listing("barrier")] == [(4, BARRIER)]
    assert len(listing(SIGNALS)) == 4
    assert not set(listing("scan")) & set(listing("exscan"))
    assert listing("send") == listing("all_to_all_v") != []
    assert listing("send", size=1) == []


@pytest.mark.parametrize("size", [2, 3])
def test_a_handshake_is_followed_by_the_kernel_of_calls_without_one(size):
    def bound(operation, algorithm):
        target = 0 if operation.in_place else 1 << 30
        float32 = dtypes.element(np.dtype("float32"), "test")
        call = Call(0, target, size << 22, float32, "sum")  # several chunks
        with listed() as found:
            operation.bind(algorithm, endpoint(size), call)
        return found.keys()

    moved = 0
    for operation in OPERATIONS.values():
        for algorithm, made in operation.algorithms.items():
            found = bound(operation, algorithm)
            shaking = make_handshake, direct.make_direct
            shakes = any(kernel.factory in shaking for kernel in found)
            assert shakes == (made.handshake and made.suits(size))
            if shakes:
                assert bound(operation, GENERAL) < found
                moved += 1
    assert moved >= 4


def test_a_users_operator_is_listed():
    def larger(a, b):
        return a if a > b else b

    kernels = listing("all_reduce", op=larger)
    assert kernels
    assert not any(each.cacheable for each in kernels if reduces(each))


def reduces(kernel):
    """Return whether a kernel of an all-reduce has an operator."""
    return len(kernel.constants) > 2


@pytest.mark.parametrize(
    ("names", "given", "ops", "text"),
    [
        (["allreduce"], ["float32"], ["sum"], "did you mean 'all_reduce'"),
        ([], ["float32"], ["sum"], "got none; pass some of 'all_reduce'"),
        (["all_reduce"], "float32", ["sum"], "expected a list or tuple"),
        (["all_reduce"], ["float32"], (), "expected a list or tuple"),
        (["all_reduce"], ["float31"], ["sum"], "expected a dtype"),
        (["all_reduce"], ["V3"], ["sum"], "expected a dtype that has operators"),
        (["all_reduce"], ["float32"], ["plus"], "pass one of 'sum', 'prod'"),
        (["all_reduce"], ["float32"], ["sum", "band"], "of float32, got op='band'"),
        (["scan"], ["float32"], ["avg"], "op='avg' is not defined"),
        (["broadcast", "scan"], ["float32"], ["sum", "avg"], "scan: op='avg' is not"),
    ],
)  # fmt: skip
def test_what_no_call_can_have_is_refused(names, given, ops, text):
    with pytest.raises(ArgumentError, match=text):
        kernel_set.kernels(names, given, ops, endpoint(2), "prepare")


class Loaded:
    """A kernel that notes when it is loaded."""

    def __init__(self, number, noted):
        self.constants = (number,)
        self.load = lambda: noted.append(number)


def test_each_rank_begins_to_load_with_another_part():
    orders = []
    for rank in range(3):
        noted = []
        kernel_set.load([Loaded(n, noted) for n in range(7)], rank, 3, "test")
        orders.append(noted)
    assert [order[0] for order in orders] == [0, 2, 4]
    assert all(sorted(order) == list(range(7)) for order in orders)


def test_a_users_operator_that_numba_cannot_compile_is_named(monkeypatch):
    def spelled(a, b):
        return a.spelled + b

    tried = []
    compile_it = compiler.compiled

    def compile_one(function, *args):
        tried.append(function.__name__)
        return compile_it(function, *args)

    kernels = listing("all_reduce", op=spelled)
    monkeypatch.setattr(Kernel, "load", lambda kernel: kernel.ptx((9, 0)))
    monkeypatch.setattr(compiler, "compiled", compile_one)
    with pytest.raises(ArgumentError, match=r"prepare: expected a function.*spelled"):
        kernel_set.load(kernels, 0, 1, "prepare")
    assert tried.count("spelled") == 2  # 1024 times, if each of its callers tried twice


def test_a_type_that_the_gpu_cannot_convert_is_refused():
    kernels = listing("all_reduce", dtype="float8_e5m2")
    kernel_set.check_capability(kernels, (8, 9), "prepare")
    with pytest.raises(ArgumentError, match=r"prepare: expected.*8\.9"):
        kernel_set.check_capability(kernels, (8, 0), "prepare")
