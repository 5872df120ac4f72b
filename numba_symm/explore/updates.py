"""Atomic updates of array elements."""

from collections.abc import Callable
from typing import Any

import numpy as np

from numba_symm.explore import threads
from numba_symm.explore.arrays import Array
from numba_symm.explore.machine import running
from numba_symm.explore.memory import SYSTEM, UPDATE, Strong

_CHANGES: dict[str, Callable[..., Any]] = {
    "add": lambda old, value: old + value,
    "sub": lambda old, value: old - value,
    "min": min,
    "max": max,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "cas": lambda old, expected, value: value if old == expected else old,
    "inc": lambda old, most: old * 0 if old >= most else old + old.dtype.type(1),
    "dec": lambda old, most: most if old == 0 or old > most else old - 1,
}


def of_bits(dtype: np.dtype[Any], bits: int) -> Any:
    """Return the element of some bits."""
    return np.frombuffer(int(bits).to_bytes(dtype.itemsize, "little"), dtype)[0]


def element(dtype: np.dtype[Any], value: Any) -> Any:
    """Return a value in a dtype; integers wrap around."""
    if dtype.kind in "iu":
        return of_bits(dtype, int(value) & (1 << 8 * dtype.itemsize) - 1)
    return dtype.type(value)


def changed(verb: str, dtype: np.dtype[Any], values: Any) -> Callable[[int], int]:
    """Return the function of the bits of an update."""
    given = [element(dtype, value) for value in values]

    def change(bits: int) -> int:
        with np.errstate(all="ignore"):
            new = dtype.type(_CHANGES[verb](of_bits(dtype, bits), *given))
        return int.from_bytes(new.tobytes(), "little")

    return change


def update_element(
    array: Array, index: Any, verb: str, order: str, values: Any, scope: str = SYSTEM
) -> Any:
    """Update an element of an array; return the old one."""
    execution = running()
    array._part(index)  # checks it
    dtype = array.dtype
    assert array.region is not None
    offset = array.offset_of(index)
    op = Strong(UPDATE, array.region, offset, dtype.itemsize, order, execution.site())
    op.scope = scope
    op.change = changed(verb, dtype, values)
    old = execution.access(op, threads.state(execution.files))
    return of_bits(dtype, old)
