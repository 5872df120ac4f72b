"""What is known about an algorithm: ranks, types, arrays, workspace and waits.

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
        waits: the numbers in ``waits.py`` of what its kernels wait for.
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
