"""Functions for kernels, on GPUs and in Numba's CUDA simulator.

Use them in any ``@cuda.jit`` kernel::

    from numba_symm import device as symm

    @cuda.jit
    def shift(ctx, count):                      # ctx = comm.rendezvous(x).ctx
        right = (ctx.rank + 1) % ctx.size
        there = symm.peer_array(ctx, right, count, np.float32)
        ...
        symm.barrier(ctx, cuda.blockIdx.x)      # every rank's block of this index

The simulator starts the next block of a kernel when all threads that run wait. It runs
at most 1024 threads of a launch together.
"""

from numba_symm.device.barriers import (
    barrier,
    barrier_arrive,
    barrier_wait,
    grid_barrier,
    grid_barrier_arrive,
    grid_barrier_wait,
)
from numba_symm.device.block_collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from numba_symm.device.block_exchange import WorkspaceContext
from numba_symm.device.intrinsics import (
    array_at,
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_exch,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xor,
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
from numba_symm.device.packets import (
    get_packets,
    get_packets_block,
    get_packets_warp,
    mailbox_size,
    put_packets,
    put_packets_block,
    put_packets_warp,
)
from numba_symm.device.polling import Guard
from numba_symm.device.puts import (
    get,
    get_block,
    get_warp,
    put,
    put_block,
    put_warp,
)
from numba_symm.device.signals import (
    EQ,
    GE,
    GT,
    LE,
    LT,
    NE,
    Context,
    peer_address,
    peer_array,
    put_signal,
    put_with_signal,
    signal_add,
    signal_read,
    signal_set,
    test,
    wait_signal,
    wait_until,
    wait_until_at,
)
from numba_symm.device.teams import Team
from numba_symm.environment import SIMULATED

if not SIMULATED:
    from numba_symm.device import gpu_collectives  # noqa: F401  # registers them

__all__ = [
    "EQ",
    "GE",
    "GT",
    "LE",
    "LT",
    "NE",
    "Context",
    "Guard",
    "Team",
    "WorkspaceContext",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "array_at",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_exch",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xor",
    "barrier",
    "barrier_arrive",
    "barrier_wait",
    "broadcast",
    "device_function",
    "fence_acq_rel_sys",
    "get",
    "get_block",
    "get_packets",
    "get_packets_block",
    "get_packets_warp",
    "get_warp",
    "globaltimer",
    "grid_barrier",
    "grid_barrier_arrive",
    "grid_barrier_wait",
    "ld_acquire_sys_u32",
    "ld_acquire_sys_u64",
    "ld_relaxed_sys_u32",
    "ld_relaxed_sys_u64",
    "ld_relaxed_sys_v2_u64",
    "ld_u16",
    "ld_u32",
    "ld_u64",
    "ld_v2_u64",
    "mailbox_size",
    "peer_address",
    "peer_array",
    "put",
    "put_block",
    "put_packets",
    "put_packets_block",
    "put_packets_warp",
    "put_signal",
    "put_warp",
    "put_with_signal",
    "reduce_scatter",
    "signal_add",
    "signal_read",
    "signal_set",
    "st_relaxed_sys_u32",
    "st_relaxed_sys_u64",
    "st_relaxed_sys_v2_u64",
    "st_release_sys_u32",
    "st_release_sys_u64",
    "st_u16",
    "st_u32",
    "st_u64",
    "st_v2_u64",
    "test",
    "wait_signal",
    "wait_until",
    "wait_until_at",
]
