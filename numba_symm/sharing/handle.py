"""What travels from a producer to its consumers."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numba_symm.errors import ClosedError
from numba_symm.sharing.broker import Address
from numba_symm.sharing.layout import Layout


@dataclass(frozen=True)
class SharedHandle:
    """Names an array of another process; small, and may be pickled and copied.

    Dropping or pickling one gives nothing back. Made by
    :func:`numba_symm.sharing.share`.

    Attributes:
        producer: where its process answers.
        file, slot, serial: its counter.
        kind: of the memory, see :mod:`numba_symm.sharing.kinds`.
        base: where its allocation begins in the producer, which names it.
        base_nbytes: the allocation's size.
        base_handle: the allocation's inter-process handle, where that is bytes.
        pool: names the pool it is of.
        layout: where in the allocation the array is: offset, shape, strides, dtype.
        event: the inter-process handle of what to wait for, or empty.
        event_sync_required: whether consumers have to wait for it.
        device: the UUID of the GPU it lies on.
    """

    producer: Address
    file: int
    slot: int
    serial: int
    kind: str
    base: int
    base_nbytes: int
    base_handle: bytes = field(repr=False)
    pool: int
    layout: Layout
    event: bytes = field(repr=False)
    event_sync_required: bool
    device: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.layout.shape

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The array's dtype."""
        return self.layout.dtype

    def cancel(self) -> int:
        """Give back the references that no open has taken; return how many.

        All handles of this sharing share these references. An open that comes later
        adds one if others are still out, and else raises. Any process may cancel.
        """
        from numba_symm.sharing.consumer import counters_of

        try:
            with counters_of(self) as counters:
                return counters.cancel(self.slot, self.serial)
        except ClosedError:  # the producer has ended, and everything with it
            return 0
