"""What a fault consists of, in the program's words.

The execution that has found the fault is repeated with its choices, and observed.
"""

import re
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from numba_symm.explore.machine import Fiber, Machine, Name
from numba_symm.explore.memory import (
    ACQUIRE,
    AWAIT,
    LOAD,
    NOWHERE,
    STORE,
    Access,
    Area,
    CodePlace,
    Fault,
    Files,
    Strong,
    Value,
    frame_of,
)
from numba_symm.explore.threads import Array, of_bits


class TracedStep(NamedTuple):
    """A strong access of the repeated execution.

    Attributes:
        thread: the number of its thread.
        time: the thread's time.
        op: the access.
        value: the stored bits, or the loaded ones if it stores nothing.
        read: the value that it loaded; None: none.
        stored: the value that it stored; None: none.
        known: what its thread knows after it.
        phase: the number of its launch, and of barriers since that began.
    """

    thread: int
    time: int
    op: Strong
    value: Any
    read: Value | None
    stored: Value | None
    known: Any
    phase: tuple[int, int]


class Observed:
    """A repeated execution.

    Attributes:
        steps: its strong accesses.
        ends: how many steps came before the fault; None: all.
        seen: by thread and time, of an access of the element: what the program calls
            it, how many steps came before, what the thread knew, and the number of the
            launch and of barriers before.
    """

    def __init__(self, machine: Machine, fault: Fault):
        self.machine = machine
        self.steps: list[TracedStep] = []
        self.ends: int | None = None
        self._last: Access | None = fault.details.get("second")
        self.seen: dict[tuple[int, int], tuple[str, int, Any, tuple[int, int]]] = {}
        self._watched: Area | None = fault.details.get("region")
        self._offset: int = fault.details.get("offset", -1)
        machine.traced = self._trace
        machine.memory.observe = self._observe
        machine.memory.forgives = fault.kind == "race"

    def _trace(self, thread: Fiber, op: Strong, index: int, value: Any) -> None:
        values, stored = op.region.places[op.offset].values, None
        if values[-1].step == self.machine.steps - 1:
            stored = values[-1]
        read = values[index if stored is None else -2]
        self.steps.append(
            TracedStep(
                thread.number,
                int(thread.known[thread.number]),
                op,
                value if stored is None else stored.bits,
                None if op.kind is STORE else read,
                stored,
                thread.known.copy(),
                _phase_of(thread),
            )
        )

    def _observe(
        self, thread: Any, access: Access, region: Area, offset: int, nbytes: int
    ) -> None:
        if self._watched is None or region.base != self._watched.base:
            return
        if offset <= self._offset < offset + nbytes or offset == self._offset:
            frame = None if access.scope else frame_of(self.machine.files)
            name = element_name(region, self._offset, frame, self.machine.files)
            if access == self._last:
                self.ends = len(self.steps)
            seen = name, len(self.steps), thread.known.copy(), _phase_of(thread)
            self.seen[access.thread, access.time] = seen

    def of(self, access: Access) -> tuple[str, int, Any, tuple[int, int]]:
        """Return what was seen of an access."""
        return self.seen.get(
            (access.thread, access.time), ("", 0, self.machine.clock()[0], (0, 0))
        )


def _phase_of(thread: Any) -> tuple[int, int]:
    grid = getattr(getattr(thread, "local", None), "grid", None)
    return (0, 0) if grid is None else (grid.number, thread.phase)


def element_name(
    region: Area, offset: int, frame: FrameType | None, files: Files
) -> str:
    """Return what the program calls an element: ``mine[1, 0] (x of rank 1)``."""
    whole = _whole_name(region, files)
    if frame is not None:
        code = code_at(CodePlace(frame.f_code.co_filename, frame.f_lineno), files)
        for name, value in frame.f_locals.items():
            if not isinstance(value, Array) or value.region is not region:
                continue
            index = _index_in(value, offset)
            if index is not None and re.search(rf"\b{name}\b", code):
                return f"{name}{index} ({whole})"
    if region.shape is not None:
        place = _index_in(Array.of(region, region.shape, region.dtype), offset)
        if place is not None:
            name, _, owner = whole.partition(" of ")
            if " " in name:
                return f"element {place} of {whole}"
            return f"{name}{place} of {owner}"
    if region.slots is not None:
        kind, channel, source = region.slots(offset)
        kind += f" of rank {source}" * (source >= 0)
        return f"the {kind}, channel {channel}, in {whole}"
    return f"byte {offset} of {whole}"


def _index_in(array: Array, offset: int) -> str | None:
    left = offset - array.start()
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    places = [0] * array.ndim
    for axis in order:
        stride = array.strides[axis]
        if stride <= 0 or left < 0:
            return None
        places[axis] = left // stride
        left -= places[axis] * stride
        if places[axis] >= array.shape[axis]:
            return None
    return f"[{', '.join(map(str, places))}]" if 0 <= left < array.itemsize else None


def _whole_name(region: Area, files: Files) -> str:
    """Return an allocation's name: the variable to which the program assigned it."""
    target = re.match(
        r"\s*(?:self\.)?(\w+)\s*=[^=]", code_at(region.made or NOWHERE, files)
    )
    return f"{target[1]} of rank {region.rank}" if target else region.name


def code_at(site: CodePlace, files: Files) -> str:
    """Return the program's line."""
    lines = files.get(site.file, [])
    return lines[site.line - 1].strip() if 0 < site.line <= len(lines) else ""


def nearest_order(observed: Observed, first: Access, second: Access) -> str:
    """Return which order there is near a race, and what may be missing."""
    races = [_Race(observed, first, second), _Race(observed, second, first)]
    for find in (
        *(_Race.by_other_thread, _Race.to_other_thread, _Race.by_relaxed),
        _Race.before_next,
    ):
        for race in races:
            found = find(race)
            if found:
                does = f"the {race.first.does} by {race.a.text}"
                return f"It seems that {does} should come first. {found}"
    return races[0].without_order()


class _Race:
    """Two accesses that nothing orders, of which the first might come first.

    Attributes:
        first: the first one.
        a, b: the names of their threads.
        phases: the numbers of their launches, and of barriers before.
        since: the steps that follow the first one.
    """

    def __init__(self, observed: Observed, first: Access, second: Access):
        self._observed, self.first, self._second = observed, first, second
        self._machine = observed.machine
        self._names = observed.machine.numbers.names
        self.a, self.b = self._names[first.thread], self._names[second.thread]
        _, self.since, self._knew, phase = observed.of(first)
        _, _, self._known, last = observed.of(second)
        self.phases = [phase, last]

    def _by_mates(self, name: Name, other: Name, phase: Any) -> Iterator[TracedStep]:
        """Return the steps of threads in one access's block, in the same phase."""
        for step in reversed(self._observed.steps[self.since :]):
            by = self._names[step.thread]
            mates = _are_mates(by, name) and not _are_mates(by, other)
            if mates and step.phase == phase:
                yield step

    def by_other_thread(self) -> str:
        """Another thread of the first one's block has signalled."""
        for step in self._by_mates(self.a, self.b, self.phases[0]):
            released = step.stored is not None and step.stored.release is not None
            if released and step.time <= self._known[step.thread]:
                line, other = step.op.site.line, self._names[step.thread].thread
                return (
                    f"The {_call(step.op)} of thread {other} at line {line}, which "
                    f"{self.b.text} knows of, follows thread {other}'s own accesses. "
                    f"But nothing orders thread {self.a.thread}'s before it: is a "
                    f"syncthreads missing before line {line}?"
                )
        return ""

    def to_other_thread(self) -> str:
        """Another thread of the second one's block knows."""
        for step in self._by_mates(self.b, self.a, self.phases[1]):
            knows = step.known[self.first.thread] >= self.first.time
            if knows and step.read is not None and step.op.order == ACQUIRE:
                line = step.op.site.line
                return (
                    f"Thread {self._names[step.thread].thread} of that block knows of "
                    f"it, by its {_call(step.op)} at line {line}. But nothing orders "
                    f"the access of thread {self.b.thread} after that: is a "
                    f"syncthreads missing after line {line}?"
                )
        return ""

    def by_relaxed(self) -> str:
        """A value has come from one block to the other, but without an order."""
        steps = self._observed.steps
        for step in reversed(steps if not _same_block(self.a, self.b) else ()):
            if step.read is None or step.read.step < self.since:
                continue
            writer, reader = self._names[step.read.thread], self._names[step.thread]
            if not _same_block(writer, self.a) or not _same_block(reader, self.b):
                continue
            store = steps[step.read.step]
            line, loaded = store.op.site.line, step.op.site.line
            if step.read.release is None:
                return (
                    f"The {_call(store.op)} of {writer.text} at line {line} is "
                    f"relaxed, so it orders nothing for {reader.text}, which loads its "
                    f"value at line {loaded}: is a release missing at line {line}?"
                )
            if step.op.order != ACQUIRE:
                return (
                    f"The {_call(step.op)} of {reader.text} at line {loaded} is "
                    f"relaxed, so the release at line {line} orders nothing for it: is "
                    f"an acquire missing at line {loaded}?"
                )
        return ""

    def before_next(self) -> str:
        """The second one's thread goes on without knowledge of the first one."""
        (launch, _), (later, _) = self.phases
        thread, time, a, b = *self._second[:2], self.a, self.b
        again = launch < later and a.rank != b.rank
        if launch == later and not _same_block(a, b):
            again = any(
                number == thread and at < time and at <= self._knew[thread]
                for number, at in self._observed.seen
            )
        if not launch or not again:
            return ""
        did = "stored" if "load" not in self.first.does else "loaded"
        when = f", in launch {later}, that {a.text}, in launch {launch}, has {did}"
        if launch == later:
            when = f" that {a.text} has {did}, before its next access"
        return (
            f"Nothing tells {b.text}{when}: is a barrier, or a signal back, missing "
            f"after line {self.first.site.line}?"
        )

    def without_order(self) -> str:
        """Nothing near orders the accesses."""
        here, there = self.first.site.line, self._second.site.line
        again = f"two executions of line {here}"
        lines = again if here == there else f"lines {here} and {there}"
        missing = "barrier, or a signal,"
        if _same_block(self.a, self.b):
            missing = "syncthreads"
        return f"Is a {missing} missing between {lines}?"


def _same_block(one: Name, other: Name) -> bool:
    return (one.rank, one.block) == (other.rank, other.block) and one.block is not None


def _are_mates(one: Name, other: Name) -> bool:
    """Return whether these are two threads of a block."""
    return _same_block(one, other) and one.thread != other.thread


def _call(op: Strong) -> str:
    return op.site.called or {STORE: "store", LOAD: "load", AWAIT: "wait"}.get(
        op.kind, "update"
    )


def waiting(fault: Fault, machine: Machine) -> list[tuple[str, CodePlace]]:
    """Return who waits for what, each text once; hosts only if nothing else waits."""
    given = fault.details.get("waiting", ())
    kernels = [each for each in given if each[0].block is not None or each[0].thread]
    found: dict[tuple[str, str, CodePlace], list[str]] = {}
    for name, what, site, op, polling in kernels or given:
        ops = [each for each, _, _ in polling] or ([op] if op is not None else [])
        text = f"at {what}"
        if ops:
            text = "for " + " and ".join(
                dict.fromkeys(_wanted(name, each, machine) for each in ops)
            )
        group = f"rank {name.rank}" + f" block {name.block}" * (name.block is not None)
        found.setdefault((group, text, site), []).append(name.text)
    return [
        (
            f"{who[0]} waits {text}"
            if len(who) == 1
            else f"{len(who)} threads of {group} wait {text}",
            site,
        )
        for (group, text, site), who in found.items()
    ]


_COMPARISONS = "==", "!=", ">", ">=", "<", "<="
"""By the numbers of ``symm.EQ`` and so on."""


def _number(op: Strong, bits: int) -> Any:
    """Return a word in the dtype of the program's array, or else signed."""
    fits = getattr(op.region.dtype, "itemsize", 0) == op.nbytes
    dtype = op.region.dtype if fits else np.dtype(f"i{op.nbytes}")
    return of_bits(dtype, int(bits)).item()


def _wanted(name: Name, op: Strong, machine: Machine) -> str:
    region, place = op.region, op.region.places.get(op.offset)
    values = place.values[1:] if place is not None else []
    bits, wanted = _number(op, region.bits(op.offset, op.nbytes)), "to change"
    if isinstance(op.wanted, str):
        return op.wanted
    if op.wanted is not None:
        wanted = f"to be {_COMPARISONS[op.wanted[0]]} {op.wanted[1]}"
    if region.slots is None:
        element = element_name(region, op.offset, None, machine.files)
        return f"{element} {wanted}, which is {bits}"
    kind, channel, source = region.slots(op.offset)
    if kind == "grid barrier":
        return f"the other blocks at the grid barrier on channel {channel}"
    if kind == "word":
        sent = f"is {bits}" if values else "was never set or added to"
        return f"the word of rank {source} on channel {channel} {wanted}, which {sent}"
    if region.rank == name.rank:
        times = sum(value.bits == 1 for value in values)
        state = f"sent {times} times before" if times else "never sent"
        return f"the signal of rank {source} on channel {channel}, which was {state}"
    return (
        f"rank {region.rank} to take the signal before on channel {channel}, which it "
        "never did"
    )


def trace(observed: Observed) -> list[dict[str, Any]]:
    """Return the steps of the execution."""
    machine, found = observed.machine, []
    for number, step in enumerate(observed.steps[: observed.ends]):
        op = step.op
        verbs = {STORE: "stores", LOAD: "loads", AWAIT: "waits for"}
        value = None if step.value is None else _number(op, step.value)
        found.append(
            {
                "step": number,
                "thread": machine.numbers.names[step.thread].text,
                "file": op.site.file,
                "line": op.site.line,
                "called": op.site.called,
                "does": "looks too late at"
                if value is None
                else verbs.get(op.kind, "updates"),
                "order": op.order,
                "element": element_name(op.region, op.offset, None, machine.files),
                "value": value,
            }
        )
    return found
