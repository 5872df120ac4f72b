"""The protocols under thousands of interleavings and a weak memory.

Every claim comes with its negative controls: the same code with one thing broken,
which the same search must find.

With race reports switched off, what is broken must show in what comes out: wrong or
unwritten words, or ranks that wait for ever.
"""

from types import SimpleNamespace

import pytest

from explore.memory import Finding
from explore.scheduler import Launch, Machine, explore
from explore.source import MAX_BLOCKS, THREADS, device_code
from numba_symm import dtypes

INT64 = dtypes.element("int64", "test")
COUNTS = [1, 2, 3, 5, 6, 7, 9, 13]  # 1 to 4 rounds of LL; full and partial ones
WORST = 400  # schedules in which a broken protocol must show; most need under 20

by_anything_and_by_result = pytest.mark.parametrize(
    "races", [True, False], ids=["by anything", "by result"]
)
worlds = pytest.mark.parametrize("ranks", [2, 3])


class World:
    """Ranks with workspaces, boards and pads; their launches; what must come out."""

    def __init__(self, machine, code, timeout=0):
        self.machine, self.memory, self.random = machine, machine.memory, machine.random
        self.code = code
        self.size = machine.ranks
        self.layout = code.workspace.layout(self.size)
        self.streams = [[] for _ in range(self.size)]
        self.expected = {}
        self.workspaces = self.map("workspace", self.layout.nbytes, fill=0)
        self.board = self.memory.map("board", 8 * self.size, fill=0)
        self.buffers = self.map("buffer", 8 * 64)
        self.pads = self.map("pad", 4 * self.size * MAX_BLOCKS, fill=0)
        Guard, Context = code.signals.Guard, code.signals.Context
        guards = [
            Guard(self.board, rank, self.size, timeout) for rank in range(self.size)
        ]
        self.contexts = [
            Context(guard.rank, self.size, tuple(self.buffers), tuple(self.pads), guard)
            for guard in guards
        ]
        workspace = SimpleNamespace(addresses=self.workspaces)
        self.comms = [
            SimpleNamespace(
                rank=guard.rank,
                size=self.size,
                max_blocks=MAX_BLOCKS,
                guard=guard,
                workspace=workspace,
            )
            for guard in guards
        ]

    def map(self, name, nbytes, fill=None):
        """Return every rank's address of new memory."""
        return [
            self.memory.map(f"rank {rank}'s {name}", nbytes, fill)
            for rank in range(self.size)
        ]

    def inputs(self, count):
        """Return every rank's address of random words, and the words."""
        addresses = self.map("input", 8 * count + 8)
        # Now and then not aligned to 16 bytes.
        addresses = [base + self.random.choice([0, 8]) for base in addresses]
        words = [[self.random.getrandbits(40) for _ in range(count)] for _ in addresses]
        for address, mine in zip(addresses, words, strict=True):
            for i, word in enumerate(mine):
                self.memory.plant(address + 8 * i, 8, word)
        return addresses, words

    def launch(self, rank, kernel, grid, *args):
        self.streams[rank].append(Launch(kernel, grid, args))

    def expect(self, address, words):
        for i, word in enumerate(words):
            self.expected[address + 8 * i] = word

    def all_reduce(self, algorithm, count):
        sources, words = self.inputs(count)
        in_place = self.random.random() < 0.5
        targets = sources if in_place else self.map("output", 8 * count)
        total = [sum(column) for column in zip(*words, strict=True)]
        for comm, source, target in zip(self.comms, sources, targets, strict=True):
            launch = algorithm.bind(comm, source, target, count, INT64, "sum")
            self.streams[comm.rank].append(launch)
            self.expect(target, total)

    def barrier(self):
        for comm in self.comms:
            self.streams[comm.rank].append(self.code.barrier.bind(comm))

    def run(self):
        self.machine.run(self.streams)
        for address, word in self.expected.items():
            found = self.memory.final(address, 8)
            if found != word:
                raise Finding("result", f"{found} at {address:#x} is not {word}")
        at = self.layout
        for start in (at.ll_epochs, at.pull_epochs, at.barrier_epochs):
            blocks = 1 if start == at.barrier_epochs else MAX_BLOCKS
            for epochs in range(start, start + 4 * blocks, 4):
                found = [self.memory.final(w + epochs, 4) for w in self.workspaces]
                if len(set(found)) > 1:
                    raise Finding("result", f"epochs at {epochs} differ: {found}")
        for pad in self.pads:
            for slot in range(self.size * MAX_BLOCKS):
                if self.memory.final(pad + 4 * slot, 4) != 0:
                    raise Finding("result", f"slot {slot} of a pad is not 0")


def all_reduces(code, *algorithms):
    """Calls of any size, one right after the other."""

    def scenario(machine):
        world = World(machine, code)
        for _ in range(4):
            algorithm = getattr(code, machine.random.choice(algorithms))
            world.all_reduce(algorithm, machine.random.choice(COUNTS))
            if machine.random.random() < 0.1:
                world.barrier()
        world.run()

    return scenario


def all_reduces_at_the_wrap(code):
    """Calls by LL as the epoch comes round, over packets of 2**32 rounds ago.

    Slots that only large calls use still hold the packets of any old epoch, among them
    those that follow the wrap.
    """

    def scenario(machine):
        world = World(machine, code)
        at, random = world.layout, machine.random
        last = device_code().one_shot_ll.LAST_EPOCH
        epoch = last - 2 - random.randrange(3)
        for workspace in world.workspaces:
            for block in range(MAX_BLOCKS):
                world.memory.plant(workspace + at.ll_epochs + 4 * block, 4, epoch)
            for slot in range(MAX_BLOCKS * 2 * world.size * THREADS):
                half = slot // (world.size * THREADS) % 2
                old = random.choice([2, 4]) - half
                for offset in (0, 8):
                    address = workspace + at.ll_slots + 16 * slot + offset
                    word = random.getrandbits(32) | old << 32
                    world.memory.plant(address, 8, word)
        # Small calls leave old packets where the large ones find them.
        for _ in range(7):
            world.all_reduce(code.one_shot_ll, random.choice([1, 2, 5, 13]))
        world.run()

    return scenario


def exchanges_between_barriers(code):
    """Kernels that write to peers, meet them with ``barrier``, and read."""

    def scenario(machine):
        world = World(machine, code)
        for _ in range(2):
            grid, rounds = 1 + machine.random.randrange(MAX_BLOCKS), 2
            workers = THREADS * grid
            inputs, words = world.inputs(rounds * workers)
            outputs = world.map("output", 8 * rounds * workers * world.size)
            for context in world.contexts:
                rank = context.rank
                args = (context, inputs[rank], outputs[rank], rounds)
                world.launch(rank, code.programs.exchange, grid, *args)
                for worker in range(workers):
                    for i in range(rounds):
                        # Of every rank, what the other thread of this block sent.
                        theirs = [mine[rounds * (worker ^ 1) + i] for mine in words]
                        place = (rounds * worker + i) * world.size
                        world.expect(outputs[rank] + 8 * place, theirs)
        world.run()

    return scenario


def words_by_signals(code):
    """A chain of ranks, each of which signals the next one after every word."""

    def scenario(machine):
        world = World(machine, code)
        total = 6
        inputs, words = world.inputs(total)
        outputs = world.map("output", 8 * total)
        for context in world.contexts:
            rank = context.rank
            if rank > 0:
                for first, count in parts(machine.random, total):
                    args = (context, rank - 1, outputs[rank], first, count)
                    world.launch(rank, code.programs.receive, 1, *args)
                world.expect(outputs[rank], words[rank - 1])
            if rank < world.size - 1:
                for first, count in parts(machine.random, total):
                    args = (context, rank + 1, inputs[rank], first, count)
                    world.launch(rank, code.programs.send, 1, *args)
        world.run()

    return scenario


def parts(random, total):
    """Return a split of ``range(total)`` into two kernels' shares."""
    middle = 1 + random.randrange(total - 1)
    return [(0, middle), (middle, total - middle)]


def plain_stores_between_barriers(code):
    """Kernels that write, a barrier on the stream, and kernels that read from peers."""

    def scenario(machine):
        world = World(machine, code)
        for _ in range(3):
            count = machine.random.choice([1, 2, 5])
            inputs, words = world.inputs(count)
            outputs = world.map("output", 8 * count * world.size)
            for rank in range(world.size):
                args = (world.buffers[rank], inputs[rank], count)
                world.launch(rank, code.programs.write, 1, *args)
            world.barrier()
            for rank in range(world.size):
                args = (world.buffers, outputs[rank], count)
                world.launch(rank, code.programs.read, 1, *args)
                world.expect(outputs[rank], [word for mine in words for word in mine])
            world.barrier()
        world.run()

    return scenario


def a_rank_that_never_calls(code, algorithm):
    """A wait with a deadline, for a rank that launches nothing."""

    def scenario(machine):
        machine.time_passes = True
        machine.memory.races = False  # results are undefined after a deadline
        world = World(machine, code, timeout=50_000)
        for _ in range(2):
            world.all_reduce(getattr(code, algorithm), machine.random.choice(COUNTS))
        world.streams[-1] = []
        machine.run(world.streams)
        for rank in range(world.size):
            if world.memory.final(world.board + 8 * rank, 8) == 0:
                raise Finding("result", f"rank {rank} was told of no failure")

    return scenario


def search(scenario, ranks, schedules, races=True):
    def make(seed):
        machine = Machine(ranks, MAX_BLOCKS, THREADS, seed)
        machine.memory.races = races
        return machine

    return explore(scenario, make, schedules)


def holds(scenario, ranks, schedules):
    found = search(scenario, ranks, schedules)
    if found:
        seed, finding = found
        steps = "\n".join(finding.__notes__)
        pytest.fail(f"seed {seed}: {finding}\n{steps}", pytrace=False)


def breaks(scenario, ranks, races=True):
    found = search(scenario, ranks, WORST, races)
    assert found, f"{WORST} schedules show nothing wrong"
    seed, finding = found
    print(f"found after {seed + 1} schedules: {finding}")


@worlds
def test_ll(ranks):
    holds(all_reduces(device_code(), "one_shot_ll"), ranks, 400)


@worlds
def test_ll_as_its_epoch_comes_round(ranks):
    holds(all_reduces_at_the_wrap(device_code()), ranks, 200)


@worlds
def test_pull(ranks):
    holds(all_reduces(device_code(), "one_shot_pull"), ranks, 400)


@worlds
def test_ll_and_pull_in_turns(ranks):
    holds(all_reduces(device_code(), "one_shot_ll", "one_shot_pull"), ranks, 200)


@worlds
def test_the_barrier_on_a_stream(ranks):
    holds(plain_stores_between_barriers(device_code()), ranks, 300)


@worlds
def test_the_barrier_in_a_kernel(ranks):
    holds(exchanges_between_barriers(device_code()), ranks, 300)


@worlds
def test_signals(ranks):
    holds(words_by_signals(device_code()), ranks, 300)


@worlds
@pytest.mark.parametrize("algorithm", ["one_shot_ll", "one_shot_pull"])
def test_every_rank_leaves_when_one_never_comes(algorithm, ranks):
    holds(a_rank_that_never_calls(device_code(), algorithm), ranks, 50)


# What is broken, and the edits (text that must be there, text instead) that break it.

LL_BROKEN = {
    "one half": [("half = first + (epoch & 1) * half_stride", "half = first")],
    "one flag": [(" | (word_of(flag2) ^ epoch)", "")],
    "no syncthreads after a round": [
        (
            "cuda.syncthreads()\n            if epoch >= LAST_EPOCH - 1:",
            "if epoch >= LAST_EPOCH - 1:",
        ),
        # All threads have read the epoch before it changes: another reason for one.
        (
            "if thread == 0:\n            st_u32(epoch_at",
            "cuda.syncthreads()\n        if thread == 0:\n            st_u32(epoch_at",
        ),
    ],
}
WRAP_BROKEN = {
    "nothing cleared": [("if epoch >= LAST_EPOCH - 1:", "if False:")],
    "one half cleared": [("if epoch >= LAST_EPOCH - 1:", "if epoch >= LAST_EPOCH:")],
    "no fence after clearing": [("fence_acq_rel_sys()\n", "pass\n")],
    "no syncthreads after clearing": [
        ("fence_acq_rel_sys()\n                cuda.syncthreads()", "pass")
    ],
    "an odd last epoch": [("LAST_EPOCH = 2**32 - 2", "LAST_EPOCH = 2**32 - 1")],
}
PULL_BROKEN = {
    "flag relaxed": [
        ("    st_release_sys_u32,", "    st_relaxed_sys_u32 as st_release_sys_u32,")
    ],
    "no syncthreads before the flags": [
        (
            "cuda.syncthreads()\n            for r in range(size):\n"
            "                if thread == r % THREADS:\n",
            "for r in range(size):\n                if thread == r % THREADS:\n",
        )
    ],
    "no syncthreads after the flags": [
        (
            "cuda.syncthreads()\n            for vector in range(start",
            "for vector in range(start",
        )
    ],
    "one half": [("(2 * block + (epoch & 1))", "2 * block")],
    "slots by element": [
        (
            "half = slots + (2 * block + (epoch & 1)) * half_bytes",
            f"half = slots + (epoch & 1) * {MAX_BLOCKS} * half_bytes"
            f" + 16 * (start % ({MAX_BLOCKS} * PULL_VECTORS))",
        )
    ],
}

BARRIER_BROKEN = {
    "flags relaxed": [
        ("import ld_u32, st_release_sys_u32, st_u32", "import ld_u32, st_u32"),
        (
            "from numba_symm.device.signals",
            "from numba_symm.device.intrinsics import"
            " st_relaxed_sys_u32 as st_release_sys_u32\n"
            "from numba_symm.device.signals",
        ),
    ],
    "one flag for all": [
        ("peers[r] + flags + 4 * guard.rank", "peers[r] + flags"),
        ("own + flags + 4 * r,", "own + flags,"),
    ],
}
SIGNALS_BROKEN = {
    "stored without waiting for 0": [
        ("taken = _wait_for_slot(ctx.guard, slot, 0, record)", "taken = True")
    ],
    "taken without waiting for 1": [
        ("arrived = _wait_for_slot(ctx.guard, slot, 1, record)", "arrived = True")
    ],
    "stored relaxed": [
        ("st_release_sys_u32(slot, 1)", "st_relaxed_sys_u32(slot, 1)"),
        ("    st_release_sys_u32,", "    st_release_sys_u32, st_relaxed_sys_u32,"),
    ],
    "awaited relaxed": [
        ("    ld_acquire_sys_u32,", "    ld_relaxed_sys_u32 as ld_acquire_sys_u32,")
    ],
}
IN_KERNEL_BROKEN = {
    "no syncthreads before": [
        (
            "# All writes of this block come before its release of the signals below.\n"
            "    syncthreads()",
            "",
        )
    ],
    "no syncthreads after": [
        (
            "# The peers' writes, acquired by one thread each, become visible to all.\n"
            "    syncthreads()",
            "",
        )
    ],
    "no waiting": [
        ("met = wait_signal(ctx, peer, channel) and met", "pass"),
    ],
}


def broken(module, *edits):
    return device_code(*((module, *edit) for edit in edits))


@worlds
@pytest.mark.parametrize("what", LL_BROKEN)
def test_ll_broken_is_found(what, ranks):
    code = broken("one_shot_ll", *LL_BROKEN[what])
    breaks(all_reduces(code, "one_shot_ll"), ranks)


@worlds
@pytest.mark.parametrize("what", WRAP_BROKEN)
def test_ll_broken_at_the_wrap_is_found(what, ranks):
    code = broken("one_shot_ll", *WRAP_BROKEN[what])
    breaks(all_reduces_at_the_wrap(code), ranks)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", PULL_BROKEN)
def test_pull_broken_is_found(what, races, ranks):
    code = broken("one_shot_pull", *PULL_BROKEN[what])
    breaks(all_reduces(code, "one_shot_pull"), ranks, races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", BARRIER_BROKEN)
def test_the_barrier_on_a_stream_broken_is_found(what, races, ranks):
    code = broken("barrier", *BARRIER_BROKEN[what])
    breaks(plain_stores_between_barriers(code), ranks, races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", IN_KERNEL_BROKEN)
def test_the_barrier_in_a_kernel_broken_is_found(what, races, ranks):
    code = broken("signals", *IN_KERNEL_BROKEN[what])
    breaks(exchanges_between_barriers(code), ranks, races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", SIGNALS_BROKEN)
def test_signals_broken_are_found(what, races, ranks):
    code = broken("signals", *SIGNALS_BROKEN[what])
    breaks(words_by_signals(code), ranks, races)
