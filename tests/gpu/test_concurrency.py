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
