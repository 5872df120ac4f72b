"""A call on device arrays, and the three methods that start it."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI
from numba import cuda

from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.collectives.enqueueing import REFUSALS
from numba_symm.collectives.invocation import check_writable
from numba_symm.environment import SIMULATED
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.events import Event
from numba_symm.gpu.streams import SideStream
from numba_symm.mpi import buffers
from numba_symm.mpi.buffers import Items, PackedStep, array_in, on_device
from numba_symm.mpi.datatypes import like
from numba_symm.mpi.errors import MPIError, refusal, unsupported
from numba_symm.mpi.started import Prequest, Started

MethodCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A method of the communicator, and its arguments but the stream."""


def stream_for(communicator: Communicator, array: Any) -> int:
    """Return the stream that an array names, else the communicator's."""
    named = None if array is None else arrays.stream_of(array)
    return streams.handle_or_default(communicator.stream) if named is None else named


def wait(communicator: Communicator, stream: int) -> None:
    """Wait for a stream, and raise if the communicator has failed.

    Within a capture, return immediately.
    """
    if not streams.is_capturing(stream):
        streams.synchronize(stream)
        communicator.check()


_lingering: "list[tuple[Event, Job, ExitStack]]" = []
"""Jobs whose work may not have ended, when it has, and what is closed then."""

_lock = threading.RLock()  # several threads may have communicators


def let_go() -> None:
    """Let go of the jobs whose work has ended."""
    with _lock:
        states = [(each, each[0].query()) for each in _lingering]
        _lingering[:] = [each for each, ended in states if not ended]
        for (_, _, unfreed), ended in states:
            if ended:
                unfreed.close()


class Job:
    """The steps of one call, which may be started many times.

    Args:
        communicator: makes the call.
        what: the name of the call.
        array: the array whose stream the steps are on, if it names one.
    """

    def __init__(self, communicator: Communicator, what: str, array: Any = None):
        self.communicator = communicator
        self.what = what
        self.array = array
        self.stream = stream_for(communicator, array)
        self._calls: list[MethodCall] = []
        self._steps: list[PackedStep] = []
        self._last: list[PackedStep] = []
        self._kept: list[Any] = []  # steps have addresses only
        self._lingers = False

    def read(self, message: Items) -> Any:
        """Return a contiguous array of a message's elements."""
        if message.layout.runs is None:
            return self.view(message)
        packed = self.temporary(message.size, message.layout.base)
        if message.size:
            self.then_move(buffers.pack, message, packed)
        return packed

    def write(self, message: Items) -> Any:
        """Return a contiguous array whose elements the message has in the end."""
        dense, base = message.layout.runs is None, message.layout.base
        made = self.view(message) if dense else self.temporary(message.size, base)
        return self.unpacked(message, made)

    def view(self, message: Items) -> Any:
        """Return the elements of a message without gaps, in their own memory."""
        view, dtype = message.view, message.layout.base
        self._kept.append(message.array)
        whole = message.first == 0 and message.nbytes == view.nbytes
        if whole and view.dtype == dtype and view.order == "C":
            return message.array
        return buffers.at(message.address, message.size, dtype, message.array)

    def update(self, message: Items) -> Any:
        """Return a contiguous array that is read and written, as by both of these."""
        return self.unpacked(message, self.read(message))

    def unpacked(self, message: Items, packed: Any) -> Any:
        """Let the elements of a message be those of a packed array in the end."""
        check_writable(message.view, self.what)
        if message.layout.runs is not None and message.size:
            with self._all_or_none(self.stream):
                self._last.append(buffers.unpack(message, packed))
        return packed

    def flat(
        self,
        array: Any,
        dtype: np.dtype[Any] | None = None,
        first: int = 0,
        count: int | None = None,
    ) -> Any:
        """Return elements of a contiguous array on one axis, perhaps of another dtype.

        By default, these are all elements from the first one on.
        """
        view = arrays.view(array, self.what)
        kind = view.dtype if dtype is None else dtype
        number = view.nbytes // kind.itemsize if count is None else count
        if (view.dtype, view.shape) == (kind, (number,)):
            return array
        self._kept.append(array)
        return buffers.at(view.address + first * kind.itemsize, number, kind, array)

    def keep(self, *kept: Any) -> None:
        """Keep objects as long as the job."""
        self._kept += kept

    def temporary(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return a new array, which lives as long as the job.

        Raises:
            NotImplementedError: within a capture, whose graph would use it later.
        """
        if self.captured:
            raise unsupported(
                f"{self.what}: this call needs a temporary array, whose address a graph"
                f" would keep after it is freed; call {self.what}_init before the "
                "capture, start its request within, and keep that as long as the graph"
            )
        self._lingers = True
        with self._all_or_none(self.stream):
            made = arrays.empty((size,), dtype, self.what)
        self._kept.append(made)
        return made

    def then(self, step: PackedStep) -> None:
        """Add a step."""
        self._steps.append(step)

    def then_move(
        self, move: Callable[[Items, Any], PackedStep], message: Items, packed: Any
    ) -> None:
        """Add ``buffers.pack`` or ``buffers.unpack``."""
        with self._all_or_none(self.stream):
            self._steps.append(move(message, packed))

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Add a call of a method of the communicator."""
        self._calls.append((method, args, options))
        self._steps.append(lambda stream: method(*args, **options, stream=stream))

    def only_call(self) -> MethodCall | None:
        """Return the call of the communicator if the job has no other step."""
        alone = len(self._steps) == 1 and len(self._calls) == 1 and not self._last
        return self._calls[0] if alone else None

    def start(self, stream: int | None = None) -> None:
        """Enqueue all steps, on the job's stream or another one."""
        chosen = self.stream if stream is None else stream
        with self._all_or_none(chosen):
            for step in (*self._steps, *self._last):
                step(chosen)

    @contextmanager
    def _all_or_none(self, stream: int) -> Iterator[None]:
        """Make the communicator fail if this rank cannot make the call.

        Otherwise the other ranks, which make it, would wait until the deadline. It does
        not fail after a refusal, because the rank may repeat the call.
        """
        try:
            yield
        except (MPIError, *REFUSALS):
            raise
        except BaseException as error:
            inside(self.communicator).give_up(error, self.what, stream)
            raise

    @property
    def captured(self) -> bool:
        """Whether the job's stream is being captured."""
        return streams.is_capturing(self.stream)

    def start_beside(self, side: SideStream) -> Event:
        """Enqueue all steps beside the later work of the job's stream.

        Its earlier work precedes them. All arrays are kept until the steps have ended.

        Returns:
            Their end.
        """
        with ExitStack() as unfreed:
            if not SIMULATED:
                # Freeing memory waits for the device, so for this call. Its peers may
                # wait for what this rank could not start then.
                unfreed.enter_context(cuda.defer_cleanup())
            side.follow(self.stream, 0)
            with side.joined(self.stream):
                self.start(side.stream)
                return self._keep_until_end(side.stream, unfreed.pop_all())

    def linger(self) -> None:
        """Keep the job's temporary arrays until its work so far has ended.

        For a job that the program may drop before that.
        """
        if self._lingers and not self.captured:
            self._keep_until_end(self.stream, ExitStack())

    def _keep_until_end(self, stream: int, unfreed: ExitStack) -> Event:
        let_go()
        done = Event()
        done.record(stream)
        with _lock:
            _lingering.append((done, self, unfreed))
        return done

    def wait_for(self, done: Event) -> None:
        """Wait for the end of the steps, and raise as :meth:`wait`."""
        done.synchronize()
        let_go()
        self.communicator.check()

    def test_for(self, done: Event) -> bool:
        """Return whether the steps have ended."""
        if not done.query():
            return False
        let_go()
        self.communicator.check()
        return True

    def wait(self) -> None:
        """Wait until the arrays may be used; return immediately within a capture.

        Raises:
            CollectiveError: the communicator has failed.
        """
        wait(self.communicator, self.stream)


Build = Callable[..., Job | None]
"""Takes a ``Comm`` and the arguments of mpi4py's method; see ``collectives.py``."""

Method = Callable[..., Any]


def forms(name: str, build: Build) -> tuple[Method, Method, Method]:
    """Return the methods of a collective, such as Bcast, Ibcast and Bcast_init.

    If the arrays are on the host, each calls mpi4py's method of its name.
    """

    def blocking(self: Any, *args: Any) -> None:
        key, used = _key_of(name, args)
        if key is not None:
            communicator = self.communicator
            within = inside(communicator)
            known = within.memory.young.get(key)
            if known is not None:
                call, number = known
                stream = stream_for(communicator, used[number])
                if within.made(call.enqueue(stream), call, stream, used):
                    if self.synchronizes:
                        wait(communicator, stream)
                    return
        job = build(self, *args)
        if job is None:
            getattr(self.host, name)(*args)
            return
        job.start()
        if key is not None:
            _remember(key, job, used)
        if self.synchronizes:
            job.wait()
        else:
            job.linger()

    def nonblocking(self: Any, *args: Any) -> Any:
        job = build(self, *args)
        if job is None:
            return getattr(self.host, f"I{name.lower()}")(*args)
        return _started(self, job)

    def persistent(self: Any, *args: Any) -> Any:
        given = args[:-1]  # without the info
        job = build(self, *given)
        if job is None:
            return getattr(self.host, f"{name}_init")(*args)
        used = [buffers.there(array_in(spec)) for spec in given if on_device(spec)]
        return Prequest(functools.partial(_started, self, job), used)

    of = MPI.Topocomm
    return (
        like(getattr(of, name), blocking),
        like(getattr(of, f"I{name.lower()}"), nonblocking),
        like(getattr(of, f"{name}_init"), persistent),
    )


_OF_ALL_RANKS = ("Reduce_scatter",)  # without recvcounts, ranks exchange their counts


def _key_of(name: str, args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Return the key of a call, None if it is not of a plain form, and its arrays.

    The arguments of a plain form are arrays, pairs of an array and a type, operators,
    roots and MPI.IN_PLACE. An array is read anew, because its memory may differ now.
    """
    found: list[Any] = []
    key: list[Any] = [name]
    for value in args if name not in _OF_ALL_RANKS else ():
        if isinstance(value, MPI.Op):
            key.append(value.handle)
        elif type(value) is int or value is MPI.IN_PLACE:
            key += type(value), int(value)
        else:
            each, array = buffers.key_of(value)
            if each is None:
                return None, found
            key.append(each)
            found.append(array)
    return tuple(key) if found else None, found


def _remember(key: Any, job: Job, given: list[Any]) -> None:
    """Remember a job that is one call of the communicator on these arrays.

    The value is the packed call, and which of the arrays may name the stream.
    """
    found, within = job.only_call(), inside(job.communicator)
    # In debug mode, all ranks compare the call, so all must prepare it.
    if found is None or within.debug:
        return
    method, x, options = found
    places = [id(array) for array in given]
    needed = [job.array, *x, options.get("out")]
    if any(id(each) not in places for each in needed if each is not None):
        return
    prepare = getattr(job.communicator, f"{method.__name__}_init")
    call = prepare(*x, **options, stream=job.stream).call
    within.memory.put(key, (call, places.index(id(job.array))))


def _started(comm: Any, job: Job) -> Started:
    if job.captured:  # into a graph, whose later nodes follow it
        job.start()
        return Started(job.wait, lambda: True)
    done = job.start_beside(comm.side)
    wait = functools.partial(job.wait_for, done)
    return Started(wait, functools.partial(job.test_for, done))


_ROOMS = {"recv": (0, "buf"), "irecv": (0, "buf"), "sendrecv": (3, "recvbuf")}
"""The memory for a pickled object, among the arguments of mpi4py's methods."""


def _has_no_memory(kind: type) -> bool:
    """Return whether objects of a class neither are nor contain device arrays."""
    return not (
        hasattr(kind, "copy_to_host")
        or hasattr(kind, "__getattr__")
        or issubclass(kind, (list, tuple, *buffers.ASKED))
    )


_holds_none: Any = functools.lru_cache(maxsize=256)(_has_no_memory)


def of_objects(name: str) -> Method:
    """Return mpi4py's method of that name, which pickles objects.

    It refuses Numba's device arrays, which cannot be pickled, and buffers over
    addresses of the GPU. Arrays of CuPy and torch can be pickled, through host memory.
    No device array can be the memory for a pickled object.
    """
    place, room = _ROOMS.get(name, (0, ""))
    plain = getattr(MPI.Topocomm, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        # A program makes many of these calls, with numbers and shapes.
        for given in (*args, *options.values()) if options else args:
            if _holds_none(type(given)):
                continue
            for each in given if isinstance(given, list | tuple) else (given,):
                if not _holds_none(type(each)):
                    check(each)
        if room:
            memory = options.get(room, args[place] if len(args) > place else None)
            if memory is not None and buffers.buffer_on_device(memory):
                raise refused(memory, f"{room} on the host")
        return plain(self, *args, **options)

    def check(given: Any) -> None:
        own = hasattr(given, "copy_to_host") and arrays.on_device(given)
        if own or buffers.there(given) is not given:
            raise refused(given, "objects that can be pickled")

    def refused(given: Any, expected: str) -> Exception:
        return refusal(
            MPI.ERR_BUFFER,
            f"{name}: expected {expected}, got {type(given).__name__} on the device; "
            f"call {name.capitalize()}, or pass x.copy_to_host()",
        )

    return functools.update_wrapper(method, plain)
