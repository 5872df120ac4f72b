"""Functions for kernels, on GPUs and in Numba's CUDA simulator.

Use them in any ``@cuda.jit`` kernel::

    from numba_symm import device as symm

    @cuda.jit
    def shift(ctx, count):                      # ctx = comm.rendezvous(x).ctx
        right = (ctx.rank + 1) % ctx.world_size
        there = symm.peer_array(ctx, right, count, np.float32)
        ...
        symm.barrier(ctx, cuda.blockIdx.x)      # every rank's block of this index

The simulator starts the next block of a kernel when all threads that run wait. It runs
at most 1024 threads of a launch together.
"""

from numba_symm.device.intrinsics import (
    array_at,
    device_function,
    fence_acq_rel_sys,
    globaltimer,
    ld_acquire_sys_u32,
    ld_acquire_sys_u64,
    ld_relaxed_sys_u32,
    ld_relaxed_sys_u64,
    ld_relaxed_sys_v2_u64,
    ld_u16,
    ld_u32,
    ld_u64,
    ld_v2_u64,
    st_relaxed_sys_u32,
    st_relaxed_sys_u64,
    st_relaxed_sys_v2_u64,
    st_release_sys_u32,
    st_release_sys_u64,
    st_u16,
    st_u32,
    st_u64,
    st_v2_u64,
)
from numba_symm.device.polling import Guard
from numba_symm.device.signals import (
    Context,
    barrier,
    peer_address,
    peer_array,
    put_signal,
    wait_signal,
)

__all__ = [
    "Context",
    "Guard",
    "array_at",
    "barrier",
    "device_function",
    "fence_acq_rel_sys",
    "globaltimer",
    "ld_acquire_sys_u32",
    "ld_acquire_sys_u64",
    "ld_relaxed_sys_u32",
    "ld_relaxed_sys_u64",
    "ld_relaxed_sys_v2_u64",
    "ld_u16",
    "ld_u32",
    "ld_u64",
    "ld_v2_u64",
    "peer_address",
    "peer_array",
    "put_signal",
    "st_relaxed_sys_u32",
    "st_relaxed_sys_u64",
    "st_relaxed_sys_v2_u64",
    "st_release_sys_u32",
    "st_release_sys_u64",
    "st_u16",
    "st_u32",
    "st_u64",
    "st_v2_u64",
    "wait_signal",
]
