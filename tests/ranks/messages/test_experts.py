"""Dispatch and combine of a mixture of experts, compared with NumPy."""

import functools
import time

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.bench import __main__ as bench
from numba_symm.environment import SIMULATED
from tests.coded import coded, rounding
from tests.operators import in_tree
from tests.ranks.helpers import (
    check_works,
    get,
    needs_peers,
    of_one_island,
    on_few_numbers,
    ordinary,
    put,
    refused,
    same,
    wait_for_all,
)

pytestmark = on_few_numbers

EACH, TOP_K = 3, 4  # experts of a rank, and of a token


def routings(random, size):
    """Return functions that draw the experts of a rank's tokens, by name."""
    experts = EACH * size

    def none(count):
        return np.full((count, TOP_K), -1)

    def some(count):
        ids = random.integers(0, experts, (count, TOP_K))
        ids[random.random(ids.shape) < 0.3] = -1
        return ids

    return {
        "any": lambda count: random.integers(0, experts, (count, TOP_K)),
        "none": none,
        "all to one": lambda count: np.full((count, TOP_K), experts - 1),
        "duplicates": lambda count: np.repeat(
            random.integers(0, experts, (count, 1)), TOP_K, 1
        ),
        "some": some,
    }


class Model:
    """What all ranks send, and what a rank must receive and return."""

    def __init__(self, comm, seed, tokens, hidden, dtype, kinds):
        random = np.random.default_rng(seed)  # the same on all ranks
        made = routings(random, comm.size)
        self.size, self.rank = comm.size, comm.rank
        self.counts = random.integers(0, tokens + 1, comm.size)
        if random.random() < 0.3:
            self.counts[random.integers(comm.size)] = 0
        self.x = [random.normal(size=(n, hidden)).astype(dtype) for n in self.counts]
        kind = kinds[random.integers(len(kinds))]
        self.ids = [made[kind](n).astype(np.int32) for n in self.counts]
        self.weights = [
            random.random((n, TOP_K)).astype(np.float32) for n in self.counts
        ]

    def sent(self, source, rank):
        """Return which tokens of a rank are for another one, and their experts."""
        ids = self.ids[source] - EACH * rank
        ids = np.where((ids >= 0) & (ids < EACH), ids, -1)
        tokens = np.flatnonzero((ids >= 0).any(1))
        return tokens, ids[tokens]

    def check_received(self, found):
        counts = get(found.counts)
        tokens, weights = get(found.tokens), get(found.weights)
        ids, sources = get(found.expert_ids), get(found.sources)
        for source in range(self.size):
            chosen, wanted = self.sent(source, self.rank)
            count = counts[source]
            assert count == len(chosen)
            assert sources[source, :count].tolist() == chosen.tolist()
            assert ids[source, :count].tolist() == wanted.tolist()
            theirs = self.weights[source][chosen]
            assert weights[source, :count].tobytes() == theirs.tobytes()
            theirs = self.x[source][chosen]
            assert same(tokens[source, :count], theirs)

    def result(self, token, expert):
        """Return what an expert makes of a token, of its dtype."""
        return (token.astype(np.float32) * np.float32(expert + 1)).astype(token.dtype)

    def results(self, found):
        """Return the results of each choice of the tokens that this rank received."""
        tokens, ids = get(found.tokens), get(found.expert_ids)
        made = np.full((*ids.shape, tokens.shape[-1]), 99, tokens.dtype)
        for source, count in enumerate(get(found.counts)):
            for row in range(count):
                for i, expert in enumerate(ids[source, row]):
                    if expert >= 0:
                        number = EACH * self.rank + expert
                        made[source, row, i] = self.result(tokens[source, row], number)
        return made

    def of_rank(self, token, source, rank):
        """Return the sum of a rank's results of a token, each times its weight."""
        total = np.zeros(self.x[source].shape[1], np.float32)
        for expert, weight in zip(
            self.ids[source][token], self.weights[source][token], strict=True
        ):
            if EACH * rank <= expert < EACH * (rank + 1):
                made = self.result(self.x[source][token], expert)
                total += made.astype(np.float32) * weight
        return total.astype(self.x[source].dtype)

    def sums(self, source):
        """Return what combine must return on a rank."""
        x = self.x[source]
        made = np.zeros(x.shape, x.dtype)
        for token in range(len(x)):
            each = [self.of_rank(token, source, rank) for rank in range(self.size)]
            wide = {rank: of.astype(np.float32) for rank, of in enumerate(each)}
            made[token] = in_tree(np.add, wide).astype(x.dtype)
        return made


def on_gpu(host):
    array = ordinary(host.shape, host.dtype)
    put(array, np.ascontiguousarray(host))
    return array


@of_one_island
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=str)
def test_calls_of_other_tokens_and_routings_each_time(comm, world, dtype):
    """Nothing waits for the host between the calls of a step, which vary in size.

    There are two forms: for few tokens, in up to four epochs, and for many.
    """
    few, many, hidden = 9, 9, 24
    if not SIMULATED:  # tokens that fit, on few multiprocessors, too
        few, many, hidden = 30, 300, 4096 if comm.size == 2 else 1024
    kinds = list(routings(None, 1))
    sizes = {"top_k": TOP_K, "hidden": hidden, "dtype": dtype}
    of_few = comm.experts(EACH * comm.size, tokens=few, **sizes)
    of_many = comm.experts(EACH * comm.size, tokens=300, **sizes)
    assert (of_few._mailed is None) == (comm.size == 1)
    assert of_many._mailed is None
    for step in range(6):
        experts, tokens = (of_many, many) if step % 2 else (of_few, few)
        model = Model(comm, step, tokens, hidden, dtype, kinds)
        x, ids = on_gpu(model.x[comm.rank]), on_gpu(model.ids[comm.rank])
        found = experts.dispatch(x, ids, on_gpu(model.weights[comm.rank]))
        comm.synchronize()
        model.check_received(found)
        results = model.results(found)
        out = experts.combine(on_gpu(results))
        # Each rank adds up its own results, and stores them in its room itself.
        own = np.zeros(experts.results.shape, dtype)
        for source, count in enumerate(get(found.counts)):
            chosen, _ = model.sent(source, comm.rank)
            for row in range(count):
                own[source, row] = model.of_rank(chosen[row], source, comm.rank)
        again = experts.combine(on_gpu(own), out=ordinary(out.shape, dtype))
        put(experts.results, own)
        third = experts.combine()
        comm.synchronize()
        wanted = model.sums(comm.rank)
        for each in (out, again, third):
            assert get(each).tobytes() == wanted.tobytes()
    wait_for_all(comm, world)


@of_one_island
@pytest.mark.parametrize(
    ("wire", "dtype"), [("fp8", ml_dtypes.bfloat16), ("int8", np.float32)], ids=str
)
def test_tokens_cross_as_codes(comm, world, wire, dtype):
    """What is received has the bits of NumPy's model, and is within the bound."""
    few, many, hidden = 4 // np.dtype(dtype).itemsize, 3, 512
    if not SIMULATED:
        few, many, hidden = 40, 300, 3072
    if wire == "fp8" and not SIMULATED and comm.device.compute_capability < (8, 9):
        pytest.skip("the GPU does not convert fp8")
    kinds = list(routings(None, 1))
    sizes = {"top_k": TOP_K, "hidden": hidden, "dtype": dtype}
    of_few = comm.experts(EACH * comm.size, tokens=few, **sizes)
    of_many = comm.experts(EACH * comm.size, tokens=300, **sizes)
    assert of_few._mailed or comm.size in (1, 4)
    for step in range(4):
        experts, tokens = (of_many, many) if step % 2 else (of_few, few)
        model = Model(comm, step, tokens, hidden, dtype, kinds)
        if step == 2:  # of several magnitudes, and not numbers
            for x in model.x:
                x[:, 128:256] *= dtype(1e-20)
                x[:1, 300] = np.inf
        x, ids = on_gpu(model.x[comm.rank]), on_gpu(model.ids[comm.rank])
        weights = on_gpu(model.weights[comm.rank])
        found = experts.dispatch(x, ids, weights, wire=wire)
        comm.synchronize()
        exact = [x.astype(np.float32) for x in model.x]
        decoded = [coded(x.ravel(), wire).reshape(x.shape) for x in exact]
        model.x = [x.astype(dtype) for x in decoded]
        model.check_received(found)
        for x, given in zip(decoded, exact, strict=True):
            limit = rounding(given.ravel(), wire).reshape(x.shape)
            right = abs(x.astype(np.float64) - given) <= limit
            assert (right | ~np.isfinite(limit)).all()
        out = experts.combine(on_gpu(model.results(found)))
        comm.synchronize()
        if step != 2:
            assert get(out).tobytes() == model.sums(comm.rank).tobytes()
    wait_for_all(comm, world)


def failing(world, capacity, ids):
    """Dispatch rank 0's tokens until the call fails; return every rank's text."""
    comm = ns.Communicator(world, timeout=60)
    sizes = {"top_k": 1, "hidden": 4, "tokens": 6, "capacity": capacity}
    experts = comm.experts(comm.size, **sizes)
    count = len(ids) if comm.rank == 0 else 0
    x = on_gpu(np.ones((count, 4), np.float32))
    numbers = on_gpu(np.array(ids, np.int32).reshape(-1, 1)[:count])
    put(experts.received.tokens, np.full((comm.size, capacity, 4), 7, np.float32))

    def until_it_has_failed():
        experts.dispatch(x, numbers)
        while True:  # the ranks fail one after another
            comm.synchronize()

    texts = refused(world, ns.CollectiveError, until_it_has_failed)
    found = get(experts.received.tokens)
    comm.close()
    return texts, found


@of_one_island
def test_more_tokens_than_the_capacity_are_an_error(world):
    last = world.size - 1
    texts, found = failing(world, 2, [last] * 3)
    for text in texts:
        assert f"rank 0 has 3 tokens for experts of rank {last}" in text
        assert "at most the capacity, 2" in text
    assert (found[1:] == 7).all()  # what is after rank 0's tokens


@of_one_island
@pytest.mark.parametrize("wrong", [-2, -(2**31), 2**31 - 1, "experts"])
def test_an_expert_that_does_not_exist_is_an_error(world, wrong):
    number = world.size if wrong == "experts" else wrong
    texts, found = failing(world, 3, [0, number])
    for text in texts:
        assert f"rank 0's token 1 has expert {number}: expected less" in text
    assert (found == 7).all()


@of_one_island
@needs_peers
def test_calls_of_different_objects_are_an_error(world):
    comm, sizes = ns.Communicator(world, timeout=60), {"hidden": 4, "tokens": 6}
    made = [comm.experts(comm.size, top_k=1, **sizes) for _ in range(2)]
    x, ids = on_gpu(np.ones((1, 4), np.float32)), on_gpu(np.zeros((1, 1), np.int32))

    def until_it_has_failed():
        made[comm.rank == 0].dispatch(x, ids)
        end = time.monotonic() + 300
        while time.monotonic() < end:
            comm.synchronize()

    texts = "dispatch of object 1, ", "dispatch of object 2, "
    refused(world, ns.CallMismatch, until_it_has_failed, *texts)
    comm.close()


def test_wrong_arguments_of_experts(comm, world):
    size, kind = comm.size, ns.ArgumentError
    sizes = {"top_k": 2, "hidden": 8, "tokens": 4}

    def make(number=2 * size, **changed):
        return lambda: comm.experts(number, **sizes | changed)

    if len(comm.islands) > 1:
        refused(world, kind, make(), "expected ranks of one island")
        return
    for name, value in [("top_k", True), ("hidden", 1.5), ("tokens", 1 << 15)]:
        refused(world, kind, make(**{name: value}), f"expected {name} to be an integer")
    refused(world, kind, make(capacity=5), "capacity to be an integer from 1 to 4")
    refused(world, kind, make(hidden=6), "a multiple of 16 bytes")
    # Of results: at least 2**32 vectors.
    refused(world, kind, make(tokens=1 << 14, hidden=1 << 20), "than 63 GiB of")
    refused(world, kind, make(dtype=np.int32), "expected dtype float32, bfloat16")
    if size > 1:
        refused(world, kind, make(2 * size + 1), f"multiple of the {size} ranks")
        refused(world, kind, make(tokens=4 + comm.rank), "tokens")
    experts = make()()
    x, ids = ordinary((3, 8), np.float32), ordinary((3, 2), np.int32)
    refused(world, kind, experts.combine, "expected a dispatch before")
    calls = [
        ((ordinary((5, 8), np.float32), ids), "at most 4 tokens, got (5, 8)"),
        ((ordinary((3, 4), np.float32), ids), "x: expected shape (3, 8) of float32"),
        ((ordinary((3, 8), np.float16), ids), "got (3, 8) of float16"),
        ((x, ordinary((3, 2), np.int64)), "expert_ids: expected shape (3, 2) of int32"),
        ((x, ids, ordinary((3, 1), np.float32)), "weights: expected shape (3, 2)"),
        ((x, np.zeros((3, 2), np.int32)), "device array"),
        ((ordinary((3, 8), np.float32, "F"), ids), "expected an array in C order"),
    ]
    flat = ordinary(25, np.float32)
    calls.append(((flat[1:].reshape(3, 8), ids), "begins on a 16-byte boundary"))
    for given, text in calls:
        refused(world, kind, lambda given=given: experts.dispatch(*given), text)
    for wire, text in [("fp4", "wire to be 'fp8', 'int8'"), ("fp8", "multiple of 512")]:
        call = functools.partial(experts.dispatch, x, ids, wire=wire)
        refused(world, kind, call, f"{text}")
    put(ids, np.zeros((3, 2), np.int32))
    put(x, np.ones((3, 8), np.float32))
    experts.dispatch(x, ids)
    wrong = {"results": ordinary((size, 4, 4), np.float32), "out": x.reshape(6, 4)}
    for name, array in wrong.items():
        text = f"{name}: expected shape"
        call = lambda name=name, array=array: experts.combine(**{name: array})  # noqa: E731
        refused(world, kind, call, text)
    of_one = make(top_k=1)()
    of_one.dispatch(x, on_gpu(np.zeros((3, 1), np.int32)))
    room = of_one.results
    refusals = [
        ({"results": room.reshape(size, 4, 1, 8)}, "results of each choice apart from"),
        ({"results": of_one.received.tokens, "out": room[0, :3]}, "out apart from Exp"),
    ]
    for given, text in refusals:
        call = lambda given=given: of_one.combine(**given)  # noqa: E731
        refused(world, kind, call, text)
    tokens = of_one.received.tokens[0, :3]
    experts.dispatch(tokens, ids)  # those of another object
    call = lambda: of_one.dispatch(tokens, on_gpu(np.zeros((3, 1), np.int32)))  # noqa: E731
    refused(world, kind, call, "expected arrays apart from Experts.received")
    check_works(comm)
    wait_for_all(comm, world)


@of_one_island
def test_a_measurement_has_an_all_to_all_there_and_back_beside_it(world, capfd):
    words = "experts -b 256 -e 256 -d half -n 2 -w 1 -G 2 --algorithm all"
    assert bench.main(words.split()) == 0
    text = world.bcast(capfd.readouterr().out)
    rows = [line.split() for line in text.splitlines() if line.startswith(" ")]
    assert rows[0][2:4] == ["half", "none"]
    assert rows[0][7] == "0"  # wrong elements
    assert all(float(cell) > 0 for cell in (rows[0][4], *rows[0][8:10]))
    with pytest.raises(SystemExit):
        bench.main(["experts", "-b", "256", "-e", "256", "-d", "int32"])
    text = world.bcast(capfd.readouterr().err)
    assert "expected some of float, half, bfloat16, or all, got 'int32'" in text


@of_one_island
@pytest.mark.skipif(SIMULATED, reason="graphs need a GPU")
@pytest.mark.parametrize(
    ("most", "wire"), [(128, None), (300, None), (128, "int8"), (300, "int8")]
)
def test_a_graph_replays_with_other_routings(comm, world, most, wire):
    from cuda.core import Device

    from tests.gpu.helpers import capturing

    tokens, hidden = 128, 1024
    sizes = {"top_k": TOP_K, "hidden": hidden, "tokens": most}
    experts = comm.experts(EACH * comm.size, capacity=tokens, **sizes)
    x = ordinary((tokens, hidden), np.float32)
    ids = ordinary((tokens, TOP_K), np.int32)
    weights, out = ordinary((tokens, TOP_K), np.float32), ordinary(x.shape, np.float32)
    results = ordinary((comm.size, tokens, TOP_K, hidden), np.float32)
    stream = Device().create_stream()
    put(ids, np.full((tokens, TOP_K), -1, np.int32))
    experts.dispatch(x, ids, weights, wire=wire, stream=stream)
    experts.combine(results, out=out, stream=stream)
    comm.synchronize(stream)
    with capturing(stream) as (builder, graphs):
        experts.dispatch(x, ids, weights, wire=wire, stream=builder.stream)
    with capturing(stream) as (builder, more):
        experts.combine(results, out=out, stream=builder.stream)
    for step, kind in enumerate([*routings(None, 1), "any"]):
        model = Model(comm, step, tokens, hidden, np.float32, [kind])
        full = [np.resize(each, (tokens, hidden)) for each in model.x]
        model.x = full
        model.ids = [np.resize(each, (tokens, TOP_K)) for each in model.ids]
        model.weights = [np.resize(each, (tokens, TOP_K)) for each in model.weights]
        put(x, model.x[comm.rank])
        put(ids, model.ids[comm.rank])
        put(weights, model.weights[comm.rank])
        cuda.synchronize()
        graphs[0].launch(stream)
        comm.synchronize(stream)
        if wire is not None:
            shape = tokens, hidden
            model.x = [coded(each.ravel(), wire).reshape(shape) for each in full]
        model.check_received(experts.received)
        put(results, model.results(experts.received))
        cuda.synchronize()
        more[0].launch(stream)
        comm.synchronize(stream)
        assert get(out).tobytes() == model.sums(comm.rank).tobytes()
    wait_for_all(comm, world)
