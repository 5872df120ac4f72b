"""Times between islands that ``numba-symm tune`` has measured, instead of assumed ones.

They are in one file of the user, for one GPU model and library version, by engine. Rank
0's file decides for all ranks, because two ranks that chose different steps would wait
for each other.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from numba_symm import environment
from numba_symm.collectives import tuned
from numba_symm.collectives.islands.sizes import Sizes
from numba_symm.launch.store import StoreExchange

_MOST = 1 << 40  # bytes; a link carries them in seconds


class Starts(NamedTuple):
    """What starts cost, as in :class:`Sizes`.

    Attributes:
        start: bytes that a link carries in the time that an exchange takes to start.
        message: the same for each further message of an exchange.
    """

    start: int
    message: int


def file() -> Path:
    """Return the file's place. The simulator has a file of its own."""
    return tuned.file().with_name(tuned.file().name.replace("limits", "islands"))


def agreed(exchange: StoreExchange, gpu: str, engine: str, sizes: Sizes) -> Sizes:
    """Return the sizes with what rank 0 has measured, if it has. Collective.

    Args:
        exchange: of all ranks.
        gpu: the name of this rank's GPU.
        engine: the engine's name.
        sizes: the built-in sizes.
    """
    mine = read(gpu, engine) if exchange.rank == 0 else None
    found = exchange.all_gather(mine, "limits between islands")[0]
    return sizes if found is None else dataclasses.replace(sizes, **found._asdict())


def read(gpu: str, engine: str) -> Starts | None:
    """Return what the file has for an engine; warn if the file cannot be used."""
    try:
        content = json.loads(file().read_text())
        if (content["gpu"], content["version"]) != (gpu, tuned.version_of_library()):
            why = f"it is of {content['gpu']}, version {content['version']}"
        elif (found := content["engines"].get(engine)) is None:
            return None
        else:
            starts = Starts(int(found["start"]), int(found["message"]))
            if all(1 <= each <= _MOST for each in starts):
                return starts
            why = f"it has {starts}"
    except FileNotFoundError:
        return None
    except (OSError, *tuned.UNUSABLE) as error:
        why = f"it cannot be used ({error!r})"
    environment.warn_once(
        f"{file()} is ignored: {why}; run `numba-symm tune` between islands again"
    )
    return None


def write(gpu: str, engine: str, starts: Starts) -> None:
    """Write what was measured for an engine; keep that of others.

    Raises:
        OSError: the file cannot be written.
    """
    place = file()
    content: dict[str, Any] = {"gpu": gpu, "version": tuned.version_of_library()}
    engines: dict[str, Any] = {}
    try:
        before = json.loads(place.read_text())
        if {each: before[each] for each in content} == content:
            engines = dict(before["engines"])
    except (OSError, *tuned.UNUSABLE):
        pass  # there is none, or it is replaced
    content["engines"] = engines | {engine: starts._asdict()}
    tuned.replace(place, content)
