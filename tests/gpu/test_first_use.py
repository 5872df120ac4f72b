"""Kernels that are loaded while others wait for their peers.

The driver loads a kernel when the GPU has nothing to do: seen with driver 580, a kernel
that was running for 20 s made a first call wait for 20 s. So plans are made beforehand.
The types here are those of no other test in this folder, so nothing is loaded yet.
"""

from contextlib import ExitStack

import numpy as np
import pytest
from cuda.core import Device
from numba import cuda

import numba_symm as ns
from tests.gpu.helpers import to_device

LOADING = pytest.mark.xfail(
    raises=ns.CollectiveTimeout,
    strict=True,
    reason="each rank loads a kernel while another waits for its peer",
)


@pytest.mark.parametrize("planned", [pytest.param(False, marks=LOADING), True])
def test_two_communicators_are_first_used_in_opposite_orders(world, planned):
    if world.size == 1:
        pytest.skip("needs a peer to wait for")
    with ExitStack() as stack:
        comms = [
            stack.enter_context(ns.Communicator(world, timeout=10)) for _ in range(2)
        ]
        streams = [Device().create_stream() for _ in comms]
        types = ("int16", "int8") if planned else ("uint16", "uint8")
        inputs = [to_device(np.ones(7000, dtype)) for dtype in types]
        outputs = [cuda.device_array_like(x) for x in inputs]

        def plan(which):
            args = {"out": outputs[which], "stream": streams[which]}
            return comms[which].all_reduce_init(inputs[which], op="bxor", **args)

        plans = [plan(which) for which in range(2)] if planned else []
        world.barrier()
        for which in (0, 1) if world.rank % 2 else (1, 0):
            (plans[which] if planned else plan(which))()
        for comm, stream in zip(comms, streams, strict=True):
            comm.synchronize(stream)
        assert all((y.copy_to_host() == world.size % 2).all() for y in outputs)
