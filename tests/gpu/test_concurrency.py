"""Communicators side by side, and calls of all kinds one after another."""

import random
import time
from contextlib import ExitStack

import numpy as np
import pytest
from cuda.core import Device
from numba import cuda

import numba_symm as ns
from numba_symm.collectives.operations import ALL_REDUCE
from tests.algorithms import those
from tests.gpu.helpers import add, optional, to_device

MIB = 1 << 20
INTEGERS = ("int32", "int64")
FLOATS = those("all_reduce", lambda made: made.floats)
CHAIN = [name for name in ALL_REDUCE.algorithms if name not in FLOATS]


@pytest.mark.parametrize(
    "algorithms",
    [
        ["one_shot_ll", "chunked", "one_shot_sentinel", "two_shot_marked"],
        ["two_shot_sentinel", "chunked", "two_shot_marked", "one_shot_marked"],
    ],
    ids=", ".join,
)
def test_four_communicators_in_different_orders(world, algorithms):
    """Each rank calls them in its own order, so all four must run simultaneously."""
    with ExitStack() as stack:
        comms = [
            stack.enter_context(ns.Communicator(world, timeout=60)) for _ in range(4)
        ]
        streams = [Device().create_stream() for _ in comms]
        counts = [MIB // 4, 3 * MIB, 1000, 500_000]  # two of them fill their grids
        inputs = [
            to_device(np.full(count, world.rank + 1, np.float32)) for count in counts
        ]
        outputs = [cuda.device_array_like(x) for x in inputs]

        def issue(which):
            comms[which].all_reduce(
                inputs[which],
                out=outputs[which],
                stream=streams[which],
                algorithm=algorithms[which],
            )

        for which in range(4):  # every kernel is loaded
            issue(which)
        cuda.synchronize()
        order = random.Random(world.rank)
        for _ in range(25):
            for which in order.sample(range(4), 4):
                issue(which)
        for comm, stream in zip(comms, streams, strict=True):
            comm.synchronize(stream)
        wanted = world.size * (world.size + 1) / 2
        assert all((y.copy_to_host() == wanted).all() for y in outputs)


def test_children_on_streams_of_their_own_run_simultaneously(comm):
    """Each rank calls its row, its column and all in an order of its own."""
    colors = [comm.rank // 2, comm.rank % 2, 0]
    with ExitStack() as stack:
        children = [stack.enter_context(comm.split(color)) for color in colors]
        streams = [Device().create_stream() for _ in children]
        counts = [MIB // 4, 3 * MIB, 1000]
        algorithms = ["two_shot_sentinel", "chunked", "one_shot_ll"]
        inputs = [
            to_device(np.full(count, comm.rank + 1, np.float32)) for count in counts
        ]
        outputs = [cuda.device_array_like(x) for x in inputs]

        def issue(which):
            children[which].all_reduce(
                inputs[which],
                out=outputs[which],
                stream=streams[which],
                algorithm=algorithms[which],
            )

        for which in range(3):  # every kernel is loaded
            issue(which)
        cuda.synchronize()
        order = random.Random(comm.rank)
        for _ in range(25):
            for which in order.sample(range(3), 3):
                issue(which)
        for child, stream in zip(children, streams, strict=True):
            child.synchronize(stream)
        everyone = range(comm.size)
        wanted = [
            sum(rank + 1 for rank in everyone if rank // 2 == comm.rank // 2),
            sum(rank + 1 for rank in everyone if rank % 2 == comm.rank % 2),
            sum(rank + 1 for rank in everyone),
        ]
        for y, value in zip(outputs, wanted, strict=True):
            assert (y.copy_to_host() == value).all()


@pytest.mark.parametrize("fewer", [0, 7])  # multiprocessors than the default
@pytest.mark.parametrize("number", [2, 4])
def test_communicators_and_a_product_before_each_call(world, number, fewer):
    """A product needs a whole multiprocessor.

    Each rank calls the communicators in an order of its own, with a product before each
    call. So on some rank, a call waits for one that is behind a product elsewhere.
    """
    torch = optional("torch")
    most = None
    if fewer:
        with ns.Communicator(world) as comm:
            most = max(1, comm.multiprocessors - fewer)
    with ExitStack() as stack:
        comms = [
            stack.enter_context(ns.Communicator(world, timeout=8, multiprocessors=most))
            for _ in range(number)
        ]
        torch.cuda.set_device(comms[0].device.ordinal)
        streams = [torch.cuda.Stream() for _ in comms]
        matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
        products = [torch.empty_like(matrix) for _ in comms]
        sizes = 1 << 8, 1 << 14, 1 << 18, 1 << 22
        pairs = [
            [comm.empty((2, size), np.float32) for size in sizes] for comm in comms
        ]

        def call(which, size, step):
            stream, (x, out) = streams[which], pairs[which][size]
            with torch.cuda.stream(stream):
                torch.matmul(matrix, matrix, out=products[which])
                torch.as_tensor(x, device="cuda").fill_(step + world.rank)
            comms[which].all_reduce(x, out=out, stream=stream)

        for which in range(number):  # every kernel is loaded
            for size in range(len(sizes)):
                call(which, size, 0)
                torch.cuda.synchronize()
        own, common = random.Random(world.rank), random.Random(3)
        ranks = sum(range(world.size))
        for step in range(40):
            world.barrier()
            chosen = [common.randrange(len(sizes)) for _ in comms]
            for which in own.sample(range(number), number):
                if own.random() < 0.2:
                    time.sleep(0.02)  # the last call waits for the others by now
                call(which, chosen[which], step)
            for comm, stream in zip(comms, streams, strict=True):
                comm.synchronize(stream)
            for which, size in enumerate(chosen):
                _, out = pairs[which][size]
                assert (out.copy_to_host() == step * world.size + ranks).all()


def test_a_thousand_mixed_calls(comm):
    """Ranks may run ahead of each other, because results are checked last."""
    lot = random.Random(5)
    streams = [None, cuda.stream(), Device().create_stream()]
    inputs = {
        (count, dtype): to_device((np.arange(count) % 5 + comm.rank).astype(dtype))
        for count in (1, 3, 130, 4096, 20_001, 150_000)
        for dtype in ("float16", "float32", "float64", "int32", "int64")
    }
    choices = [None, *ALL_REDUCE.algorithms]
    calls = [
        (
            *lot.choice(list(inputs)),
            lot.choice(["sum", "max", "min"]),
            lot.choice(choices),
        )
        for _ in range(1000)
    ]
    calls = [call for call in calls if not (call[1] in INTEGERS and call[3] in FLOATS)]
    outputs = {call: to_device(np.full(call[0], -1, call[1])) for call in calls}
    for number, call in enumerate(calls):
        count, dtype, op, algorithm = call
        stream = lot.choice(streams)
        if number % 50 == 0:
            comm.barrier(stream=stream)
        comm.all_reduce(
            inputs[count, dtype],
            op=op,
            out=outputs[call],
            stream=stream,
            algorithm=algorithm,
        )
    for stream in streams:
        comm.synchronize(stream)
    for (count, dtype, op, _), y in outputs.items():
        one = np.arange(count) % 5
        ranks = range(comm.size)
        wanted = getattr(np, op)([one + rank for rank in ranks], axis=0)
        assert (y.copy_to_host() == wanted.astype(dtype)).all(), (count, dtype, op)


def test_a_chain_of_calls_that_the_host_never_waits_for(comm):
    x = to_device(np.ones(3000, np.int64))
    wanted = np.ones((), np.int64)
    with np.errstate(over="ignore"):
        for call in range(500):
            algorithm = CHAIN[call % len(CHAIN)]
            comm.all_reduce(x, out=x, algorithm=algorithm)
            add(x, 1)
            wanted = wanted * comm.size + 1
    comm.synchronize()
    assert (x.copy_to_host() == wanted).all()
