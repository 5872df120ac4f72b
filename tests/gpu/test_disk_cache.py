"""Kernels are compiled once: other ranks and later processes read them from disk."""

import numpy as np

import numba_symm as ns
from numba_symm.gpu.kernels import Kernel
from tests.gpu.helpers import to_device
from tests.spawned import run_ranks


def compile_and_reduce(world, may_compile):
    """Return how many kernels were compiled, and whether they work."""
    compiled = []
    compile_kernel = Kernel.cubin

    def cubin(kernel, cc):
        assert may_compile, f"{kernel.factory.__qualname__} is compiled again"
        compiled.append(kernel)
        return compile_kernel(kernel, cc)

    Kernel.cubin = cubin
    with ns.Communicator(world, timeout=60) as comm:
        x = to_device(np.full(1000, 3, np.int32))
        found = [
            comm.all_reduce(x, algorithm=name)
            for name in ("two_shot_marked", "one_shot_ll")
        ]
        comm.barrier()
        memory = comm.rendezvous(comm.zeros(10))
        memory.barrier()
        comm.synchronize()
        right = 3 * comm.size
        return len(compiled), all((y.copy_to_host() == right).all() for y in found)


def test_a_second_process_compiles_nothing(world, tmp_path):
    if world.rank > 0:  # the others wait after the test
        return
    environ = [{"XDG_CACHE_HOME": str(tmp_path)}]
    # One rank copies; the kernels are of both barriers.
    assert run_ranks(1, compile_and_reduce, True, environ=environ) == [(2, True)]
    assert run_ranks(1, compile_and_reduce, False, environ=environ) == [(0, True)]


def test_the_ranks_of_a_host_compile_each_kernel_once(world, tmp_path):
    if world.rank > 0:
        return
    environ = [{"XDG_CACHE_HOME": str(tmp_path)}] * world.size
    found = run_ranks(world.size, compile_and_reduce, True, environ=environ)
    assert sum(compiled for compiled, _ in found) == (4 if world.size > 1 else 2)
    assert all(right for _, right in found)
