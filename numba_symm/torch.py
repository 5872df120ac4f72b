"""A backend of torch.distributed: ``import numba_symm.torch`` registers "symm".

No other module imports this one, because torch is an optional dependency.

Python cannot extend ``torch.distributed.Backend``, which has a backend for each kind of
device. So a group is a whole ``ProcessGroup``, and passes tensors of the CPU to gloo.
In the simulator, tensors of the CPU are in the place of those on a GPU.

The order of calls: one that the program waits for runs on torch's current stream. Any
other one runs on the group's own stream, after the work that was on the current stream
when the program made the call. Its ``wait`` lets the current stream follow.

Messages are requests of the communicator, which run beside all other calls. So two
ranks may both send first, and no call waits for a message that the program has not
waited for.
"""

import atexit
import functools
import operator
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from numba_symm import dtypes
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.requests import Request
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, CollectiveTimeout, SymmError
from numba_symm.gpu import arrays
from numba_symm.gpu.events import Event, Point
from numba_symm.launch import ranks

DEVICE = "cpu" if SIMULATED else "cuda"
"""The kind of device whose tensors the library itself reads and writes."""

NAME = "symm"

PARTING = 10.0
"""Seconds that a program waits for the other ranks at its end, if groups are open."""

_PLAIN = dist.AllreduceOptions()
_POLL = 2e-3  # seconds between two looks into a store
_AT_ONCE = timedelta(0)

_DTYPES = {
    getattr(torch, dtype.name): dtype
    for dtype in dtypes.DTYPES
    if hasattr(torch, dtype.name)
}
_NAMES = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
# By number, which is the hash: torch takes longer to compare its constants.
_OPERATORS = {hash(getattr(dist.ReduceOp, each)): _NAMES[each] for each in _NAMES}


class StoreComm:
    """What a ``Communicator`` needs of its ranks, through a store of torch's.

    Args:
        store: the store; no other code uses its keys.
        rank: this process' number.
        size: the number of ranks.
        seconds: how long a call waits for the other ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, seconds: float):
        self.rank, self.size = rank, size
        self.seconds = seconds
        self._store, self._step = store, 0
        # The store may outlive the group, and have another one of the same name.
        self._number = store.add(f"{NAME}/{rank}", 1)

    def allgather(self, sendobj: Any, /) -> list[Any]:
        """Return every rank's picklable object, in rank order. Collective.

        Raises:
            CollectiveTimeout: a rank did not arrive in time.
        """
        self._step += 1
        keys = [f"{NAME}/{self._number}/{self._step}/{r}" for r in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(sendobj))
        end = time.monotonic() + self.seconds
        held = self._store.check
        while absent := [r for r, key in enumerate(keys) if not held([key])]:
            time.sleep(_POLL)  # the store's own waits log warnings, and block signals
            if time.monotonic() > end:
                raise CollectiveTimeout(
                    f"Communicator: rank {self.rank} has waited {self.seconds:g} s "
                    f"for {ranks.name_ranks(absent)}; the first call of a group is "
                    "collective, so every rank of the group must make it",
                    ranks=(self.rank, *absent),
                    operation="Communicator",
                )
        return [pickle.loads(self._store.get(key)) for key in keys]

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.allgather(None)


Body = Callable[[Communicator, "SymmWork"], Any]


class SymmWork(dist.Work):  # type: ignore[misc]  # mypy does not see torch
    """One call of a group, or several that start together.

    Args:
        group: the group.
        tensors: those that the call reads or writes.
        outputs: what the future of the call has.
        body: makes the calls of the communicator; None: they are made already.

    Attributes:
        tensors, body: the same.
        stream: the handle of the group's own stream; None: torch's current one.
        requests: messages that it stands for.
    """

    stream: int | None = None
    requests: Sequence[Request] = ()
    done: Sequence[Any] = ()  # the point after it, if it is on the group's own stream
    _copies: tuple[tuple[Any, Any], ...] = ()  # of tensors with gaps, to be copied back
    postponed = False  # to the end of a coalescing block

    def __init__(
        self,
        group: "SymmGroup",
        tensors: Sequence[Any],
        outputs: Any,
        body: Any = None,
    ):
        super().__init__()
        self.tensors, self.body = tensors, body
        self._group, self._outputs = group, outputs

    def of(self, tensor: Any, *, written: bool = False) -> Any:
        """Return the elements of a tensor along one axis, as an array.

        It is the tensor's memory, or a contiguous copy of it.
        """
        dense = tensor.detach() if tensor.requires_grad else tensor
        if not dense.is_contiguous():
            with self.current():
                dense = dense.contiguous()
            if written:
                self._copies += ((tensor.detach(), dense),)
        flat = dense if dense.dim() == 1 else dense.view(-1)
        if flat.dtype not in _DTYPES:  # of a type that is only moved
            flat = flat.view(torch.uint8)
        if not SIMULATED:
            return flat
        nbytes = flat.numel() * flat.element_size()
        memory = arrays.Memory(flat.data_ptr(), nbytes, owner=flat)
        return memory.array(flat.numel(), _DTYPES[flat.dtype])

    def finish(self) -> None:
        """Copy what the call has stored to the tensors that have gaps."""
        for tensor, dense in self._copies:
            with self.current():
                tensor.copy_(dense)

    def current(self) -> Any:
        """Make the stream of the call torch's current one."""
        return torch.cuda.stream(self._group.own if self.stream else None)

    def wait(self, timeout: timedelta = _AT_ONCE) -> bool:
        """Let torch's current stream follow; with a timeout, the host waits as well.

        Raises:
            ArgumentError: the coalescing block of the call has not ended.
            CollectiveError: a call of the group has failed.
        """
        if self.postponed:
            raise self._unstarted("wait")
        if self.requests or self.done:
            with on_device(self._group.ordinal):
                for end in (*self.requests, *self.done):
                    end.wait(None if SIMULATED else current_stream())
        if timeout > _AT_ONCE:
            self._wait_on_the_host(timeout)
        if not self.requests:  # these raise errors themselves
            self._group.check()
        return True

    def _unstarted(self, what: str) -> ArgumentError:
        return ArgumentError(
            f"{what}: the coalescing block of this call has not ended, or ended with "
            f"an exception; call {what} after the block, or destroy the group"
        )

    def _wait_on_the_host(self, timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            self._group.check()
            if time.monotonic() > end:
                raise CollectiveTimeout(f"wait: the call still runs after {timeout}")
            time.sleep(1e-4)

    def is_completed(self) -> bool:
        """Return whether the call has ended."""
        ended = [request.test() for request in self.requests]
        ended += [point.query() for point in self.done]
        if ended or self.postponed:
            return all(ended) and not self.postponed
        # It ran on the current stream.
        return SIMULATED or bool(torch.cuda.current_stream().query())

    def synchronize(self) -> None:
        """Do as :meth:`wait`."""
        self.wait()

    def result(self) -> Any:
        """Return the outputs."""
        return self._outputs

    def get_future(self) -> Any:
        """Return a future of the outputs, which is done at once, in stream order.

        torch's current stream first follows messages.

        Raises:
            ArgumentError, CollectiveError: as for :meth:`wait`.
        """
        if self.postponed:
            raise self._unstarted("get_future")
        if self.requests:
            self.wait()
        self._group.check()
        future = torch._C.Future(self._group.devices)
        if self.requests or not self.done:
            future.set_result(self._outputs)
            return future
        number = self._group.ordinal
        with on_device(number):  # torch.cuda.stream takes longer than the call
            before = torch._C._cuda_getCurrentStream(number)
            torch._C._cuda_setStream(*self._group.numbers)
            try:
                future.set_result(self._outputs)
            finally:
                torch._C._cuda_setStream(*before)
        return future


def current_stream() -> int:
    """Return the handle of torch's current stream of the current GPU."""
    # torch.cuda.current_stream makes an object, in several microseconds.
    return int(torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()))


def on_device(number: int) -> AbstractContextManager[object]:
    """Make a GPU the current one; -1: it stays. Handle 0 is a stream of that GPU."""
    if SIMULATED or number < 0 or number == torch._C._cuda_getDevice():
        return _STAYS
    return cast(AbstractContextManager[object], torch.cuda.device(number))


_STAYS = nullcontext()


class _Barrier(SymmWork):
    def wait(self, timeout: timedelta = _AT_ONCE) -> bool:
        """Wait on the host until every rank has arrived."""
        super().wait(timeout)
        self._group.synchronize()
        return True


class _Unusual(Exception):  # never reaches the program
    """A tensor is not plain memory of the library's kind of device."""


def _place(tensors: Sequence[Any]) -> int:
    """Return the GPU of plain tensors; -1: there is none.

    Raises:
        _Unusual: one of them is not plain.
    """
    place = -1
    for tensor in tensors:
        plain = _is_own(tensor) and tensor.layout is _STRIDED
        if not plain or tensor.is_conj() or tensor.is_neg():
            raise _Unusual
        place = tensor.get_device()
    return place


_STRIDED = torch.strided
_is_own = operator.attrgetter(f"is_{DEVICE}")


def _collective(method: Callable[..., SymmWork]) -> Callable[..., SymmWork]:
    """Pass tensors of the CPU to gloo, and refuse those that are not plain memory."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: "SymmGroup", *args: Any) -> SymmWork:
        try:
            return method(self, *args)
        except _Unusual:
            pass
        tensors = _tensors(args)
        for tensor in tensors:
            if tensor.layout is not _STRIDED or tensor.is_conj():
                raise ArgumentError(
                    f"{name}: expected dense tensors that are not conjugate views, got "
                    f"a tensor of layout {tensor.layout}; pass x.to_dense() or "
                    "x.resolve_conj()"
                )
            if tensor.is_neg():
                raise ArgumentError(
                    f"{name}: expected a tensor without negative bit; pass "
                    "x.resolve_neg()"
                )
        work = getattr(self.gloo(name, tensors), name)(*args)
        if self.coalesces:  # what torch returns of the block waits for ours only
            work.wait()
        return cast(SymmWork, work)

    return call


def _tensors(args: Sequence[Any]) -> list[Any]:
    found = []
    for each in args:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += _tensors(each)
    return found


def _operator(opts: Any, tensors: Sequence[Any], what: str) -> str:
    """Return the name of the options' operator. Refuse it, or the type of a tensor."""
    op = opts.reduceOp
    found = _OPERATORS.get(hash(op))
    if found is None:
        known = ", ".join(_NAMES)
        raise ArgumentError(f"{what}: expected one of {known}, got {op.op}")
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise ArgumentError(
                f"{what}: expected a type that has operators, got {tensor.dtype}"
            )
    return found


def _refused(name: str, advice: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **options: Any) -> Any:
        raise ArgumentError(f"{name}: the backend {NAME} does not have it; {advice}")

    return refuse


class SymmGroup(dist.ProcessGroup):  # type: ignore[misc]  # mypy does not see torch
    """A process group of the backend "symm".

    It makes its ``Communicator`` in its first call, on the device of that call.

    Args:
        store: the store of this group.
        rank: this process' number in the group.
        size: the number of ranks.
        timeout: how long calls wait for other ranks.

    Attributes:
        ordinal: the GPU's number; -1: it has none yet, as in the simulator.
        devices: the GPU, if there is one.
        own: the stream of calls that the program does not wait for; None: none yet.
        numbers: by which torch finds that stream.
        coalesces: whether a coalescing block is open.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._store, self._timeout = store, timeout
        self._comm: Communicator | None = None
        self._meeting = StoreComm(store, rank, size, timeout.total_seconds())
        self._lock = threading.RLock()  # autograd calls from threads of its own
        self._gloo: Any = None
        self.ordinal, self.devices = -1, list[Any]()
        self.own: Any = None
        self._idle: list[Event] = []  # of points that are no more
        self._later: list[SymmWork] = []
        self._begun: list[Request] = []  # messages of a coalescing block
        self.coalesces = self._closed = False
        self._name = ""
        _groups.add(self)

    # What torch asks a group.

    def getBackendName(self) -> str:
        """Return the name."""
        return NAME

    def setGroupName(self, name: str) -> None:
        """Set the name of the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._name

    def get_group_store(self) -> Any:
        """Return the store."""
        return self._store

    supports_coalescing = supports_splitting = False  # torch asks a backend

    def _get_backend(self, device: Any) -> "SymmGroup":
        return self

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(name) for name in dict.fromkeys(("cpu", DEVICE))]

    def gloo(self, name: str, tensors: Sequence[Any]) -> Any:
        """Return the group for tensors of the CPU."""
        kinds = sorted({tensor.device.type for tensor in tensors})
        if kinds != ["cpu"]:
            raise ArgumentError(
                f"{name}: expected tensors on {DEVICE}, or all on cpu, got {kinds}; "
                "move them"
            )
        if self._gloo is None:
            store, place = dist.PrefixStore("gloo", self._store), torch.device("cpu")
            made = dist.ProcessGroup(store, self.rank(), self.size())
            kind = dist.ProcessGroup.BackendType.GLOO
            backend = dist.ProcessGroupGloo(
                store, self.rank(), self.size(), self._timeout
            )
            made._set_default_backend(kind)
            made._register_backend(place, kind, backend)
            self._gloo = made
        return self._gloo

    def check(self) -> None:
        """Raise if a call has failed."""
        if self._comm is not None and not self._closed:
            self._comm.check()

    def synchronize(self) -> None:
        """Wait on the host until the calls have ended. Raise if one has failed."""
        if self._comm is not None:
            with on_device(self.ordinal):
                self._comm.synchronize(None if SIMULATED else current_stream())

    def abort(self) -> None:
        """End the calls of all ranks with an error."""
        if self._comm is not None and not self._closed:
            self._comm.abort("torch.distributed: abort")

    def shutdown(self) -> None:
        """Close the communicator, with the other ranks if they end it soon, too."""
        if self._closed:
            return
        self._closed = True
        if self._comm is not None:
            self._meeting.seconds = PARTING
            with suppress(SymmError):  # a failed one closes without the other ranks
                self._comm.check()
                try:
                    self._meeting.barrier()
                except (CollectiveTimeout, RuntimeError):  # the store may have ended
                    self._comm.abort("torch.distributed: it has left the group")
            with suppress(SymmError):
                self._comm.close()
        if self._gloo is not None:
            self._gloo.shutdown()

    # How calls start.

    def _communicator(self) -> Communicator:
        """Return the communicator, which the first call makes on the current GPU."""
        if self._closed:
            raise ArgumentError("the process group was destroyed; make another one")
        if self._comm is None:
            device = None
            if not SIMULATED:
                device = self.ordinal = torch.cuda.current_device()
                self.devices = [torch.device(DEVICE, device)]
            self._comm = Communicator(
                self._meeting, device, timeout=self._meeting.seconds, requests=True
            )
        return self._comm

    def _follow(self, work: SymmWork) -> None:
        """Let the work be on the group's own stream, after the current one's so far."""
        if self.own is None:
            self.own = own = torch.cuda.Stream()
            self.numbers = own.stream_id, own.device_index, own.device_type
            self._handle = own.cuda_stream
            self._ready = Point([], self._handle)
        self._ready.move(current_stream())
        self._ready.wait(self._handle)
        work.stream = self._handle
        for tensor in work.tensors:  # its memory waits for this stream if dropped
            tensor.record_stream(self.own)

    def _run(
        self,
        body: Body,
        tensors: Sequence[Any],
        opts: Any = None,
        *,
        outputs: Any = None,
        messages: bool = False,
        kind: type[SymmWork] = SymmWork,
    ) -> SymmWork:
        """Start a call, or let it start with others. Return its work.

        Args:
            body: makes the calls of the communicator.
            tensors: those that it reads or writes.
            opts: torch's options of the call.
            outputs: of the future; None: ``tensors``.
            messages: whether ``body`` makes messages, which start together.
            kind: the class of the work.
        """
        place = _place(tensors)
        work = kind(self, tensors, tensors if outputs is None else outputs, body)
        waits = getattr(opts, "asyncOp", True)
        with self._lock, on_device(place):
            if (waits or self.coalesces) and not SIMULATED:
                self._follow(work)
            if self.coalesces:
                # torch awaits any other call at once, within the block.
                work.postponed = waits
                self._later.append(work)
            else:
                self._start([work], messages)
        return work

    def _start(self, works: Sequence[SymmWork], together: bool) -> None:
        comm = self._communicator()
        with comm.group() if together else _STAYS:
            for work in works:
                work.body(comm, work)
                work.postponed = False
        for work in works:
            work.finish()
        if works[-1].stream is not None:
            done = [Point(self._idle, self._handle)]
            for work in works:
                work.done = done

    def _start_coalescing(self, device: Any) -> None:
        self._later, self._begun = [], []  # of a block that ended with an exception
        self.coalesces = True

    def _end_coalescing(self, device: Any) -> SymmWork:
        self.coalesces = False
        works, self._later = self._later, []
        tensors = [tensor for work in works for tensor in work.tensors]
        whole = SymmWork(self, tensors, tensors)
        if works:
            with self._lock, on_device(_place(tensors)):
                self._start(works, together=True)
            whole.done = works[-1].done
        whole.requests = self._begun
        return whole

    def _messages(
        self,
        sends: Sequence[tuple[Any, int]],
        receives: Sequence[tuple[Any, int]],
        opts: Any,
    ) -> SymmWork:
        """Send tensors to ranks, and receive tensors from ranks."""

        def body(comm: Communicator, work: SymmWork) -> None:
            for tensor, peer in sends:
                comm.send(work.of(tensor), dst=peer, stream=work.stream)
            for tensor, peer in receives:
                x = work.of(tensor, written=True)
                comm.recv(x, src=peer, stream=work.stream)

        tensors = [tensor for tensor, _ in (*sends, *receives)]
        outputs = [tensor for tensor, _ in receives]
        return self._run(body, tensors, opts, outputs=outputs, messages=True)

    def _each(
        self,
        name: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        opts: Any,
        reduces: bool = False,
        **options: Any,
    ) -> SymmWork:
        """Make a call of the communicator for each input and its output."""
        if reduces:
            options["op"] = _operator(opts, inputs, name)

        def body(comm: Communicator, work: SymmWork) -> None:
            call, stream = getattr(comm, name), work.stream
            for tensor, output in zip(inputs, outputs, strict=True):
                out = work.of(output, written=True)
                x = out if tensor is output else work.of(tensor)
                call(x, out=out, stream=stream, **options)

        tensors = outputs if inputs is outputs else [*inputs, *outputs]
        return self._run(body, tensors, opts, outputs=outputs)

    # Collectives, by torch's names. ``opts`` are torch's options.

    @_collective
    def allreduce(self, tensors: Any, opts: Any = _PLAIN) -> SymmWork:
        """Reduce tensors over all ranks, or one tensor."""
        # DistributedDataParallel.join passes one. torch's class would look longer.
        if not isinstance(tensors, (list, tuple)):
            tensors = [tensors]
        return self._each("all_reduce", tensors, tensors, opts, reduces=True)

    @_collective
    def allreduce_coalesced(self, tensors: list[Any], opts: Any) -> SymmWork:
        """Do as :meth:`allreduce`."""
        return self._each("all_reduce", tensors, tensors, opts, reduces=True)

    @_collective
    def broadcast(self, tensors: list[Any], opts: Any) -> SymmWork:
        """Copy the root's tensors to all ranks."""

        def body(comm: Communicator, work: SymmWork) -> None:
            for tensor in tensors:
                x = work.of(tensor, written=True)
                comm.broadcast(x, root=opts.rootRank, stream=work.stream)

        return self._run(body, tensors, opts)

    @_collective
    def reduce(self, tensors: list[Any], opts: Any) -> SymmWork:
        """Reduce tensors over all ranks, for the root."""
        return self._each(
            "reduce", tensors, tensors, opts, reduces=True, root=opts.rootRank
        )

    @_collective
    def allgather(self, outputs: list[Any], inputs: list[Any], opts: Any) -> SymmWork:
        """Give all ranks the tensors of all ranks, which may have any sizes."""
        everyone = range(self.size())
        sends = [(tensor, rank) for tensor in inputs for rank in everyone]
        receives = [pair for parts in outputs for pair in zip(parts, everyone)]  # noqa: B905
        self._expect_lists(outputs, "all_gather")
        return self._messages(sends, receives, opts)

    @_collective
    def _allgather_base(self, output: Any, input: Any, opts: Any) -> SymmWork:
        """Give all ranks the tensors of all ranks, one after another."""
        return self._each("all_gather", [input], [output], opts)

    @_collective
    def allgather_into_tensor_coalesced(
        self, outputs: list[Any], inputs: list[Any], opts: Any
    ) -> SymmWork:
        """Do as :meth:`_allgather_base` with several tensors."""
        return self._each("all_gather", inputs, outputs, opts)

    @_collective
    def reduce_scatter(
        self, outputs: list[Any], inputs: list[Any], opts: Any
    ) -> SymmWork:
        """Reduce a tensor for each rank, of any sizes."""
        op = _operator(opts, outputs, "reduce_scatter")
        self._expect_lists(inputs, "reduce_scatter")

        def body(comm: Communicator, work: SymmWork) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                out = work.of(output, written=True)
                if len({part.numel() for part in parts}) == 1:
                    with work.current():
                        whole = torch.cat([part.reshape(-1) for part in parts])
                    x = work.of(whole)
                    comm.reduce_scatter(x, out=out, op=op, stream=work.stream)
                else:
                    for root, part in enumerate(parts):
                        x = work.of(part)
                        comm.reduce(x, root=root, out=out, op=op, stream=work.stream)

        tensors = [*outputs, *(part for parts in inputs for part in parts)]
        return self._run(body, tensors, opts, outputs=outputs)

    @_collective
    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any) -> SymmWork:
        """Reduce a tensor, and give each rank its part."""
        return self._each("reduce_scatter", [input], [output], opts, reduces=True)

    @_collective
    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Any], inputs: list[Any], opts: Any
    ) -> SymmWork:
        """Do as :meth:`_reduce_scatter_base` with several tensors."""
        return self._each("reduce_scatter", inputs, outputs, opts, reduces=True)

    @_collective
    def alltoall_base(
        self,
        output: Any,
        input: Any,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> SymmWork:
        """Send each rank a part of a tensor, along its first axis."""
        equal = not output_splits and not input_splits
        received = self._counts(output, output_splits)
        sent = self._counts(input, input_splits)

        def body(comm: Communicator, work: SymmWork) -> None:
            x, out = work.of(input), work.of(output, written=True)
            if equal:
                comm.all_to_all(x, out=out, stream=work.stream)
                return
            width = x.dtype.itemsize if SIMULATED else x.element_size()
            units = input.element_size() // width  # bytes, if it is only moved
            sends, receives = ([n * units for n in each] for each in (sent, received))
            comm.all_to_all_v(
                x,
                send_counts=sends,
                recv_counts=receives,
                out=out,
                stream=work.stream,
            )

        tensors = [input, output]
        return self._run(body, tensors, opts, outputs=[output], messages=not equal)

    def _counts(self, tensor: Any, splits: Sequence[int]) -> list[int]:
        """Return the number of a tensor's elements for each rank."""
        length, size = tensor.shape[0] if tensor.dim() else 1, self.size()
        parts = list(splits) or [length // size] * size
        if len(parts) != size or sum(parts) != length:
            raise ArgumentError(
                f"all_to_all: expected a part for each of {size} ranks, of {length} "
                f"rows together, got {parts}"
            )
        row = tensor.numel() // length if length else 0
        return [part * row for part in parts]

    @_collective
    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any) -> SymmWork:
        """Send each rank a tensor, and receive one from each, of any sizes."""
        self._expect_lists([outputs, inputs], "all_to_all")
        everyone = range(self.size())
        sends = list(zip(inputs, everyone, strict=True))
        receives = list(zip(outputs, everyone, strict=True))
        return self._messages(sends, receives, opts)

    @_collective
    def gather(self, outputs: list[Any], inputs: list[Any], opts: Any) -> SymmWork:
        """Give the root the tensors of all ranks, of any sizes."""
        receives: list[tuple[Any, int]] = []
        if self.rank() == opts.rootRank:
            self._expect_lists(outputs, "gather")
            receives = list(zip(outputs[0], range(self.size()), strict=True))
        return self._messages([(inputs[0], opts.rootRank)], receives, opts)

    @_collective
    def scatter(self, outputs: list[Any], inputs: list[Any], opts: Any) -> SymmWork:
        """Give each rank one of the root's tensors, of any sizes."""
        sends: list[tuple[Any, int]] = []
        if self.rank() == opts.rootRank:
            self._expect_lists(inputs, "scatter")
            sends = list(zip(inputs[0], range(self.size()), strict=True))
        return self._messages(sends, [(outputs[0], opts.rootRank)], opts)

    def _expect_lists(self, lists: Sequence[Any], what: str) -> None:
        for each in lists:
            if len(each) != self.size():
                raise ArgumentError(
                    f"{what}: expected a list of {self.size()} tensors, one for each "
                    f"rank, got {len(each)}"
                )

    @_collective
    def send(self, tensors: list[Any], peer: int, tag: int) -> SymmWork:
        """Send a tensor to a rank."""
        return self._request("isend", tensors, tag, dst=peer)

    @_collective
    def recv(self, tensors: list[Any], peer: int, tag: int) -> SymmWork:
        """Receive a tensor from a rank."""
        for tensor in tensors:
            if _is_own(tensor) and not tensor.is_contiguous():
                raise ArgumentError(
                    "recv: expected a contiguous tensor, got one with strides "
                    f"{tensor.stride()}; receive into another one, and copy"
                )
        return self._request("irecv", tensors, tag, src=peer)

    def _request(
        self, name: str, tensors: list[Any], tag: int, **peer: int
    ) -> SymmWork:
        place, work = _place(tensors), SymmWork(self, tensors, tensors)
        if tag:
            raise ArgumentError(
                f"{name}: expected tag=0, got {tag}, because messages of two ranks "
                "match in the order of their calls; omit tag="
            )
        with self._lock, on_device(place):
            start = getattr(self._communicator(), name)
            stream = None if SIMULATED else current_stream()
            work.requests = [start(work.of(x), stream=stream, **peer) for x in tensors]
            if self.coalesces:
                self._begun += work.requests
        return work

    def barrier(self, opts: Any = None) -> SymmWork:
        """Wait for all ranks, on the host."""
        limit = getattr(opts, "timeout", self._timeout)
        if limit not in (self._timeout, timedelta(milliseconds=-1)):
            raise ArgumentError(
                f"barrier: expected the timeout of the group, {self._timeout}, got "
                f"{limit}; omit timeout="
            )

        def body(comm: Communicator, work: SymmWork) -> None:
            comm.barrier(None if SIMULATED else work.stream or current_stream())

        with on_device(self.ordinal):
            return self._run(body, [], opts, kind=_Barrier)

    # From torch 2.13 on, it calls these names.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    allgather_coalesced = _refused("allgather_coalesced", "call all_gather")
    recv_anysource = _refused("recv_anysource", "pass the rank to receive from")


_groups: "weakref.WeakSet[SymmGroup]" = weakref.WeakSet()


@atexit.register
def _close() -> None:
    """Close the groups of a program that does not destroy them.

    A rank that another one waits for, but that leaves by ``sys.exit``, is not awaited.
    """
    if not hasattr(sys, "last_value"):  # else the library reports the exception
        for group in sorted(_groups, key=SymmGroup.getGroupName):
            group.shutdown()


def _create(options: Any, given: Any) -> SymmGroup:
    if given is not None:
        raise ArgumentError(
            f"init_process_group: expected no pg_options for {NAME}, got {given!r}; "
            "omit them"
        )
    return SymmGroup(
        options.store, options.group_rank, options.group_size, options.timeout
    )


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[DEVICE])
