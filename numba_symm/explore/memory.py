"""All ranks' memory in a model of PTX, and the faults of accesses.

Addresses are numbers of this model, the same in every execution. A *region* is what the
program or the library allocates at once.

Weak accesses take effect at once, in whatever order threads run. Vector clocks find two
weak accesses, or a weak and a strong one, that nothing orders: a race. If there is
none, each weak load has one possible value.

A *place* is a word that strong accesses use: relaxed, acquire, release, and atomic
updates. It keeps all its values. A strong load may return any of them that is not older
than one that the thread knows of: one whose store happened before, or was read by a
load that happened before.

Not modelled: loads that are delayed past a later store of their thread, orders of
stores to different places that no interleaving has, and the total order of fences.
"""

import bisect
import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from math import gcd
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from numba_symm.errors import SymmError


class Fault(BaseException):
    """A fault of the program, in one execution. No program catches it by accident.

    Attributes:
        kind: ``race``, ``access``, ``deadlock``, ``divergence``, ``livelock``,
            ``result`` or ``error``.
        details: what the report needs beyond the text.
    """

    def __init__(self, kind: str, text: str, **details: Any):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.details = kind, text, details


class Unsupported(SymmError):
    """The program uses something that ``numba_symm.explore`` has no stand-in for."""


class Pruned(BaseException):
    """This execution is equivalent to another one, which is explored, too."""


class Ended(BaseException):
    """Ends a thread of an execution that is over."""


class CodePlace(NamedTuple):
    """A place in the program.

    Attributes:
        file: the program's file.
        line: the line.
        called: the library's function that was called there; "" if none was.
    """

    file: str
    line: int
    called: str = ""


_DEVICE = str(Path(__file__).parents[1] / "device")

NOWHERE = CodePlace("?", 0)

Files = Mapping[str, list[str]]
"""The lines of the program's files, by name."""


def site(files: Files) -> CodePlace:
    """Return where the program is: its innermost frame, and what that called."""
    frame: FrameType | None = sys._getframe(1)
    called = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename in files:
            return CodePlace(code.co_filename, frame.f_lineno, called)
        if code.co_filename.startswith(_DEVICE) and code.co_name[0] not in "_<":
            called = code.co_name
        frame = frame.f_back
    return NOWHERE


def frame_of(files: Files) -> FrameType | None:
    """Return the program's innermost frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in files:
        frame = frame.f_back
    return frame


class Access(NamedTuple):
    """An access that later ones must be ordered after.

    Attributes:
        thread: the number of its thread.
        time: the thread's time.
        site: where.
        does: what, in words.
        scope: the scope of a strong access; "" for a weak one.
    """

    thread: int
    time: int
    site: CodePlace
    does: str
    scope: str = ""


class Cell:
    """The last accesses to a few bytes.

    Attributes:
        writes: by thread, stores of one value that nothing orders.
        reads, strong_reads, strong_writes: by thread, what came after these.
        before: what these stores follow.
    """

    __slots__ = ("before", "reads", "strong_reads", "strong_writes", "writes")

    def __init__(self) -> None:
        self.before: list[Access] = []
        self.writes: dict[int, Access] = {}
        self.reads: dict[int, Access] = {}
        self.strong_writes: dict[int, Access] = {}
        self.strong_reads: dict[int, Access] = {}

    def store(self, me: Access) -> None:
        """Note a store that follows all accesses so far."""
        kinds = self.writes, self.reads, self.strong_writes, self.strong_reads
        self.before = [each for kind in kinds for each in kind.values()]
        self.writes = {me.thread: me}
        self.reads, self.strong_writes, self.strong_reads = {}, {}, {}


def unknown(others: Iterable[Access], known: Any) -> list[Access]:
    """Return those of some accesses that a thread does not know of."""
    return [other for other in others if other.time > known[other.thread]]


RELAXED, ACQUIRE, RELEASE = "relaxed", "acquire", "release"
SYSTEM, GPU = "system", "gpu"
LOAD, AWAIT, STORE, UPDATE = "load", "await", "store", "update"
CHANGES = (STORE, UPDATE)

LATE = -1
"""As a value for an await: it looks when the newest value does not end it."""

_GAP = 1 << 16


class Value(NamedTuple):
    """A value of a place.

    Attributes:
        bits: the value.
        thread: the number of the thread that stored it.
        time: that thread's time.
        release: what an acquire of it learns; None: nothing.
        local: the same, for threads of the same rank only.
        rank: the rank that stored it.
        step: the step of the execution that stored it; -1: none.
    """

    bits: int
    thread: int
    time: int
    release: Any
    local: Any
    rank: int
    step: int


class Word:
    """A word of strong accesses, with all its values."""

    __slots__ = ("chain", "kinds", "loads", "nbytes", "reads", "values")

    def __init__(self, bits: int, nbytes: int):
        self.nbytes = nbytes
        self.values = [Value(bits, 0, 0, None, None, -1, -1)]
        self.reads: dict[int, list[tuple[int, int]]] = {}
        # For the search: its silent updates and others, and by their steps, its last
        # changes and its loads.
        self.kinds: set[str] = set()
        self.chain: list[tuple[int, int, Any]] = []
        self.loads: list[int] = []

    def note(self, thread: int, time: int, index: int) -> None:
        """Note that a thread has seen a value."""
        seen = self.reads.setdefault(thread, [])
        if not seen or seen[-1][1] < index:
            seen.append((time, index))

    def oldest(self, known: Any) -> int:
        """Return the oldest value that a thread may still load."""
        values = self.values
        low = len(values) - 1
        while low > 0 and values[low].time > known[values[low].thread]:
            low -= 1
        for thread, seen in self.reads.items():
            for time, index in reversed(seen):
                if index <= low:
                    break
                if time <= known[thread]:
                    low = index
                    break
        return low


class Area:
    """An allocation.

    Attributes:
        name: its name in reports.
        base: its address.
        granule: the bytes of a cell.
        unset: which bytes were never stored; None: all have a value.
        rank: its rank.
        shape: of the program's array there, with ``dtype``; None: not an array.
        pad: its signal pad.
        slots: for a pad, the function that describes an offset.
    """

    def __init__(self, name: str, base: int, nbytes: int, granule: int, unset: bool):
        self.name, self.base, self.nbytes, self.granule = name, base, nbytes, granule
        raw = np.zeros(nbytes + 16, np.uint8)
        skip = -raw.ctypes.data % 16
        self.buffer = raw[skip : skip + nbytes]
        self.origin = self.buffer.ctypes.data
        self.bytes = memoryview(self.buffer.data)
        self.unset = np.ones(nbytes, bool) if unset else None
        self.rank = -1
        self.shape: tuple[int, ...] | None = None
        self.dtype: Any = None
        self.made: Any = None
        self.slots: Callable[[int], Any] | None = None
        self.pad: Area | None = None
        self.cells: dict[int, Cell] = {}
        self.places: dict[int, Word] = {}

    def cells_at(self, offset: int, nbytes: int) -> list[tuple[int, Cell]]:
        """Return the cells of some bytes, with their offsets."""
        if offset % self.granule or nbytes % self.granule:
            self._refine(gcd(self.granule, offset, nbytes))
        granule, cells, found = self.granule, self.cells, []
        for number in range(offset // granule, (offset + nbytes) // granule):
            cell = cells.get(number)
            if cell is None:
                cell = cells[number] = Cell()
            found.append((number * granule, cell))
        return found

    def _refine(self, granule: int) -> None:
        parts = self.granule // granule
        self.cells = {
            number * parts + k: copy.deepcopy(cell)
            for number, cell in self.cells.items()
            for k in range(parts)
        }
        self.granule = granule

    def bits(self, offset: int, nbytes: int) -> int:
        """Return a word, unsigned."""
        return int.from_bytes(self.bytes[offset : offset + nbytes], "little")

    def put_bits(self, offset: int, nbytes: int, value: int) -> None:
        """Store a word."""
        word = int(value) & (1 << 8 * nbytes) - 1
        self.bytes[offset : offset + nbytes] = word.to_bytes(nbytes, "little")


class Strong:
    """A strong access that a thread wants to make.

    Attributes:
        kind: ``LOAD``, ``AWAIT``, ``STORE`` or ``UPDATE``.
        region: where, with ``offset`` and ``nbytes``.
        order: its order.
        scope: its scope.
        bits: the value that a store stores.
        change: for an update, the function from the old bits to the new ones.
        holds: whether the thread can go on with a value; None: with any.
        used: whether the program gets the value of an await.
        wanted: for an await of a comparison, its number and the value, or what reports
            call it; None: another.
        silent: the verb of an update whose result the program drops, if such updates
            give the same in any order. It acquires nothing, as on GPUs and CPUs that
            have instructions for it.
        site: where in the program.
    """

    __slots__ = (
        "bits", "change", "holds", "key", "kind", "nbytes", "offset", "order",
        "region", "scope", "silent", "site", "used", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        region: Area,
        offset: int,
        nbytes: int,
        order: str,
        site: CodePlace,
    ):
        self.kind, self.region, self.offset, self.nbytes = kind, region, offset, nbytes
        self.order, self.site, self.scope = order, site, SYSTEM
        self.key = region.base + offset
        self.bits = 0
        self.change: Callable[[int], int] | None = None
        self.holds: Callable[[int], bool] | None = None
        self.wanted: Any = None
        self.used, self.silent = True, ""


class MemoryModel:
    """All regions, and the accesses to them.

    Attributes:
        observe: is called for each access, with its thread, region, offset and size.
        forgives: whether an execution goes on after a race.
    """

    def __init__(self) -> None:
        self.regions: list[Area] = []
        self.forgives = False
        self._bases: list[int] = []
        self._next = _GAP
        self.observe: Callable[[Any, Access, Area, int, int], None] | None = None

    def allocate(
        self, name: str, nbytes: int, granule: int = 1, unset: bool = False
    ) -> Area:
        """Return a new region of zeros, or of bytes that were never stored."""
        granule = min(8, granule & -granule)
        padded = -(-max(nbytes, 1) // 16) * 16
        region = Area(name, self._next, padded, granule, unset)
        self._next += -(-padded // 256) * 256 + _GAP
        self.regions.append(region)
        self._bases.append(region.base)
        return region

    def at(self, address: int, nbytes: int) -> tuple[Area, int]:
        """Return the region of some bytes, and their offset in it."""
        place = bisect.bisect(self._bases, address) - 1
        region = self.regions[place] if place >= 0 else None
        if region is None or address + nbytes > region.base + region.nbytes:
            near = "" if region is None else f", behind {region.name}"
            raise Fault("access", f"an access to memory outside of all arrays{near}")
        return region, address - region.base

    def weak(
        self,
        thread: Any,
        region: Area,
        offset: int,
        nbytes: int,
        stored: Callable[[], bytes] | None,
        site: CodePlace,
    ) -> None:
        """Check a weak access.

        Threads may store the same bytes without order, but not others.

        Args:
            thread: whose access it is.
            region: where, with ``offset`` and ``nbytes``.
            offset: the first byte.
            nbytes: how many.
            stored: returns what it stores, b"" if that is unknown; None: a load.
            site: where in the program.
        """
        known, write = thread.known, stored is not None
        me = Access(thread.number, thread.tick(), site, "store" if write else "load")
        if self.observe is not None:
            self.observe(thread, me, region, offset, nbytes)
        for at, cell in region.cells_at(offset, nbytes):
            others = unknown(cell.writes.values(), known)
            span = slice(offset, offset + nbytes)
            same = stored is not None and bytes(region.bytes[span]) == stored()
            if others and not same:
                self._race(region, at, others[0], me)
            self._check(cell.strong_writes.values(), known, region, at, me)
            if not write:
                cell.reads[me.thread] = me
                continue
            self._check(cell.reads.values(), known, region, at, me)
            self._check(cell.strong_reads.values(), known, region, at, me)
            if same:  # it must follow what the other stores of this value follow
                self._check(cell.before, known, region, at, me)
                cell.writes[me.thread] = me
            else:
                cell.store(me)
        if write and region.places:
            for at in range(offset - 7, offset + nbytes):
                place = region.places.get(at)
                if place is not None and at + place.nbytes > offset:
                    del region.places[at]
        if region.unset is not None:
            part = region.unset[offset : offset + nbytes]
            if write:
                part[:] = False
            elif part.any() and thread.name.block is not None and not site.called:
                # Copies of the host and of the library may contain unused parts.
                raise Fault(
                    "access",
                    "a load of memory that was not stored before; if another thread "
                    "stores there, is a barrier, a signal or a syncthreads missing "
                    f"before line {site.line}?",
                    region=region, offset=offset, second=me,
                )  # fmt: skip

    def _check(
        self,
        others: Iterable[Access],
        known: Any,
        region: Area,
        offset: int,
        me: Access,
    ) -> None:
        for other in unknown(others, known):
            self._race(region, offset, other, me)

    def _race(self, region: Area, offset: int, first: Access, second: Access) -> None:
        if self.forgives:
            return
        raise Fault(
            "race", "two accesses that nothing orders",
            region=region, offset=offset, first=first, second=second,
        )  # fmt: skip

    def place(self, region: Area, offset: int, nbytes: int) -> Word:
        """Return the place at an offset."""
        place = region.places.get(offset)
        if place is None:
            place = Word(region.bits(offset, nbytes), nbytes)
            region.places[offset] = place
        elif place.nbytes != nbytes:
            raise Fault(
                "access",
                f"atomic accesses of {place.nbytes} and of {nbytes} bytes to a word of "
                f"{region.name}",
            )
        return place

    def options(self, thread: Any, op: Strong) -> list[int]:
        """Return with which values an access can be executed now, by index.

        Of the values that would end a wait and that the program does not see, only
        those count from which the thread learns least: it could do whatever it does
        with them also with fewer.
        """
        place = self.place(op.region, op.offset, op.nbytes)
        newest = len(place.values) - 1
        if op.kind is STORE:
            return [newest]
        if op.kind is UPDATE:
            held = op.holds is None or op.holds(place.values[newest].bits)
            return [newest] if held else []
        low = place.oldest(thread.known)
        if op.holds is None:
            return list(range(newest, low - 1, -1))
        good = [i for i in range(low, newest + 1) if op.holds(place.values[i].bits)]
        late = bool(good) and good[-1] != newest
        if not op.used:
            good = [
                i
                for k, i in enumerate(good)
                if not any(
                    teaches_less(place.values[j], place.values[i]) for j in good[:k]
                )
            ]
        return good + [LATE] * late

    def execute(self, thread: Any, op: Strong, index: int, step: int) -> Any:
        """Execute an access with one of its options; return the value that it loads."""
        region, offset, nbytes = op.region, op.offset, op.nbytes
        place = self.place(region, offset, nbytes)
        time = thread.tick()
        newest = len(place.values) - 1
        if index == LATE:
            place.note(thread.number, time, newest)
            return None
        self._check_strong(thread, op, time)
        if region.unset is not None:
            region.unset[offset : offset + nbytes] = False
        if op.kind is STORE:
            self._append(thread, place, op, op.bits, (time, step), None)
            return None
        found = place.values[index]
        place.note(thread.number, time, index)
        local = found.local if found.rank == thread.rank else None
        for clock in () if op.silent else (found.release, local):
            if clock is not None and op.order == ACQUIRE:
                np.maximum(thread.known, clock, out=thread.known)
            elif clock is not None:
                thread.unfenced.append(clock)
        if op.kind is UPDATE:
            assert op.change is not None
            bits = op.change(found.bits)
            if bits != found.bits or op.order == RELEASE:
                self._append(thread, place, op, bits, (time, step), found)
        return found.bits

    def _append(
        self,
        thread: Any,
        place: Word,
        op: Strong,
        bits: int,
        at: tuple[int, int],
        updated: Value | None,
    ) -> None:
        """Store a value; an update continues the release of the value before it."""
        release, local = thread.fenced, thread.fenced_local
        if op.order == RELEASE:
            release, local = thread.known.copy(), None
        if updated is not None:
            release = joined(release, updated.release)
            local = joined(local, updated.local)
        bits = int(bits) & (1 << 8 * place.nbytes) - 1
        op.region.put_bits(op.offset, place.nbytes, bits)
        time, step = at
        place.values.append(
            Value(bits, thread.number, time, release, local, thread.rank, step)
        )
        if updated is not None:
            place.note(thread.number, time, len(place.values) - 1)

    def _check_strong(self, thread: Any, op: Strong, time: int) -> None:
        does = {LOAD: "atomic load", AWAIT: "atomic load", STORE: "atomic store"}
        me = Access(
            thread.number, time, op.site, does.get(op.kind, "atomic update"), op.scope
        )
        if self.observe is not None:
            self.observe(thread, me, op.region, op.offset, op.nbytes)
        known, region = thread.known, op.region
        for at, cell in region.cells_at(op.offset, op.nbytes):
            self._check(cell.writes.values(), known, region, at, me)
            if op.kind in CHANGES:
                self._check(cell.reads.values(), known, region, at, me)
                self._check_scopes(cell.strong_reads, thread, region, at, me)
                cell.strong_writes[me.thread] = me
            self._check_scopes(cell.strong_writes, thread, region, at, me)
            if op.kind is not STORE:
                cell.strong_reads[me.thread] = me

    def _check_scopes(
        self,
        others: dict[int, Access],
        thread: Any,
        region: Area,
        offset: int,
        me: Access,
    ) -> None:
        """Check that atomic accesses of different ranks are atomic for both."""
        for number, other in others.items():
            narrow = GPU in (me.scope, other.scope)
            unknown = other.time > thread.known[number]
            rank = thread.machine.numbers.names[number].rank
            if narrow and unknown and rank != thread.rank:
                self._race(region, offset, other, me)


def joined(first: Any, second: Any) -> Any:
    """Return what both clocks know; None knows nothing."""
    if first is None or second is None:
        return second if first is None else first
    return np.maximum(first, second)


def teaches_less(one: Value, other: Value) -> bool:
    """Return whether who loads the first value learns at most what the second has."""
    if one.local is not None and one.local is not other.local:
        return False
    if one.release is None:
        return True
    return other.release is not None and bool((one.release <= other.release).all())
