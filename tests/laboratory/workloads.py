"""Programs of CuPy and mpi4py, timed: with device arrays, or through the host.

    python workloads.py NAME device|host RESULT

``packages.py`` starts it under mpirun, and puts ``numba_symm.mpi`` in mpi4py's place
for ``device``. This file imports nothing of the library, as other people's programs do.
Rank 0 writes RESULT. Without CuPy, arrays are NumPy's, and small.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from mpi4py import MPI

try:
    import cupy as xp
    from cupyx import empty_pinned
except ImportError:
    xp, empty_pinned = np, np.empty

WORLD = MPI.COMM_WORLD
SMALL = xp is np
ENGINE = "numpy" if SMALL else "cupy"
Step = Callable[[], Any]
"""Does the timed work, and returns what all programs of a name must agree on."""


def wait() -> None:
    """Wait for this rank's stream, as a program does before it calls MPI."""
    if not SMALL:
        xp.cuda.get_current_stream().synchronize()


def to_host(array: Any, host: Any) -> None:
    """Copy a device array to an array on the host."""
    if SMALL:
        host[...] = array
    else:
        array.get(out=host)


def to_device(host: Any, array: Any) -> None:
    """Copy an array on the host to the device."""
    if SMALL:
        array[...] = host
    else:
        array.set(host)


def jacobi(through_host: bool, n: int, synchronize: bool = True) -> Step:
    """Return 100 steps of Jacobi's method, with ``n`` rows of ``n`` on each rank."""
    up = WORLD.rank - 1 if WORLD.rank else MPI.PROC_NULL
    down = WORLD.rank + 1 if WORLD.rank + 1 < WORLD.size else MPI.PROC_NULL
    arrays = [xp.zeros((n + 2, n + 2)) for _ in range(2)]
    for a in arrays:
        a[:, 0] = WORLD.rank + 1
    rows = [empty_pinned(n + 2, "d") for _ in range(4)]
    found, total = xp.zeros(1), xp.zeros(1)

    def exchange(first: Any, last: Any, to_up: Any, to_down: Any) -> None:
        requests = [
            WORLD.Irecv(first, up),
            WORLD.Irecv(last, down),
            WORLD.Isend(to_up, up),
            WORLD.Isend(to_down, down),
        ]
        MPI.Request.Waitall(requests)

    def halo(a: Any) -> None:
        if not through_host:
            if synchronize:
                wait()
            exchange(a[0], a[-1], a[1], a[-2])
            return
        to_host(a[1], rows[2])
        to_host(a[-2], rows[3])
        exchange(*rows)
        if up != MPI.PROC_NULL:
            to_device(rows[0], a[0])
        if down != MPI.PROC_NULL:
            to_device(rows[1], a[-1])

    def change(a: Any, b: Any) -> None:
        found[0] = xp.sum((a - b) ** 2)
        if not through_host:
            if synchronize:
                wait()
            WORLD.Allreduce(found, total)
            return
        local, whole = np.zeros(1), np.zeros(1)
        to_host(found, local)
        WORLD.Allreduce(local, whole)
        to_device(whole, total)

    def step() -> float:
        for i in range(10 if SMALL else 100):
            a, b = arrays
            halo(a)
            inner = b[1:-1, 1:-1]
            xp.add(a[:-2, 1:-1], a[2:, 1:-1], out=inner)
            inner += a[1:-1, :-2]
            inner += a[1:-1, 2:]
            inner *= 0.25
            if i % 10 == 9:
                change(a, b)
            arrays.reverse()
        return float(total[0])

    return step


def fft(through_host: bool, n: int) -> Step:
    """Return a transform of ``n`` by ``n`` by ``n`` elements, forth and back."""
    fftw = ModuleType("mpi4py_fft.fftw")  # compiled; Pencil does not use it
    fftw.aligned, fftw.aligned_like, fftw.fftlib = np.empty, np.empty_like, {}  # type: ignore[attr-defined]
    sys.modules[fftw.__name__] = fftw
    from mpi4py_fft.pencil import Pencil, Subcomm

    shape = n, n, n
    before = Pencil(Subcomm(WORLD, [0, 1, 1]), shape, 1)
    after = before.pencil(0)
    transfer = before.transfer(after, np.dtype("D"))
    size = int(np.prod(before.subshape))
    x = xp.arange(size).reshape(before.subshape) / size + WORLD.rank
    x = x.astype("D")
    y, z = xp.empty(before.subshape, "D"), xp.empty(after.subshape, "D")
    host = [empty_pinned(p.subshape, "D") for p in (before, after)]

    def move(how: Any, source: Any, target: Any, hosts: Any) -> None:
        if not through_host:
            wait()
            how(source, target)
            return
        to_host(source, hosts[0])
        how(*hosts)
        to_device(hosts[1], target)

    def step() -> float:
        y[...] = xp.fft.fftn(x, axes=(1, 2))
        move(transfer.forward, y, z, host)
        z[...] = xp.fft.fft(z, axis=0)
        middle = float(abs(z).sum())
        z[...] = xp.fft.ifft(z, axis=0)
        move(transfer.backward, z, y, host[::-1])
        y[...] = xp.fft.ifftn(y, axes=(1, 2))
        assert float(abs(y - x).max()) < 1e-10
        return float(WORLD.allreduce(middle))

    return step


def cgls(n: int, shared: bool) -> Step:
    """Return ten steps of PyLops-MPI's CGLS for ``n`` unknowns.

    PyLops-MPI itself copies through the host, or does not (PYLOPS_MPI_CUDA_AWARE).

    Args:
        n: the unknowns.
        shared: whether each rank has all unknowns, and data of its own. Otherwise the
            unknowns are divided, and a Laplacian makes the solution smooth.
    """
    import pylops
    import pylops_mpi as pm

    rank, size = WORLD.rank, WORLD.size
    if shared:
        weights = 1 + xp.arange(n) / n + rank
        op = pm.MPIVStack([pylops.Diagonal(weights)])
        kind = pm.Partition.BROADCAST
        data = pm.DistributedArray(global_shape=size * n, engine=ENGINE)
        data[:] = xp.sin(xp.arange(n) * 1e-3) * weights + rank
        start = pm.DistributedArray(global_shape=n, partition=kind, engine=ENGINE)
    else:
        rows = n // 1000 // size  # of each rank
        own = rows * 1000
        weights = 1 + xp.arange(own) / own + rank
        diagonal = pm.MPIBlockDiag([pylops.Diagonal(weights)])
        smooth = pm.MPILaplacian((rows * size, 1000), axes=(0, 1))
        op = pm.MPIStackedVStack([diagonal, 0.1 * smooth])
        given, zeros, start = (
            pm.DistributedArray(global_shape=own * size, engine=ENGINE)
            for _ in range(3)
        )
        given[:] = xp.sin(xp.arange(own) * 1e-3) * weights
        zeros[:] = 0
        data = pm.StackedDistributedArray([given, zeros])
    start[:] = 0

    def step() -> float:
        found = pm.cgls(op, data, x0=start, niter=10, tol=0)
        return float(found[0].norm())

    return step


def timed(step: Step) -> tuple[list[float], Any]:
    """Return the seconds of the slowest rank in each sample, and the last result."""
    result, samples = step(), []
    step()
    for _ in range(5):
        wait()
        WORLD.barrier()
        began = time.perf_counter()
        result = step()
        wait()
        samples.append(WORLD.allreduce(time.perf_counter() - began, MPI.MAX))
    return samples, result


WORKLOADS: dict[str, Callable[[bool], Step]] = {
    "jacobi-1024": lambda host: jacobi(host, 16 if SMALL else 1024),
    "jacobi-4096": lambda host: jacobi(host, 16 if SMALL else 4096),
    "jacobi-1024-no-wait": lambda host: jacobi(host, 16 if SMALL else 1024, False),
    "fft-256": lambda host: fft(host, 8 if SMALL else 256),
    "cgls-shared": lambda host: cgls(2000 if SMALL else 10**7, True),
    "cgls-divided": lambda host: cgls(12_000 if SMALL else 10**7, False),
}


def main(name: str, way: str, result: str) -> None:
    """Run one program on this rank."""
    if not SMALL:
        xp.cuda.Device(WORLD.rank % xp.cuda.runtime.getDeviceCount()).use()
    if way == "host":  # the simulator alone lacks what PyLops passes to cuda.jit
        os.environ.pop("NUMBA_ENABLE_CUDASIM", None)
    samples, found = timed(WORKLOADS[name](way == "host"))
    if WORLD.rank == 0:
        Path(result).write_text(json.dumps({"seconds": samples, "result": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
