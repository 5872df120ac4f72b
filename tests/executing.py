"""A CUDA driver that executes the order of what is enqueued, and finds what is missing.

Each stream and each host thread is a timeline with a vector clock, and each event keeps
the clock of the stream that recorded it. Copies, fills and launches are accesses of
memory. Two accesses of one range, of which at least one is a store, must be ordered, by
a stream, an event or a wait of the host. If they are not, the later call fails, with
the names of both. Memory has no contents.

Methods have the names and the results of the driver's functions: a status, and what it
returns. Handles are integers. ``bind`` puts the driver in the place of
``numba_symm.gpu.driver``; ``table`` is for what compiled code calls.
"""

import ctypes
import itertools
import threading
from collections import defaultdict
from functools import partial

from numba_symm.errors import DriverError
from numba_symm.gpu import compiled, driver, entry
from numba_symm.gpu.compiled import Config
from numba_symm.gpu.streams import PER_THREAD

_LEGACY = 1  # the handle that always names the legacy default stream
NOT_READY, INVALIDATED, ISOLATION = 600, 901, 905
FAILED = 999

OUTPUTS = {  # of the functions that compiled code calls, the place of an output
    "cuStreamIsCapturing": 1,
    "cuStreamGetId": 1,
    "cuStreamWaitEvent": None,
    "cuEventRecord": None,
    "cuLaunchKernelEx": None,
    "cuMemcpyDtoDAsync": None,
    "cuMemsetD32Async": None,
    "cuEventQuery": None,
    "cuStreamQuery": None,
}


class Unordered(AssertionError):
    """Two accesses of the same memory that nothing orders."""


class Clock(dict):
    """By timeline, how many of its accesses came before."""

    def join(self, other):
        for timeline, number in other.items():
            self[timeline] = max(self.get(timeline, 0), number)


class Stream:
    """A stream: where it is, and in which capture."""

    def __init__(self, number, blocking):
        self.number, self.blocking = number, blocking
        self.clock, self.capture = Clock(), None


class Capture:
    """Work that is captured, whose accesses are ordered among each other only."""

    def __init__(self, number):
        self.number, self.valid, self.nodes = number, True, 0
        self.last = {}  # by stream, the nodes that its next one follows
        self.accesses = []


class ExecutingDriver:
    """The driver.

    Attributes:
        calls: the names of the functions that were called, in order.
        failing: the names of those that fail.
        works: what was enqueued, and on which stream, in order.
        unready: the events and streams whose work has not ended when they are asked.
        unordered: the failure that compiled code has met; None: none.
        kernels: by handle of a function, what returns the accesses of a launch: its
            name, and the ranges that it loads and stores: one, or a list.
    """

    def __init__(self, zero_is_per_thread=False):
        self._zero_is_per_thread = zero_is_per_thread
        self.calls, self.failing, self.unready, self.kernels = [], set(), set(), {}
        self.unordered = None
        self.works, self._numbers = [], itertools.count(100)
        self._streams = {_LEGACY: Stream(next(self._numbers), True)}
        self._events, self._hosts = {}, defaultdict(Clock)
        self._own, self._accesses = threading.local(), []

    # The places where it is used.

    def bind(self, monkeypatch, *modules):
        """Take the driver's place; modules take the branches of a GPU."""
        monkeypatch.setattr(driver, "call", self.call)
        monkeypatch.setattr(driver, "function", self.function)
        monkeypatch.setattr(entry, "driver_function", self.driver_function)
        for module in modules:
            monkeypatch.setattr(module, "SIMULATED", False)
        return self

    def function(self, name):
        """Return a function, which returns its status and its results."""
        if name == "CUstream":
            return lambda handle: handle

        def called(*args):
            self.calls.append(name)
            if name in self.failing:
                return (1,)
            found = getattr(self, name)(*args)
            return found if isinstance(found, tuple) else (found or 0,)

        return called

    def driver_function(self, name):
        """Return one that compiled code calls for Python, with three integers."""
        count = compiled.ARGUMENTS[compiled.WHERE.index(name)]

        def called(*args):
            status = self._in_c(name, *args[:count])
            if self.unordered is not None:
                raise self.unordered
            return status

        return called

    def call(self, name, *args):
        """Call a function; return its results, or raise an error."""
        status, *found = self.function(name)(*args)
        if status:
            reason = {NOT_READY: "CUDA_ERROR_NOT_READY"}.get(status, status)
            raise DriverError(f"{name} failed: {reason}")
        return (found[0] if len(found) == 1 else tuple(found)) if found else None

    def table(self):
        """Return functions for ``tests.gates``: by name, of C's arguments as integers.

        What compiled code has enqueued without an order is kept as ``unordered``.
        """
        return {name: partial(self._in_c, name) for name in OUTPUTS}

    def _in_c(self, name, *args):
        given, out = list(args), OUTPUTS[name]
        address = None if out is None else given.pop(out)
        if name == "cuLaunchKernelEx":
            given[0] = Config.from_address(given[0]).stream or 0
        try:
            status, *found = self.function(name)(*given)
        except AssertionError as error:  # a callback cannot raise it
            self.unordered = error
            return FAILED
        for value in found:
            kind = ctypes.c_int if name == "cuStreamIsCapturing" else ctypes.c_int64
            kind.from_address(address).value = value
        return status

    # Accesses.

    def launch(self, what, stream, loads=(), stores=()):
        """Enqueue work that loads and stores ranges: addresses, or with a size."""
        found, accesses = self._stream(stream), self._accesses
        if found.capture is None:
            self._begin(found)
        else:
            self._node(found)
            accesses = found.capture.accesses
        clock = found.clock
        clock[found] = clock.get(found, 0) + 1
        self.works.append((what, int(stream)))
        what = f"{what} on stream {int(stream):#x}"
        self._access(what, clock, found, accesses, loads, stores)
        if found.blocking and found.capture is None:
            self._with_default(found)

    def host(self, what, loads=(), stores=(), answer=None):
        """Return a function of the host that accesses ranges when it is called."""

        def accessing(*args, **options):
            self.calls.append(what)
            host = threading.get_ident()
            self._hosts[host][host] = self._hosts[host].get(host, 0) + 1
            given = self._hosts[host], host, self._accesses, loads, stores
            self._access(f"{what} on the host", *given)
            return answer

        return accessing

    def _access(self, what, clock, timeline, accesses, loads, stores):
        for ranges, storing in ((loads, False), (stores, True)):
            for each in (
                ranges if isinstance(ranges, list) else [ranges] if ranges else []
            ):
                begin, size = each if isinstance(each, tuple) else (each, 8)
                new = begin, begin + size, storing, what, timeline, clock[timeline]
                for old in accesses:
                    if old[0] < new[1] and new[0] < old[1] and (old[2] or storing):
                        self._check(old, new, clock)
                accesses.append(new)

    @staticmethod
    def _check(old, new, clock):
        if clock.get(old[4], 0) < old[5]:
            verbs = ["stores to" if each[2] else "loads from" for each in (old, new)]
            raise Unordered(
                f"{new[3]} {verbs[1]} {new[0]:#x}, and nothing orders it after "
                f"{old[3]}, which {verbs[0]} {old[0]:#x}"
            )

    def _begin(self, stream):
        """Let a stream's next work follow the host, and legacy streams each other."""
        stream.clock.join(self._hosts[threading.get_ident()])
        if stream is self._streams[_LEGACY]:
            for other in self._streams.values():
                if other.blocking and other.capture is None:
                    stream.clock.join(other.clock)

    def _with_default(self, stream):
        """Let later work of blocking streams follow the legacy default stream's."""
        if stream is self._streams[_LEGACY]:
            for other in self._streams.values():
                if other.blocking and other.capture is None:
                    other.clock.join(stream.clock)

    def _node(self, stream):
        capture = stream.capture
        assert capture.valid, "the capture was invalidated"
        capture.nodes += 1
        capture.last[stream] = {capture.nodes}

    def _stream(self, handle):
        handle = int(handle)
        if handle == 0:
            handle = PER_THREAD if self._zero_is_per_thread else _LEGACY
        if handle == PER_THREAD:
            if not hasattr(self._own, "stream"):
                self._own.stream = Stream(next(self._numbers), True)
                self._streams[self._own.stream] = self._own.stream
            return self._own.stream
        assert handle in self._streams, f"no stream {handle:#x}, or it was destroyed"
        return self._streams[handle]

    def create(self, handle, blocking=False):
        """Make a stream of a handle, also in the place of a destroyed one."""
        self._streams[handle] = Stream(next(self._numbers), blocking)
        return handle

    def capture(self, handle):
        """Begin a capture of a stream; return it."""
        self._stream(handle).capture = found = Capture(next(self._numbers))
        self._stream(handle).clock = Clock()
        found.last[self._stream(handle)] = set()
        return found

    # Functions of the driver.

    def cuStreamCreate(self, flags):
        return 0, self.create(next(self._numbers), blocking=not flags & 1)

    def cuStreamDestroy(self, stream):
        self._stream(stream)
        del self._streams[int(stream)]

    def cuStreamGetId(self, stream):
        found = self._stream(stream)
        if found.capture is not None:
            found.capture.valid = False
            return INVALIDATED, 0
        return 0, found.number

    def cuStreamIsCapturing(self, stream):
        return 0, int(self._stream(stream).capture is not None)

    def cuStreamGetCaptureInfo(self, stream):
        capture = self._stream(stream).capture
        nodes = sorted(capture.last[self._stream(stream)])
        return 0, 1, capture.number, None, nodes, len(nodes)

    def cuStreamQuery(self, stream):
        found = self._stream(stream)
        if found.capture is not None:
            found.capture.valid = False
            return INVALIDATED
        if stream in self.unready:
            return NOT_READY
        return self.cuStreamSynchronize(stream)

    def cuStreamSynchronize(self, stream):
        found = self._stream(stream)
        assert found.capture is None, "the host waits for a stream in a capture"
        self._hosts[threading.get_ident()].join(found.clock)

    def cuStreamWaitEvent(self, stream, event, flags):
        found, (clock, capture, nodes) = self._stream(stream), self._events[int(event)]
        if capture is not None and found.capture is None:  # it joins the capture
            found.capture, found.clock = capture, Clock()
        if found.capture is not capture:
            return ISOLATION
        if capture is not None:
            capture.last[found] = capture.last.get(found, set()) | nodes
        found.clock.join(clock)
        return 0

    def cuStreamGetCtx(self, stream):
        return 0, 1

    def cuCtxGetCurrent(self):
        return 0, 1

    def cuCtxPushCurrent(self, context):
        pass

    def cuCtxPopCurrent(self):
        return 0, 1

    def cuCtxSynchronize(self):
        for stream in self._streams.values():
            self._hosts[threading.get_ident()].join(stream.clock)

    def cuEventCreate(self, flags):
        event = next(self._numbers)
        self._events[event] = Clock(), None, set()
        return 0, event

    def cuEventDestroy(self, event):
        del self._events[int(event)]

    def cuEventRecord(self, event, stream):
        assert int(event) in self._events, f"no event {event}, or it was destroyed"
        found = self._stream(stream)
        if found.capture is None:
            self._begin(found)
            self._events[int(event)] = Clock(found.clock), None, set()
        else:
            last = set(found.capture.last[found])
            self._events[int(event)] = Clock(found.clock), found.capture, last

    def cuEventQuery(self, event):
        return NOT_READY if event in self.unready else self.cuEventSynchronize(event)

    def cuEventSynchronize(self, event):
        self._hosts[threading.get_ident()].join(self._events[int(event)][0])

    def cuMemcpyDtoDAsync(self, target, source, nbytes, stream):
        self.launch("a copy", stream, (int(source), nbytes), (int(target), nbytes))

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync = cuMemcpyDtoDAsync

    def cuMemsetD32Async(self, target, value, number, stream):
        self.launch(f"a fill with {value}", stream, (), (int(target), 4 * number))

    def cuLaunchKernelEx(self, config, function, params, extra):
        what, loads, stores = self.kernels[int(function)](params)
        stream = config if isinstance(config, int) else config.hStream
        self.launch(what, stream, loads, stores)
