"""Parts of one-sided calls: origins, the memory of all ranks, copies, reductions."""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from numba_symm import arrays, dtypes, own_arrays, streams
from numba_symm.arguments import shown
from numba_symm.arrays import ArrayView
from numba_symm.collectives.checks import check_writable
from numba_symm.launch.store import StoreExchange
from numba_symm.mpi import addresses, buffers, datatypes, operators, packing
from numba_symm.mpi.buffers import Items, message
from numba_symm.mpi.errors import MPIError, MPITypeError, refusal
from numba_symm.mpi.reading import integer, natural, translated, whole
from numba_symm.own_arrays import Memory
from numba_symm.sharing import SharedHandle, open_shared, share
from numba_symm.sharing.kinds import locate
from numba_symm.sharing.sent import leave_out

_BYTE = np.dtype(np.uint8)


def bytes_of(found: Items) -> Any:
    """Return the bytes of a message without gaps."""
    memory = Memory(found.address, found.nbytes, found.array)
    return memory.array(found.nbytes, _BYTE)


def copied(of: Items, into: Items) -> list[packing.PackedStep]:
    """Return the copy of one message's elements to those of another one."""
    if not of.nbytes:
        return []
    if of.layout.runs is None and into.layout.runs is None:
        to, source, nbytes = into.address, of.address, of.nbytes
        return [lambda stream: streams.copy(to, source, nbytes, stream)]
    if of.layout.runs is None:
        return [packing.unpack(into, bytes_of(of))]
    if into.layout.runs is None:
        return [packing.pack(of, bytes_of(into))]
    between = own_arrays.empty((of.nbytes,), _BYTE, "a one-sided call")
    return [packing.pack(of, between), packing.unpack(into, between)]


def reduced(of: Items, into: Items, op: Any, what: str) -> list[packing.PackedStep]:
    """Return the reduction of one message's elements into those of another one."""
    if op == MPI.NO_OP or not of.nbytes:
        return []
    if op == MPI.REPLACE:
        return copied(of, into)
    base = of.layout.base
    if base != into.layout.base or not (of.layout.uniform and into.layout.uniform):
        raise refusal(
            MPI.ERR_TYPE,
            f"{what}: expected elements of one type at origin and target, got {base} "
            f"and {into.layout.base}",
        )
    name = operators.operator(op, base, what)
    if name in dtypes.LOCATED:
        raise refusal(
            MPI.ERR_OP,
            f"{what}: MPI.MINLOC and MPI.MAXLOC are for collectives; pass another "
            "operator, or copy the pairs to the host",
        )
    element = dtypes.element(base, what)
    dtypes.check(name, element, what)
    function = dtypes.REDUCTIONS.get(name, name)
    made = [
        Memory(each.address, each.nbytes, each.array).array(each.size, base)
        if each.layout.runs is None
        else own_arrays.empty((each.size,), base, what)
        for each in (of, into)
    ]
    steps = [packing.pack(of, made[0])] if of.layout.runs is not None else []
    if into.layout.runs is None:
        return [*steps, packing.fold(function, made[1], made[0])]
    steps += [packing.pack(into, made[1]), packing.fold(function, made[1], made[0])]
    return [*steps, packing.unpack(into, made[1])]


def check_single(**specs: Any) -> None:
    """Refuse specifications of more than one item, or of different types."""
    found = {}
    for name, spec in specs.items():
        array, count, _, datatype = buffers.parts(spec)
        layout = datatypes.dense(getattr(array, "dtype", _BYTE))
        if datatype is not None:
            layout = buffers.layout_of(datatype)
        number = count
        if count is None:
            held = getattr(array, "nbytes", None)
            nbytes = len(_numpy(array)) if held is None else held
            number = nbytes // max(layout.nbytes, 1)
        if whole(number, "count", MPI.ERR_COUNT) != 1:
            raise refusal(
                MPI.ERR_COUNT,
                f"{name}: expecting a single element, got {number}; pass one",
            )
        found[name] = layout.nbytes
    if len(set(found.values())) != 1:
        raise refusal(
            MPI.ERR_TYPE,
            f"mismatch in {' and '.join(found)} MPI datatypes: items of "
            f"{', '.join(map(str, found.values()))} bytes; pass equal ones",
        )


def target_of(
    target: Any, origin: Items, memory: Any, rank: int, unit: int, what: str
) -> Items:
    """Return the items of a target specification, of as many bytes as origin.

    Args:
        target: the specification: None, a displacement, or a list or tuple of a
            displacement, a count and a datatype, of which the last ones may be missing.
        origin: the origin's items.
        memory: the memory of the target rank.
        rank: the target rank.
        unit: its displacement unit.
        what: the call.
    """
    given = (target,) if not isinstance(target, (list, tuple)) else tuple(target)
    if len(given) > 3:
        raise refusal(
            MPI.ERR_ARG,
            f"{what}: expected a target of 3 items at most, got {len(given)}; pass "
            "[displacement, count, type]",
        )
    disp, number, layout = 0, origin.number, origin.layout
    if given and given[0] is not None:
        disp = whole(given[0], "displacement", MPI.ERR_DISP)
    if len(given) > 1:
        number = natural(given[1], "count", MPI.ERR_COUNT)
    if len(given) > 2:
        layout = buffers.layout_of(given[2])
    view = ArrayView(0, (0,), _BYTE, "C", False)
    if memory is not None:
        view = arrays.view(memory, what)
    found = Items(memory, view, disp * unit, number, layout)
    try:
        buffers.check_room(found)
    except ValueError as error:
        raise refusal(
            MPI.ERR_RMA_RANGE,
            f"{what}: expected items within the {view.nbytes} bytes of rank {rank},"
            f" got displacement {disp} and {number} items; pass fewer",
        ) from error
    if found.nbytes != origin.nbytes:
        raise refusal(
            MPI.ERR_COUNT,
            f"{what}: expected as many bytes at the target as the origin's "
            f"{origin.nbytes}, got {found.nbytes}; pass as many",
        )
    return found


def units_of_all(exchange: StoreExchange, what: str, given: Any) -> list[int]:
    """Return all ranks' displacement units, or refuse a wrong one on all ranks."""
    unit, text = 0, shown(given)
    with suppress(MPIError):
        unit = integer(given, what, "disp_unit", MPI.ERR_DISP)
    everyone = exchange.all_gather((unit, text), "displacement units")
    for rank, (unit, text) in enumerate(everyone):
        if unit < 1:
            raise refusal(
                MPI.ERR_DISP,
                f"{what}: expected a displacement unit of 1 byte or more, got {text} "
                f"on rank {rank}; pass the bytes of an item",
            )
    return [unit for unit, _ in everyone]


def mapped_by_all(
    exchange: StoreExchange, what: str, make: Callable[[], Any]
) -> tuple[Any, list[Any]]:
    """Return this rank's memory, which ``make`` returns, and that of all ranks.

    Raise on all ranks or on none. A rank that failed alone would not allocate what the
    other ranks allocate with it.
    """
    memory, own, mapped, error = None, None, [], None
    try:
        memory = make()
        if memory is not None:
            own = _shared(memory, exchange.size, what)
    except Exception as caught:
        error = caught
    handle = b"" if own is None else own.to_bytes()
    everyone = exchange.all_gather((handle, error is None), "handles")
    try:
        if all(fine for _, fine in everyone):
            for handle, _ in everyone:
                of = SharedHandle.from_bytes(handle) if handle else None
                mapped.append(None if of is None else open_shared(of))
    except Exception as caught:
        error = caught
    causes = exchange.all_gather(None if error is None else str(error), "outcome")
    failed = [rank for rank, cause in enumerate(causes) if cause is not None]
    if not failed:
        return memory, mapped
    for array in mapped:
        if array is not None:
            array.close()
    if own is not None:
        own.cancel()
    if error is not None:
        raise error
    raise refusal(
        MPI.ERR_WIN,
        f"{what}: rank {failed[0]} cannot allocate, share or map memory: "
        f"{causes[failed[0]]}",
    )


def _shared(memory: Any, opens: int, what: str) -> SharedHandle:
    """Return the handle of an array that every rank opens once."""
    view = arrays.dense(arrays.view(memory, what), what)
    if locate(view.address, view.nbytes) is None:
        raise refusal(
            MPI.ERR_BUFFER,
            f"{what}: the array is in this process' private memory; under the "
            "simulator, use MPI.Win.Allocate_device or comm.communicator.empty",
        )
    shared = share(memory, opens=opens)
    leave_out(shared)  # the program itself has not shared it
    return shared


def synchronizing(name: str, step: Callable[[Any, str], None]) -> Any:
    """Return the method of ``MPI.Win`` of that name, after a step of the window."""
    plain = getattr(MPI.Win, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **options: Any) -> None:
        if not self._of_host:
            step(self, name)
        plain(self, *args, **options)

    return translated(method)


def moving(method: Any) -> Any:
    """Return a method of windows of device memory as one of all windows.

    mpi4py's method serves windows of host memory. It would read or write addresses of
    the device there.
    """
    plain = buffers.of_host(
        getattr(MPI.Win, method.__name__),
        "the window is over host memory; make it with MPI.Win.Allocate_device",
    )

    @functools.wraps(method)
    def either(self: Any, *args: Any, **options: Any) -> Any:
        call = plain if self._of_host else method
        return call(self, *args, **options)

    return translated(either)


class Origin:
    """The items of an origin, on the device; a host array is copied there and back."""

    def __init__(self, win: Any, spec: Any, written: bool = False):
        self._win, self._host = win, None
        self._written = written
        array = buffers.array_in(spec)
        if array is not None and not addresses.on_device(array):
            self._host = _numpy(array)
            if written and not self._host.flags.writeable:
                raise refusal(
                    MPI.ERR_BUFFER,
                    f"message: expecting an array that may be written, got "
                    f"{type(array).__name__} that is read-only; pass a copy",
                )
            self._there = packing.on_device(np.ascontiguousarray(self._host))
            several = isinstance(spec, (list, tuple))
            spec = [self._there, *spec[1:]] if several else self._there
        self._spec = spec

    def __enter__(self) -> Items:
        found = message(self._spec)
        if self._written:
            check_writable(found.view, "Win")
        return found

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and self._host is not None:
            self._win._settle()  # the copy there lives as long
            if self._written:
                self._host[...] = self._there.copy_to_host()


def _numpy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    try:
        return np.frombuffer(array, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise MPITypeError(
            MPI.ERR_BUFFER,
            f"message: expecting an array on the device or the host, got "
            f"{shown(array)}; pass one",
        ) from error
