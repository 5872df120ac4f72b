"""Symmetric memory under allocations, drops, meetings and queries that are drawn.

All ranks draw the same steps. A model knows which allocations live, on which ranks an
array was dropped, and what each one contains.
"""

import gc

import numpy as np
import pytest
from ml_dtypes import bfloat16

import numba_symm as ns
from numba_symm.environment import SIMULATED
from numba_symm.gpu import arrays
from tests.drivers.sides import rng
from tests.ranks.helpers import (
    Window,
    get,
    of_one_island,
    ordinary,
    put,
    refused,
    wait_for_all,
)
from tests.ranks.memory.peeks import pad_of

pytestmark = of_one_island


class Model:
    """The arrays of this rank, and what the heap must say of them."""

    def __init__(self, comm, world, seed):
        self.comm, self.world, self.draw = comm, world, rng(seed)
        self.heap = comm._calls.heap
        self.arrays, self.met, self.number = {}, {}, 0
        self.contents = {}  # by number, those of all ranks
        self.ranks = range(comm.size)

    def drawn(self, count):
        """Return other bytes for each rank, of small numbers."""
        return [
            np.random.default_rng([self.draw.getrandbits(30), rank]).integers(
                0, 2, count, np.uint8
            )
            for rank in self.ranks
        ]

    def allocate(self):
        count = self.draw.choice([0, 1, 16, 255, 256, 4096, 70_000])
        x = self.comm.empty(count, np.uint8)
        assert not get(x).any()
        self.contents[self.number] = self.drawn(count)
        put(x, self.contents[self.number][self.comm.rank])
        self.arrays[self.number] = x
        self.number += 1

    def fail(self):
        """Allocate what the ranks do not agree on."""
        call = lambda: self.comm.empty(1 + self.comm.rank % 2, np.uint8)  # noqa: E731
        if self.comm.size > 1:
            refused(self.world, ns.ArgumentError, call, "every rank must pass the same")

    def drop(self):
        """Drop an array, on all ranks or on one of them first."""
        if self.arrays:
            number = self.draw.choice(sorted(self.arrays))
            whose = self.draw.choice([None, self.draw.randrange(self.comm.size)])
            if whose in (None, self.comm.rank):
                self.met.pop(number, None)
                del self.arrays[number]
                gc.collect()
            if whose is not None:
                self.check()
                self.arrays.pop(number, None)
                self.met.pop(number, None)
                gc.collect()

    def meet(self):
        """Meet at a part of an array, and look at the peers' parts."""
        numbers = [n for n in sorted(self.arrays) if self.arrays[n].size]
        if not numbers:
            return
        number = self.draw.choice(numbers)
        x = self.arrays[number]
        first = self.draw.choice([0, x.size // 2, x.size - 1])
        memory = self.comm.rendezvous(x[first:])
        self.comm.barrier()
        self.comm.synchronize()
        for rank in range(self.comm.size):
            rest = get(memory.get_buffer(rank, x.size - first, np.uint8))
            assert np.array_equal(rest, self.contents[number][rank][first:])
        if number in self.met:
            assert self.met[number].signal_pad_ptrs == memory.signal_pad_ptrs
        elif first == 0:
            own = pad_of(self.comm, memory)
            assert not np.any(own), "a pad with signals of another array"
        self.met.setdefault(number, memory)
        pads_of = [each.signal_pad_ptrs[self.comm.rank] for each in self.met.values()]
        assert len({*pads_of}) == len(pads_of)
        wait_for_all(self.comm, self.world)

    def copy(self):
        """Put elements of any type into the next rank's array, then get them there."""
        numbers = [n for n in sorted(self.arrays) if self.arrays[n].size]
        if not numbers:
            return
        number, draw = self.draw.choice(numbers), self.draw
        x, comm, contents = self.arrays[number], self.comm, self.contents[number]
        begin = draw.choice([0, x.size // 16 * 8])
        memory = comm.rendezvous(x[begin:])
        dtype = np.dtype(draw.choice([np.int8, np.bool_, bfloat16, np.float64]))
        room = (x.size - begin) // dtype.itemsize
        start = draw.randrange(room + 1)
        count = draw.choice([min(1, room - start), draw.randrange(room - start + 1)])
        shape = draw.choice([(count,), (1, count), (count, 1)])
        shape = draw.choice([(), shape]) if count == 1 else shape
        nbytes, peer = count * dtype.itemsize, (comm.rank + 1) % comm.size
        place = slice(first := begin + start * dtype.itemsize, first + nbytes)
        data = self.drawn(nbytes)
        source = ordinary(nbytes, np.uint8)
        put(source, data[comm.rank])
        memory.put(source.view(dtype).reshape(shape), peer, storage_offset=start)
        memory.barrier()
        for rank in self.ranks:
            contents[(rank + 1) % comm.size][place] = data[rank]
        window = Window(ordinary(8 + nbytes + Window.MARGIN, np.uint8), 8, nbytes)
        window.fill(np.zeros(nbytes, np.uint8))
        out = window.array.view(dtype).reshape(shape)
        assert memory.get(peer, shape, dtype, start, out=out) is out
        for found in (memory.get(peer, shape, dtype, start), out):
            assert (found.shape, found.dtype) == (shape, dtype)
            assert get(found).tobytes() == contents[peer][place].tobytes()
        there = memory.get_buffer(peer, shape, dtype, storage_offset=start)
        assert get(there).tobytes() == contents[peer][place].tobytes()
        window.read()
        wait_for_all(comm, self.world)

    def ask(self):
        """Ask for places in an array, at its end, and beyond."""
        for x in self.arrays.values():
            address, end = arrays.view(x, "test").address, x.size
            if not end:  # on GPUs, an empty array has no memory
                continue
            first = self.draw.randrange(end + 1)
            for nbytes in (0, end - first, end - first + 1):
                found = self.heap.place(address + first, nbytes)
                assert (found is not None) == (first + nbytes <= end)
                if found is not None:
                    assert found.addresses[self.comm.rank] == address + first
            if end and self.heap.place(address + end, 0) is None:  # no other is there
                beyond = address + end
                call = lambda at=beyond: self.comm._rendezvous(at)  # noqa: E731
                refused(self.world, ns.ArgumentError, call, "rendezvous")

    def mapped(self):
        return len(self.heap._entries) - len(self.heap._arenas)

    def check(self):
        """Compare what the arrays contain."""
        for number, x in self.arrays.items():
            assert np.array_equal(get(x), self.contents[number][self.comm.rank])


@pytest.mark.parametrize("seed", [1, 2])
def test_memory_under_steps_that_are_drawn(world, seed):
    with ns.Communicator(world, timeout=60) as comm:
        model = Model(comm, world, seed)
        before = model.mapped()
        steps = [model.allocate, model.drop, model.meet, model.copy] * 3
        for _ in range(60):
            model.draw.choice([*steps, model.ask, model.fail])()
            model.check()
        model.allocate()  # which frees what all ranks have dropped
        # On a GPU, Numba's arrays of no elements keep no memory.
        keeping = [x for x in model.arrays.values() if x.size or SIMULATED]
        assert model.mapped() == before + len(keeping)
