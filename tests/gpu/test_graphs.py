"""CUDA graphs: calls are captured once and replayed, with new contents each time."""

import contextlib
import gc

import numpy as np
import pytest
from cuda.bindings import driver as binding
from cuda.core import Device
from numba import cuda

import numba_symm as ns
from numba_symm.collectives.operations import ALL_REDUCE
from numba_symm.gpu import streams
from tests.absence import context_is_alive
from tests.coded import coded_sum
from tests.gates import intercepted
from tests.gpu.helpers import (
    add,
    capturing,
    fill,
    of_ranks,
    to_device,
)
from tests.ranks.helpers import check_works, refused, same

ALGORITHMS = list(ALL_REDUCE.algorithms)


@pytest.fixture
def stream(comm):
    stream = Device().create_stream()
    yield stream
    stream.sync()


@pytest.mark.parametrize("count", [1, 1000, 300_001])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hundred_replays_with_new_inputs(comm, stream, algorithm, count):
    x = to_device(np.full(count, comm.rank, np.float64))
    y = cuda.device_array_like(x)
    comm.all_reduce(x, out=y, stream=stream, algorithm=algorithm)
    add(x, 0, stream)  # compiled
    with capturing(stream) as (builder, graphs):
        add(x, 1, builder.stream)
        comm.all_reduce(x, out=y, stream=builder.stream, algorithm=algorithm)
    first = comm.size * (comm.size - 1) // 2
    for replay in range(1, 101):
        graphs[0].launch(stream)
        if replay in (1, 2, 3, 50, 100):
            comm.synchronize(stream)
            assert (y.copy_to_host() == first + comm.size * replay).all()


def test_several_calls_in_a_graph_and_others_between_replays(comm, stream):
    """Sizes, dtypes and algorithms may follow one another, eager or replayed."""
    kinds = [
        (10, np.int64, "one_shot_ll"),
        (200_000, np.float32, "one_shot_sentinel"),
        (200_000, np.float32, "one_shot_marked"),
        (5001, np.int32, "two_shot_marked"),
        (77, np.float64, "two_shot_sentinel"),
        (300_000, np.float32, "chunked"),
        (8192, np.float32, "direct"),
        (64 << 10, np.float32, None),
    ]
    inputs = [to_device(np.full(n, comm.rank, dtype)) for n, dtype, _ in kinds]
    outputs = [cuda.device_array_like(x) for x in inputs]
    aside = to_device(np.full(3000, comm.rank + 1, np.float32))
    for x in inputs:
        add(x, 0, stream)  # compiled
    plan = comm.all_reduce_init(inputs[0], out=outputs[0], stream=stream)
    with capturing(stream) as (builder, graphs):
        on = builder.stream
        for x, y, (_, _, algorithm) in zip(inputs, outputs, kinds, strict=True):
            add(x, 1, on)
            comm.all_reduce(x, out=y, stream=on, algorithm=algorithm)
            comm.barrier(stream=on)
            comm.all_reduce(y, op="max", out=y, stream=on)
    first = comm.size * (comm.size - 1) // 2
    for replay in range(1, 31):
        graphs[0].launch(stream)
        if replay % 3 == 0:
            found = [
                comm.all_reduce(aside, stream=stream, algorithm=name)
                for name in ALGORITHMS
            ]
            comm.synchronize(stream)
            assert all((each.copy_to_host() == of_ranks(comm)).all() for each in found)
            for y in outputs:
                assert (y.copy_to_host() == first + comm.size * replay).all()
            plan()
    comm.synchronize(stream)
    assert (outputs[0].copy_to_host() == first + comm.size * 30).all()


def test_arrays_with_gaps_and_short_messages_in_a_graph(comm, stream):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    cells = to_device(np.full(64 * 6, comm.rank, np.float32))
    field = cells.reshape(64, 6)
    count = to_device(np.zeros(1, np.int64))
    large = to_device(np.zeros(1 << 20, np.float32))
    gaps = large[::2]

    def step(on):
        ring = {"dst": right, "src": left, "out": field[:, 0]}
        comm.sendrecv(field[:16, 1], **ring, count=count, stream=on)
        comm.all_reduce(field[:, 2], out=field[:, 3], stream=on)

    add(cells, 0, stream)  # compiled
    step(stream)  # allocates the staging memory
    with capturing(stream) as (builder, graphs):
        add(cells, 1, builder.stream)
        step(builder.stream)
        with pytest.raises(ns.ArgumentError, match="whose size has been used before"):
            comm.all_reduce(gaps, out=gaps, stream=builder.stream)
    for replay in range(1, 6):
        graphs[0].launch(stream)
        comm.all_reduce(large[::3], stream=stream)  # takes more memory
        comm.synchronize(stream)
        found = field.copy_to_host()
        assert (found[:16, 0] == left + replay).all()
        assert (found[16:, 0] == comm.rank + replay).all()
        assert (found[:, 1] == comm.rank + replay).all()
        total = comm.size * (comm.size - 1) // 2 + comm.size * replay
        assert (found[:, 3] == total).all()
        assert count.copy_to_host()[0] == 16


def test_a_sum_by_codes_in_a_graph(comm, stream):
    def inputs(replay):
        return [
            np.random.default_rng([replay, rank]).standard_normal(4099).astype("f4")
            for rank in range(comm.size)
        ]

    x, out = to_device(inputs(0)[comm.rank]), to_device(np.zeros(4099, np.float32))
    large = to_device(np.zeros(1 << 22, np.float32))
    comm.all_reduce(x, out=out, wire="int8", stream=stream)  # compiled, and allocates
    with capturing(stream) as (builder, graphs):
        comm.all_reduce(x, out=out, wire="int8", stream=builder.stream)
        with pytest.raises(ns.ArgumentError, match="a size that has been made before"):
            comm.all_reduce(large, out=large, wire="int8", stream=builder.stream)
    for replay in range(1, 4):
        x.copy_to_device(inputs(replay)[comm.rank])
        cuda.default_stream().synchronize()  # the copy may end after the call
        graphs[0].launch(stream)
        comm.all_reduce(large, out=large, wire="int8", stream=stream)  # more memory
        comm.synchronize(stream)
        assert same(out.copy_to_host(), coded_sum(inputs(replay), "int8"))


def square(value, kept):
    return (value + kept) * (value + kept)


def share(value, total, kept):
    return (value + kept) / total, value + kept


def test_epilogues_in_a_graph(comm, stream):
    """A residual that each replay updates, in one kernel and in two."""
    shape, first = (3, 64), comm.size * (comm.size - 1) // 2
    x = to_device(np.full(shape, comm.rank, np.float32))
    calls = []
    for algorithm in ("one_shot_ll", "chunked"):
        kept, y = to_device(np.zeros(shape, np.float32)), to_device(np.zeros(shape))
        given = {"epilogue": share, "row_sum": square, "args": (kept,)}
        calls.append({"out": (y, kept), "algorithm": algorithm} | given)
        comm.all_reduce(x, stream=stream, **calls[-1])  # compiled, and allocates
    flat = x.ravel()
    add(flat, 0, stream)  # compiled
    with capturing(stream) as (builder, graphs):
        add(flat, 1, builder.stream)
        for call in calls:
            comm.all_reduce(x, stream=builder.stream, **call)
    wanted = first
    for replay in range(1, 11):
        graphs[0].launch(stream)
        wanted += first + comm.size * replay
        if replay in (1, 2, 10):
            comm.synchronize(stream)
            for y, kept in (call["out"] for call in calls):
                assert (kept.copy_to_host() == wanted).all()
                # Of 64 equal elements; all numbers are exact in float32.
                one = np.float32(wanted) / np.float32(64 * wanted * wanted)
                assert (y.copy_to_host() == one).all()


@pytest.mark.parametrize("mode", ["relaxed", "thread_local", "global"])
def test_a_kernel_may_be_captured_that_never_ran(comm, stream, mode):
    op = {"relaxed": "prod", "thread_local": "min", "global": "max"}[mode]
    wanted = {"prod": 2**comm.size, "min": 2, "max": 2}[op]
    x = to_device(np.full(100, 2, np.int32))
    y = cuda.device_array_like(x)
    with capturing(stream, mode) as (builder, graphs):
        comm.all_reduce(x, op=op, out=y, stream=builder.stream)
    graphs[0].launch(stream)
    comm.synchronize(stream)
    assert (y.copy_to_host() == wanted).all()


def test_calls_on_the_branches_of_a_capture_are_ordered(comm, stream):
    inputs = [to_device(np.full(5000, comm.rank, np.float32)) for _ in range(2)]
    outputs = [cuda.device_array_like(x) for x in inputs]
    add(inputs[0], 0, stream)  # compiled
    builder = stream.create_graph_builder().begin_building()
    branches = builder.split(2)
    for _ in range(3):
        for branch, x, y in zip(branches, inputs, outputs, strict=True):
            add(x, 1, branch.stream)
            comm.all_reduce(x, out=y, stream=branch.stream)
    joined = type(builder).join(*branches)
    graph = joined.end_building().complete()
    for _ in range(10):
        graph.launch(stream)
    comm.synchronize(stream)
    wanted = comm.size * (comm.size - 1) // 2 + comm.size * 30
    assert all((y.copy_to_host() == wanted).all() for y in outputs)


@pytest.mark.parametrize("algorithm", ["direct", "chunked"])
def test_captures_may_take_turns_with_each_other_and_with_eager_calls(comm, algorithm):
    """Each capture orders its own calls, on streams that no other work uses."""
    count = 4096 * comm.size
    streams = [Device().create_stream() for _ in range(4)]
    x, y = comm.empty(count), comm.empty(count)
    outputs = [comm.empty(count) for _ in range(2)]
    fill(x, comm.rank + 1)
    comm.all_reduce(x, out=y, algorithm=algorithm)
    comm.synchronize()
    builders = [each.create_graph_builder().begin_building() for each in streams[:2]]
    branches = [builder.split(2) for builder in builders]
    for turn in range(3):
        for split, out in zip(branches, outputs, strict=True):
            stream = split[turn % 2].stream
            comm.all_reduce(x, out=out, stream=stream, algorithm=algorithm)
        fill(y, 0, streams[2])
        comm.all_reduce(x, out=y, stream=streams[2], algorithm=algorithm)
        comm.synchronize(streams[2])
        assert (y.copy_to_host() == of_ranks(comm)).all()
    graphs = []
    for split in branches:
        graphs.append(type(split[0]).join(*split).end_building().complete())
    for _ in range(10):
        for graph, out in zip(graphs, outputs, strict=True):
            fill(out, 0, streams[3])
            graph.launch(streams[3])
    comm.synchronize(streams[3])
    for out in outputs:
        assert (out.copy_to_host() == of_ranks(comm)).all()


def test_a_builder_with_a_stream_of_its_own_may_be_closed(comm, stream):
    x = to_device(np.full(1000, comm.rank + 1, np.float32))
    y = cuda.device_array_like(x)
    builder = Device().create_graph_builder().begin_building()
    comm.all_reduce(x, out=y, stream=builder)
    graph = builder.end_building().complete()
    builder.close()
    for _ in range(3):
        graph.launch(stream)
        stream.sync()
        z = comm.all_reduce(x)
        comm.synchronize()
        assert (y.copy_to_host() == of_ranks(comm)).all()
        assert (z.copy_to_host() == of_ranks(comm)).all()


def test_a_capture_needs_an_output(comm, world, stream):
    x = comm.zeros(1000)
    with capturing(stream) as (builder, graphs):
        refused(
            world,
            ns.ArgumentError,
            lambda: comm.all_reduce(x, stream=builder.stream),
            "out=",
            "captur",
        )
        comm.all_reduce(x, out=x, stream=builder.stream)
    graphs[0].launch(stream)
    comm.synchronize(stream)


@pytest.mark.parametrize("mode", ["relaxed", "thread_local", "global"])
def test_memory_cannot_be_allocated_during_a_capture(comm, world, stream, mode):
    """It is refused on all ranks, and invalidates only the capture."""
    check_works(comm)
    builder = stream.create_graph_builder().begin_building(mode)
    try:
        comm.empty(1000)
        outcome = "no error"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # CUDA gives the capture up
        builder.end_building()
    binding.cuStreamEndCapture(int(builder.stream.handle))  # if that did not end it
    everyone = world.allgather(outcome)
    assert all("captur" in text and "Error: " in text for text in everyone), everyone
    assert context_is_alive()
    check_works(comm)
    assert comm.zeros(10).copy_to_host().tolist() == [0] * 10


@pytest.mark.parametrize("mode", ["relaxed", "thread_local", "global"])
def test_a_communicator_may_be_dropped_during_a_capture(comm, world, stream, mode):
    """The garbage collector may run at any moment; it waits for no GPU."""
    x = to_device(np.full(100, comm.rank + 1, np.float32))
    y = cuda.device_array_like(x)
    comm.all_reduce(x, out=y, stream=stream)
    lost = ns.Communicator(world, timeout=60)
    check_works(lost)
    lost.itself, lost.kept = lost, lost.zeros(10)
    world.barrier()  # the ranks wait for each other there no more
    with capturing(stream, mode) as (builder, graphs):
        del lost
        with pytest.warns(ResourceWarning, match="was not closed"):
            gc.collect()
        comm.all_reduce(x, out=y, stream=builder.stream)
    y.copy_to_device(np.zeros(100, np.float32))
    cuda.synchronize()  # a copy from pageable memory returns before it has arrived
    graphs[0].launch(stream)
    comm.synchronize(stream)
    assert (y.copy_to_host() == of_ranks(comm)).all()
    assert context_is_alive()
    with ns.Communicator(world, timeout=60) as another:  # unmaps the lost one's memory
        check_works(another)
    assert not streams._queue.steps
    check_works(comm)


def test_a_call_that_fails_in_a_capture_spoils_nothing_but_that(comm, world, stream):
    """That rank gets no graph. The others' graphs need it, so they may be dropped."""
    if comm.size == 1:
        pytest.skip("one rank has one launch")
    # Of two ranks, only copy engines work on the ranks' own arrays.
    algorithm = "direct" if comm.size > 2 else "copy_engine"
    x = comm.zeros(10_000)
    fill(x, comm.rank + 1)
    comm.broadcast(x, algorithm=algorithm, stream=stream)
    last = comm.rank == comm.size - 1
    left = [1]

    def second_fails():
        if left[0] == 0:
            raise ns.DriverError("out of resources")
        left[0] -= 1

    builder = stream.create_graph_builder().begin_building()
    try:
        act = second_fails if last else lambda: None
        with intercepted(comm, "cuLaunchKernelEx", act):
            comm.broadcast(x, algorithm=algorithm, stream=builder.stream)
        outcome = "captured"
    except ns.DriverError as error:
        outcome = str(error)
    try:
        builder.end_building()
    except Exception as error:
        outcome += f"; {error}"
    binding.cuStreamEndCapture(int(builder.stream.handle))  # if that did not end it
    *others, own = world.allgather(outcome)
    assert set(others) <= {"captured"}
    assert own.startswith("out of resources; "), own
    comm.check()
    assert context_is_alive()
    check_works(comm)
    # Under another name, because a builder ends its capture when it is dropped.
    with capturing(stream) as (again, graphs):
        comm.broadcast(x, algorithm=algorithm, stream=again.stream)
    graphs[0].launch(stream)
    comm.synchronize(stream)
    assert (x.copy_to_host() == 1).all()
