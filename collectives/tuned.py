"""The limits that ``numba-symm tune`` has measured, instead of those of ``select.py``.

They are in one file of the user, for one GPU model and library version, by number of
ranks. If one of the first two differs, the library warns, and uses the built-in limits.
For numbers of ranks that were not measured, it uses these without a warning. Rank 0's
file decides for all ranks, because two ranks that chose different algorithms would wait
for each other.
"""

import json
import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from numba_symm import environment
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.select import ALL, CHOICES, ESTIMATES, Choice, Choices, Step
from numba_symm.environment import SIMULATED
from numba_symm.launch.store import StoreExchange

_UNREADABLE = OSError, ValueError, RecursionError
_DAMAGED = AttributeError, KeyError, TypeError, ValueError, OverflowError
"""What a file raises that this module has not written: its text, then its content."""


_MOST = 1 << 40  # bytes of a limit: more than a GPU has

AGAIN = "run `numba-symm tune` again"


class Found(NamedTuple):
    """What the file has for a number of ranks.

    Attributes:
        choices: by operation; None if the file is missing or cannot be used.
        why: why it cannot be used; "" otherwise.
    """

    choices: Choices | None
    why: str = ""


def file() -> Path:
    """Return the file's place. The simulator has a file of its own."""
    import platformdirs

    name = "limits-simulated.json" if SIMULATED else "limits.json"
    return platformdirs.user_data_path("numba-symm", appauthor=False) / name


def version_of_library() -> str:
    """Return the library's version, for files of what was measured."""
    try:
        return version("numba-symm")
    except PackageNotFoundError:
        return "unknown"


def agreed(exchange: StoreExchange, gpu: str, size: int) -> Choices:
    """Return the limits of a communicator, which rank 0 has read. Collective.

    Args:
        exchange: of the communicator's ranks.
        gpu: the name of this rank's GPU.
        size: the number of ranks.
    """
    mine = read(gpu, size) if exchange.rank == 0 else Found(None)
    everyone = exchange.all_gather((gpu, mine), "limits of algorithms")
    found = everyone[0][1]
    if found.choices is not None and len({name for name, _ in everyone}) > 1:
        found = Found(None, "the ranks have several kinds of GPUs")
    if found.why and exchange.rank == 0:
        environment.warn_once(f"{file()} is ignored: {found.why}")
    return found.choices or CHOICES


def read(gpu: str, size: int) -> Found:
    """Return what the file has for ``size`` ranks with GPUs of that name."""
    if size == 1:  # nothing to choose, so nothing is measured
        return Found(None)
    content, why = _content()
    if content is None:
        return Found(None, why)
    try:
        for what, key, wanted in (
            ("GPU", "gpu", gpu),
            ("version", "version", version_of_library()),
        ):
            if content[key] != wanted:
                why = f"it is of {what} {content[key]}, not of {wanted}; {AGAIN}"
                return Found(None, why)
        table = content["ranks"].get(str(size))
        if table is None:
            return Found(None)
        choices = {
            name: Choice(*(_steps(name, kinds[kind], kind) for kind in Choice._fields))
            for name, kinds in table.items()
        }
        return Found(dict(CHOICES) | choices)
    except _DAMAGED as error:
        return Found(None, f"it is damaged ({error!r}); {AGAIN}")


def _content() -> tuple[Any, str]:
    """Return what the file has, and why it cannot be read; without a file, neither."""
    try:
        return json.loads(file().read_text()) or {}, ""
    except FileNotFoundError:
        return None, ""
    except _UNREADABLE as error:
        return None, f"it cannot be read ({error}); {AGAIN}"


def _steps(name: str, listed: Any, kind: str) -> tuple[Step, ...]:
    known = [
        each
        for each, made in OPERATIONS[name].algorithms.items()
        if kind == "floats" or not made.floats
    ]
    steps, before = [], -1.0
    for algorithm, limit in listed:
        most = ALL if limit is None else float(limit)
        if algorithm not in known or not before < most or _MOST < most < ALL:
            raise ValueError(f"{name}: {algorithm} up to {most:g}")
        steps.append(Step(algorithm, (most, most, most)))
        before = most
    if before != ALL:
        raise ValueError(f"{name}: nothing for the largest messages")
    return tuple(steps)


def write(gpu: str, size: int, choices: Choices) -> None:
    """Write the limits for ``size`` ranks; keep those for other numbers of ranks.

    Args:
        gpu: the name of the GPUs.
        size: the number of ranks.
        choices: limits of messages or of one rank's shard, which are those of Step
            without ``sent``; the same in each column.

    Raises:
        OSError: the file cannot be written.
    """
    content: dict[str, Any] = {"gpu": gpu, "version": version_of_library(), "ranks": {}}
    place = file()
    try:
        before = json.loads(place.read_text())
        if {
            what: before[what] for what in ("gpu", "version")
        }.items() <= content.items():
            content["ranks"] = dict(before["ranks"])
    except (*_UNREADABLE, *_DAMAGED):
        pass  # there is none, or it is replaced
    content["ranks"][str(size)] = {
        name: {
            kind: [
                [each.algorithm, None if each.most[0] == ALL else int(each.most[0])]
                for each in steps
            ]
            for kind, steps in choice._asdict().items()
        }
        for name, choice in choices.items()
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(dir=place.parent)
    with os.fdopen(handle, "w") as written:
        json.dump(content, written, indent=1)
    Path(path).replace(place)  # at once: other processes may read the old one


def described(gpu: str | None) -> str:
    """Return a line on the file for ``numba-symm info``.

    Args:
        gpu: the name of this node's GPUs; None: not known.
    """
    place, (content, why) = file(), _content()
    if content is None and not why:
        guessed = (f"{name} by {' and '.join(a)}" for name, a in ESTIMATES.items())
        return (
            "built in; `numba-symm tune` measures those of this node; from 5 ranks on, "
            f"estimates for {', '.join(guessed)}"
        )
    if content is None:
        return f"{place} is ignored: {why}"
    try:
        of, sizes = content["gpu"], list(content["ranks"])
        found = [read(gpu or of, int(size)).why for size in sizes]
        text = f"{place}: {', '.join(sizes)} ranks, {of}, version {content['version']}"
    except _DAMAGED as error:
        return f"{place} is ignored: it is damaged ({error!r}); {AGAIN}"
    why = next(filter(None, found), "")
    return f"{text}; ignored: {why}" if why else text
