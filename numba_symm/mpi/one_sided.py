"""The steps of one-sided calls: copies and reductions between two messages."""

from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI
from numba import cuda

from numba_symm import dtypes, streams
from numba_symm.arrays import Memory
from numba_symm.mpi import buffers, operators, packing
from numba_symm.mpi.buffers import Message
from numba_symm.mpi.errors import refusal

_BYTE = np.dtype(np.uint8)


def bytes_of(found: Message) -> Any:
    """Return the bytes of a message without gaps."""
    memory = Memory(found.address, found.nbytes, found.array)
    return memory.array(found.nbytes, _BYTE)


def copied(of: Message, into: Message) -> list[packing.Step]:
    """Return the copy of one message's elements to those of another one."""
    if not of.nbytes:
        return []
    if of.layout.runs is None and into.layout.runs is None:
        place = into.address, of.address, of.nbytes
        return [lambda stream: streams.copy(*place, stream)]
    if of.layout.runs is None:
        return [packing.unpack(into, bytes_of(of))]
    if into.layout.runs is None:
        return [packing.pack(of, bytes_of(into))]
    between = cuda.device_array(of.nbytes, _BYTE)
    return [packing.pack(of, between), packing.unpack(into, between)]


def reduced(of: Message, into: Message, op: Any, what: str) -> list[packing.Step]:
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
            "operator, or Get the pairs within a lock",
        )
    element = dtypes.element(base, what)
    dtypes.check(name, element, what)
    function = dtypes.REDUCTIONS.get(name, name)
    made = [
        Memory(each.address, each.nbytes, each.array).array(each.size, base)
        if each.layout.runs is None
        else cuda.device_array(each.size, base)
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
        size = _itemsize(array, datatype)
        held = array.nbytes if hasattr(array, "nbytes") else len(array)
        number = held // size if count is None else index(count)
        if number != 1:
            raise refusal(
                MPI.ERR_COUNT, f"{name}: expecting a single element, got {number}"
            )
        found[name] = size
    if len(set(found.values())) != 1:
        raise refusal(MPI.ERR_TYPE, f"mismatch in {' and '.join(found)} MPI datatypes")


def _itemsize(array: Any, datatype: Any) -> int:
    if datatype is None:
        return int(getattr(array, "dtype", _BYTE).itemsize)
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    return int(datatype.Get_size())
