"""The binding of a kernel to a call: a rank's end, the arguments, and the launch."""

import functools
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, cast

from numba.cuda import types

from numba_symm.collectives.protocols.workspace import (
    HELD,
    REGISTERS,
    THREADS,
    divide_up,
)
from numba_symm.dtypes import Element, Op, UserOperator, element
from numba_symm.gpu.kernels import GUARD, Kernel, Launch

P = ParamSpec("P")

ADDRESS = types.int64

RING = types.UniTuple
"""Stands for an address for each rank of the ring in ``make_kernel``."""

Enqueue = Callable[[int], None]
"""Enqueues a packed call on the stream of that handle."""


class Place(Protocol):
    """The addresses of an array on all ranks, if all ranks pass the same one.

    Attributes:
        addresses: by rank, at which address this rank sees that rank's array.
        seen: by rank, at which address that rank sees this rank's array.
    """

    @property
    def addresses(self) -> tuple[int, ...]: ...

    @property
    def seen(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, eq=False)
class Endpoint:
    """One rank's end of a communicator, as kernels need it.

    Attributes:
        rank: this rank.
        size: number of ranks.
        guard: the deadline and the status board of kernels' waits.
        workspaces: by rank, at which address this rank sees that rank's workspace.
        max_blocks: most blocks of a call, agreed on by all ranks.
        multiprocessors: most thread blocks that are resident at a time, and so the most
            multiprocessors that they occupy; agreed on by all ranks.
        place: ``(address, nbytes)`` returns the place of symmetric memory, or None.
        order: the communicator's ``StreamOrder``, for algorithms with a side stream.
        choices: the limits of algorithms, by operation, as ``select.fastest`` takes
            them; agreed on by all ranks.
    """

    rank: int
    size: int
    guard: Any
    workspaces: tuple[int, ...]
    max_blocks: int
    multiprocessors: int
    place: Callable[[int, int], Place | None]
    order: Any
    choices: Any


@dataclass(frozen=True)
class Call:
    """The arguments of a call, as algorithms need them.

    All but the addresses are equal on all ranks. Grid and slots follow from that alone.

    Attributes:
        source: address of the input, on this rank.
        target: address of the output, which may be ``source``; 0: this rank has none.
        count: number of elements, at least 1: those of one shard, if the input or the
            output has a shard for each rank.
        element: their type.
        op: the operator; any, if the operation has none.
        root: the root, if the operation has one.
    """

    source: int
    target: int
    count: int
    element: Element
    op: Op
    root: int = 0

    @property
    def vectors(self) -> int:
        """How many vectors hold ``count`` elements."""
        return -(-self.count // self.element.lanes)

    @property
    def nbytes(self) -> int:
        """How many bytes ``count`` elements take."""
        return self.count * self.element.itemsize


Bind = Callable[[Endpoint, Call], Enqueue]
"""Packs an algorithm for a call."""

BindFallback = Callable[[Endpoint, Call, int], Enqueue]
"""Packs the third launch of a call with a handshake (``handshake.py``).

The third argument is the number in ``launch/failures.py`` of what the ranks wait for.
"""


class Carried:
    """How a reduction's elements are carried between the steps of a call.

    Steps are within islands and between them, or over leaves and over ranks.

    Attributes:
        call: the call.
        element: the type of partial results: that in which the call's elements
            accumulate, unless a narrower one gives the same bits.
        op: the operator of the steps; an average is a sum until it is finished.
    """

    def __init__(self, call: Call):
        self.call = call
        kind, op = call.element, call.op
        wide = kind.floating or op == "avg" or isinstance(op, UserOperator)
        self.element = kind
        if wide and kind.accumulate != kind.dtype:
            self.element = element(kind.accumulate, "carried")
        self.op: Op = "sum" if op == "avg" else op

    @property
    def width(self) -> int:
        """Bytes of a carried element."""
        return self.element.itemsize

    def step(self, source: int, target: int, count: int, root: int = 0) -> Call:
        """Return the call of a step that reduces carried elements."""
        return Call(source, target, count, self.element, self.op, root)


class Series:
    """Calls that are enqueued one after another.

    Attributes:
        calls: the same.
    """

    def __init__(self, *calls: Enqueue):
        self.calls = calls

    def __call__(self, stream: int) -> None:
        """Enqueue all."""
        for call in self.calls:
            call(stream)


def digest_of(call: str) -> int:
    """Return the digest of a call in words; it must be equal on all ranks."""
    return zlib.crc32(call.encode())


def make_kernel(
    factory: Callable[..., Any],
    constants: tuple[Any, ...],
    arguments: tuple[Any, ...] = (),
    weight: int = 1,
    threads: int = THREADS,
) -> Kernel:
    """Return a collective's kernel; ``constants`` begin with the number of ranks.

    Its function takes what ``launch`` passes, then ``arguments`` of those types, and
    calls ``follow_previous_grid`` first. A thread uses ``weight`` times the registers
    of most kernels', and a thread block holds ``weight`` times fewer blocks, of
    ``threads`` threads.
    """
    size = constants[0]
    ring = types.UniTuple(ADDRESS, max(1, size - 1))
    common = (GUARD, types.boolean, ring, ADDRESS, types.int64)
    own = (ring if each is RING else each for each in arguments)
    signature = *common, *own
    held = max(1, HELD * THREADS // (threads * weight))
    return Kernel(factory, constants, signature, threads, held, weight * REGISTERS)


def kernels_of(factory: Callable[P, Any], *arguments: Any) -> Callable[P, Kernel]:
    """Return the function that returns a factory's kernel for its constants.

    Its kernels have the same arguments, whatever the constants; see ``make_kernel``.
    """

    @functools.cache
    @functools.wraps(factory)
    def kernel(*constants: Hashable) -> Kernel:
        return make_kernel(factory, constants, arguments)

    return cast(Callable[P, Kernel], kernel)


SMALL = 2
"""Blocks in a thread block, up to which an early launch of a kernel that does not wait
is faster than one on all multiprocessors."""

EARLY_VECTORS = 2
"""The most vectors of a thread in a grid that has fewer blocks in order to be early.

An early launch saves about 1 µs, which is how long a second vector takes.
"""


def most_blocks(
    end: Endpoint, most: int, held: int, tiles: int, vectors: int = EARLY_VECTORS
) -> int:
    """Return the most blocks of a call: fewer than possible, if that makes it early.

    Args:
        end: this rank's end.
        most: for how many blocks there are slots and multiprocessors.
        held: blocks of a thread block.
        tiles: those of the message.
        vectors: the most of a thread in a grid that has fewer blocks to be early.
    """
    early = min(most, held * (end.multiprocessors // 2))
    sent = tiles * max(1, end.size - 1)
    return early if 0 < sent <= vectors * early else most


def launch(
    kernel: Kernel,
    end: Endpoint,
    grid: int,
    arguments: tuple[Any, ...] = (),
    follows: bool = False,
    waits: bool = True,
    long: bool = False,
) -> Launch:
    """Pack a launch: guard, whether it is early, ring, own workspace, grid, arguments.

    The ring is the other ranks' workspaces, from the next rank on, so that the ranks
    do not all access the same one first.

    An early grid is launched while the one before it still runs, so each takes at most
    half of the endpoint's multiprocessors. A thread block holds as few blocks as that
    allows; if it cannot hold enough, the grid is not early.

    A kernel that waits for no rank may take all multiprocessors, unless it is early:
    then it waits for the grid before it. It is early if it is small.

    Args:
        kernel: the kernel.
        end: this rank's end.
        grid: the number of blocks.
        arguments: the kernel's own arguments.
        follows: whether it is launched by blocks of a grid of the same call, of which
            all thread blocks are running on all ranks. Then it may be early and take
            all.
        waits: whether it waits for other ranks.
        long: whether it gains more from all multiprocessors than from an early start.
    """
    most = end.multiprocessors // 2
    early = (
        not long and grid <= (kernel.held if waits else min(kernel.held, SMALL)) * most
    )
    held = divide_up(grid, most if early else end.multiprocessors)
    if not waits and not early:
        held = 1
    own = end.workspaces[end.rank]
    ring = along_ring(end.rank, end.workspaces) or (own,)
    args = (end.guard, early, ring, own, grid, *arguments)
    held = min(held, kernel.held)
    return kernel.bind(grid, *args, held=held, early=early or follows)


def along_ring(rank: int, by_rank: tuple[int, ...]) -> tuple[int, ...]:
    """Return the entries of the other ranks, from the one after ``rank`` on."""
    return (*by_rank[rank + 1 :], *by_rank[:rank])
