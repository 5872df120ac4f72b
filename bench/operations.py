"""The operations that can be measured, one table entry each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from numba_symm import dtypes
from numba_symm.bench import calls, norm
from numba_symm.bench.calls import ROOT, EnqueueOn
from numba_symm.bench.data import PERIOD, Tiled
from numba_symm.collectives import operations
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.protocols.exchanges import Output

Array = np.ndarray[Any, Any]

Expected = Callable[[Sequence[Tiled], str, int], list[Tiled]]
"""Returns a rank's output for (all ranks' inputs, reduction, rank)."""

TYPES: dict[str, np.dtype[Any]] = {
    "half": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
"""Element types by their names in nccl-tests."""

_REDUCE: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,  # divided by the number of ranks at the end
}
REDUCTIONS = tuple(_REDUCE)

NO_REDUCTION = "none"
"""The reduction of an operation that only moves data, as nccl-tests names it."""

_finfo: Callable[[Any], Any] = ml_dtypes.finfo  # it has no type annotations


@dataclass(frozen=True)
class BenchOperation:
    """A collective: its inputs, its result, its bandwidth, and our calls.

    Attributes:
        name: of the operation and of the contenders' methods.
        shapes: returns the elements of a rank's input and output for (count, ranks);
            the larger one is the ``size`` of nccl-tests.
        bus: returns bus bandwidth / algorithm bandwidth for a number of ranks.
        inputs: returns a pattern for each rank, for (random generator, ranks,
            reduction, dtype); results are exact in the dtype in any order.
        expected: returns a rank's output for (all ranks' inputs, reduction, rank).
        plan: returns a plan for (communicator, input, output, reduction, algorithm).
        call: the same, for a plain call.
        algorithms: the names of our algorithms.
        in_place: whether our input is always the output array.
        apart: whether input and output must not be the same array.
        reductions: the names of its reductions; none if it only moves data.
        sized: whether it has a message.
        windowed: whether a call may consist of several messages, one for each row of
            input and output.
        types: the names of the element types that it takes.
        aligned: whether its arrays must begin on 16-byte boundaries.
    """

    name: str
    shapes: Callable[[int, int], tuple[int, int]]
    bus: Callable[[int], float]
    inputs: Callable[[np.random.Generator, int, str, np.dtype[Any]], Array]
    expected: Expected
    plan: Callable[[Communicator, Any, Any, str, str | None], EnqueueOn]
    call: Callable[[Communicator, Any, Any, str, str | None], EnqueueOn]
    algorithms: tuple[str, ...]
    in_place: bool = False
    apart: bool = False
    reductions: tuple[str, ...] = ()
    sized: bool = True
    windowed: bool = False
    types: tuple[str, ...] = tuple(TYPES)
    aligned: bool = False

    @property
    def in_place_too(self) -> bool:
        """Whether it is measured in place, too."""
        sent, received = self.shapes(1, 2)
        return sent == received and not self.apart


def reducible(
    random: np.random.Generator, ranks: int, op: str, dtype: np.dtype[Any]
) -> Array:
    """Return a pattern for each rank whose reduction is exact in any order.

    - Integers have any value, as they wrap around; for an average their sum must not.
    - Floats are integers so small that their sum is exact.
    - For a product of floats, one factor has any value; the others are powers of 2.
    - For an average of floats, they are powers of 2 times the number of ranks, because
      NCCL divides each before it adds them.
    """
    shape = (ranks, PERIOD)
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        least, most = int(limits.min), int(limits.max)
        if op == "avg":
            least, most = -(most // ranks), most // ranks
        return random.integers(least, most, shape, dtype, endpoint=True)
    if op == "sum":
        digits = int(_finfo(dtype).nmant) + 1
        limit = 2 ** (digits - math.ceil(math.log2(ranks)))
        return random.integers(-limit, limit, shape, endpoint=True).astype(dtype)
    if op == "avg":
        return (ranks * _powers(random, shape)).astype(dtype)
    numbers = _signs(random, shape) * random.uniform(1, 2, shape)
    if op == "prod":
        powers = _powers(random, shape)
        alone = np.arange(ranks)[:, None] == random.integers(0, ranks, PERIOD)
        numbers = np.where(alone, numbers, powers)
    return numbers.astype(dtype)


def _signs(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return random.choice([-1.0, 1.0], shape)


def _powers(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    powers: Array = _signs(random, shape) * 2.0 ** random.integers(-1, 2, shape)
    return powers


def reduced(patterns: Array, op: str) -> Array:
    """Reduce the first axis: integers in their dtype, floats in float64."""
    dtype = patterns.dtype
    kept = dtype if dtype.kind == "i" else np.dtype(np.float64)
    total: Array = _REDUCE[op].reduce(patterns.astype(kept), axis=0)
    if op == "avg":
        total = _divided(total, len(patterns))
    return total.astype(dtype)


def _divided(total: Array, ranks: int) -> Array:
    """Return the quotients; those of integers are rounded towards 0."""
    if total.dtype.kind == "i":
        total = total - np.fmod(total, ranks)
        return total // ranks
    return total / ranks


def _total(inputs: Sequence[Tiled], op: str) -> Tiled:
    total = reduced(np.stack([each.pattern for each in inputs]), op)
    return Tiled(total, inputs[0].start, inputs[0].count)


def _of_none(like: Tiled, op: str) -> Tiled:
    """Return the output of a rank that has nothing to reduce."""
    dtype = like.pattern.dtype
    pattern = np.full(PERIOD, dtypes.identity(op, dtype), dtype)
    return Tiled(pattern, 0, like.count)


def _part(whole: Tiled, rank: int, ranks: int) -> Tiled:
    count = whole.count // ranks
    return Tiled(whole.pattern, whole.start + rank * count, count)


def _parts(count: int, ranks: int) -> tuple[int, int]:
    """Return the elements of a shard and of all shards, of about ``count``."""
    part = max(1, count // ranks)
    return part, part * ranks


def _nothing(inputs: Sequence[Tiled], op: str, rank: int) -> list[Tiled]:
    return []


def _collective(ours: operations.Operation) -> BenchOperation:
    """Return the entry of an operation of the library's table."""
    gathers = ours.exchange.output is Output.SHARDS
    scatters = ours.exchange.sends_shards
    reductions = tuple(op for op in REDUCTIONS if op not in ours.without)

    def shapes(count: int, ranks: int) -> tuple[int, int]:
        if not gathers and not scatters:
            return count, count
        part, whole = _parts(count, ranks)
        return whole if scatters else part, whole if gathers else part

    def bus(ranks: int) -> float:
        if gathers or scatters:
            return (ranks - 1) / ranks
        return 2 * (ranks - 1) / ranks if ours is operations.ALL_REDUCE else 1

    def expected(inputs: Sequence[Tiled], op: str, rank: int) -> list[Tiled]:
        ranks = len(inputs)
        if ours.at_root and rank != ROOT:
            return []
        if scatters:
            inputs = [_part(each, rank, ranks) for each in inputs]
        used = [inputs[r] for r in ours.exchange.output.used(rank, ranks, ROOT)]
        if not ours.reduces:
            return used
        return [_total(used, op) if used else _of_none(inputs[rank], op)]

    return BenchOperation(
        name=ours.name,
        shapes=shapes,
        bus=bus,
        inputs=reducible,
        expected=expected,
        plan=calls.collective(ours, prepared=True),
        call=calls.collective(ours, prepared=False),
        algorithms=tuple(ours.algorithms),
        in_place=ours.in_place,
        reductions=reductions if ours.reduces else (),
    )


OPERATIONS = {
    **{name: _collective(each) for name, each in operations.OPERATIONS.items()},
    "gather": BenchOperation(
        name="gather",
        shapes=_parts,
        bus=lambda ranks: (ranks - 1) / ranks,
        inputs=reducible,
        expected=lambda inputs, op, rank: list(inputs) if rank == ROOT else [],
        plan=calls.gather,
        call=calls.gather,
        algorithms=(),
    ),
    "scatter": BenchOperation(
        name="scatter",
        shapes=lambda count, ranks: _parts(count, ranks)[::-1],
        bus=lambda ranks: (ranks - 1) / ranks,
        inputs=reducible,
        expected=lambda inputs, op, rank: [_part(inputs[ROOT], rank, len(inputs))],
        plan=calls.scatter,
        call=calls.scatter,
        algorithms=(),
    ),
    "sendrecv": BenchOperation(
        name="sendrecv",
        shapes=lambda count, ranks: (count, count),
        bus=lambda ranks: 1,
        inputs=reducible,
        expected=lambda inputs, op, rank: [inputs[rank - 1]],
        plan=calls.sendrecv,
        call=calls.sendrecv,
        algorithms=("sendrecv", "group"),
        apart=True,
        windowed=True,
    ),
    "barrier": BenchOperation(
        name="barrier",
        shapes=lambda count, ranks: (1, 1),
        bus=lambda ranks: 1,
        inputs=reducible,
        expected=_nothing,
        plan=calls.barrier,
        call=calls.barrier,
        algorithms=(),
        apart=True,
        sized=False,
    ),
}

_EXPERTS = BenchOperation(
    name="experts",
    shapes=lambda count, ranks: 2 * (8 * max(1, count // (8 * ranks)) * ranks,),
    bus=lambda ranks: 2 * (ranks - 1) / ranks,
    inputs=reducible,
    expected=lambda inputs, op, rank: [inputs[rank]],
    plan=calls.experts(stored=False),
    call=calls.experts(stored=False),
    algorithms=("experts", "all_to_all"),
    apart=True,
    types=("float", "half", "bfloat16"),
    aligned=True,
)
OPERATIONS |= {
    "experts": _EXPERTS,
    "experts_stored": replace(
        _EXPERTS,
        name="experts_stored",
        expected=_nothing,
        plan=calls.experts(stored=True),
        call=calls.experts(stored=True),
    ),
}

OPERATIONS |= {
    f"{name}_v": replace(
        OPERATIONS[name],
        name=f"{name}_v",
        plan=call,
        call=call,
        algorithms=(),
        apart=True,
    )
    for name, call in calls.V_FORMS.items()
}


def _largest(size: int) -> Callable[..., Array]:
    """Return what makes inputs whose quantized sum is exact, for any number of ranks.

    The first two ranks have the largest code, with random signs, the others zeros.
    """

    def inputs(
        random: np.random.Generator, ranks: int, op: str, dtype: np.dtype[Any]
    ) -> Array:
        found = np.zeros((ranks, PERIOD))
        found[:2] = size * _signs(random, (PERIOD,))
        return found.astype(dtype)

    return inputs


OPERATIONS |= {
    f"all_reduce_{wire}": replace(
        OPERATIONS["all_reduce"],
        name=f"all_reduce_{wire}",
        inputs=_largest(size),
        plan=calls.coded(wire, prepared=True),
        call=calls.coded(wire, prepared=False),
        algorithms=("coded", "plain"),
        reductions=("sum",),
        types=("half", "bfloat16", "float"),
    )
    for wire, size in (("int8", 127), ("fp8", 448))
}
"""Quantized sums, and those of the elements themselves (``plain``)."""


def _signs_of_one(
    random: np.random.Generator, ranks: int, op: str, dtype: np.dtype[Any]
) -> Array:
    """Return patterns whose sum is ±1, so that a row has the norm 1."""
    found = np.zeros((ranks, PERIOD))
    found[0] = _signs(random, (PERIOD,))
    return found.astype(dtype)


OPERATIONS["rms_norm"] = replace(
    OPERATIONS["all_reduce"],
    name="rms_norm",
    inputs=_signs_of_one,
    plan=norm.rms_norm(prepared=True),
    call=norm.rms_norm(prepared=False),
    algorithms=("epilogue", "two_calls"),
    reductions=("sum",),
    types=("half", "bfloat16", "float"),
)


class Contents:
    """The inputs and outputs of calls; the patterns of each type are drawn once.

    Args:
        random: draws them, the same on all ranks.
        comm: the ranks.
    """

    def __init__(self, random: np.random.Generator, comm: Communicator):
        self._random, self._comm = random, comm
        self._patterns: dict[tuple[str, str], Array] = {}

    def of(
        self, operation: BenchOperation, type_: str, op: str, count: int, start: int = 0
    ) -> tuple[Tiled, list[Tiled]]:
        """Return this rank's input of ``count`` elements, and its expected output."""
        key, rank, size = (type_, op), self._comm.rank, self._comm.size
        if key not in self._patterns:
            made = operation.inputs(self._random, size, op, TYPES[type_])
            self._patterns[key] = made
        everyone = [Tiled(each, start, count) for each in self._patterns[key]]
        return everyone[rank], operation.expected(everyone, op, rank)
