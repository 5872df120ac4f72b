"""The record of calls as a Chrome trace, which Perfetto and chrome://tracing show."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba_symm.record import END, TAG, Records, steps

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
    for index, (entry, numbered) in enumerate(made):
        end = made[index + 1][0].time if index + 1 < len(made) else now
        text = records.words(rank, entry)
        if text.startswith(TAG):
            opened.append((text.removeprefix(TAG), entry.time))
            continue
        if text == END:
            if opened:  # otherwise its beginning was overwritten
                tag, began = opened.pop()
                yield _slice(tag, pid, _TAGS, began, entry.time, {})
            continue
        about: dict[str, Any] = {"stream": entry.stream}
        if numbered:
            about["number"] = entry.number
        yield _slice(text, pid, entry.stream, entry.time, end, about)
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
