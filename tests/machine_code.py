"""The machine code of kernels, as NVIDIA's tools print it."""

import bisect
import itertools
import re
import struct
import subprocess
import tempfile
from collections import deque
from pathlib import Path
from typing import NamedTuple

import nvidia

from numba_symm.collectives.protocols import workspace


class Instruction(NamedTuple):
    guard: str  # such as "@!P0"
    opcode: str
    operands: str


class Code:
    """The machine code of one kernel, and which instruction may follow which."""

    def __init__(self, kernel, cc):
        self.kernel = kernel
        self.usage, text = machine_code(kernel, cc)
        self.instructions = []
        labels = {}
        for line in text.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(self.instructions)
            if found := re.match(LINE, line):
                place, *parts = found.groups()
                labels[f"0x{int(place, 16):x}"] = len(self.instructions)
                self.instructions.append(Instruction(*(part or "" for part in parts)))
        self._next = [
            self._successors(index, labels) for index in range(len(self.instructions))
        ]

    def _successors(self, index, labels):
        guard, opcode, operands = self.instructions[index]
        kind = opcode.partition(".")[0]
        jumps = kind in ("BRA", "BRX") or opcode.startswith("CALL.REL")
        names = re.findall(r"\.L_x_\d+", operands) or re.findall(r"0x\w+", operands)
        targets = [labels[name] for name in names] if jumps else []
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

    def repeated_with(self, index, without):
        """Return the instructions of all loops through one that avoid others."""

        def reached(following):
            found, queue = set(), [index]
            while queue:
                new = {
                    place
                    for place in following[queue.pop()]
                    if place not in found and place not in without
                }
                found |= new
                queue += new
            return found

        before = [[] for _ in self._next]
        for place, following in enumerate(self._next):
            for each in following:
                before[each].append(place)
        return reached(self._next) & reached(before)

    def waiting(self):
        """Return what is repeated with a look at the clock, and without stores."""
        clocks = [
            place
            for place, each in enumerate(self.instructions)
            if "SR_GLOBALTIMERLO" in each.operands
        ]
        stores = set(self.find(r"(STG|BAR)\b.*"))
        return set().union(*(self.repeated_with(clock, stores) for clock in clocks))

    def between(self, first, last):
        return self.instructions[first + 1 : last]


def opcodes(instructions, pattern):
    return [i.opcode for i in instructions if re.fullmatch(pattern, i.opcode)]


def branches(instructions):
    return opcodes(instructions, r"(BRA|BRX|BSSY|BSYNC|CALL|EXIT)\b.*")


def flag_stores(code):
    """Return the stores of 4 bytes but those that mark that the rank has failed.

    These are one line apart, one after another or in a loop that does nothing else.
    """
    stores = code.find(r"STG\.E\.STRONG\.SYS")
    loops = {store: code.loop(store) for store in stores}
    stores = [
        store
        for store in stores
        if not loops[store] or opcodes(loops[store], r"(LDG|BAR|MEMBAR)\b.*")
    ]
    found = []
    while stores:
        run = stores[: workspace._MARKS]
        number = len(run) if are_marks(code, run) else 1
        found += stores[:number] if number == 1 else []
        stores = stores[number:]
    return found


def are_marks(code, stores):
    operands = [code.instructions[store].operands for store in stores]
    offsets = [re.search(r"\+(-?0x\w+)\]", each) for each in operands]
    places = sorted(int(found[1], 16) if found else 0 for found in offsets)
    first = places[0]
    apart = [first + workspace._LINE * i for i in range(workspace._MARKS)]
    return places == apart


_READ = {}
"""By kernel and compute capability, what :func:`read_together` has read."""


def read_together(jobs):
    """Read the machine code of kernels by one process for each compute capability.

    nvdisasm takes 0.4 s to start, and reads one file. So the instructions of all
    kernels are one file, in which jumps have addresses in place of labels.

    Args:
        jobs: kernels, each with a compute capability.
    """
    for cc in dict.fromkeys(cc for _, cc in jobs):
        texts, usages = [], {}
        with tempfile.TemporaryDirectory() as folder:
            cubin, joined = Path(folder, "one.cubin"), Path(folder, "all")
            for kernel in dict.fromkeys(kernel for kernel, of in jobs if of == cc):
                try:
                    code = kernel.cubin(cc)
                except Exception:  # its own test will raise it
                    continue
                cubin.write_bytes(code)
                usage, sections = usage_of(cubin), instructions_of(code)
                if len(sections) > 1:  # a call of another section has no address
                    _READ[kernel, cc] = usage, run("nvdisasm", "-c", str(cubin))
                    continue
                usages[kernel] = usage
                texts += sections
            if not texts:
                continue
            joined.write_bytes(b"".join(texts))
            sm = "SM{}{}".format(*cc)
            lines = run("nvdisasm", "-c", "-b", sm, str(joined)).splitlines()
        ends = list(itertools.accumulate(map(len, texts)))
        parts = [[] for _ in texts]
        for line in lines:
            if found := re.match(LINE, line):
                number = bisect.bisect_right(ends, int(found[1], 16))
                start = ends[number] - len(texts[number])
                parts[number].append(moved(line, start))
        for (kernel, usage), part in zip(usages.items(), parts, strict=True):
            _READ[kernel, cc] = usage, "\n".join(part)


LINE = r"\s*/\*(\w+)\*/\s+(@\S+)?\s*([A-Z][\w.]*)(.*);"


def moved(line, start):
    """Return a line whose addresses count from ``start``."""
    found = re.match(LINE, line)
    assert not found[3].startswith("BRX"), "its targets are only in the whole cubin"
    if found[3].startswith(("BRA", "CALL.REL")):
        line = re.sub(
            r"0x(\w+)(?=\s*;)", lambda at: f"0x{int(at[1], 16) - start:x}", line
        )
    return line.replace(found[1], f"{int(found[1], 16) - start:x}", 1)


def instructions_of(cubin):
    """Return the instructions in a cubin, by section."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, sections + size * i)
        for i in range(number)
    ]
    return [
        cubin[place : place + nbytes]
        for name, kind, _, _, place, nbytes, *_ in headers
        if kind == 1 and cubin.startswith(b".text.", headers[names][4] + name)
    ]


def machine_code(kernel, cc=(9, 0)):
    """Return the resources of a kernel's cubin, and its instructions as text."""
    if (kernel, cc) in _READ:
        return _READ.pop((kernel, cc))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin(cc))
        file.flush()
        return usage_of(file.name), run("nvdisasm", "-c", file.name)


def usage_of(file):
    """Return the resources of the kernel in a file."""
    return dict(re.findall(r"(\w+):(\d+)", run("cuobjdump", "-res-usage", str(file))))


def run(tool, *arguments):
    found = [
        file for root in nvidia.__path__ for file in Path(root).glob(f"*/bin/{tool}")
    ]
    assert found, f"no {tool}: install nvidia-cuda-{tool}"
    return subprocess.run(
        [found[0], *arguments], capture_output=True, text=True, check=True
    ).stdout
