"""The record of calls, the table of calls in errors, and the trace.

The record: the last calls of every rank, in memory that all of them map.

A rank stores 32 bytes for each call that it enqueues: the call's number, the time, a
chain of digests, what the call is, and the stream. Nobody waits for that. The chain of
call *n* follows from the digests of all calls up to *n*. So two ranks have made the
same calls if their chains of one number are equal.

Only calls that all ranks make in the same order have a number. Other calls, such as
messages and groups, are stored in a separate ring, with the number of the previous
numbered call. They are not compared.

An entry has one writer. Its first and its last word contain the call's number, and are
stored first and last. A reader copies it twice, and uses it if the copies are equal and
have that number on both sides.
"""

import bisect
import ctypes
import hashlib
import json
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from numba_symm.gpu import entry
from numba_symm.launch.ranks import name_ranks

CALLS = 1024
"""How many calls of a rank are kept; a power of two."""

MAGIC = b"numsymm1"
"""The first bytes of the records of a board."""

TAG, END = "tag: ", "end of a tag"
"""How the descriptions of the beginning and of the end of a tag begin."""

_ENTRY = struct.Struct("<QQQIHH")
_WORDS = 152  # bytes of a description
_ABOUT = struct.Struct(f"<Q{_WORDS}s")
_FIRST = 0x10000  # streams are numbered from 1 to below it
_PAUSE = 1e-3  # seconds until a difference is read again


class Description:
    """What a call is: made once, when its kernels are bound.

    Args:
        what: the name of the call.
        words: its arguments, as a text; "" if it has none.
        key: what must be equal on all ranks; "": the call is not compared.

    Attributes:
        digest: a number of 64 bits that follows from ``what`` and ``key``; 0: the call
            is not compared.
        address: of its number, for packed calls.
    """

    __slots__ = ("_number", "address", "digest", "key", "what", "words")

    def __init__(self, what: str, words: str = "", key: str = ""):
        self.what, self.words, self.key = what, words, key
        self._number = ctypes.c_int64(0)
        self.address = ctypes.addressof(self._number)
        self.digest = 0
        if key:
            found = hashlib.blake2b(f"{what} {key}".encode(), digest_size=8).digest()
            self.digest = int.from_bytes(found, "little") | 1

    @property
    def number(self) -> int:
        """The number of its text on the board; 0: it has none."""
        return self._number.value

    @number.setter
    def number(self, number: int) -> None:
        self._number.value = number

    def __str__(self) -> str:
        return f"{self.what} of {self.words}" if self.words else self.what


class Entry(NamedTuple):
    """One call of a rank.

    Attributes:
        number: its number; in the ring of what is not compared, a number of its own.
        time: nanoseconds of the clock that all processes of a node share.
        chain: the chain of digests; of what is not compared, the call before it.
        about: the number of its description.
        stream: the number of its stream, in the order in which the rank used them.
    """

    number: int
    time: int
    chain: int
    about: int
    stream: int


class Head(ctypes.Structure):
    """What is known of one rank.

    Attributes:
        pid: its process.
        name: its number in texts.
        captured: one more than its number of calls when it first captured one into a
            graph; 0: it has captured none. Later calls are not compared, because the
            record does not show replays.
        captures: how many calls it has captured.
        node: its node, if texts name nodes.
        tag: the program's own text for its current calls.
        table: the table of calls that this rank has made for errors.
        heard: of how many ranks of other islands it has received the calls.
        across: how these calls differ from its own, for the table.
    """

    _fields_ = (
        ("pid", ctypes.c_uint64),
        ("name", ctypes.c_uint64),
        ("captured", ctypes.c_uint64),
        ("captures", ctypes.c_uint64),
        ("node", ctypes.c_char * 64),
        ("tag", ctypes.c_char * 128),
        ("table", ctypes.c_char * 4096),
        ("heard", ctypes.c_uint64),
        ("across", ctypes.c_char * 2048),
    )


_TOP = 4096
"""Bytes before the ranks' places.

They are the magic word, the time, and a text of the ranks on other islands.
"""

_RING = CALLS * _ENTRY.size
_CALLS_AT = ctypes.sizeof(Head)
_OTHERS_AT = _CALLS_AT + _RING
_ABOUT_AT = _OTHERS_AT + _RING
_PLACE = _ABOUT_AT + CALLS * _ABOUT.size


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def place(before: int, size: int) -> tuple[int, int]:
    """Return where records begin in a file that has other bytes before, and its end.

    Args:
        before: the number of other bytes.
        size: the number of ranks.
    """
    start = -(-before // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, start + _TOP + size * _PLACE


class Records:
    """The records of all ranks, to read.

    Args:
        memory: from the start of the records on.
        size: the number of ranks; 0: nothing is recorded.
    """

    def __init__(self, memory: memoryview, size: int):
        self._memory = memory
        self.size = size
        self.heads = [
            Head.from_buffer(memory, _TOP + rank * _PLACE) for rank in range(self.size)
        ]

    @property
    def began(self) -> int:
        """When the board was made, in nanoseconds; 0: nothing is recorded."""
        return int.from_bytes(self._memory[8:16], "little")

    @property
    def others_text(self) -> str:
        """The ranks of other islands, as a text; "" if there are none."""
        text = bytes(self._memory[16:_TOP]) if self.size else b""
        return text.partition(b"\0")[0].decode(errors="ignore")

    @others_text.setter
    def others_text(self, text: str) -> None:
        packed = text.encode(errors="replace")[: _TOP - 17]
        self._memory[16 : 16 + len(packed)] = packed

    def close(self) -> None:
        """Drop the memory."""
        self.heads = []
        with suppress(BufferError):  # an exception's traceback may use it
            self._memory.release()

    def call(self, rank: int, number: int) -> Entry | None:
        """Return a rank's call of a number, or None if it is not there."""
        found = self._entry(self._at(rank, _CALLS_AT), number % CALLS)
        return found if found is not None and found.number == number else None

    def has_reached(self, rank: int, number: int) -> bool:
        """Return whether a rank has made a call of that number, or a later one."""
        at = self._at(rank, _CALLS_AT) + number % CALLS * _ENTRY.size
        return bool(_ENTRY.unpack_from(self._memory, at)[0] >= number)

    def calls(self, rank: int) -> list[Entry]:
        """Return a rank's latest calls that are numbered, in order."""
        return self._all(self._at(rank, _CALLS_AT))

    def others(self, rank: int) -> list[Entry]:
        """Return what else a rank has called last, in order."""
        return self._all(self._at(rank, _OTHERS_AT))

    def words(self, rank: int, entry: Entry) -> str:
        """Return what a call is."""
        at = self._at(rank, _ABOUT_AT) + entry.about % CALLS * _ABOUT.size
        number, text = _ABOUT.unpack_from(self._memory, at)
        if number != entry.about:
            return "a call whose description was overwritten"
        return bytes(text).rstrip(b"\0").decode(errors="ignore")

    def _at(self, rank: int, start: int) -> int:
        return _TOP + rank * _PLACE + start

    def _all(self, ring: int) -> list[Entry]:
        found = (self._entry(ring, slot) for slot in range(CALLS))
        return sorted(entry for entry in found if entry is not None)

    def _entry(self, ring: int, slot: int) -> Entry | None:
        """Return what is in a slot, or None if that is nothing, or is being stored."""
        at = ring + slot * _ENTRY.size
        *found, last = _ENTRY.unpack_from(self._memory, at)
        if not found[0] or found[0] & 0xFFFF != last:
            return None
        again = _ENTRY.unpack_from(self._memory, at)
        return Entry(*found) if again == (*found, last) else None


class Record(Records):
    """The records, of which this rank writes its own.

    Args:
        memory: from the start of the records on.
        rank: this rank.
        name: its number in texts.
        node: its node, or "".
        size: the number of ranks.

    Attributes:
        book: where this rank stores its calls, for packed calls.
    """

    def __init__(self, memory: memoryview, rank: int, name: int, node: str, size: int):
        super().__init__(memory, size)
        self.rank = rank
        self._published = 0
        self._owners: list[Description | None] = [None] * CALLS
        self._equal = [0] * size  # by rank, up to which number the calls are the same
        self._streams: dict[int, int] = {}
        self._captured: dict[str, Description] = {}
        self._end = Description(END)
        start = self._at(rank, 0)
        self._calls = memory[start + _CALLS_AT : start + _OTHERS_AT]
        self._others = memory[start + _OTHERS_AT : start + _ABOUT_AT]
        self._texts = memory[start + _ABOUT_AT : start + _PLACE]
        self.book = entry.Book(
            calls=_address(self._calls), others=_address(self._others)
        )
        self._note = entry.compiled("noted")
        self.own = self.heads[rank]
        self.own.pid, self.own.name = os.getpid(), name
        self.own.node = node.encode()[:63]
        if rank == 0:
            memory[8:16] = time.monotonic_ns().to_bytes(8, "little")
            memory[: len(MAGIC)] = MAGIC

    @property
    def number(self) -> int:
        """The number of this rank's last call."""
        return int(self.book.number)

    def close(self) -> None:
        """Drop the memory."""
        del self.own
        for each in (self._calls, self._others, self._texts):
            each.release()
        super().close()

    def publish(self, about: Description, stream: int) -> None:
        """Let packed calls find a description's text and a stream's number."""
        if not about.number:
            self._publish(about)
        at = entry.place_of(stream)
        self.book.streams[at : at + 2] = stream, self._number_of(stream)

    def note(self, about: Description, stream: int) -> None:
        """Store a call, which this rank is about to enqueue.

        Args:
            about: what it is.
            stream: the handle of its stream.
        """
        if not about.number:
            self._publish(about)
        place, number = ctypes.addressof(self.book), self._number_of(stream)
        self._note(place, about.number, about.digest, number)

    def note_captured(self, about: Description, stream: int) -> None:
        """Store that a call is being captured into a graph. It has no number."""
        own = self.own
        own.captured = own.captured or self.number + 1  # before any call after this one
        own.captures += 1
        if len(self._captured) >= CALLS:
            self._captured.clear()
        words = f"captured: {about}"
        self.note(self._captured.setdefault(words, Description(words)), stream)

    @contextmanager
    def tagged(self, text: str) -> Iterator[None]:
        """Store a text of the program's for the calls within the block."""
        before = bytes(self.own.tag)
        self.own.tag = text.encode(errors="replace")[: Head.tag.size - 1]
        self.note(Description(f"{TAG}{text}"), 0)
        try:
            yield
        finally:
            if self.heads:  # otherwise the communicator was closed in the block
                self.note(self._end, 0)
                self.own.tag = before

    def _publish(self, about: Description) -> None:
        """Store a description's text, in the place of the oldest one."""
        number = self._published = self._published + 1
        slot = number % CALLS
        before = self._owners[slot]
        if before is not None:
            before.number = 0  # stored again when it is used again
        text = str(about).encode(errors="replace")
        if len(text) > _WORDS:
            text = text[: _WORDS - 3] + "…".encode()
        at = slot * _ABOUT.size
        _ABOUT.pack_into(self._texts, at, 0, text)
        self._texts[at : at + 8] = number.to_bytes(8, "little")
        self._owners[slot], about.number = about, number

    def _number_of(self, stream: int) -> int:
        if stream not in self._streams and len(self._streams) + 1 >= _FIRST:
            self._streams.clear()
            self.book.streams[:] = entry.NO_STREAMS
        return self._streams.setdefault(stream, len(self._streams) + 1)

    # The comparison.

    def difference(self) -> tuple[int, int] | None:
        """Return a rank whose calls differ from this rank's, and the first number.

        It reads the records of the other ranks, and waits for none of them. Calls are
        compared as far as both ranks have made them.
        """
        for rank in range(self.size):
            if rank != self.rank:
                number = self._common(rank)
                if number > self._equal[rank]:
                    if self._differs(rank, number):
                        return rank, self._first(rank, number)
                    self._equal[rank] = number
        return None

    def _common(self, rank: int) -> int:
        """Return the last number at which the calls of this rank and one compare."""
        last = self._comparable(rank)
        if self.has_reached(rank, last):
            return last
        after = max(self._equal[rank], last - CALLS + 1)
        # All numbers that the rank has reached are before the others.
        numbers = range(after, last)
        found = bisect.bisect(
            numbers, 0, key=lambda number: not self.has_reached(rank, number)
        )
        return after + found - 1 if found else 0

    def _comparable(self, rank: int) -> int:
        captured = int(self.own.captured), int(self.heads[rank].captured)
        return min([self.number, *(each - 1 for each in captured if each)])

    def _differs(self, rank: int, number: int) -> bool:
        """Return whether the calls up to a number differ, as far as that is known."""
        if not self._unequal(rank, number):
            return False
        time.sleep(_PAUSE)  # what another processor has stored is all here by then
        return self._unequal(rank, number) and self._comparable(rank) >= number

    def _unequal(self, rank: int, number: int) -> bool:
        mine, other = self.call(self.rank, number), self.call(rank, number)
        return mine is not None and other is not None and mine.chain != other.chain

    def _first(self, rank: int, number: int) -> int:
        """Return the first number whose calls differ, of those that are still there."""
        first = max(self._equal[rank] + 1, number - CALLS + 1)
        return next(n for n in range(first, number + 1) if self._unequal(rank, n))


def steps(entries: list[Entry], others: list[Entry]) -> Iterator[tuple[Entry, bool]]:
    """Yield a rank's calls in the order of time, and whether each one is numbered."""
    both = [(each.time, each, True) for each in entries]
    both += [(each.time, each, False) for each in others]
    for _, call, numbered in sorted(both, key=lambda each: each[0]):
        yield call, numbered


_AROUND = 2
"""Calls that are shown before and after the one that the table is about."""

_LINES = 24
"""The most lines of calls, of which the last ones are left out."""

_AFTER = 3
"""The most calls of a rank that are not compared, after each one that is."""

_SENT = 64
"""Calls that a rank sends to other islands, so that MPI sends them without delay."""

_DIFFER = "Calls differ between islands"

_BETWEEN = 2e-3  # seconds in which ranks that make the table simultaneously store it


def table(records: Records, now: Callable[[], int] = time.monotonic_ns) -> str:
    """Return the table of all ranks' calls: around the first difference, if any.

    Args:
        records: the records of all ranks.
        now: the clock.
    """
    calls = [
        {entry.number: entry for entry in records.calls(rank)}
        for rank in range(records.size)
    ]
    found = difference(records, calls)
    last = [max(each, default=0) for each in calls]
    others = [records.others(rank) for rank in range(records.size)]
    if not any(last) and not any(others):
        return ""
    about = found or min(last)
    lines = _lines(records, calls, others, about, marked=found)
    lines += states(records, last, now())
    lines += _first(head.across for head in records.heads).splitlines()
    return "\n".join(["The calls of the ranks:", *lines])


def difference(records: Records, calls: Sequence[dict[int, Entry]]) -> int:
    """Return the first number whose calls differ, of those that are known; 0: none.

    Calls after a rank's first capture are not compared.

    Args:
        records: the records of all ranks.
        calls: by rank, the calls by number.
    """
    last = min(
        (head.captured - 1 for head in records.heads if head.captured), default=math.inf
    )
    for number in sorted(set().union(*calls)):
        found = {each[number].chain for each in calls if number in each}
        if len(found) > 1 and number <= last:
            return number
    return 0


class Cause(NamedTuple):
    """Why a rank was late, as far as the ranks of its island know.

    Attributes:
        differ: whether calls differ; otherwise processes have ended.
        ranks: the ranks that the text names, by their numbers in texts.
        text: what they have done.
    """

    differ: bool
    ranks: Sequence[int]
    text: str


def mismatch(records: Records, here: int, there: int, number: int) -> Cause:
    """Return that the calls of two ranks with a number differ."""
    names = [records.heads[rank].name for rank in (here, there)]
    words = [
        records.words(rank, entry) if entry else "a call that was overwritten"
        for rank in (here, there)
        for entry in [records.call(rank, number)]
    ]
    text = (
        f"rank {names[0]}'s call {number} differs from rank {names[1]}'s: {words[0]}, "
        f"and {words[1]}"
    )
    return Cause(True, names, text)


def cause(records: Records) -> Cause | None:
    """Return how the ranks' calls differ, or None."""
    calls = [
        {entry.number: entry for entry in records.calls(rank)}
        for rank in range(records.size)
    ]
    number = difference(records, calls)
    if number:
        chains = {
            rank: each[number].chain
            for rank, each in enumerate(calls)
            if number in each
        }
        here = min(chains)
        there = next(rank for rank in chains if chains[rank] != chains[here])
        return mismatch(records, here, there, number)
    across = _first(head.across for head in records.heads)
    if not across.startswith(_DIFFER):
        return None
    return Cause(True, (), across.partition("\n")[0].rstrip(":"))


def _lines(
    records: Records,
    calls: Sequence[dict[int, Entry]],
    others: Sequence[list[Entry]],
    about: int,
    marked: int,
) -> list[str]:
    lines: list[tuple[str, str]] = []
    numbers = range(max(0, about - _AROUND), about + _AROUND + 1)
    for number in numbers:
        made: dict[str, list[int]] = {}
        for rank, each in enumerate(calls):
            entry = each.get(number)
            if entry is not None:
                made.setdefault(records.words(rank, entry), []).append(rank)
        if made:
            absent = [rank for rank, each in enumerate(calls) if number not in each]
            late = [rank for rank in absent if max(calls[rank], default=0) < number]
            if late:
                made["not made yet"] = late
            sign = "> " if number == marked else "  "
            lines += _grouped(records, f"{sign}{number}", made)
        between: dict[str, list[int]] = {}
        for rank, ring in enumerate(others):
            for entry in [each for each in ring if each.chain == number][-_AFTER:]:
                between.setdefault(records.words(rank, entry), []).append(rank)
        lines += _grouped(records, f"  after {number}", between)
    width = max((len(head) for head, _ in lines), default=0)
    shown = [f"{head:{width}}  {text}" for head, text in lines[:_LINES]]
    return shown + ["  …"] * (len(lines) > _LINES)


def _grouped(
    records: Records, head: str, found: dict[str, list[int]]
) -> list[tuple[str, str]]:
    lines = []
    for text, ranks in found.items():
        lines.append((head, f"{named(records, ranks)}: {text}"))
        head = ""
    return lines


def named(records: Records, ranks: Sequence[int]) -> str:
    """Return "ranks 0, 1", by their numbers in texts."""
    return name_ranks([records.heads[rank].name for rank in ranks])


def states(records: Records, last: Sequence[int], now: int) -> list[str]:
    """Return a line for each rank that is behind, and for those with captures.

    Args:
        records: the records of all ranks.
        last: by rank, the number of its last call.
        now: the time.
    """
    lines, most = [], max(last)
    for rank, number in enumerate(last):
        tag = records.heads[rank].tag.decode(errors="ignore")
        within = f" within {tag!r}" if tag else ""
        if number < most or tag:
            behind = most - number
            where = (
                f"is {behind} call{'s' * (behind > 1)} behind"
                if behind
                else "is at the last call"
            )
            lines.append(
                f"{named(records, [rank])} {where}{within}: "
                f"{latest(records, rank, now)}"
            )
        captures = records.heads[rank].captures
        if captures:
            lines.append(
                f"{named(records, [rank])} has captured {captures} "
                f"call{'s' * (captures > 1)}, whose replays the record does not show"
            )
    return lines


def latest(records: Records, rank: int, now: int) -> str:
    """Return the last call of a rank, and for how long it has made no other one."""
    found = [*records.calls(rank)[-1:], *records.others(rank)[-1:]]
    if not found:
        return "it has made no call"
    entry = max(found, key=lambda each: each.time)
    seconds = max(0, now - entry.time) / 1e9
    number = f"{entry.number}, " if entry in records.calls(rank)[-1:] else ""
    return (
        f"its last call is {number}{records.words(rank, entry)}; it has made no other "
        f"call for {seconds:.0f} s"
    )


def agreed(records: Record, ended: Cause | None = None) -> tuple[Cause | None, str]:
    """Return why a rank was late, and the table: the same on all ranks.

    The first rank that needs them stores them. If several do that simultaneously, they
    take those of the lowest rank. So a rank that ends after the failure is no cause.

    Args:
        records: the records of all ranks.
        ended: that ranks' processes have ended; None: all run.
    """
    kept = _kept(records)
    if not kept:
        made = f"{json.dumps(cause(records) or ended)}\n{table(records)}"
        records.own.table = made.encode(errors="replace")[: Head.table.size - 1]
        time.sleep(_BETWEEN)
        kept = _kept(records)
    found, _, text = kept.partition("\n")
    why = json.loads(found)
    return why and Cause(*why), text


def _kept(records: Records) -> str:
    return _first(head.table for head in records.heads)


def _first(texts: Iterable[bytes]) -> str:
    """Return the first text that is not empty."""
    return next(filter(None, texts), b"").decode(errors="ignore")


class Sent(NamedTuple):
    """The latest calls of a rank, as it sends them to other islands.

    Attributes:
        name: the rank's number in texts.
        compared: the last number that may be compared, because no capture is before.
        calls: by number, the chain of digests and what the call is.
    """

    name: int
    compared: int
    calls: dict[int, tuple[int, str]]


def sent(records: Record) -> Sent:
    """Return what this rank sends to other islands, after a failure."""
    calls = records.calls(records.rank)[-_SENT:]
    words = {each.about: records.words(records.rank, each) for each in calls}
    own = records.own
    compared = int(own.captured) - 1 if own.captured else records.number
    made = {each.number: (each.chain, words[each.about]) for each in calls}
    return Sent(int(own.name), compared, made)


def compare_across(records: Record, other: Sent) -> None:
    """Compare this rank's calls with those of a rank of another island.

    Store the result in the table. Raise nothing if calls differ: the communicator has
    failed before.
    """
    own = records.own
    before = own.across.decode(errors="ignore").splitlines()
    text = "\n".join([*before, *_across(sent(records), other)])
    own.across = text.encode(errors="replace")[: Head.across.size - 1]
    own.heard += 1  # last, because others may wait for it


def _across(mine: Sent, other: Sent) -> list[str]:
    here, there = f"rank {mine.name}", f"rank {other.name}"
    last = min(mine.compared, other.compared)
    common = [n for n in mine.calls if n in other.calls and n <= last]
    differ = [n for n in common if mine.calls[n][0] != other.calls[n][0]]
    if differ:
        first = differ[0]
        known = first > common[0] or first == 1
        return [
            f"{_DIFFER}, from call {first} on"
            + (":" if known else ", or from an earlier one:"),
            f"  {here}: {mine.calls[first][1]}",
            f"  {there}: {other.calls[first][1]}",
        ]
    behind = max(mine.calls, default=0) - max(other.calls, default=0)
    if not behind:
        return []
    late, ahead, calls = (there, here, other) if behind > 0 else (here, there, mine)
    number, (_, words) = max(calls.calls.items(), default=(0, (0, "none")))
    return [
        f"{late} is {abs(behind)} call{'s' * (abs(behind) > 1)} behind {ahead} of "
        f"another island: its last call is {number}, {words}"
    ]


_TAGS = 0  # the thread of tags; streams are numbered from 1


def write(path: Path, records: Records) -> None:
    """Write the calls of all ranks whose records are here.

    Args:
        path: the file, which is replaced.
        records: the records.
    """
    found = list(events(records))
    path.write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ns"}))


def events(
    records: Records, now: Callable[[], int] = time.monotonic_ns
) -> Iterator[dict[str, Any]]:
    """Yield the events: for each rank its name, its calls, and its tags."""
    for rank, head in enumerate(records.heads):
        name = int(head.name)
        node = head.node.decode(errors="ignore")
        title = f"rank {name} on {node}" if node else f"rank {name}"
        yield {
            "ph": "M",
            "name": "process_name",
            "pid": name,
            "args": {"name": title},
        }
        yield from _calls(records, rank, name, now())


def _calls(records: Records, rank: int, pid: int, now: int) -> Iterator[dict[str, Any]]:
    # A slice lasts until the rank's next call, because the record has no ends.
    made = list(steps(records.calls(rank), records.others(rank)))
    opened: list[tuple[str, int]] = []
    for index, (call, numbered) in enumerate(made):
        end = made[index + 1][0].time if index + 1 < len(made) else now
        text = records.words(rank, call)
        if text.startswith(TAG):
            opened.append((text.removeprefix(TAG), call.time))
            continue
        if text == END:
            if opened:  # otherwise its beginning was overwritten
                tag, began = opened.pop()
                yield _slice(tag, pid, _TAGS, began, call.time, {})
            continue
        about: dict[str, Any] = {"stream": call.stream}
        if numbered:
            about["number"] = call.number
        yield _slice(text, pid, call.stream, call.time, end, about)
    for tag, began in opened:
        yield _slice(tag, pid, _TAGS, began, now, {})


def _slice(
    name: str, pid: int, tid: int, began: int, end: int, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": began / 1e3,
        "dur": (end - began) / 1e3,
        "args": about,
    }
