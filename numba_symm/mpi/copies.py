"""Copies of messages to their arrays, on a stream of their own."""

from typing import Any

import numpy as np

from numba_symm import streams
from numba_symm.environment import SIMULATED
from numba_symm.events import Event
from numba_symm.mpi import packing
from numba_symm.mpi.buffers import Items
from numba_symm.own_arrays import Memory
from numba_symm.streams import SideStream


class CopyStream:
    """The stream of one communicator's copies, which may run beside the program's work.

    Its events are used again, because to make one takes longer than to record it.
    """

    def __init__(self) -> None:
        self._side: SideStream | None = None
        self._events: list[Event] = []  # those that are not in use

    def event(self, stream: int) -> Event:
        """Return the end of a stream's work so far."""
        try:
            found = self._events.pop()
        except IndexError:
            found = Event()
        found.record(stream)
        return found

    def reuse(self, event: Event) -> None:
        """Take back an event that no caller will query any more."""
        self._events.append(event)

    @property
    def stream(self) -> int:
        """The stream of the copies."""
        if self._side is None:
            self._side = SideStream(0)
        return self._side.stream

    def begin(
        self,
        into: Items,
        source: int,
        nbytes: int,
        owner: Any,
        after: Event | None,
        on: int | None = None,
        from_host: bool = False,
    ) -> Event:
        """Start a copy to an array; return its end.

        Args:
            into: the array's items.
            source: the address of the data.
            nbytes: its size.
            owner: keeps the data.
            after: what the copy follows, if anything.
            on: another stream for the copy.
            from_host: whether the data is in host memory; then the array has no gaps.
        """
        stream = self.stream if on is None else on
        if after is not None:
            after.wait(stream)
        if nbytes and into.layout.runs is None:
            copy = streams.copy_from_host if from_host else streams.copy
            copy(into.address, source, nbytes, stream)
        elif nbytes:
            packed = Memory(source, nbytes, owner).array(nbytes, np.dtype(np.uint8))
            packing.unpack(into, packed)(stream)
        done = self.event(stream)
        if after is not None:  # last: after an interrupt, a crossing begins again
            self.reuse(after)
        return done

    def settle(self) -> None:
        """Wait for all copies; later ones have a new stream."""
        if self._side is not None:
            if not SIMULATED:
                streams.synchronize(self._side.stream)
            self._side.close()
            self._side = None
