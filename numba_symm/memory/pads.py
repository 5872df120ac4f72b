"""Signal pads: their layout, and the kernels of the host's signals.

A pad has a slot of uint32 and a word of 64 bits for each channel and source (see
``device/signals.py``). Each pair of an allocation and a communicator has its own pad,
so communicators do not share slots.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.device import barriers, signals
from numba_symm.device.intrinsics import fence_acq_rel_sys
from numba_symm.device.signals import CHANNELS, Context
from numba_symm.errors import ArgumentError
from numba_symm.gpu.kernels import GUARD, Kernel

CHANNELS_PER_ARENA = 64 * CHANNELS
"""Channels of the pads in one allocation, because an allocation has at least 2 MiB."""

MOST_CHANNELS = 1 << 16
"""A record of a failure has 16 bits for the channel."""

THREADS = 32


def pad_nbytes(world_size: int, channels: int) -> int:
    """Return the bytes of one pad."""
    return (12 * world_size + 23) // 8 * 8 * channels  # of signals.channel_stride


def context_type(world_size: int) -> Any:
    """Return the Numba type of a :class:`numba_symm.device.Context`."""
    pointers = types.UniTuple(types.int64, world_size)
    scalar = types.int64
    return types.NamedTuple((scalar, scalar, pointers, pointers, GUARD), Context)


def check_channel(channel: int, channels: int, what: str) -> int:
    """Return ``channel``. Raise ArgumentError if it is not a channel."""
    if not isinstance(channel, int) or not 0 <= channel < channels:
        raise ArgumentError(
            f"{what}: expected a channel from 0 to {channels - 1}, got "
            f"{channel!r}; pass a channel of the signal pad"
        )
    return channel


def check_peer(peer: int, world_size: int, what: str, note: str) -> int:
    """Return ``peer``. Raise ArgumentError with the note if it is not a rank."""
    if not isinstance(peer, int) or not 0 <= peer < world_size:
        raise ArgumentError(
            f"{what}: expected a rank from 0 to {world_size - 1}, got {peer!r}{note}"
        )
    return peer


def make_barrier() -> Any:
    """Return the kernel behind ``SymmetricMemory.barrier``."""

    def pad_barrier(ctx: Any, channel: int) -> None:
        barriers.barrier(ctx, channel)

    return pad_barrier


def make_put_signal() -> Any:
    """Return the kernel behind ``SymmetricMemory.put_signal``."""

    def pad_put_signal(ctx: Any, dst: int, channel: int) -> None:
        if cuda.threadIdx.x == 0:  # explore: put
            signals.put_signal(ctx, dst, channel)

    return pad_put_signal


def make_wait_signal() -> Any:
    """Return the kernel behind ``SymmetricMemory.wait_signal``."""

    def pad_wait_signal(ctx: Any, src: int, channel: int) -> None:
        if cuda.threadIdx.x == 0:  # explore: wait
            signals.wait_signal(ctx, src, channel)

    return pad_wait_signal


def make_fence() -> Any:
    """Return the kernel behind ``SymmetricMemory.fence``."""

    def pad_fence() -> None:
        if cuda.threadIdx.x == 0:
            fence_acq_rel_sys()

    return pad_fence


@functools.cache
def barrier_kernel(world_size: int) -> Kernel:
    """Return the barrier's kernel for ``world_size`` ranks."""
    signature = (context_type(world_size), types.int64)
    return Kernel(make_barrier, (), signature, THREADS)


@functools.cache
def put_signal_kernel(world_size: int) -> Kernel:
    """Return put_signal's kernel for ``world_size`` ranks."""
    signature = (context_type(world_size), types.int64, types.int64)
    return Kernel(make_put_signal, (), signature, THREADS)


@functools.cache
def wait_signal_kernel(world_size: int) -> Kernel:
    """Return wait_signal's kernel for ``world_size`` ranks."""
    signature = (context_type(world_size), types.int64, types.int64)
    return Kernel(make_wait_signal, (), signature, THREADS)


@functools.cache
def fence_kernel() -> Kernel:
    """Return the fence's kernel, for any number of ranks."""
    return Kernel(make_fence, (), (), THREADS)
