"""Algorithms: what is known about each, and the choice of the fastest.

The choice of the fastest algorithm: all limits, for bytes, types and ranks.

The limits were measured on H200s (bench/README.md). Those for 2 ranks were measured on
31 or 32 multiprocessors. Those for 3 and 4 ranks were measured with 4 ranks on 32,
except for scans. The others were measured on all multiprocessors, except for those in
``ESTIMATES``. ``numba-symm tune -n N`` measures the limits for N ranks.

What is known about an algorithm: ranks, types, arrays, workspace and waits.

The table of operations has an entry for each. The choice, the checks, the errors, the
docstrings, the pages, the benchmark and the tests read these entries. None of them
depends on an algorithm's name.
"""

import enum
import math
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from numba_symm.collectives.protocols.binding import Bind
from numba_symm.dtypes import Element
from numba_symm.environment import SIMULATED

_K, _M = 1 << 10, 1 << 20
ALL, NONE = math.inf, -1


class Step(NamedTuple):
    """One algorithm and the largest message for which it is chosen.

    Attributes:
        algorithm: its name.
        most: its bytes, for 2 ranks, 3 to 4 ranks, and more ranks.
        sent: whether ``most`` limits the bytes that a rank sends to all peers together.
            Otherwise it limits the message, or one rank's shard of it.
    """

    algorithm: str
    most: tuple[float, float, float]
    sent: bool = False


class Choice(NamedTuple):
    """The algorithms of an operation, from small messages to large ones.

    Attributes:
        floats: for floats.
        others: for all other types, and for floats that are not reduced.
    """

    floats: tuple[Step, ...]
    others: tuple[Step, ...]


Choices = Mapping[str, Choice]
"""By operation."""

# A sentinel changes the bits of some NaNs, so floats that are only moved take the
# algorithms of other types.
_LL = Step("one_shot_ll", (64 * _K, 64 * _K, 224 * _K), sent=True)
_MARKED = Step("one_shot_marked", (1280 * _K, 1536 * _K, 1792 * _K), sent=True)

# Copy engines occupy no multiprocessors. Still, ``direct`` is chosen where it is faster
# on 32 of them.
_GATHERED = (
    _LL,
    _MARKED,
    Step("chunked", (3 * _M, 7 * _M, 56 * _M), sent=True),
    Step("direct", (48 * _M, 72 * _M, NONE), sent=True),
    Step("copy_engine", (ALL, ALL, ALL)),
)
_SCANNED = Choice(
    floats=(
        Step("one_shot_sentinel", (1792 * _K, 3 * _M, 14 * _M), sent=True),
        Step("chunked", (ALL, ALL, ALL)),
    ),
    others=(_LL, _MARKED, Step("chunked", (ALL, ALL, ALL))),
)
_SCATTERED = Choice(
    floats=(
        Step("one_shot_sentinel", (2 * _M, 3 * _M, 14 * _M), sent=True),
        Step("direct", (ALL, ALL, ALL)),
    ),
    others=(
        _LL,
        Step("one_shot_marked", (1536 * _K, 1536 * _K, 1792 * _K), sent=True),
        Step("chunked", (2560 * _K, NONE, NONE)),
        Step("direct", (ALL, ALL, ALL)),
    ),
)
# For two ranks, a two-shot reduction to a root has no advantage.
_REDUCED = Choice(
    floats=(
        Step("one_shot_sentinel", (2 * _M, 256 * _K, 128 * _K)),
        Step("two_shot_sentinel", (NONE, 3 * _M, 4 * _M)),
        Step("chunked", (10 * _M, NONE, NONE)),
        Step("direct", (ALL, ALL, ALL)),
    ),
    others=(
        Step("one_shot_ll", (8 * _K, 8 * _K, 32 * _K)),
        Step("one_shot_marked", (2 * _M, 256 * _K, 128 * _K)),
        Step("two_shot_marked", (NONE, 1 * _M, 1 * _M)),
        Step("chunked", (10 * _M, NONE, NONE)),
        Step("direct", (ALL, ALL, ALL)),
    ),
)
# For two ranks, no rank has anything to pass on. The 576 KiB are interpolated between
# the times of 256 KiB and 1 MiB.
_BROADCAST = (
    Step("one_shot_marked", (1280 * _K, 768 * _K, 896 * _K), sent=True),
    Step("two_shot_marked", (NONE, 576 * _K, 1792 * _K)),
    Step("chunked", (12 * _M, NONE, 2 * _M - 1)),
    Step("direct", (20 * _M, ALL, ALL)),
    Step("copy_engine", (ALL, NONE, NONE)),
)
ON_GPUS = {
    "all_reduce": Choice(
        floats=(
            Step("one_shot_sentinel", (2 * _M, 128 * _K, 64 * _K)),
            Step("two_shot_sentinel", (6 * _M, 256 * _M, 8 * _M)),
            Step("direct", (ALL, ALL, ALL)),
        ),
        others=(
            # Packets are twice the bytes, and need fewer instructions.
            Step("one_shot_ll", (64 * _K, 8 * _K, 32 * _K)),
            Step("one_shot_marked", (2 * _M, 128 * _K, 64 * _K)),
            Step("two_shot_marked", (NONE, 1 * _M, 1 * _M)),
            Step("direct", (ALL, 48 * _M, ALL)),
            Step("chunked", (NONE, ALL, NONE)),
        ),
    ),
    "all_gather": Choice(_GATHERED, _GATHERED),
    "all_to_all": Choice(_GATHERED, _GATHERED),
    "reduce_scatter": _SCATTERED,
    "scan": _SCANNED,
    "reduce": _REDUCED,
    "broadcast": Choice(_BROADCAST, _BROADCAST),
}
"""By operation. Others use the limits of one of these: ``Operation.limits_of``."""


ESTIMATES: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("direct",),
    "reduce_scatter": ("direct",),
    "broadcast": ("two_shot_marked",),
}
"""The algorithms, by operation, whose sizes from 5 ranks on were not measured."""


def _simulated(step: Step) -> Step:
    """Return the step with limits for the simulator, where each vector takes long."""
    limits = {
        "one_shot_ll": 128 if step.sent else 64,
        "one_shot_marked": 512,
        "one_shot_sentinel": 512,
        "two_shot_marked": 2 * _K,
        "two_shot_sentinel": 2 * _K,
    }
    limit = limits.get(step.algorithm, ALL)
    few, some, many = step.most
    return step._replace(most=(min(few, limit), min(some, limit), min(many, limit)))


CHOICES = (
    {
        name: Choice(*(tuple(map(_simulated, steps)) for steps in choice))
        for name, choice in ON_GPUS.items()
    }
    if SIMULATED
    else ON_GPUS
)
"""By operation, for this process: on GPUs or in the simulator."""


def fastest(
    name: str,
    nbytes: int,
    size: int,
    element: Element,
    choices: Choices = CHOICES,
) -> str:
    """Return the name of the fastest algorithm.

    Args:
        name: the operation.
        nbytes: bytes of the message, or of one rank's shard of it.
        size: number of ranks.
        element: the element type.
        choices: by operation.
    """
    for step in _steps(name, element, choices):
        counted = nbytes * (size - 1) if step.sent else nbytes
        if counted <= step.most[_column(size)]:
            return step.algorithm
    raise AssertionError(f"{name}: no algorithm for {nbytes} bytes")


def limits(
    name: str, size: int, element: Element, choices: Choices = CHOICES
) -> list[int]:
    """Return the largest message of each algorithm but the last, in bytes.

    The arguments are those of :func:`fastest`.
    """
    found = []
    for step in _steps(name, element, choices):
        most = step.most[_column(size)]
        if 0 <= most < ALL:
            found.append(int(most) // (max(1, size - 1) if step.sent else 1))
    return found


def _steps(name: str, element: Element, choices: Choices) -> tuple[Step, ...]:
    choice = choices[name]
    return choice.floats if element.floating else choice.others


def _column(size: int) -> int:
    return 0 if size <= 2 else 1 if size <= 4 else 2


GENERAL = "chunked"
"""The algorithm that every operation has, for any call."""


class Arrays(enum.Enum):
    """Where an algorithm needs an array to be, on every rank that has one."""

    ANYWHERE = enum.auto()
    SYMMETRIC = enum.auto()  # in symmetric memory, at a multiple of 16 bytes
    AT_ONE_PLACE = enum.auto()  # at the same offset of the same symmetric allocation


class Algorithm(NamedTuple):
    """One algorithm of an operation. ``GENERAL`` does the calls that it cannot do.

    Attributes:
        bind: packs a call.
        waits: the numbers in ``launch/failures.py`` of what its kernels wait for.
        region: the region of the workspace (an attribute of ``Layout``) that its data
            or its handshake uses.
        transport: how its mailboxes are filled (``mailboxes.TRANSPORTS``); "": it has
            none.
        fewest: the least number of ranks; one rank copies, or takes ``GENERAL``.
        most: the greatest number of ranks.
        floats: whether it is for floats only.
        x: where it needs the inputs to be.
        out: where it needs the outputs to be.
        either: whether it suffices that the inputs or the outputs are there.
        in_place: whether the output may be the input.
        copies: whether copy engines move the data.
    """

    bind: Bind
    waits: tuple[int, ...]
    region: str
    transport: str = ""
    fewest: int = 2
    most: float = math.inf
    floats: bool = False
    x: Arrays = Arrays.ANYWHERE
    out: Arrays = Arrays.ANYWHERE
    either: bool = False
    in_place: bool = True
    copies: bool = False

    @property
    def handshake(self) -> bool:
        """Whether the ranks first exchange addresses and a digest of the call.

        If an array of one rank is elsewhere, all ranks make the call by ``GENERAL``.
        """
        return {self.x, self.out} != {Arrays.ANYWHERE}

    def suits(self, size: int) -> bool:
        """Return whether ``size`` ranks can make a call by this algorithm."""
        return self.fewest <= size <= self.most

    @property
    def ranks(self) -> str:
        """The numbers of ranks in words; "" if it is for any from 2 on."""
        if math.isinf(self.most):
            return f"{self.fewest} ranks or more" if self.fewest > 2 else ""
        if self.fewest == self.most:
            return f"{self.most} ranks"
        return f"{self.fewest} to {self.most} ranks"

    @property
    def arrays(self) -> str:
        """The arrays that must be symmetric in words; "" for none."""
        named = {"x": self.x, "out": self.out}
        names = [f"``{n}``" for n, where in named.items() if where != Arrays.ANYWHERE]
        return (" or " if self.either else " and ").join(names)

    @property
    def conditions(self) -> str:
        """What a call needs for it, in a few words; "" for nothing."""
        found = {
            "floats": self.floats,
            f"symmetric {self.arrays}": self.handshake,
            "at the same place": Arrays.AT_ONE_PLACE in (self.x, self.out),
            "not in place": not self.in_place,
            self.ranks: self.ranks,
        }
        return ", ".join(words for words, holds in found.items() if holds)


def fill_in(docstring: str, algorithms: Mapping[str, Algorithm]) -> str:
    """Return a docstring with the names and conditions for ``{algorithms}``.

    Args:
        docstring: the method's; the line with the word describes an argument.
        algorithms: by name.
    """
    names = [
        f'``"{name}"``' + (f" ({made.conditions})" if made.conditions else "")
        for name, made in algorithms.items()
    ]
    words = f"{', '.join(names[:-1])} or {names[-1]}."
    if any(made.handshake or made.ranks for made in algorithms.values()):
        words += f' Calls that do not meet such a condition use ``"{GENERAL}"``.'
    (line,) = (each for each in docstring.splitlines() if "{algorithms}" in each)
    indent = " " * (len(line) - len(line.lstrip()))
    wrapped = textwrap.fill(
        line.strip().replace("{algorithms}", words),
        width=88,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_on_hyphens=False,
    )
    return docstring.replace(line, wrapped)
