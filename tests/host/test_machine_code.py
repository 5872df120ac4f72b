"""What the compilers make of the kernels, for three architectures, without a GPU.

SASS is read as nvdisasm prints it. A flag's load is ``LDG.E.STRONG.SYS``, a packet's
``LDG.E.128.STRONG.SYS``; an acquire adds ``CCTL.IVALL`` (drop what the L1 cache holds)
after the load, a release ``MEMBAR.ALL.SYS`` before the store.
"""

import functools
import re
import subprocess
import tempfile
from collections import deque
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import nvidia
import pytest

from numba_symm import dtypes, pads
from numba_symm.collectives import barrier, one_shot_ll, one_shot_pull

REGISTERS = 65536  # of a multiprocessor, on every architecture here

ALGORITHMS = {"ll": one_shot_ll, "pull": one_shot_pull}
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
REDUCTIONS = [
    (2, "float16", "sum"),
    (2, "float32", "max"),
    (2, "int64", "prod"),
    (8, "bfloat16", "sum"),
    (8, "int32", "min"),
    (8, "float64", "sum"),
]
SIGNALS = {
    "barrier": barrier.kernel,
    "pad_barrier": pads.barrier_kernel,
    "put_signal": pads.put_signal_kernel,
    "wait_signal": pads.wait_signal_kernel,
}

LL = [("ll", *case) for case in REDUCTIONS]
PULL = [("pull", *case) for case in REDUCTIONS]
PADS = [(name, n) for name in SIGNALS if name != "barrier" for n in (2, 8)]
FLAGGED = [*PULL, ("barrier", 2), ("barrier", 8), *PADS]
EVERY = [*LL, *FLAGGED]


def on(cases):
    """Run a test for each kernel on each architecture."""

    def named(case):
        return "-".join(map(str, case))

    architectures = pytest.mark.parametrize(
        "cc", [(8, 0), (9, 0), (10, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}"
    )
    kernels = pytest.mark.parametrize("case", cases, ids=named)
    return lambda test: architectures(kernels(test))


def kernel(name, n, dtype=None, op=None):
    if name in SIGNALS:
        return SIGNALS[name](n)
    return ALGORITHMS[name].kernel(n, element(dtype), op)


def element(dtype):
    return dtypes.element(HALVES.get(dtype, dtype), "test")


class Instruction(NamedTuple):
    guard: str  # such as "@!P0"
    opcode: str
    operands: str


class Code:
    """The machine code of one kernel, and which instruction may follow which."""

    def __init__(self, case, cc):
        self.threads = kernel(*case).threads
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel(*case).cubin(cc))
            file.flush()
            self.usage = dict(
                re.findall(r"(\w+):(\d+)", run("cuobjdump", "-res-usage", file.name))
            )
            text = run("nvdisasm", "-c", file.name)
        self.instructions = []
        labels = {}
        for line in text.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(self.instructions)
            if found := re.match(r"\s*/\*\w+\*/\s+(@\S+)?\s*([A-Z][\w.]*)(.*);", line):
                self.instructions.append(
                    Instruction(*(part or "" for part in found.groups()))
                )
        self._next = [
            self._successors(index, labels) for index in range(len(self.instructions))
        ]

    def _successors(self, index, labels):
        guard, opcode, operands = self.instructions[index]
        kind = opcode.partition(".")[0]
        jumps = kind in ("BRA", "BRX") or opcode.startswith("CALL.REL")
        targets = [labels[name] for name in re.findall(r"\.L_x_\d+", operands) if jumps]
        conditional = guard or "P" in operands.partition("`")[0]
        if kind not in ("BRA", "BRX", "EXIT", "RET") or conditional:
            targets.append(index + 1)
        return [target for target in targets if target < len(self.instructions)]

    def find(self, pattern):
        """Return the indices of the instructions whose whole opcode matches."""
        return [
            index
            for index, instruction in enumerate(self.instructions)
            if re.fullmatch(pattern, instruction.opcode)
        ]

    def loop(self, index):
        """Return the instructions of the shortest loop through one, or None."""
        came_from = dict.fromkeys(self._next[index], index)
        queue = deque(came_from)
        while queue:
            here = queue.popleft()
            if here == index:
                path = [came_from[here]]
                while path[-1] != index:
                    path.append(came_from[path[-1]])
                return [self.instructions[step] for step in reversed(path)]
            for following in self._next[here]:
                if following not in came_from:
                    came_from[following] = here
                    queue.append(following)
        return None

    def between(self, first, last):
        return self.instructions[first + 1 : last]


@functools.cache
def compiled(case, cc):
    return Code(case, cc)


def run(tool, *arguments):
    found = [
        file for root in nvidia.__path__ for file in Path(root).glob(f"*/bin/{tool}")
    ]
    assert found, f"no {tool}: install nvidia-cuda-{tool}"
    return subprocess.run(
        [found[0], *arguments], capture_output=True, text=True, check=True
    ).stdout


def opcodes(instructions, pattern):
    return [i.opcode for i in instructions if re.fullmatch(pattern, i.opcode)]


def branches(instructions):
    return opcodes(instructions, r"(BRA|BRX|BSSY|BSYNC|CALL|EXIT)\b.*")


@on(EVERY)
def test_everything_stays_in_registers_and_a_block_fits(case, cc):
    code = compiled(case, cc)
    assert code.usage["STACK"] == code.usage["LOCAL"] == "0"
    assert int(code.usage["REG"]) * code.threads <= REGISTERS
    assert not code.find(r"(LDL|STL)\b.*")


@on(EVERY)
def test_memory_is_global_and_nothing_is_atomic(case, cc):
    code = compiled(case, cc)
    assert code.find(r"LDG\b.*")
    assert code.find(r"STG\b.*")
    assert not code.find(r"(LD|ST|ATOM|ATOMG|ATOMS|RED|REDG)(\..*)?")


@on(EVERY)
def test_nothing_is_called(case, cc):
    # A division by what is not constant is a call of some hundred instructions.
    assert not compiled(case, cc).find(r"CALL\.ABS.*")


@on(EVERY)
def test_no_plain_load_is_polled(case, cc):
    # A loop that loads data stores some; one that waits stores nothing.
    code = compiled(case, cc)
    for load in code.find(r"LDG\b(?!.*STRONG\.SYS).*"):
        loop = code.loop(load)
        assert loop is None or opcodes(loop, r"STG\b.*"), code.instructions[load]


@on(FLAGGED)
def test_a_wait_polls_its_flag_and_nothing_else(case, cc):
    code = compiled(case, cc)
    loops = [code.loop(load) for load in code.find(r"LDG\.E\.STRONG\.SYS")]
    waits = [loop for loop in loops if loop and not opcodes(loop, r"(STG|BAR)\b.*")]
    assert waits
    for wait in waits:
        accesses = opcodes(wait, r"(LDG|STG|LDS|STS|CCTL|MEMBAR)\b.*")
        assert accesses == ["LDG.E.STRONG.SYS", "CCTL.IVALL"]


@on(FLAGGED)
def test_every_flag_is_loaded_with_acquire(case, cc):
    code = compiled(case, cc)
    loads = code.find(r"LDG\.E\.STRONG\.SYS")
    assert loads
    for load in loads:
        following = code.instructions[load + 1 :]
        accesses = opcodes(following, r"(LDG|STG|LDS|STS|CCTL|MEMBAR|BAR)\b.*")
        assert accesses[0] == "CCTL.IVALL"


@on(FLAGGED)
def test_every_flag_is_stored_with_release(case, cc):
    code = compiled(case, cc)
    stores = code.find(r"STG\.E\.STRONG\.SYS")
    assert stores
    for store in stores:
        fence = max(i for i in code.find(r"MEMBAR\.(ALL|SC)\.SYS") if i < store)
        assert code.instructions[fence].guard == code.instructions[store].guard
        assert not opcodes(code.between(fence, store), r"(LDG|STG|BAR|BRA)\b.*")


@on(PADS)
def test_signals_access_memory_at_system_scope_only(case, cc):
    code = compiled(case, cc)
    accesses = code.find(r"(LDG|STG)\b.*")
    assert accesses == code.find(r"(LDG|STG)\.E(\.64)?\.STRONG\.SYS")


@on([("barrier", 2), ("barrier", 8)])
def test_a_barrier_has_one_plain_load_and_store_for_its_own_epoch(case, cc):
    code = compiled(case, cc)
    assert len(code.find(r"LDG\b(?!.*STRONG).*")) == 1
    assert len(code.find(r"STG\b(?!.*STRONG).*")) == 1


@on(LL)
def test_ll_sends_one_packet_to_each_rank(case, cc):
    code = compiled(case, cc)
    packets = [code.instructions[i] for i in code.find(r"STG\.E\.128\.STRONG\.SYS")]
    cleared = [packet for packet in packets if packet.operands.split()[-1] == "RZ"]
    assert len(packets) - len(cleared) == case[1]
    assert cleared  # when the epochs come round
    assert not code.find(r"STG\.E\.128")


@on(LL)
def test_ll_polls_all_packets_at_once(case, cc):
    # Nothing waits between the loads: a round of polls takes one latency, not n.
    code = compiled(case, cc)
    loads = code.find(r"LDG\.E\.128.*")
    assert loads == code.find(r"LDG\.E\.128\.STRONG\.SYS")
    assert len(loads) == case[1]
    assert not branches(code.between(loads[0], loads[-1]))
    assert all(
        opcodes(code.loop(load), r"(LDG|STG|MEMBAR|BAR)\b.*")
        == ["LDG.E.128.STRONG.SYS"] * case[1]
        for load in loads
    )


@on(LL)
def test_ll_rounds_have_no_fence(case, cc):
    code = compiled(case, cc)
    fences = code.find(r"MEMBAR\..*SYS")
    assert len(fences) == 1  # when the epochs come round
    sends = code.find(r"STG\.E\.128\.STRONG\.SYS")
    round_trip = code.loop(sends[0])
    assert opcodes(round_trip, r"BAR\b.*")
    assert not opcodes(round_trip, r"MEMBAR\b.*")


@on(PULL)
def test_pull_reads_and_writes_16_bytes_at_a_time(case, cc):
    code = compiled(case, cc)
    loops = [code.loop(load) for load in code.find(r"LDG\.E\.128")]
    reading = [len(opcodes(loop, r"LDG\.E\.128")) for loop in loops if loop]
    assert 1 in reading  # staging
    assert case[1] in reading  # reducing, one vector a rank
    assert len(code.find(r"STG\.E\.128")) >= 2  # staged; reduced


@on(PULL)
def test_pull_reads_all_ranks_at_once(case, cc):
    code = compiled(case, cc)
    loads = code.find(r"LDG\.E\.128")[-case[1] :]
    assert not branches(code.between(loads[0], loads[-1]))


@on([case for case in LL + PULL if case[2] in HALVES])
def test_halves_are_rounded_by_the_hardware(case, cc):
    half = {"bfloat16": "BF16", "float16": "F16"}[case[2]]
    code = compiled(case, cc)
    assert code.find(rf"F2FP?\.{half}(\.F32)?(\.PACK_AB)?")
    assert code.find(r"FADD(2|\.FTZ)?")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_halves_accumulate_in_float32(dtype, op):
    text = kernel("ll", 2, dtype, op).ptx((9, 0))
    instruction = {"sum": r"\badd\.(rn\.)?f32\b", "max": r"\bsetp\.\w+\.f32\b"}[op]
    assert len(re.findall(instruction, text)) >= 4
    assert not re.search(r"\b(add|mul|fma|min|max|setp)\.\S*\bb?f16(x2)?\b", text)
