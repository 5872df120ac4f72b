"""Enqueues the launches of calls and of open groups, and handles their failures."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from numba_symm import profiling, streams
from numba_symm.collectives.call_streams import HeldStream
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.transfers import Pending
from numba_symm.errors import ArgumentError, ClosedError, CollectiveError
from numba_symm.members import Members
from numba_symm.record import Description
from numba_symm.streams import StreamOrder

REFUSALS = (ArgumentError, ClosedError, CollectiveError)
"""Errors before anything is enqueued, after which other calls may follow."""


class Enqueuer:
    """Enqueues the calls of a communicator.

    Args:
        members: the ranks.
        order: orders the calls of all streams.
        memory: an object that keeps all memory of the communicator that an engine
            between islands may access in a call.

    Attributes:
        order: the same.
        record: the record of calls; None: they are not recorded.
        marks: ranges for a profiler; None: there is none.
        group: the calls of the group that is open, or None.
    """

    def __init__(self, members: Members, order: StreamOrder, memory: object):
        self.order = order
        self.group: Pending | None = None
        self._members = members
        self._memory = memory
        self.record = members.board.record
        self.marks = profiling.marks()

    def run(
        self, about: Description, launch: Enqueue | None, stream: HeldStream, *keep: Any
    ) -> None:
        """Enqueue a call, or add it to the open group.

        If this raises, the communicator fails, because other ranks may have enqueued
        their part of the call. If all streams are in captures, these become invalid,
        and the communicator fails only if an engine between islands has raised.

        Args:
            about: what the call is.
            launch: enqueues the call; None: a call without elements.
            stream: the stream to enqueue it on.
            keep: objects that must live until it is enqueued.
        """
        if self.group is not None:
            self.group.kept += keep
            self.group.launches.append((about, launch, stream))
        elif launch is None:
            self.note(about, stream[0])
        else:
            handle = stream[0]
            try:
                trail = self.order.enter(handle)
                if self.marks is not None:
                    self.marks.push(str(about))
                try:
                    if self.record is not None:
                        if trail.captured:
                            self.record.note_captured(about, handle)
                        else:
                            self.record.note(about, handle)
                    launch(handle)
                finally:
                    trail.leave()
                    if self.marks is not None:
                        self.marks.pop()
            except BaseException as error:
                if self._members.engine is not None:
                    self._members.engine.keep(self._memory, *keep)
                self.give_up(error, about.what, handle)
                raise

    def note(self, about: Description, handle: int) -> None:
        """Record a call that is enqueued elsewhere, or that enqueues nothing."""
        if self.record is not None and not streams.is_capturing(handle):
            self.record.note(about, handle)

    @contextmanager
    def tagged(self, text: str) -> Iterator[None]:
        """Name the calls within the block, in the record and for a profiler."""
        with ExitStack() as block:
            if self.record is not None:
                block.enter_context(self.record.tagged(text))
            if self.marks is not None:
                self.marks.push(text)
                block.callback(self.marks.pop)
            yield

    def give_up_unless_refused(self, error: BaseException, what: str) -> None:
        """Make the communicator fail after an error before anything was enqueued.

        It does not fail after an argument error, because the rank may repeat the call.
        """
        if not isinstance(error, REFUSALS):
            self.give_up(error, what)

    def give_up(self, error: BaseException, what: str, *stream_handles: int) -> None:
        """Make the communicator fail after an error within a call.

        It does not fail if all streams of the call are in captures. These captures are
        invalidated, so no graph contains a part of the call.
        """
        spoiled = [streams.spoil_capture(handle) for handle in stream_handles]
        if not (spoiled and all(spoiled)):
            self._members.abandon(error, what)

    def refuse_in_group(self, what: str) -> None:
        """Refuse a call that is impossible before the calls of a group have started."""
        if self.group is not None:
            raise ArgumentError(f"{what}: a group is open; leave its with block first")

    def forget(self) -> None:
        """Drop references to memory and streams, before these are released."""
        self.order.close()
        self.record = None
        self._memory = None
