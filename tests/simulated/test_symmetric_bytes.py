"""Which bytes are symmetric memory, on one rank."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import numba_symm as ns
from numba_symm.gpu import arrays

PAGE = 4096
SIZES = st.integers(1, 2 * PAGE).filter(
    lambda n: n % PAGE
)  # none ends where one begins


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(sizes=st.lists(SIZES, min_size=1, max_size=4), data=st.data())
def test_bytes_are_symmetric_if_one_allocation_has_all_of_them(comm, sizes, data):
    heap = comm._calls.heap
    made = [comm.empty(size, np.uint8) for size in sizes]
    for array, size in zip(made, sizes, strict=True):
        address = arrays.view(array, "test").address
        first = data.draw(st.sampled_from([0, size // 2, size - 1, size]))
        left = size - first
        for nbytes in {0, left // 2, left, left + 1, left + PAGE}:
            place = heap.place(address + first, nbytes)
            assert (place is not None) == (nbytes <= left)
            if place is not None:
                assert place.addresses == place.seen == (address + first,)
        if left:
            memory = heap.rendezvous(address + first)
            assert memory.buffer_ptrs == [address + first]
        else:
            with pytest.raises(ns.ArgumentError, match="rendezvous"):
                heap.rendezvous(address + first)
