"""Executable graphs of calls that are made often.

The driver launches a graph of any number of steps in less time than one kernel. So the
steps of a call that is repeated are captured into a graph, which its later calls
launch. A graph has the addresses of the call's arrays, as the packed call does.

When the driver's memory for graphs must grow, making a graph waits for the GPU. A
kernel there may wait for another rank, whose host may wait for this one. So a
communicator's construction makes graphs that are never launched. Later, each graph
takes the place of one that is at least as large, which is destroyed immediately before.
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

from numba_symm import driver, driver_table, entry, forks, streams
from numba_symm.environment import SIMULATED
from numba_symm.errors import DriverError
from numba_symm.streams import SideStream, StreamOrder

PLACES = ((1, False, 128), (4, False, 64), (8, True, 32), (64, True, 16))
"""The graphs of a process for all communicators on a GPU: how many nodes they have,
whether they fork, as calls do that use copy engines, and how many such graphs."""

FIRST = 3
"""Before which call of the same arguments the graph is made."""

AGAIN = 64
"""How many calls later the next attempt is made if there was no place."""


class _Graph(NamedTuple):
    """An executable graph.

    Attributes:
        nodes: how many it has.
        forked: whether some of them are beside others.
        handle: the driver's.
    """

    nodes: int
    forked: bool
    handle: Any

    def fits(self, other: "_Graph") -> bool:
        """Return whether the other one has room in its place."""
        return self.nodes >= other.nodes and self.forked >= other.forked


class _Places:
    """The graphs of a context that no call has, of which each may be replaced."""

    def __init__(self) -> None:
        self._unused: list[_Graph] = []
        self._lock = threading.Lock()  # of communicators in several threads
        forks.watch(self)
        stream = int(driver.call("cuStreamCreate", _NON_BLOCKING))
        side = SideStream(1)
        module = driver.call("cuModuleLoadData", _NOTHING)
        function = int(driver.call("cuModuleGetFunction", module, b"nothing"))
        for nodes, forked, number in PLACES:
            enqueue = partial(_launch, function, nodes, side if forked else None)
            graph = _captured(stream, enqueue)
            for _ in range(number):
                made = driver.call("cuGraphInstantiate", graph, 0)
                self._unused.append(_Graph(nodes, forked, made))
            driver.call("cuGraphDestroy", graph)
        side.close()
        driver.call("cuStreamDestroy", stream)

    def disown(self) -> None:
        """Use nothing that a forked child has inherited."""
        self._unused.clear()
        self._lock = threading.Lock()

    def replaced(self, graph: Any) -> _Graph | None:
        """Instantiate a graph in the place of one that is at least as large.

        Return None if there is none.
        """
        _, nodes = driver.call("cuGraphGetNodes", graph, 0)
        *_, edges = driver.call("cuGraphGetEdges", graph, 0)
        wanted = _Graph(nodes, edges >= nodes, None)
        with self._lock:
            fitting = [each for each in self._unused if each.fits(wanted)]
            if not fitting:
                return None
            found = min(fitting, key=lambda each: (each.forked, each.nodes))
            self._unused.remove(found)
            driver.call("cuGraphExecDestroy", found.handle)
            made = driver.call("cuGraphInstantiate", graph, 0)
            return wanted._replace(handle=made)

    def give_back(self, graphs: Iterable[_Graph]) -> None:
        """Let graphs be replaced that no call has any more."""
        with self._lock:
            self._unused += graphs


@functools.cache
def _of_context(context: int) -> _Places:
    return _Places()


def places() -> _Places:
    """Return those of the current context."""
    return _of_context(int(streams.current_context()))


class Graphs:
    """The graphs of one communicator.

    Args:
        order: orders its calls.
        possible: whether its calls consist of steps that a graph can have.

    Attributes:
        countdown: that of a new call.
    """

    def __init__(self, order: StreamOrder, possible: bool):
        self._order = order
        self._made: dict[weakref.ref[Any], _Graph] = {}
        self._dropped: list[weakref.ref[Any]] = []  # finalizers append to it
        self.countdown = entry.NEVER
        if not SIMULATED:  # before anything waits, for later communicators, too
            self._places = places()
        if possible and not SIMULATED:
            self.countdown = FIRST
            self._stream = int(driver.call("cuStreamCreate", _NON_BLOCKING))

    def make(self, call: Any, enqueue: Callable[[int], None]) -> None:
        """Make the graph of a call, if there is a place.

        Args:
            call: the packed call; its ``block`` gets the graph.
            enqueue: enqueues its steps on a stream.
        """
        head = entry.Head.from_buffer(call.block)
        head.countdown = AGAIN
        # The stream may be beside one that is being captured. If there is too little
        # memory, for example, the steps are enqueued one by one.
        with streams.relaxed(), suppress(DriverError), ExitStack() as steps:
            with self._order.apart():
                graph = _captured(self._stream, enqueue)
            steps.callback(driver.call, "cuGraphDestroy", graph)
            self._give_back()
            made = self._places.replaced(graph)
            if made is not None:
                self._made[weakref.ref(call, self._dropped.append)] = made
                driver.call("cuGraphUpload", made.handle, self._stream)
                head.graph = int(made.handle)

    def _give_back(self) -> None:
        """Let others have the graphs of dropped calls, if all calls are done."""
        if self._dropped and self._order.is_done():
            number = len(self._dropped)  # others may be dropped meanwhile
            dropped = [self._dropped.pop() for _ in range(number)]
            self._places.give_back(self._made.pop(each) for each in dropped)

    def close(self) -> None:
        """Release the graphs, and close the order. No call may follow."""
        if self.countdown != entry.NEVER:
            self.countdown = entry.NEVER
            made = [*self._made.values()]
            self._made.clear()
            if self._order.is_done():
                self._places.give_back(made)
            else:  # after a failure; what replaced them could not have their memory
                for each in made:
                    driver.call("cuGraphExecDestroy", each.handle)
            driver.call("cuStreamDestroy", self._stream)
        self._order.close()


_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def _captured(stream: int, enqueue: Callable[[int], None]) -> Any:
    """Return the graph of what a function enqueues on a stream."""
    from cuda.bindings import driver as bindings

    mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    driver.call("cuStreamBeginCapture", stream, mode)
    try:
        enqueue(stream)
    except BaseException:
        with suppress(DriverError):
            driver.call("cuGraphDestroy", driver.call("cuStreamEndCapture", stream))
        raise
    return driver.call("cuStreamEndCapture", stream)


_NOTHING = b".version 7.0\n.target sm_70\n.address_size 64\n.entry nothing() { ret; }\0"


def _launch(function: int, times: int, side: SideStream | None, stream: int) -> None:
    """Launch a kernel without arguments several times, half of them beside others."""
    config = driver_table.Config(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    def launch(times: int) -> None:
        for _ in range(times):
            status = driver_table.launch()(ctypes.addressof(config), function, 0, 0)
            if status:
                raise driver.failure("cuLaunchKernelEx", status)

    if side is None:
        launch(times)
        return
    launch(1)
    side.follow(stream, 0)
    launch(times // 2)
    config.stream = side.stream
    launch(times - times // 2 - 2)
    side.mark(1)
    side.lead(stream, 1)
    config.stream = stream
    launch(1)
