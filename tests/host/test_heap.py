"""Allocations of several islands, and those whose mapping fails, without ranks."""

from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from numba_symm.memory import allocator as heap_module
from numba_symm.memory.allocator import Heap, Misses, Ranges

FIRST, MOST = 5, 2  # a number, and how many allocations a call maps


class Failed(Exception):
    """Why a step fails."""


@pytest.fixture
def heap():
    made = object.__new__(Heap)
    made._count, made._arenas, made._entries, made.removed = FIRST, [], {}, []
    made._remove = lambda numbers, what: made.removed.append(numbers)
    exchange = SimpleNamespace(
        is_everybodys=lambda error: made.in_step,
        agreed=lambda what: nullcontext(),
        agree_equal=lambda value, what: None,
    )
    made.in_step = True
    world = SimpleNamespace(size=2)
    made.island = SimpleNamespace(exchange=exchange, world=world)
    made._members = SimpleNamespace(
        exchange=exchange, within=lambda what: nullcontext()
    )
    return made


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("mapped", range(MOST + 1))
def test_islands_number_what_they_map_next_alike(heap, mapped, fails, in_step):
    """An island may have needed memory for pads, or have failed before it mapped."""
    heap.in_step = in_step
    with suppress(Failed), heap._of_islands("test"):
        for number in range(FIRST, FIRST + mapped):
            heap._entries[number] = object()
            heap._count += 1
        if fails:
            raise Failed
    assert heap._count == FIRST + MOST
    undone = [list(range(FIRST, FIRST + mapped))]
    assert heap.removed == (undone if fails and in_step else [])


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("frees_while_mapped", [True, False])
def test_memory_is_released_if_no_rank_can_have_mapped_it(
    heap, frees_while_mapped, in_step
):
    """Or if its kind may be freed while a rank has."""

    def fail(block, what):
        raise Failed

    backend, released = SimpleNamespace(frees_while_mapped=frees_while_mapped), []
    block, heap.in_step = SimpleNamespace(backend=backend), in_step
    heap.allocator = SimpleNamespace(
        allocate=lambda nbytes, size: block, release=released.append
    )
    heap._map = fail
    with pytest.raises(Failed):
        heap._allocate(100, "test")
    assert released == ([block] if in_step or frees_while_mapped else [])


@pytest.mark.parametrize("most", [100, 1])
@pytest.mark.parametrize(
    ("address", "before"), [(80, False), (81, True), (299, True), (300, False)]
)
def test_calls_are_packed_anew_if_their_ordinary_memory_is_mapped(
    heap, monkeypatch, address, before, most
):
    """It was another library's, or was freed, so its addresses are the block's now."""
    peers = SimpleNamespace(addresses=(100, 900), seen=(100, 700))
    monkeypatch.setattr(heap_module, "map_peers", lambda *_: peers)
    monkeypatch.setattr("numba_symm.memory.allocator._MOST_RANGES", most)
    heap._found, heap._misses, heap._dropped = Ranges(), Misses(), set()
    packed = []
    heap.changed = lambda: packed.append("anew")
    for number in range(2):
        assert heap.place(address - 1000 * number, 20) is None
    allocation = SimpleNamespace(nbytes=200)
    block = SimpleNamespace(backend=None, allocation=allocation, nbytes=200, own=True)
    block.address, block.add_mapped = 100, lambda entry: None
    heap._map(block, "test")
    assert packed == (["anew"] if before or most == 1 else [])
    assert heap.place(110, 20) == ((110, 910), (110, 710))
    heap._map(block, "test")  # what was noted before is forgotten
    assert len(packed) <= 1
