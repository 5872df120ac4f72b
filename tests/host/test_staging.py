"""The contiguous memory that replaces strided arrays."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpys

from numba_symm.collectives import staging
from numba_symm.collectives.staging import Staging
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, streams

LINE = 256
STREAM = 7
SIZES = st.builds(
    lambda lines, more: max(0, LINE * lines + more),
    st.integers(0, 2),
    st.integers(-1, 2),
)


class Rooms:
    """Memory at addresses of its own, of which nothing is ever given back."""

    def __init__(self):
        self.made = []

    def new(self, nbytes, stream, what, expected=""):
        address = LINE * 1000 * (1 + len(self.made))
        self.made.append(SimpleNamespace(address=address, size=nbytes))
        return self.made[-1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIZES), max_size=12))
def test_arrays_of_a_call_are_apart_aligned_and_within_their_rooms(steps):
    rooms, memory, taken = Rooms(), Staging(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_new", rooms.new)
        patch.setattr(arrays, "view", lambda room, what: room)
        for begins, nbytes in steps:
            if begins:
                memory.used = 0
                taken.clear()
            address, room = memory.take(nbytes, "test", message=True)
            assert address % LINE == 0
            assert room.address <= address
            assert address + nbytes <= room.address + room.size
            for at, length in taken:
                assert at + length <= address or address + nbytes <= at
            taken.append((address, nbytes))
        whole = sum(-(-n // LINE) * LINE for _, n in taken)
        if whole:  # a call that is made again needs no more memory, soon
            for _ in range(12):
                made = len(rooms.made)
                memory.used = 0
                for _, nbytes in taken:
                    memory.take(nbytes, "test", message=True)
            assert len(rooms.made) == made


def test_no_memory_is_allocated_while_a_stream_is_captured(monkeypatch):
    """A captured call may use what there is, as the error advises."""
    monkeypatch.setattr(staging, "SIMULATED", False)
    monkeypatch.setattr(staging.arrays, "empty", lambda shape, *_: np.zeros(*shape))
    monkeypatch.setattr(
        arrays, "view", lambda room, _: SimpleNamespace(address=room.ctypes.data)
    )
    captured = set()
    monkeypatch.setattr(streams, "is_capturing", lambda stream: stream in captured)
    memory = Staging()
    memory.stream = STREAM
    memory.take(100, "first", message=False)
    first = memory.scratch(100, "first")
    captured.add(STREAM)
    memory.used = 0
    memory.take(100, "again", message=False)
    assert memory.scratch(50, "again") == first
    for take in (
        lambda: memory.take(1, "more", message=False),
        lambda: memory.scratch(101, "more"),
    ):
        with pytest.raises(
            ArgumentError, match=r"more: .* make such a call before the"
        ):
            take()
    memory.stream = STREAM + 1
    memory.take(1, "another stream", message=False)


@settings(deadline=None)
@given(st.data())
def test_the_extent_of_an_array_is_from_its_lowest_byte_to_its_highest(data):
    whole = np.zeros(data.draw(numpys.array_shapes(max_side=4)), np.float32)
    array = np.asarray(whole[data.draw(numpys.basic_indices(whole.shape))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "strides_of", lambda each: each.strides)
        patch.setattr(
            arrays,
            "fields",
            lambda each, what: (each.ctypes.data, each.shape, each.dtype, None, False),
        )
        found = staging._extent(array, "test")
    low, high = np.lib.array_utils.byte_bounds(array)
    if array.size == 0:
        assert found.nbytes == 0
    else:
        assert (found.address, found.address + found.nbytes) == (low, high)
