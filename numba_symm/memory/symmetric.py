"""The result of a rendezvous: the buffers and signal pads of all ranks."""

import functools
import math
from typing import Any

import numpy as np
from numba import cuda

from numba_symm import arguments, dtypes
from numba_symm.device.signals import CheckedContext, Context
from numba_symm.errors import ArgumentError, ClosedError
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.arrays import Memory
from numba_symm.launch.members import Members, Peers
from numba_symm.memory import pads


class SymmetricMemory:
    """The buffers and signal pads of all ranks, mapped in this process.

    ``comm.rendezvous(array)`` returns it. It is valid until the communicator is closed.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        buffer_size: the bytes from the array's beginning to the end of its allocation.
        channels: the number of channels of a signal pad.
        signal_pad_size: the bytes of a signal pad.
        buffer_ptrs: the address of every rank's buffer in this process.
        signal_pad_ptrs: the address of every rank's signal pad in this process.

    Source: ``CUDASymmetricMemory`` of PyTorch.
    """

    def __init__(
        self,
        island: Members,
        peers: Peers,
        nbytes: int,
        offset: int,
        pad: tuple[int, ...],
        channels: int,
        owner: Any,
        debug: bool,
    ):
        self.rank = island.world.rank
        self.world_size = island.world.size
        self.buffer_size = nbytes - offset
        self.channels = channels
        self.signal_pad_size = pads.pad_nbytes(self.world_size, channels)
        self.buffer_ptrs = [base + offset for base in peers.addresses]
        self.signal_pad_ptrs = list(pad)
        self._ctx = Context(
            self.rank,
            self.world_size,
            tuple(self.buffer_ptrs),
            tuple(self.signal_pad_ptrs),
            island.guard,
        )
        self._island = island
        self._peers = peers
        # It keeps this rank's memory. Contexts and arrays over it keep that, too.
        self._owner = owner
        # For kernels of the program. The library's own have checked their arguments.
        users = self._ctx
        if debug:
            users = CheckedContext(*self._ctx, self.buffer_size, channels)
        users.owner = self._owner, tuple(peers.mappings)
        users.buffer_size, users.channels = self.buffer_size, channels
        self._check_mapped = functools.partial(_check_mapped, island, peers)
        users.check_mapped = self._check_mapped
        self._users_ctx = users

    def __repr__(self) -> str:
        closed = ", closed" if self._island.closed or self._peers.closed else ""
        return (
            f"<SymmetricMemory of {self.buffer_size} bytes, rank {self.rank} of "
            f"{self.world_size}{closed}>"
        )

    def is_of(self, island: Members) -> bool:
        """Return whether these ranks have mapped the memory."""
        return self._island is island

    @property
    def ctx(self) -> Context:
        """The context to pass to ``@cuda.jit`` kernels, as an ordinary argument.

        Like this object, the context keeps the memory alive until the communicator is
        closed.

        Raises:
            ClosedError: the communicator or the memory was closed.
        """
        self._check_mapped()
        return self._users_ctx

    @property
    def _numba_type_(self) -> Any:
        """Refuse to be an argument of a kernel, whose type Numba asks for here."""
        raise ArgumentError(
            "a kernel's argument: expected a context, got SymmetricMemory; pass mem.ctx"
        )

    @functools.cached_property
    def _pointer_arrays(self) -> tuple[Any, Any]:
        buffers = np.array(self.buffer_ptrs, np.uint64)
        signal_pads = np.array(self.signal_pad_ptrs, np.uint64)
        return cuda.to_device(buffers), cuda.to_device(signal_pads)

    @property
    def buffer_ptrs_dev(self) -> int:
        """The device address of an array with the buffers' addresses, as uint64.

        Raises:
            ClosedError: the communicator or the memory was closed.
        """
        self._check_mapped()
        return arrays.view(self._pointer_arrays[0], "buffer_ptrs_dev").address

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """The device address of an array with the signal pads' addresses, as uint64.

        Raises:
            ClosedError: the communicator or the memory was closed.
        """
        self._check_mapped()
        return arrays.view(self._pointer_arrays[1], "signal_pad_ptrs_dev").address

    def get_buffer(
        self, rank: int, shape: Any, dtype: Any, storage_offset: int = 0
    ) -> Any:
        """Return an array over rank ``rank``'s buffer. Not collective.

        Args:
            rank: the rank of the buffer.
            shape: the array's shape, an int or a tuple.
            dtype: the array's dtype.
            storage_offset: elements of ``dtype`` from the buffer's start.

        Returns:
            A Numba device array. Only signals order this rank's accesses to the array
            with the peer's. A peer's array must not be used after the communicator was
            closed.

        Raises:
            ArgumentError: ``rank`` is not a rank, or the array does not fit.
        """
        self._check_open()
        dtype = dtypes.checked(dtype, "get_buffer")
        shape, start = self._place(rank, shape, dtype, storage_offset, "get_buffer")
        memory = Memory(
            self.buffer_ptrs[rank],
            self.buffer_size,
            (self._owner, self._peers.mappings[rank]),
        )
        return memory.array(shape, dtype, start)

    def _place(
        self, rank: int, shape: Any, dtype: Any, storage_offset: int, what: str
    ) -> tuple[tuple[int, ...], int]:
        """Return the shape as a tuple, and the first byte. Check that it fits."""
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.world_size:
            raise ArgumentError(
                f"{what}: expected a rank from 0 to {self.world_size - 1}, got {rank!r}"
                f"{self._island.note}"
            )
        shape = arrays.checked_shape(shape, dtype, what)
        first = arguments.integer(
            storage_offset,
            what,
            "storage_offset to be an integer",
            least=-(1 << 63),
            most=1 << 63,
            do="pass where the array begins, in elements",
        )
        start = first * dtype.itemsize
        end = start + math.prod(shape) * dtype.itemsize
        if start < 0 or end > self.buffer_size:
            raise ArgumentError(
                f"{what}: expected an array within the {self.buffer_size} bytes of a "
                f"buffer, got shape {shape} of {dtype.name} from element "
                f"{storage_offset}: bytes {start} to {end}"
            )
        return shape, start

    def put(
        self, x: Any, rank: int, storage_offset: int = 0, stream: Any = None
    ) -> None:
        """Enqueue a copy of ``x`` into rank ``rank``'s buffer, with a copy engine.

        Not collective. The call may be captured. The target is ``get_buffer(rank,
        x.shape, x.dtype, storage_offset)``. Announce the copy with a :meth:`put_signal`
        or :meth:`barrier` on the same stream. The peer sees the data after it has
        waited for that signal. Before that, ``x`` must not change, and the peer must
        not use the target.

        Args:
            x: a device array of this rank's GPU, in C order, of any dtype.
            rank: the rank of the buffer; may be this rank.
            storage_offset: elements of x's dtype from the buffer's start.
            stream: the stream; None: the legacy default stream, even if ``x`` names
                another one.

        Raises:
            ArgumentError: ``rank`` is not a rank, or ``x`` is not such an array, does
                not fit, or overlaps the target.
            ClosedError: the communicator or the memory was closed.
            CollectiveError: the communicator has failed.
        """
        self._check_open()
        source = self._contiguous(x, "put")
        _, start = self._place(rank, source.shape, source.dtype, storage_offset, "put")
        target = self.buffer_ptrs[rank] + start
        self._copy(target, source.address, source.nbytes, stream, "put")

    def get(
        self,
        rank: int,
        shape: Any,
        dtype: Any,
        storage_offset: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Enqueue a copy from rank ``rank``'s buffer, with a copy engine.

        Not collective. The call may be captured. The copy reads the buffer when the
        stream reaches the copy. So first enqueue a :meth:`wait_signal` for a signal
        that ``rank`` puts after it has written the data.

        Args:
            rank: the rank of the buffer; may be this rank.
            shape: the shape of the data, an int or a tuple.
            dtype: the dtype of the data.
            storage_offset: elements of ``dtype`` from the buffer's start.
            out: the target, a device array of this rank's GPU of that shape and dtype,
                in C order. None: a new array of ordinary device memory.
            stream: the stream; None: the legacy default stream.

        Returns:
            ``out``, or the new array. Its contents are defined when the stream's work
            is done.

        Raises:
            ArgumentError: ``rank`` is not a rank; the data does not fit; ``out`` is not
                such an array, overlaps the data, or is None in a capture.
            ClosedError: the communicator or the memory was closed.
            CollectiveError: the communicator has failed.
        """
        self._check_open()
        dtype = dtypes.checked(dtype, "get")
        shape, start = self._place(rank, shape, dtype, storage_offset, "get")
        if out is None:
            if streams.is_capturing(streams.handle_or_default(stream)):
                raise ArgumentError(
                    "get: pass out= while a stream is being captured into a graph; "
                    "memory cannot be allocated then"
                )
            out = self._new_array(shape, dtype)
        target = self._contiguous(out, "get: out")
        if (target.shape, target.dtype) != (shape, dtype) or target.readonly:
            raise ArgumentError(
                f"get: expected a writable out of shape {shape} and {dtype.name}, got "
                f"{'a read-only ' * target.readonly}one of shape {target.shape} and "
                f"{target.dtype.name}"
            )
        source = self.buffer_ptrs[rank] + start
        self._copy(target.address, source, target.nbytes, stream, "get")
        return out

    def _contiguous(self, array: Any, what: str) -> arrays.ArrayView:
        view = arrays.dense(arrays.view(array, what), what)
        if view.order != "C":
            raise ArgumentError(
                f"{what}: expected an array in C order, got one in Fortran order; pass "
                "its transpose"
            )
        arrays.check_device(view, self._island.gpu.ordinal, what)
        return view

    def fence(self, stream: Any = None) -> None:
        """Enqueue a kernel with one fence at system scope. Not collective.

        The kernel orders earlier puts of the stream before the stream's later signals.
        This order also exists without a fence: the kernels of :meth:`put_signal` and
        :meth:`barrier` begin when earlier copies are done, and release at system scope.
        So a fence only documents the order, at the cost of a launch. A fence waits for
        no peer. To order streams, use events.
        """
        self._check_open()
        pads.fence_kernel().bind(1)(streams.handle_or_default(stream))

    def barrier(self, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a barrier of all ranks on ``channel``. Every rank calls it.

        What each rank's stream wrote before the barrier is visible to every rank's
        stream after the barrier.

        Args:
            channel: 0 to ``channels`` - 1; between two ranks, only one operation may
                use a channel at a time.
            stream: the stream; None: the legacy default stream.

        Raises:
            ArgumentError: ``channel`` is not a channel.
            ClosedError: the communicator or the memory was closed.
            CollectiveError: the communicator has failed.
        """
        pads.check_channel(channel, self.channels, "barrier")
        self._launch("barrier", pads.barrier_kernel, stream, channel)

    def put_signal(self, dst: int, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a wait until this rank's slot at ``dst`` is empty, then a signal.

        What this rank's stream wrote before the signal is visible to ``dst`` after
        ``dst`` has waited for the signal. Channels, streams and errors are those of
        :meth:`barrier`. ``dst`` may be this rank.
        """
        pads.check_channel(channel, self.channels, "put_signal")
        self._check_peer(dst, "put_signal")
        self._launch("put_signal", pads.put_signal_kernel, stream, dst, channel)

    def wait_signal(self, src: int, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a wait for rank ``src``'s signal; the wait then resets the slot.

        Channels, streams and errors are those of :meth:`barrier`. ``src`` may be this
        rank, if this rank has already put a signal to itself, on any stream.
        """
        pads.check_channel(channel, self.channels, "wait_signal")
        self._check_peer(src, "wait_signal")
        self._launch("wait_signal", pads.wait_signal_kernel, stream, src, channel)

    def _check_peer(self, peer: int, what: str) -> None:
        pads.check_peer(peer, self.world_size, what, self._island.note)

    def _launch(self, what: str, kernel: Any, stream: Any, *args: int) -> None:
        self._check_open()
        handle = streams.handle_or_default(stream)
        try:
            kernel(self.world_size).bind(1, self._ctx, *args)(handle)
        except BaseException as error:
            # The other ranks have enqueued theirs. A capture is invalidated.
            if not streams.spoil_capture(handle):
                self._island.abandon(error, what)
            raise

    def _new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return arrays.empty(shape, dtype, "get")

    def _copy(
        self, target: int, source: int, nbytes: int, stream: Any, what: str
    ) -> None:
        """Enqueue a copy between arrays that do not overlap."""
        handle = streams.handle_or_default(stream)
        if nbytes == 0:
            return
        if abs(target - source) < nbytes:
            raise ArgumentError(
                f"{what}: expected an array apart from its place in the buffer, got "
                "arrays that overlap"
            )
        streams.copy(target, source, nbytes, handle)

    def _check_open(self) -> None:
        self._island.check()
        self._check_mapped()


def _check_mapped(island: Members, peers: Peers) -> None:
    island.check_open()
    if peers.closed:
        raise ClosedError("this symmetric memory was closed by its communicator")
