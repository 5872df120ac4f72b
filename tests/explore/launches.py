"""What is enqueued on streams, and the grids and threads of kernels that run."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from explore.memory import Finding


@dataclass(frozen=True)
class Launch:
    """A kernel of plain device code, with its grid and arguments.

    Attributes:
        kernel: the device code.
        grid: the number of logical blocks.
        args: its arguments.
        is_copy: whether it represents a copy that was enqueued on the stream.
        held: logical blocks of a thread block. The last ones may exceed the grid.
        early: whether it may start while the kernel before it on its stream runs.
    """

    kernel: Callable[..., Any]
    grid: int
    args: tuple[Any, ...]
    is_copy: bool = False
    held: int = 1
    early: bool = False

    def __call__(self, stream: list["Launch"]) -> None:
        """Enqueue it."""
        stream.append(self)


@dataclass(eq=False)
class Mark:
    """An event that is recorded on a stream, after all that precedes it there.

    Attributes:
        known: what had happened before it; None: it is not complete.
    """

    known: list[int] | None = None


@dataclass(frozen=True)
class Follow:
    """What follows on a stream follows a mark of another stream."""

    mark: Mark


Work = Launch | Mark | Follow
"""What is enqueued on a stream."""


class Stream(list[Work]):
    """A stream of a rank besides its first one, for copies and kernels of one block.

    Its methods are those of ``numba_symm.gpu.streams.SideStream``.
    """

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        self.stream = self
        self._marks: dict[int, Mark] = {}

    def follow(self, stream: list[Work], event: int) -> None:
        """Make what follows here follow all work of another stream."""
        self._marks[event] = Mark()
        stream.append(self._marks[event])
        self.append(Follow(self._marks[event]))

    def mark(self, event: int) -> None:
        """Record an event here."""
        self._marks[event] = Mark()
        self.append(self._marks[event])

    def lead(self, stream: list[Work], event: int) -> None:
        """Make what follows on another stream follow an event of this one."""
        stream.append(Follow(self._marks[event]))

    @contextmanager
    def joined(self, stream: list[Work]) -> Iterator[None]:
        """Do nothing: no step of the ``with`` block fails."""
        yield


class Overlap(Exception):
    """A thread has accessed memory while the kernel before its own may be running."""


class _Unordered:
    """The observer of a thread that has not waited for the kernel before its own."""

    def __getattr__(self, name: str) -> Any:
        raise Overlap


class _BeyondTheGrid:
    """The observer of a thread whose logical block is not one of the grid's."""

    def __getattr__(self, name: str) -> Any:
        raise Finding("access", "a block beyond its grid does more than wait")


UNORDERED, BEYOND_THE_GRID = _Unordered(), _BeyondTheGrid()


class Thread:
    """One simulated thread, of one launch."""

    def __init__(self, grid: "Grid", block: int, index: int):
        launch = grid.launch
        self.priority = 0.0
        self.grid = grid
        self.lane = grid.lane
        self.block = block
        self.index = index
        self.thread_block, self.row = divmod(block, launch.held)
        self.thread_blocks = grid.thread_blocks
        self.observer: Any = UNORDERED
        self.code: Generator[int, None, None] = launch.kernel(*launch.args)
        self.follows = False  # whether it waits for the end of the kernel before
        self.at_sync = False
        self.barrier = (0, 0)  # the number of its barrier, and of the threads there
        self.failed = False  # whether a thread of its block has found a failure
        self.has_looked_at_the_clock = False
        self.condition = False  # its argument of bar_red_or or syncthreads_or
        self.conditions = 0  # the threads with one that held there, as bits
        self.done = False
        self.polled_at = -1  # memory.changes when its poll began
        self.asleep_until = 0  # memory.changes at which it wakes


class Grid:
    """A kernel that runs.

    Args:
        launch: its launch.
        lane: the number of its stream.
        threads: threads of a logical block.
        early: whether it starts while the kernel before it may be running.

    Attributes:
        threads: all of its threads.
        blocks: by thread block, its threads.
        left: by thread block, how many of them have not ended.
        not_ready: thread blocks that do not yet permit the next kernel to start.
        before: what had happened before the end of the kernel before it, if this one
            started before that end; None: that is not so, or not yet known.
        second: whether its threads have the second set of observers.
    """

    def __init__(self, launch: Launch, lane: int, threads: int, early: bool):
        self.launch = launch
        self.lane = lane
        self.early = early
        self.second = False
        self.before: list[int] | None = None
        self.thread_blocks = -(-launch.grid // launch.held)
        self.not_ready = set(range(self.thread_blocks))
        self.threads = [
            Thread(self, block, index)
            for block in range(self.thread_blocks * launch.held)
            for index in range(threads)
        ]
        each = launch.held * threads
        self.blocks = [
            self.threads[at : at + each] for at in range(0, len(self.threads), each)
        ]
        self.left = [each] * self.thread_blocks

    @property
    def is_over(self) -> bool:
        """Whether all of its threads have ended."""
        return not any(self.left)
