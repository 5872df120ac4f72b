"""Kernel arguments as the driver reads them."""

import ctypes
from typing import Any

from numba.cuda import types


class Packed:
    """Kernel arguments in memory, and the array of pointers that the driver reads.

    Each member of a tuple is an argument, as in Numba.
    """

    def __init__(self, signature: tuple[Any, ...], args: tuple[Any, ...]):
        self.values: list[Any] = []
        for numba_type, value in zip(signature, args, strict=True):
            self._add(numba_type, value)
        pointers = [ctypes.addressof(value) for value in self.values]
        self.pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.address = ctypes.addressof(self.pointers)

    def _add(self, numba_type: Any, value: Any) -> None:
        if isinstance(numba_type, types.BaseTuple):
            for member_type, member in zip(numba_type, value, strict=True):
                self._add(member_type, member)
        else:
            self.values.append(_CTYPES[numba_type](value))


_CTYPES = {
    types.boolean: ctypes.c_uint8,
    types.int32: ctypes.c_int32,
    types.int64: ctypes.c_int64,
}
