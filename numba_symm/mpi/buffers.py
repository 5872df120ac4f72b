"""Buffers and classes of mpi4py's, and kernels on the arrays of one rank.

Buffer specifications, as mpi4py takes them, of device arrays.

A specification is an array ``x`` or a list or tuple: ``[x, type]``, ``[x, count]``,
``[x, (count, displ)]``, ``[x, count, type]``, ``[x, (count, displ), type]`` or ``[x,
count, displ, type]``; the vector forms have a count and a displacement for each rank.
As in mpi4py, counts and displacements are numbers of items of the type, and omitted
values follow from the array.

Buffers of host types over memory of the GPU, such as ``MPI.memory.fromaddress``.

A program makes such a buffer from a pointer, for a library whose arrays have no
interface. The buffer's type does not show whether its memory is on the GPU, so this
module asks the driver. MPI would read the memory as the host's.

The class of this package's classes, which stand for mpi4py's of the same names.

A program may have objects of both: windows of host memory, null handles, requests of
host arrays and communicators that nobody wrapped are mpi4py's own. What it asks of a
class here holds for all of them.

Kernels on the arrays of one rank: strided items, and reductions of two arrays.

Items at regular distances, as in vectors and subarrays, are moved by the library's
kernel for strided arrays. The other kernels wait for no rank, so they are plain
``cuda.jit`` kernels.
"""

import array
import contextlib
import ctypes
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numba import cuda

from numba_symm.arguments import shown
from numba_symm.collectives.invocation import UNKNOWN, Cache
from numba_symm.collectives.kernels import pack as kernel
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.device.intrinsics import device_function
from numba_symm.environment import SIMULATED
from numba_symm.gpu import arrays, driver
from numba_symm.gpu.arrays import ArrayView, Memory
from numba_symm.mpi import datatypes
from numba_symm.mpi.datatypes import ItemLayout, listed, natural, naturals
from numba_symm.mpi.errors import refusal

if SIMULATED:
    from numba_symm import simulator

BYTE = np.dtype(np.uint8)
_OWNERS = (bytes, bytearray, array.array)
ASKED = (MPI.buffer, memoryview, ctypes.Array, np.ndarray)
"""Buffers that may be over memory of the GPU."""


def there(buffer: Any) -> Any:
    """Return a device array of the bytes of a buffer over memory of the GPU.

    Any other object is returned unchanged. A buffer of 0 bytes has an address only. It
    is treated as extending to the end of the allocation, because a datatype gives its
    size.
    """
    if not isinstance(buffer, ASKED) or arrays.on_device(buffer) or _is_own(buffer):
        return buffer
    try:
        place = MPI.buffer(buffer)
    except (TypeError, ValueError, BufferError):  # mpi4py's call refuses it, too
        return buffer
    if not place.address or not any_on_device([place.address]):
        return buffer
    nbytes = place.nbytes or _end(place.address) - place.address
    return at(place.address, nbytes, BYTE, buffer)


def at(address: int, count: int, dtype: np.dtype[Any], owner: Any) -> Any:
    """Return the array of some elements in memory that an object keeps."""
    return Memory(address, count * dtype.itemsize, owner).array(count, dtype)


def buffer_on_device(buffer: Any) -> bool:
    """Return whether an object is a device array, or a buffer over such memory."""
    return arrays.on_device(buffer) or there(buffer) is not buffer


def _is_own(buffer: Any) -> bool:
    """Return whether Python or NumPy has allocated the memory of a buffer."""
    while isinstance(buffer, np.ndarray | memoryview):
        if isinstance(buffer, memoryview):
            buffer = buffer.obj
        elif buffer.base is None:
            return bool(buffer.flags.owndata)
        else:
            buffer = buffer.base
    return isinstance(buffer, _OWNERS)


def any_on_device(addresses: Collection[int]) -> bool:
    """Return whether one of several addresses is of the GPU's memory."""
    if SIMULATED:
        return simulator.end_of_array(addresses) is not None
    from cuda.core import Buffer

    return any(not Buffer.from_handle(each, 1).is_host_accessible for each in addresses)


def _end(address: int) -> int:
    """Return the end of an allocation."""
    if SIMULATED:
        found = simulator.end_of_array([address])
        assert found is not None
        return found
    base, nbytes = driver.call("cuMemGetAddressRange", address)
    return int(base) + int(nbytes)


_SEQUENCE = (list, tuple)
_BOTTOM = type(MPI.BOTTOM)


class Items(NamedTuple):
    """The items that one argument names.

    Attributes:
        array: the array that the caller passed, which keeps the memory.
        view: its location.
        first: the byte of the array at which the first item begins.
        number: the number of items.
        layout: where the elements of an item are.
    """

    array: Any
    view: ArrayView
    first: int
    number: int
    layout: ItemLayout

    @property
    def size(self) -> int:
        """The number of elements of the layout's base."""
        return self.number * self.layout.elements

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.number * self.layout.elements * self.layout.base.itemsize

    @property
    def address(self) -> int:
        """The address of the first item."""
        return self.view.address + self.first

    def items(self, first: int, count: int) -> "Items":
        """Return ``count`` of these items from item ``first`` on."""
        start = self.first + first * self.layout.extent
        return check_room(self._replace(first=start, number=count))


class Vector(NamedTuple):
    """The items of several ranks in one array.

    Attributes:
        whole: a message of no items at the array's beginning.
        counts: the number of items of each rank.
        displs: the item at which those of each rank begin.
    """

    whole: Items
    counts: tuple[int, ...]
    displs: tuple[int, ...]

    @property
    def parts(self) -> list[Items]:
        """The message of each rank."""
        places = zip(self.displs, self.counts, strict=True)
        return [self.whole.items(*place) for place in places]


def array_in(spec: Any) -> Any:
    """Return the array of a specification; None if it has none."""
    if type(spec) in _SEQUENCE or isinstance(spec, _SEQUENCE):
        return spec[0] if len(spec) else None
    return spec


def on_device(*specs: Any) -> bool:
    """Return whether the arrays of specifications are on the GPU.

    None, MPI.IN_PLACE and MPI.BOTTOM are nowhere.

    Raises:
        MPIError: some are on the GPU and some on the host, or MPI.BOTTOM stands for
            addresses of the GPU.
    """
    for spec in specs:
        if is_bottom(array_in(spec)):
            _check_bottom(spec)
    arrays_of = map(array_in, specs)
    given = [each for each in arrays_of if not (in_place(each) or is_bottom(each))]
    found = {buffer_on_device(array) for array in given}
    if len(found) == 2:
        kinds = " and ".join(type(array).__name__ for array in given)
        raise refusal(
            MPI.ERR_BUFFER,
            "expected the arrays of a call on the device, or all on the host, got both:"
            f" {kinds}; copy one to where the other is",
        )
    return True in found


def _check_bottom(spec: Any) -> None:
    """Raise if a specification with ``MPI.BOTTOM`` has an address of the GPU.

    An address is a displacement, the lowest byte of a datatype, or their sum.
    """
    displs, datatypes = {0}, []
    left = list(spec) if isinstance(spec, _SEQUENCE) else []
    while left:
        each = left.pop()
        if isinstance(each, MPI.Datatype):
            datatypes.append(each)
        elif isinstance(each, int | np.integer) and not is_bottom(each):
            displs.add(int(each))
        elif isinstance(each, Sequence | np.ndarray) and not isinstance(each, str):
            left += list(each)
    lowest = {0} | {each.Get_true_extent()[0] for each in datatypes if each}
    places = {first + low for first in displs for low in lowest}
    if any_on_device({place for place in places if place > 0}):
        raise refusal(
            MPI.ERR_BUFFER,
            "MPI.BOTTOM: expected addresses of the host, got one of the device; pass "
            "the device array instead of MPI.BOTTOM",
        )


def of_host(plain: Any, advice: str) -> Any:
    """Return a method or a function of mpi4py, which refuses device arrays.

    Args:
        plain: the method or the function.
        advice: why it takes no others, and what to do; ends the error.
    """
    name = plain.__name__

    @functools.wraps(plain)
    def method(*args: Any, **options: Any) -> Any:
        for spec in (*args, *options.values()):
            if buffer_on_device(array_in(spec)):
                raise refusal(
                    MPI.ERR_BUFFER,
                    f"{name}: expected arrays on the host, got "
                    f"{type(array_in(spec)).__name__} on the device; {advice}",
                )
        return plain(*args, **options)

    return method


def is_constant(value: Any, constant: Any) -> bool:
    """Return whether a value is a constant of MPI, such as ``MPI.IN_PLACE``."""
    return type(value) is type(constant) and bool(value == constant)


def is_bottom(value: Any) -> bool:
    """Return whether a value is ``MPI.BOTTOM``."""
    return is_constant(value, MPI.BOTTOM)


def in_place(spec: Any) -> bool:
    """Return whether an argument is ``MPI.IN_PLACE``, or None, as in mpi4py."""
    return spec is None or is_constant(spec, MPI.IN_PLACE)


def message(spec: Any, blocks: int = 0) -> Items:
    """Return the items that a specification names.

    Args:
        spec: the specification.
        blocks: into how many equal parts the items are divided, of which ``count`` is
            one; 0 or 1: they are not.
    """
    key, array = key_of(spec)
    if key is not None:
        found = _known.get((key, blocks))
        if found is not UNKNOWN:
            return Items(array, *found)
    array, count, displ, datatype = parts(spec)
    made = _items(_fields(array, datatype), count, displ, datatype, blocks)
    if key is not None:
        _known.put((key, blocks), made)
    return Items(array, *made)


def key_of(spec: Any) -> tuple[Any, Any]:
    """Return what tells a plain specification from others, and its array.

    A plain one is an array of the GPU, alone or with a type of MPI, whose items depend
    on nothing else. The key of others is None.
    """
    array, handle = spec, None
    if type(spec) in _SEQUENCE and len(spec) == 2:
        array, datatype = spec
        if not (isinstance(datatype, MPI.Datatype) and datatype.is_predefined):
            return None, array  # a derived type may be freed
        handle = datatype.handle
    kind = arrays.KINDS.get(type(array))
    if kind is None or not (kind.always or getattr(array, "is_cuda", False)):
        return None, array
    return (kind.read(array, "message"), handle), array


_Items = tuple[ArrayView, int, int, ItemLayout]
"""The fields of a :class:`Items` without its array."""

_known = Cache(1024)
"""Those of plain specifications, by key and number of blocks."""


def _items(
    given: arrays.Fields, count: Any, displ: Any, datatype: Any, blocks: int
) -> _Items:
    whole = _whole(None, given, datatype)
    extent, length = whole.layout.extent, whole.view.nbytes
    first = 0
    if displ is not None:
        first = natural(displ, "displacement", MPI.ERR_DISP) * extent
        if first > length:
            raise refusal(
                MPI.ERR_DISP,
                f"message: displacement {displ} out of bounds, number of datatype "
                f"entries {length // extent}; pass a smaller one",
            )
    if count is None:
        number = _inferred(length - first, extent, max(blocks, 1))
    else:
        number = natural(count, "count", MPI.ERR_COUNT)
    found = whole._replace(first=first, number=number)
    return check_room(found, max(blocks, 1))[1:]


def _inferred(length: int, extent: int, blocks: int) -> int:
    """Return the number of items of a block that an array has."""
    if length == 0:
        return 0
    if extent <= 0 or length % extent:
        raise refusal(
            MPI.ERR_COUNT,
            f"message: cannot infer count, buffer length {length} is not a multiple of "
            f"datatype extent {extent}; pass the count",
        )
    if length // extent % blocks:
        raise refusal(
            MPI.ERR_COUNT,
            f"message: cannot infer count, number of entries {length // extent} is not "
            f"a multiple of required number of blocks {blocks}; pass the count",
        )
    return length // extent // blocks


def vector(spec: Any, blocks: int) -> Vector:
    """Return the items of ``blocks`` ranks that a specification names."""
    array, counts, displs, datatype = parts(spec, vector=True)
    whole = _whole(array, _fields(array, datatype), datatype)
    if counts is None:
        number = _inferred(whole.view.nbytes, whole.layout.extent, 1)
        numbers = tuple(
            number // blocks + (number % blocks > block) for block in range(blocks)
        )
    elif isinstance(counts, int | np.integer):
        numbers = (natural(counts, "count", MPI.ERR_COUNT),) * blocks
    else:
        numbers = naturals(counts, blocks, "counts", MPI.ERR_COUNT)
    if displs is None:
        starts = tuple(itertools.accumulate(numbers[:-1], initial=0))
    elif isinstance(displs, int | np.integer):
        starts = tuple(block * int(displs) for block in range(blocks))
    else:
        starts = naturals(displs, blocks, "displacements", MPI.ERR_DISP)
    return Vector(whole, numbers, starts)


def typed(spec: Any, blocks: int) -> list[Items]:
    """Return the items of each rank, of ``[x, counts, displs, types]``.

    Displacements are in bytes, as MPI's ``Alltoallw`` has them.
    """
    if not isinstance(spec, _SEQUENCE):
        raise refusal(
            MPI.ERR_ARG,
            "message: expecting [x, (counts, displs), types], got an array; pass a "
            "type for each rank",
        )
    given = tuple(spec)
    if not 2 <= len(given) <= 4:
        raise _length(spec)
    array = there(given[0])
    counts, displs = (1,) * blocks, (0,) * blocks
    if len(given) > 2:
        counts, displs = _pair(given[1] if len(given) == 3 else given[1:3])
    types = listed(given[-1], blocks, "datatypes", MPI.ERR_TYPE)
    numbers = naturals(counts, blocks, "counts", MPI.ERR_COUNT)
    starts = naturals(displs, blocks, "displacements", MPI.ERR_DISP)
    made = []
    for number, start, datatype in zip(numbers, starts, types, strict=True):
        whole = _whole(array, _fields(array, datatype), datatype)
        made.append(check_room(whole._replace(first=start, number=number)))
    return made


def parts(spec: Any, vector: bool = False) -> tuple[Any, Any, Any, Any]:
    """Return the array, count, displacement and type of a specification.

    The array is a device array, also of a buffer over such memory.
    """
    if not isinstance(spec, _SEQUENCE):
        return there(spec), None, None, None
    count: Any = None
    displ: Any = None
    datatype: Any = None
    if len(spec) == 2:
        array, count = spec
        if isinstance(count, MPI.Datatype | str):
            count, datatype = None, count
    elif len(spec) == 3:
        array, count, datatype = spec
    elif len(spec) == 4:
        array, count, displ, datatype = spec
    else:
        raise _length(spec)
    pair = isinstance(count, tuple) if vector else isinstance(count, _SEQUENCE)
    if pair and len(spec) < 4:
        count, displ = _pair(count)
    return there(array), count, displ, datatype


def _length(spec: Any) -> Exception:
    return refusal(
        MPI.ERR_ARG,
        f"message: expecting 2 to 4 items, got {len(spec)}; pass [x, count, type], for "
        "example",
    )


def _pair(given: Any) -> Any:
    return listed(given, 2, "items, a pair of counts and displacements", MPI.ERR_COUNT)


def _fields(array: Any, datatype: Any) -> arrays.Fields:
    """Return the location and type of a specification's array."""
    if type(array) is _BOTTOM and is_bottom(array):
        raise refusal(
            MPI.ERR_BUFFER,
            "message: MPI.BOTTOM has no array, so its memory is not known to be on "
            "the device; pass the array itself, with counts and displacements",
        )
    if array is None and datatype is not None:
        return 0, (0,), np.dtype(np.uint8), "C", False
    return arrays.fields(array, "message")


def _whole(array: Any, given: arrays.Fields, datatype: Any) -> Items:
    """Return a message of no items at the beginning of an array."""
    view = ArrayView(*given)
    if view.order is None:
        raise refusal(
            MPI.ERR_ARG,
            f"message: expected a contiguous array, got a strided one of shape "
            f"{view.shape}; pass the whole array and a derived datatype, such as [x, 1,"
            " MPI.DOUBLE.Create_vector(rows, 1, columns).Commit()], or a contiguous "
            "copy",
        )
    arrays.check_aligned(view, "message")
    layout = datatypes.dense(view.dtype) if datatype is None else layout_of(datatype)
    return Items(array, view, 0, 0, layout)


def layout_of(given: Any) -> ItemLayout:
    """Return where the elements of a datatype, or of one with this code, are."""
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            given = MPI.Datatype.fromcode(given)
    if not isinstance(given, MPI.Datatype):
        raise refusal(
            MPI.ERR_TYPE,
            f"message: expecting an MPI.Datatype, got {shown(given)}; pass one, such "
            "as MPI.FLOAT",
        )
    return datatypes.layout(given)


def check_room(found: Items, blocks: int = 1) -> Items:
    """Return a message, or refuse one that exceeds its array."""
    layout, items = found.layout, found.number * blocks
    if not items or not layout.elements:
        return found._replace(first=0)  # its displacement may be any number
    reach = (items - 1) * layout.extent
    low = found.first + layout.low + min(0, reach)
    high = found.first + layout.high + max(0, reach)
    if low < 0 or high > found.view.nbytes:
        times = f"{blocks} times " if blocks > 1 else ""
        raise refusal(
            MPI.ERR_COUNT,
            f"message: expected items within the array's {found.view.nbytes} bytes, got"
            f" {times}{found.number}, of bytes {low} to {high}; pass a smaller count",
        )
    return found


_OURS = __name__.partition(".")[0]


class Kind(type):
    """Makes a class stand for the class of mpi4py that its body names as ``_plain``.

    mpi4py's objects are instances of the class, and mpi4py's classes subclasses. A
    method that is read from the class, such as ``MPI.Comm.Send``, takes objects of
    both. Subclasses that a program makes are ordinary classes.
    """

    _plain: Any

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(
            instance, cls.__dict__.get("_plain", ())
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(cls, subclass) or issubclass(
            subclass, cls.__dict__.get("_plain", ())
        )

    def __getattribute__(cls, name: str) -> Any:
        """Return an attribute of the class; Python does not call this for objects."""
        found = type.__getattribute__(cls, name)
        if type(found) is FunctionType and name[0] != "_":
            ours = found.__globals__["__name__"].partition(".")[0] == _OURS
            plain = getattr(cls._plain, name, None) if ours else None
            if plain is not None:
                return _either(cls, found, plain)
        return found


@functools.cache
def _either(cls: type, own: Callable[..., Any], plain: Any) -> Callable[..., Any]:
    """Return a method of the class, which takes objects of mpi4py's class, too.

    For these, it is mpi4py's method, which reads host memory only.
    """
    if own.__name__[0].isupper():
        plain = of_host(plain, "call the method of an object of numba_symm.mpi")

    @functools.wraps(own)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        call = own if type.__instancecheck__(cls, self) else plain
        return call(self, *args, **options)

    return method


THREADS = 128
MOST_BLOCKS = 1024

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

PackedStep = Callable[[int], None]
"""Enqueues work on the stream with that handle."""


@cuda.jit  # type: ignore[untyped-decorator]
def _pack(
    packed: Any, spread: Any, runs: Any, extent: int, words: int, packing: bool
) -> None:
    """Copy runs of words from their places to consecutive ones, or back."""
    for index in range(cuda.grid(1), packed.size, cuda.gridsize(1)):
        run = index // words
        item = run // runs.size
        start = item * extent + runs[run - item * runs.size]
        if packing:
            packed[index] = spread[start + index - run * words]
        else:
            spread[start + index - run * words] = packed[index]


def pack(message: Items, packed: Any) -> PackedStep:
    """Return the copy of a message's elements to an array of as many bytes."""
    return _moved(True, message, packed)


def unpack(message: Items, packed: Any) -> PackedStep:
    """Return the copy of an array's bytes to a message's elements, or to the first."""
    return _moved(False, message, packed)


def packed(found: Items, stream: int) -> Items:
    """Return a copy of a message's elements, without gaps."""
    made = arrays.empty((found.nbytes,), BYTE, "Send")
    pack(found, made)(stream)
    return message(made)


def _moved(packing: bool, message: Items, packed: Any) -> PackedStep:
    layout = message.layout
    runs = layout.runs
    assert runs is not None  # else there is nothing to pack
    target = arrays.view(packed, "pack")
    whole = target.nbytes == message.nbytes  # else the last item is received in part
    if layout.axes is not None and message.size and whole:
        axes = (message.number, layout.extent), *layout.axes
        lengths, strides = zip(*axes, strict=True)
        place, first = target.address, message.address + runs[0]
        run = layout.run
        launch = kernel.bind(place, int(first), lengths, strides, run, packing)
        return functools.partial(_regular, launch, message.array, packed)
    low = min(layout.low, layout.low + (message.number - 1) * layout.extent)
    high = layout.high + max(0, (message.number - 1) * layout.extent)
    start = message.address + low
    word = math.gcd(
        *(8, layout.run, abs(layout.extent), start, target.address, target.nbytes),
        *(runs - low),
    )
    kind = np.dtype(_WORDS[word])
    spread = at(start, (high - low) // word, kind, message.array)
    flat = at(target.address, target.nbytes // word, kind, packed)
    places = _table(((runs - low) // word).tobytes())
    args = flat, spread, places, layout.extent // word, layout.run // word, packing
    return functools.partial(_launch, _pack, flat.size, args)


def _regular(launch: Enqueue, spread: Any, packed: Any, stream: int) -> None:
    """Enqueue a launch, which has the addresses of the arrays only."""
    launch(stream)


@functools.lru_cache(maxsize=64)
def _table(table: bytes) -> Any:
    return copied_to_device(np.frombuffer(table, np.int64).copy())


def copied_to_device(array: Any) -> Any:
    """Return a copy of a host array on the device, which is there on all streams.

    A copy from pageable memory may return before it has reached the device.
    """
    made = cuda.to_device(array)
    cuda.default_stream().synchronize()
    return made


def _launch(kernel: Any, size: int, args: tuple[Any, ...], stream: int) -> None:
    """Enqueue a kernel of a thread for each of ``size`` elements."""
    if not size:
        return
    blocks = min(-(-size // THREADS), MOST_BLOCKS)
    threads = min(size, THREADS) if SIMULATED else THREADS
    _configured(kernel, blocks, threads, stream)(*args)


@functools.lru_cache(maxsize=256)
def _configured(kernel: Any, blocks: int, threads: int, stream: int) -> Any:
    """Return a kernel with its grid, without Numba's advice to launch more blocks."""
    on = 0 if SIMULATED or not stream else cuda.external_stream(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kernel[blocks, threads, on]


def fold(function: Callable[[Any, Any], Any], into: Any, of: Any) -> PackedStep:
    """Return ``into[i] = function(into[i], of[i])``, of arrays of equal size."""
    return functools.partial(_launch, _reducing(function), into.size, (into, of))


@functools.lru_cache(maxsize=64)
def _reducing(function: Callable[[Any, Any], Any]) -> Any:
    reduced = device_function(function)

    def reducing(into: Any, of: Any) -> None:
        for index in range(cuda.grid(1), into.size, cuda.gridsize(1)):
            into[index] = reduced(into[index], of[index])

    return cuda.jit(reducing)


@cuda.jit  # type: ignore[untyped-decorator]
def _swap(target: Any, compare: Any, origin: Any) -> None:
    """Copy ``origin`` to ``target`` if that is equal to ``compare``."""
    equal = True
    for index in range(target.size):
        equal = equal and target[index] == compare[index]
    if equal:
        for index in range(target.size):
            target[index] = origin[index]


def compare_and_swap(target: Any, compare: Any, origin: Any) -> PackedStep:
    """Return the step that does so, for arrays of bytes, by one thread."""
    return functools.partial(_launch, _swap, 1, (target, compare, origin))
