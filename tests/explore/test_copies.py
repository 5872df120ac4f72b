"""Calls by copy engines: the handshake, the copies, and the calls after a refusal.

Also puts and gets, which are copies between a program's signals. Here, a copy is a
kernel in the stream that copies word by word.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from explore.copying import Copies, Order
from explore.launches import Launch, Stream
from explore.markers import removed, within
from explore.scenarios import breaks, by_anything_and_by_result, holds, worlds
from explore.source import device_code
from explore.world import INT64, World, add, an_integer
from numba_symm.collectives.operations import OPERATIONS
from tests.algorithms import those

VECTORS = [1, 2, 3, 5]  # of 16 bytes, of each rank


def by_copies(name, size):
    """Return an operation's algorithms by copy engines."""
    return those(name, lambda made: made.copies and made.suits(size))


class Copying(World):
    """Ranks whose arrays are at the same place, with some exceptions."""

    def __init__(self, machine, code):
        super().__init__(machine, code)
        self.copies = [Copies(code, self.size, own) for own in self.workspaces]
        self.streams = [each.on(Stream(r)) for r, each in enumerate(self.copies)]
        self.ends = [
            replace(end, order=Order(machine, end.rank, copies))
            for end, copies in zip(self.ends, self.copies, strict=True)
        ]

    def arrays(self, name, words):
        """Return every rank's address of a new array; sometimes one is elsewhere.

        A rank whose array is symmetric assumes the same place on all ranks.
        """
        # After a failure, results are copied that were not stored.
        blocks = self.map(name, 8 * words + 16, 7 if self.machine.haste else None)
        offsets = [0] * self.size
        if self.random.random() < 0.2:
            offsets[self.random.randrange(self.size)] = 16
        found = [base + offset for base, offset in zip(blocks, offsets, strict=True)]
        ordinary = None
        if self.random.random() < 0.2:
            ordinary = self.random.randrange(self.size)
        for end, block in zip(self.ends, blocks, strict=True):
            before = end.place
            self.copies[end.rank].mine.append((block, block + 8 * words + 15))

            def place(address, nbytes, before=before, mine=block, rank=end.rank):
                if not 0 <= address - mine <= 8 * words + 16 - nbytes:
                    return before(address, nbytes)
                if rank == ordinary:
                    return None
                addresses = tuple(base + address - mine for base in blocks)
                return SimpleNamespace(addresses=addresses, seen=(address,) * self.size)

            self.ends[end.rank] = replace(end, place=place)
        return found

    def call(self):
        """Add a call, and kernels after it that read its output and write its input."""
        names = [name for name in OPERATIONS if by_copies(name, self.size)]
        name = self.random.choice(names)
        algorithm = self.random.choice(by_copies(name, self.size))
        part = 2 * self.random.choice(VECTORS)
        words = part * (1 if name in ("all_gather", "broadcast") else self.size)
        results = part * self.size if name == "all_gather" else words
        sources = self.arrays("input", words)
        in_place = None
        targets = sources if name == "broadcast" else self.arrays("output", results)
        if name == "all_gather" and self.random.random() < 0.3:
            in_place = self.random.randrange(self.size)
            sources[in_place] = targets[in_place] + 8 * part * in_place
        elif name == "all_to_all" and self.random.random() < 0.2:
            in_place = self.random.randrange(self.size)
            targets[in_place] = sources[in_place]
        given = [[an_integer(self.random) for _ in range(words)] for _ in sources]
        for source, mine in zip(sources, given, strict=True):
            for i, word in enumerate(mine):
                self.memory.plant(source + 8 * i, 8, word)
        root = self.random.randrange(self.size)
        copies = self.map("copy", 8 * results)
        fresh, _ = self.inputs(words)
        for rank, end in enumerate(self.ends):
            source, target = sources[rank], targets[rank]
            count = words if name == "broadcast" else part
            call = self.code.binding.Call(source, target, count, INT64, "sum", root)
            at = slice(rank * part, (rank + 1) * part)
            wanted = given[root]
            if name == "all_gather":
                wanted = [word for mine in given for word in mine]
            elif name == "all_to_all":
                wanted = [word for mine in given for word in mine[at]]
            add(self.bound(name, algorithm, end, call), self.streams[rank])
            if self.machine.haste:
                # A rank that gave up may use its arrays again while others copy from
                # them. Copies of a refused call have any words.
                self.expect(source, given[rank])
                self.expect(target, [0] * len(wanted))
                self.expect(target, wanted)
                continue
            write = self.code.programs.write
            self.launch(rank, write, 1, copies[rank], target, results)
            self.expect(copies[rank], wanted)
            self.launch(rank, write, 1, sources[rank], fresh[rank], words)


def calls_by_copies(code):
    def scenario(machine):
        world = Copying(machine, code)
        for _ in range(2):
            world.call()
        world.run()

    return scenario


def puts_and_gets(code):
    """Ranks in a ring that put into the next one's buffer, or get from it."""

    def scenario(machine):
        world = World(machine, code)
        programs = code.programs
        for _ in range(3):
            putting = machine.random.random() < 0.5
            count = machine.random.choice([1, 2, 5])
            inputs, words = world.inputs(count)
            outputs = world.map("output", 8 * count)
            for rank, context in enumerate(world.contexts):
                following, previous = (rank + 1) % world.size, (rank - 1) % world.size
                buffer, theirs = world.buffers[rank], world.buffers[following]

                def copy(target, source, rank=rank, count=count):
                    args = (None, 0, target, source, count)
                    launch = Launch(programs.copy, 1, args, is_copy=True)
                    world.streams[rank].append(launch)

                if putting:
                    copy(theirs, inputs[rank])
                    there, here = following, previous
                else:
                    world.launch(rank, programs.write, 1, buffer, inputs[rank], count)
                    there, here = previous, following
                world.launch(rank, programs.put_one_signal, 1, context, there)
                world.launch(rank, programs.wait_for_signal, 1, context, here)
                if putting:
                    world.launch(rank, programs.write, 1, outputs[rank], buffer, count)
                else:
                    copy(outputs[rank], theirs)
                # The buffer may be used again.
                world.launch(rank, programs.put_one_signal, 1, context, here)
                world.launch(rank, programs.wait_for_signal, 1, context, there)
                world.expect(outputs[rank], words[here])
        world.run()

    return scenario


@worlds
def test_puts_and_gets(ranks):
    holds(puts_and_gets(device_code()), ranks, 200)


@worlds
def test_calls_by_copies(ranks):
    holds(calls_by_copies(device_code()), ranks, 500 // ranks)


DONE = "is_done(guard, ring, own, block, fallback_for)"
BROKEN = {
    "an input at another place not noticed": within(
        "handshake", "elsewhere", "theirs != known[k]", "False"
    ),
    "no fallback of an exchange after a refusal": within(
        "chunked", "fallback", DONE, f"({DONE} or fallback_for != 0)"
    ),
    "a rank that does not wait for the others' copies": removed("handshake", "wait"),
}


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROKEN)
def test_calls_by_copies_broken_are_found(what, races):
    breaks(calls_by_copies(device_code(BROKEN[what])), 3, races=races)
