"""The symmetric memory that a communicator's kernels work in.

One allocation a rank, zeroed before any peer can see it, with separate state for
each protocol, so that calls of any size and algorithm may follow one another,
eager or replayed. A slot's address follows from (protocol, block, parity, source,
thread) and never from a message's size or alignment.
"""

from dataclasses import dataclass
from typing import Any

from numba.cuda import types

from numba_symm.environment import SIMULATED
from numba_symm.kernels import GUARD

THREADS = 8 if SIMULATED else 512
"""Threads a block in every protocol: part of the slots' addresses, so a constant.
The simulator's threads are operating-system threads; a few show every race."""

MAX_BLOCKS = 4 if SIMULATED else 64
"""Most blocks of one call; an agreed grid may be smaller on small GPUs."""

PACKET = 16
"""Bytes of an LL packet: 8 of data, and a 4-byte flag beside each 4 of them."""

PULL_VECTORS = (16 if SIMULATED else 2) * THREADS
"""16-byte vectors a block stages at a time in the pull protocol."""

_LINE = 128  # regions begin on cache lines of their own


@dataclass(frozen=True)
class Layout:
    """Byte offsets of each protocol's state in a workspace of ``size`` ranks.

    ``*_epochs`` hold one uint32 a block, written by its own rank only: how many
    rounds the block has finished. ``*_flags`` hold one uint32 for each block and
    source rank, written by that source.
    """

    size: int
    barrier_epochs: int
    barrier_flags: int
    pull_epochs: int
    pull_flags: int
    pull_slots: int
    ll_epochs: int
    ll_slots: int
    nbytes: int


def layout(size: int) -> Layout:
    """Return the layout for ``size`` ranks."""
    flags = 4 * MAX_BLOCKS * size
    regions = {
        "barrier_epochs": 4,
        "barrier_flags": 4 * size,
        "pull_epochs": 4 * MAX_BLOCKS,
        "pull_flags": flags,
        "pull_slots": MAX_BLOCKS * 2 * PULL_VECTORS * 16,
        "ll_epochs": 4 * MAX_BLOCKS,
        "ll_slots": MAX_BLOCKS * 2 * size * THREADS * PACKET,
    }
    offsets: dict[str, Any] = {}
    end = 0
    for name, nbytes in regions.items():
        offsets[name] = end
        end += -(-nbytes // _LINE) * _LINE
    return Layout(size=size, nbytes=end, **offsets)


def reduction_types(size: int) -> tuple[Any, ...]:
    """Return the types of the arguments that all reducing kernels begin with."""
    address = types.int64
    workspaces = types.UniTuple(address, size)
    array = (address, types.boolean)
    return (GUARD, workspaces, address, *array, *array, types.int64)


def reduction_arguments(
    comm: Any, source: int, target: int, count: int, alignment: int
) -> tuple[Any, ...]:
    """Return those arguments: guard, workspaces, own one, input, output, count.

    Each array is its address and whether that is a multiple of ``alignment`` bytes.
    """
    addresses = comm.workspace.addresses
    return (
        comm.guard,
        addresses,
        addresses[comm.rank],
        source,
        source % alignment == 0,
        target,
        target % alignment == 0,
        count,
    )


def divide_up(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)
