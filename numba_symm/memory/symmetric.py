"""What a rendezvous gives: every rank's buffer, with its signal pad."""

import functools
import math
from typing import Any

import numpy as np
from numba import cuda

from numba_symm import arguments, arrays, pads, streams
from numba_symm.arrays import Memory
from numba_symm.backends.peers import Peers
from numba_symm.device.signals import Context
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, ClosedError
from numba_symm.group import Group


class SymmetricMemory:
    """A buffer that every rank has and can reach on every other, with its signal pad.

    Made by ``comm.rendezvous(array)``. Valid until the communicator closes.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        buffer_size: bytes from the rendezvous' address to the block's end.
        signal_pad_size: bytes of a signal pad.
        buffer_ptrs: address of every rank's buffer in this process.
        signal_pad_ptrs: address of every rank's signal pad in this process.

    Source: ``CUDASymmetricMemory`` of PyTorch.
    """

    def __init__(
        self,
        group: Group,
        peers: Peers,
        nbytes: int,
        offset: int,
        pad: tuple[int, ...],
        owner: Any,
    ):
        self.rank = group.world.rank
        self.world_size = group.world.size
        self.buffer_size = nbytes - offset
        self.signal_pad_size = pads.pad_nbytes(self.world_size)
        self.buffer_ptrs = [base + offset for base in peers.addresses]
        self.signal_pad_ptrs = list(pad)
        self._ctx = Context(
            self.rank,
            self.world_size,
            tuple(self.buffer_ptrs),
            tuple(self.signal_pad_ptrs),
            group.guard,
        )
        self._group = group
        self._peers = peers
        # What keeps this rank's memory; contexts and arrays over it keep that, too.
        self._owner = owner
        self._ctx.owner = self._owner, tuple(peers.mappings)
        self._ctx.buffer_size = self.buffer_size

    @property
    def ctx(self) -> Context:
        """The form that kernels take, an ordinary argument of any ``@cuda.jit`` kernel.

        It keeps the memory until the communicator closes, as this object does.

        Raises:
            ClosedError: the communicator was closed, or the memory has gone.
        """
        self._check_mapped()
        return self._ctx

    @functools.cached_property
    def _pointer_arrays(self) -> tuple[Any, Any]:
        buffers = np.array(self.buffer_ptrs, np.uint64)
        signal_pads = np.array(self.signal_pad_ptrs, np.uint64)
        return cuda.to_device(buffers), cuda.to_device(signal_pads)

    @property
    def buffer_ptrs_dev(self) -> int:
        """Device address of an array of ``world_size`` uint64: the buffers.

        Raises:
            ClosedError: the communicator was closed, or the memory has gone.
        """
        self._check_mapped()
        return arrays.view(self._pointer_arrays[0], "buffer_ptrs_dev").address

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Device address of an array of ``world_size`` uint64: the signal pads.

        Raises:
            ClosedError: the communicator was closed, or the memory has gone.
        """
        self._check_mapped()
        return arrays.view(self._pointer_arrays[1], "signal_pad_ptrs_dev").address

    def get_buffer(
        self, rank: int, shape: Any, dtype: Any, storage_offset: int = 0
    ) -> Any:
        """Return an array over rank ``rank``'s buffer; not collective.

        Args:
            rank: whose buffer.
            shape: the array's shape, an int or a tuple.
            dtype: the array's dtype.
            storage_offset: elements of ``dtype`` from the buffer's start.

        Returns:
            A Numba device array. A peer's must not be used after the communicator
            has closed; nothing orders its use with the peer's but signals.

        Raises:
            ArgumentError: there is no such rank, or the array does not fit.
        """
        self._check_open()
        dtype = arrays.checked_dtype(dtype, "get_buffer")
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
        """Return the shape as a tuple and the first byte, if an array fits there."""
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.world_size:
            raise ArgumentError(
                f"{what}: rank {rank!r}; there are ranks 0 to {self.world_size - 1}"
            )
        shape = arrays.checked_shape(shape, dtype, what)
        first = arguments.integer(
            *(storage_offset, what, "storage_offset to be an integer"),
            *(-(1 << 63), 1 << 63, "pass where the array begins, in elements"),
        )
        start = first * dtype.itemsize
        end = start + math.prod(shape) * dtype.itemsize
        if start < 0 or end > self.buffer_size:
            raise ArgumentError(
                f"{what}: shape {shape} of {dtype.name} from element "
                f"{storage_offset} takes bytes {start} to {end} of a buffer of "
                f"{self.buffer_size}"
            )
        return shape, start

    def put(
        self, x: Any, rank: int, storage_offset: int = 0, stream: Any = None
    ) -> None:
        """Enqueue a copy of ``x`` into rank ``rank``'s buffer, by a copy engine.

        Not collective, and may be captured. It arrives where that rank's
        ``get_buffer(rank, x.shape, x.dtype, storage_offset)`` looks. That it has come
        is for a signal to tell: whoever takes one that this stream has put after the
        copy, by :meth:`put_signal` or :meth:`barrier`, sees it. ``x`` must stay as it
        is, and nobody may use its place at ``rank``, until then.

        Args:
            x: a device array of this rank's GPU, in C order, of any dtype.
            rank: whose buffer, this rank's included.
            storage_offset: elements of x's dtype from the buffer's start.
            stream: where to; None is the legacy default stream, whichever ``x`` names.

        Raises:
            ArgumentError: there is no such rank, ``x`` is no such array, does not fit
                or overlaps its place.
            ClosedError: the communicator was closed, or the memory has gone.
            CollectiveError: the communicator has failed.
        """
        self._check_open()
        source = self._contiguous(x, "put")
        _, start = self._place(rank, source.shape, source.dtype, storage_offset, "put")
        target = self.buffer_ptrs[rank] + start
        _copy(target, source.address, source.nbytes, stream, "put")

    def get(
        self,
        rank: int,
        shape: Any,
        dtype: Any,
        storage_offset: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Enqueue a copy from rank ``rank``'s buffer, by a copy engine.

        Not collective, and may be captured. It takes what is there when the stream
        comes to it: let the stream first take a signal that ``rank`` put after writing.

        Args:
            rank: whose buffer, this rank's included.
            shape: the shape of what is there, an int or a tuple.
            dtype: its dtype.
            storage_offset: elements of ``dtype`` from the buffer's start.
            out: where to: a device array of this rank's GPU of that shape and dtype,
                in C order. None: a new array of ordinary device memory.
            stream: where to enqueue; None is the legacy default stream.

        Returns:
            ``out``, or the new array; what is in it is defined once the stream's work
            is done.

        Raises:
            ArgumentError: there is no such rank, nothing of that size, ``out`` is no
                such array or overlaps it, or out=None in a capture.
            ClosedError: the communicator was closed, or the memory has gone.
            CollectiveError: the communicator has failed.
        """
        self._check_open()
        dtype = arrays.checked_dtype(dtype, "get")
        shape, start = self._place(rank, shape, dtype, storage_offset, "get")
        if out is None:
            out = _new_array(shape, dtype, stream)
        target = self._contiguous(out, "get: out")
        if (target.shape, target.dtype) != (shape, dtype) or target.readonly:
            raise ArgumentError(
                f"get: out is{' read-only,' * target.readonly} of shape {target.shape} "
                f"and {target.dtype.name}; pass an array of shape {shape} and "
                f"{dtype.name} that may be written"
            )
        source = self.buffer_ptrs[rank] + start
        _copy(target.address, source, target.nbytes, stream, "get")
        return out

    def _contiguous(self, array: Any, what: str) -> arrays.ArrayView:
        view = arrays.dense(arrays.view(array, what), what)
        if view.order != "C":
            raise ArgumentError(
                f"{what}: the array is in Fortran order; pass its transpose, which is "
                "in C order"
            )
        arrays.check_device(view, self._group.gpu.ordinal, what)
        return view

    def fence(self, stream: Any = None) -> None:
        """Enqueue a kernel whose one thread fences at system scope; not collective.

        What the stream has put before is visible to a peer that takes a signal which
        the stream puts after. :meth:`put_signal` and :meth:`barrier` see to that
        without a fence: their kernels begin once the copies before them are done, and
        release at system scope. So a fence between them adds no order; it says what
        is meant, for one launch. It does not wait for a peer, and orders nothing
        between streams, which events do.
        """
        self._check_open()
        pads.fence_kernel().bind(1)(streams.handle_or_default(stream))

    def barrier(self, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a barrier of all ranks on ``channel``. Every rank calls it.

        What any rank's stream wrote before is visible to all ranks' streams after.
        ``stream=None`` here, and for signals, is the legacy default stream.

        Args:
            channel: 0 to 127; a (pair, channel) has one user at a time.
            stream: where to enqueue.

        Raises:
            ArgumentError: there is no such channel.
            ClosedError: the communicator was closed, or the memory has gone.
            CollectiveError: the communicator has failed.
        """
        pads.check_channel(channel, "barrier")
        self._launch("barrier", pads.barrier_kernel, stream, channel)

    def put_signal(self, dst: int, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a signal to rank ``dst``, once it has taken the one before.

        What this rank's stream wrote before is visible to whoever takes it. Channels,
        streams and errors are those of :meth:`barrier`; ``dst`` is another rank.
        """
        pads.check_channel(channel, "put_signal")
        pads.check_peer(dst, self.rank, self.world_size, "put_signal")
        self._launch("put_signal", pads.put_signal_kernel, stream, dst, channel)

    def wait_signal(self, src: int, channel: int = 0, stream: Any = None) -> None:
        """Enqueue a wait for rank ``src``'s signal, which takes it.

        Channels, streams and errors are those of :meth:`barrier`; ``src`` is another
        rank.
        """
        pads.check_channel(channel, "wait_signal")
        pads.check_peer(src, self.rank, self.world_size, "wait_signal")
        self._launch("wait_signal", pads.wait_signal_kernel, stream, src, channel)

    def _launch(self, what: str, kernel: Any, stream: Any, *args: int) -> None:
        self._check_open()
        handle = streams.handle_or_default(stream)
        try:
            kernel(self.world_size).bind(1, self._ctx, *args)(handle)
        except BaseException as error:
            # The other ranks have enqueued theirs. No graph comes of a capture.
            if not streams.spoil_capture(handle):
                self._group.abandon(error, what)
            raise

    def _check_open(self) -> None:
        self._group.check()
        self._check_mapped()

    def _check_mapped(self) -> None:
        self._group.check_open()
        if self._peers.closed:
            raise ClosedError("this symmetric memory was closed by its communicator")


def _new_array(shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Any:
    if not SIMULATED and streams.is_capturing(streams.handle_or_default(stream)):
        raise ArgumentError(
            "get: pass out= while a stream is being captured into a graph; memory "
            "cannot be allocated then"
        )
    return arrays.empty(shape, dtype, "get")


def _copy(target: int, source: int, nbytes: int, stream: Any, what: str) -> None:
    """Enqueue a copy between arrays that do not overlap."""
    handle = streams.handle_or_default(stream)
    if nbytes == 0:
        return
    if abs(target - source) < nbytes:
        raise ArgumentError(
            f"{what}: the array overlaps its place in the buffer; pass one apart"
        )
    streams.copy(target, source, nbytes, handle)
