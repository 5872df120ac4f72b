"""After ``prepare``, calls of any size neither compile nor load a kernel."""

import numpy as np
from numba import cuda

import numba_symm as ns
from numba_symm.gpu import kernels
from tests.gpu.helpers import to_device

COUNTS = (1, 5, 100, 1 << 10, 1 << 14, (1 << 16) + 3, 1 << 18, 1 << 20, 1 << 22)
COUNTS += ((1 << 23) + 1, 1 << 24, 1 << 25)


def refuse(kernel, *args):
    raise AssertionError(f"{kernel.factory.__qualname__} is compiled or loaded")


def test_calls_after_prepare_load_nothing(world, monkeypatch):
    names = ("all_reduce", "reduce_scatter", "all_to_all", "reduce", "broadcast")
    with ns.Communicator(world, timeout=120) as comm:
        comm.prepare(*names, "sendrecv", "barrier", dtypes=("float32",), ops=("max",))
        loads = kernels._loaded.cache_info().misses
        monkeypatch.setattr(kernels.Kernel, "cubin", refuse)
        for count in COUNTS:
            whole = count * comm.size
            host = np.arange(whole, dtype=np.float32)
            symmetric = comm.empty(whole)
            symmetric.copy_to_device(host)
            for x in (symmetric, to_device(host)):
                reduced = comm.all_reduce(x, op="max")
                part = comm.reduce_scatter(x, op="max")
                comm.all_to_all(x)
                comm.reduce(x[1:], op="max", root=comm.size - 1)
                comm.broadcast(x, root=comm.size - 1)
                right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
                comm.sendrecv(x, dst=right, out=cuda.device_array_like(x), src=left)
            comm.barrier()
            comm.synchronize()
            assert (reduced.copy_to_host() == host).all()
            assert part.shape == (count,)
        assert kernels._loaded.cache_info().misses == loads
