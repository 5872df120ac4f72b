"""The choice of the fastest algorithm: all limits, for bytes, types and ranks.

The limits were measured on H200s (bench/README.md). Those for 2 ranks were measured on
31 or 32 multiprocessors. Those for 3 and 4 ranks were measured with 4 ranks on 32,
except for scans. The others were measured on all multiprocessors, except for those in
``ESTIMATES``. ``numba-symm tune -n N`` measures the limits for N ranks.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

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
    Step("chunked", (5 * _M, 7 * _M, 56 * _M), sent=True),
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
        Step("one_shot_sentinel", (1280 * _K, 256 * _K, 128 * _K)),
        Step("two_shot_sentinel", (NONE, 3 * _M, 4 * _M)),
        Step("chunked", (10 * _M, NONE, NONE)),
        Step("direct", (128 * _M, ALL, ALL)),
        Step("copy_engine", (ALL, NONE, NONE)),
    ),
    others=(
        Step("one_shot_ll", (8 * _K, 8 * _K, 32 * _K)),
        Step("one_shot_marked", (1280 * _K, 256 * _K, 128 * _K)),
        Step("two_shot_marked", (NONE, 1 * _M, 1 * _M)),
        Step("chunked", (10 * _M, NONE, NONE)),
        Step("direct", (128 * _M, ALL, ALL)),
        Step("copy_engine", (ALL, NONE, NONE)),
    ),
)
# For two ranks, no rank has anything to pass on. The 576 KiB are interpolated between
# the times of 256 KiB and 1 MiB.
_BROADCAST = (
    Step("one_shot_marked", (1280 * _K, 768 * _K, 896 * _K), sent=True),
    Step("two_shot_marked", (NONE, 576 * _K, 1792 * _K)),
    Step("chunked", (20 * _M, NONE, 2 * _M - 1)),
    Step("copy_engine", (ALL, NONE, NONE)),
    Step("direct", (NONE, ALL, ALL)),
)
ON_GPUS = {
    "all_reduce": Choice(
        floats=(
            Step("one_shot_sentinel", (1 * _M, 128 * _K, 64 * _K)),
            Step("two_shot_sentinel", (6 * _M, 256 * _M, 8 * _M)),
            Step("direct", (56 * _M, ALL, ALL)),
            Step("copy_engine", (ALL, NONE, NONE)),
        ),
        others=(
            # Packets are twice the bytes, and need fewer instructions.
            Step("one_shot_ll", (64 * _K, 8 * _K, 32 * _K)),
            Step("one_shot_marked", (1536 * _K, 128 * _K, 64 * _K)),
            Step("two_shot_marked", (NONE, 1 * _M, 1 * _M)),
            Step("direct", (56 * _M, 48 * _M, ALL)),
            Step("copy_engine", (ALL, NONE, NONE)),
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


def _in_simulator(choice: Choice) -> Choice:
    floats, others = (tuple(map(_simulated, steps)) for steps in choice)
    return Choice(floats, others)


CHOICES = (
    {name: _in_simulator(choice) for name, choice in ON_GPUS.items()}
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
