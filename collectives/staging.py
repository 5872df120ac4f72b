"""Strided arrays: a call works on contiguous memory instead.

A kernel packs such an array before the call, and another one unpacks an output after
it. An output is packed, too, because a call may not write all of it. A message may be
shorter, ranges may leave elements out, and a call may fail.

The memory belongs to the communicator. Its calls follow one another, also on different
streams, so all of them may use the same memory. It is kept until the communicator is
closed, because graphs may contain its address.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from numba_symm import arrays, libraries, own_arrays, streams
from numba_symm.arrays import ArrayView
from numba_symm.collectives.call_streams import CallStreams
from numba_symm.collectives.checks import are_apart, check_writable
from numba_symm.collectives.enqueueing import Enqueuer
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.kernels import pack
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.transfers import BoundCall, Prepared
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError, GapsError
from numba_symm.launch.devices import GPU
from numba_symm.own_arrays import Memory

_LINE = 256  # bytes: an array in the memory begins on a multiple


class Staging:
    """The contiguous memory of one communicator.

    Attributes:
        used: bytes of the latest memory that the call, or the open group, uses.
        stream: the handle of the call's stream.
    """

    stream = streams.LEGACY_DEFAULT

    def __init__(self) -> None:
        self._rooms: list[Any] = []  # the latest one is the largest
        self.used = 0
        self._apart = False
        self._scratch: list[Any] = []  # the latest one is the largest

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Give the calls within the block memory of their own, which they keep."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def take(self, nbytes: int, what: str, message: bool) -> tuple[int, Any]:
        """Return the address of memory, and the object that owns it.

        Args:
            nbytes: its size.
            what: the call.
            message: whether the call may start together with others.
        """
        if self._apart and message:
            room = _new(nbytes, self.stream, what)
            return arrays.view(room, what).address, room
        whole = self._rooms[-1].size if self._rooms else 0
        if not self._rooms or self.used + nbytes > whole:  # nbytes may be 0
            self._rooms.append(_new(max(nbytes, 2 * whole), self.stream, what))
            self.used = 0
        room = self._rooms[-1]
        address = arrays.view(room, what).address + self.used
        self.used += -(-nbytes // _LINE) * _LINE
        return address, room

    def scratch(self, nbytes: int, what: str) -> int:
        """Return the address of memory within a call, for other data than arrays.

        The arguments are those of :meth:`take`. Each call uses it from its start.
        """
        if not self._scratch or self._scratch[-1].size < nbytes:
            most = 2 * self._scratch[-1].size if self._scratch else 0
            expected = (
                "a call of a size that has been made before, while a stream is being "
                "captured into a graph"
            )
            self._scratch.append(_new(max(nbytes, most), self.stream, what, expected))
        return arrays.view(self._scratch[-1], what).address


_EXPECTED = (
    "a contiguous array, or one whose size has been used before, while a stream is "
    "being captured into a graph"
)


def _new(nbytes: int, stream: int, what: str, expected: str = _EXPECTED) -> Any:
    if not SIMULATED and streams.is_capturing(stream):
        raise ArgumentError(
            f"{what}: expected {expected}; make such a call before the capture"
        )
    return own_arrays.empty((nbytes,), np.dtype(np.uint8), what)


class Caller(Protocol):
    """The calls of a communicator, as strided arrays need them: ``Calls``."""

    gpu: GPU
    staging: Staging
    streams: CallStreams
    enqueuer: Enqueuer

    def remembered(self, work_out: Any, given: Any) -> Any: ...


class Staged(NamedTuple):
    """The contiguous memory that replaces a strided array in a call.

    Attributes:
        array: an array of that memory.
        pack: copies the array there.
        unpack: copies it back.
    """

    array: Any
    pack: Enqueue
    unpack: Enqueue


def has_gaps(array: Any, what: str) -> bool:
    """Return whether an argument is a strided array."""
    if array is None:
        return False
    try:
        return arrays.fields(array, what)[3] is None
    except ArgumentError:  # the call itself raises it, unless it ignores the argument
        return False


def stage(calls: Caller, array: Any, what: str, written: bool, message: bool) -> Staged:
    """Return what replaces a strided array.

    Args:
        calls: the communicator's calls.
        array: the array.
        what: the call, and the argument.
        written: whether the call writes it.
        message: whether the call consists of messages.
    """
    view, strides = arrays.view(array, what), arrays.strides_of(array)
    arrays.check_device(view, calls.gpu.ordinal, what)
    arrays.check_aligned(view, what)
    if written:
        check_writable(view, what)
        # An axis of length 1 may have any stride.
        if any(each == 0 for n, each in zip(view.shape, strides, strict=True) if n > 1):
            raise ArgumentError(
                f"{what}: expected an array whose elements are apart, got one that is "
                f"broadcast, of shape {view.shape} and strides {strides}"
            )
    address, owner = calls.staging.take(view.nbytes, what, message)
    copies = [
        calls.remembered(_copy, (view, strides, address, packing))
        for packing in (True, False)
    ]
    memory = Memory(address, view.nbytes, owner)
    return Staged(memory.array(view.shape, view.dtype), *copies)


def _copy(
    calls: Caller, given: tuple[ArrayView, tuple[int, ...], int, bool]
) -> Enqueue:
    view, strides, address, packing = given
    size = view.dtype.itemsize
    return pack.bind(address, view.address, view.shape, strides, size, packing)


def copied(calls: Caller, x: Any, what: str) -> tuple[Any, Enqueue]:
    """Return an array for a copy of one without gaps, and what makes the copy."""
    view = arrays.dense(arrays.view(x, what), what)
    arrays.check_device(view, calls.gpu.ordinal, what)
    address, owner = calls.staging.take(view.nbytes, what, message=True)
    copy = Memory(address, view.nbytes, owner).array(view.shape, view.dtype)
    return copy, streams.Copy(address, view.address, view.nbytes)


class Replaced:
    """The input and the output of a call, with contiguous memory for strided ones.

    Attributes:
        x: the input.
        out: the output, which may be ``x``.
        before: what is enqueued before the call.
        after: what is enqueued after it.
    """

    def __init__(
        self,
        calls: Caller,
        what: str,
        x: Any,
        out: Any,
        message: bool = False,
    ):
        self._x, self._out = x, out
        self.x, self.out = x, out
        self.before: list[Enqueue] = []
        self.after: list[Enqueue] = []
        same = out is x
        if has_gaps(x, what):
            found = stage(calls, x, what, same, message)
            self.x = found.array
            self.before.append(found.pack)
            if same:
                self.out = found.array
                self.after.append(found.unpack)
        if not same and has_gaps(out, what):
            found = stage(calls, out, f"{what}: out", True, message)
            self.out = found.array
            self.before.append(found.pack)
            self.after.append(found.unpack)

    def result(self, made: Any) -> Any:
        """Return what the call returns, of what it would with contiguous memory."""
        if self._out is None:  # it is of Numba's, because the contiguous input is
            return made if self.x is self._x else libraries.as_that_of(self._x, made)
        return self._out if made is self.out else made


def bound(
    calls: Caller,
    given: Invocation[Any],
    out: Any,
    bind: Callable[[Invocation[Any]], BoundCall],
) -> BoundCall:
    """Bind a call whose ``x``, or whose output ``out``, has gaps.

    Args:
        calls: the communicator's calls.
        given: the call.
        out: the output.
        bind: binds calls of contiguous arrays.
    """
    if calls.enqueuer.group is None:
        calls.staging.used = 0
    what = given.operation.name
    if given.second is not None:  # later, the copies in their place are compared
        second = _extent(given.second, f"{what}: out[1]")
        others = [_extent(each, what) for each in (given.x, out) if each is not None]
        if not all(are_apart(second, each) for each in others):
            raise ArgumentError(
                f"{what}: out[1]: expected an array apart from x and out[0], got "
                "arrays that overlap; it may be one of args"
            )
    dense = Replaced(calls, what, given.x, out)
    on = calls.staging.stream
    made = bind(given._replace(x=dense.x, out=dense.out, stream=on))
    return made._replace(
        call=calls.enqueuer.around(dense.before, made.call, dense.after),
        keep=(*made.keep, given.x, out, given.stream),
        result=dense.result(made.result),
    )


def _extent(array: Any, what: str) -> ArrayView:
    """Return the bytes from an array's first element to its last one, as an array."""
    address, shape, dtype, *_ = arrays.fields(array, what)
    along = zip(shape, arrays.strides_of(array), strict=True)
    steps = [(n - 1) * stride for n, stride in along] if 0 not in shape else []
    first = address + sum(step for step in steps if step < 0)
    nbytes = sum(map(abs, steps)) + dtype.itemsize * (0 not in shape)
    return ArrayView(first, (nbytes,), np.dtype(np.uint8), "C", False)


def prepared(
    calls: Caller,
    given: Invocation[Any],
    prepare: Callable[[Any, Invocation[Any]], Prepared],
) -> Prepared:
    """Return ``prepare(calls, given)``; strided arrays are replaced.

    Args:
        calls: the communicator's calls.
        given: the call.
        prepare: takes calls of contiguous arrays.
    """
    if calls.enqueuer.group is None:
        calls.staging.used = 0
    what, x, out, stream = given.operation.name, *given[1:4]
    try:
        return prepare(calls, given)
    except GapsError:  # to look for gaps beforehand takes longer
        if not has_gaps(x, what) and not has_gaps(out, what):
            raise
    calls.staging.stream = chosen = calls.streams.of(stream, out if x is None else x)
    dense = Replaced(calls, what, x, out, message=True)
    call = prepare(calls, given._replace(x=dense.x, out=dense.out, stream=chosen))
    return call._replace(
        keep=(*call.keep, x, out, stream),
        result=dense.result(call.result),
        before=(*dense.before, *call.before),
        after=(*call.after, *dense.after),
    )
