"""The operations that are measured, their buffers, and the checks of results.

Filling buffers and checking their contents.

The contents repeat a random pattern, so that a gigabyte is cheap to make. The period is
prime, so it is not a multiple of any block or chunk of an algorithm, and misplaced data
is always wrong. Arrays are bytes in Numba's or NumPy's arrays.

What inference adds to an all-reduce: a residual and an RMS norm.

They are an epilogue of the call, or a kernel of the benchmark's after a plain call.
Residuals are zeros and weights ones, so that results are exact for inputs of ±1.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numba import cuda

from numba_symm import dtypes
from numba_symm.collectives import operations
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.exchanges import Output
from numba_symm.environment import SIMULATED

PERIOD = 65_521
"""Elements of a pattern: a prime."""

CHUNK = 64 * PERIOD
"""Elements read back at a time, a multiple of the period."""

POISON = 0xFF
"""The byte that fills outputs before a call: a float is then NaN, an integer -1."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Tiled:
    """A pattern of PERIOD elements, repeated.

    Attributes:
        pattern: the elements.
        start: index in the pattern of the first element.
        count: total number of elements.
    """

    pattern: np.ndarray[Any, Any]
    start: int
    count: int

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return int(self.pattern.dtype.itemsize)

    def first(self, count: int) -> np.ndarray[Any, Any]:
        """Return the first ``count`` elements, or all if there are fewer."""
        rolled = np.roll(self.pattern, -self.start % PERIOD)
        return np.resize(rolled, min(count, self.count))


def fill(array: Any, contents: Tiled) -> None:
    """Fill an array of ``contents.count * contents.itemsize`` bytes."""
    head = contents.first(PERIOD).view(np.uint8)
    _write(array[: head.size], head)
    done, size = head.size, array.size
    while done < size:  # copy what is filled: whole periods, so the pattern continues
        more = min(done, size - done)
        _write(array[done : done + more], array[:more])
        done += more


def poison(array: Any) -> None:
    """Fill an array with bytes that are never a result."""
    fill(array, Tiled(np.full(PERIOD, POISON, np.uint8), 0, array.size))


def arrived() -> None:
    """Wait until filled arrays are complete for every stream."""
    cuda.synchronize()


def count_wrong(array: Any, expected: Sequence[Tiled]) -> int:
    """Return the number of elements of an array that differ in any bit.

    Args:
        array: bytes.
        expected: the expected contents, concatenated, of one dtype; empty where a
            rank has no output.
    """
    if not expected:
        return 0
    unsigned = _UNSIGNED[expected[0].itemsize]
    itemsize = expected[0].itemsize
    most = min(CHUNK, max(part.count for part in expected))
    staging = np.empty(most, unsigned)
    wrong, offset = 0, 0
    for part in expected:
        wanted = part.first(CHUNK).view(unsigned)
        for first in range(0, part.count, CHUNK):
            count = min(CHUNK, part.count - first)
            begin = offset + first * itemsize
            found = staging[:count]
            _read(array[begin : begin + count * itemsize], found.view(np.uint8))
            wrong += int(np.count_nonzero(found != wanted[:count]))
        offset += part.count * itemsize
    return wrong


def _write(target: Any, source: Any) -> None:
    if isinstance(target, np.ndarray):
        target[:] = source
    else:
        target.copy_to_device(source)


def _read(source: Any, target: np.ndarray[Any, Any]) -> None:
    if isinstance(source, np.ndarray):
        target[:] = source
    else:
        source.copy_to_host(target)


EnqueueOn = Callable[[int], object]
"""Enqueues one collective on the stream with the given handle."""

ROOT = 0
"""The root of rooted operations."""


Arguments = Callable[[Communicator, Any, Any, str, str | None], dict[str, Any]]
"""Returns the arguments of a call, but the stream, by name."""


def factory(
    name: str, arguments: Arguments, prepared: bool = False
) -> Callable[..., EnqueueOn]:
    """Return a factory of calls of our method of that name, or of its plans."""

    def make(
        comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
    ) -> EnqueueOn:
        return made(comm, name, arguments(comm, x, out, op, algorithm), prepared)

    return make


def made(
    comm: Communicator, name: str, given: dict[str, Any], prepared: bool
) -> EnqueueOn:
    """Return a call of our method of that name, or its plan."""
    if prepared:
        plan: EnqueueOn = getattr(comm, f"{name}_init")(**given)
        return plan
    call = functools.partial(getattr(comm, name), **given)
    return lambda stream: call(stream=stream)


def collective(operation: Operation, *, prepared: bool) -> Callable[..., EnqueueOn]:
    """Return a factory of calls of an operation of the library's table."""

    def arguments(
        comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
    ) -> dict[str, Any]:
        given = {"x": out if operation.in_place else x, "algorithm": algorithm}
        if operation.reduces:
            given["op"] = op
        if operation.rooted:
            given["root"] = ROOT
        if not operation.in_place:
            given["out"] = _at_root(comm, out) if operation.at_root else out
        return given

    return factory(operation.name, arguments, prepared)


def coded(wire: str, *, prepared: bool) -> Callable[..., EnqueueOn]:
    """Return a factory of quantized all-reduces; its algorithm "plain" is without."""
    return factory(
        "all_reduce",
        lambda comm, x, out, op, algorithm: {
            "x": x,
            "out": out,
            "wire": None if algorithm == "plain" else wire,
        },
        prepared,
    )


def _at_root(comm: Communicator, array: Any) -> Any:
    return array if comm.rank == ROOT else None


def _equal(comm: Communicator, whole: Any) -> list[int]:
    """Return the counts of equal ranges of an array, one for each rank."""
    return [whole.size // comm.size] * comm.size


gather = factory(
    "gather",
    lambda comm, x, out, op, _: {"x": x, "root": ROOT, "out": _at_root(comm, out)},
)
scatter = factory(
    "scatter",
    lambda comm, x, out, op, _: {"x": _at_root(comm, x), "root": ROOT, "out": out},
)

V_FORMS = {
    "all_gather": factory(
        "all_gather_v",
        lambda comm, x, out, op, _: {"x": x, "counts": _equal(comm, out), "out": out},
    ),
    "reduce_scatter": factory(
        "reduce_scatter_v",
        lambda comm, x, out, op, _: {
            "x": x,
            "counts": _equal(comm, x),
            "op": op,
            "out": out,
        },
    ),
    "all_to_all": factory(
        "all_to_all_v",
        lambda comm, x, out, op, _: {
            "x": x,
            "send_counts": _equal(comm, x),
            "recv_counts": _equal(comm, x),
            "out": out,
        },
    ),
    "gather": factory(
        "gather_v",
        lambda comm, x, out, op, _: {
            "x": x,
            "counts": _equal(comm, out),
            "root": ROOT,
            "out": _at_root(comm, out),
        },
    ),
    "scatter": factory(
        "scatter_v",
        lambda comm, x, out, op, _: {
            "x": _at_root(comm, x),
            "counts": _equal(comm, x),
            "root": ROOT,
            "out": out,
        },
    ),
}
"""Our calls of the v forms, by the operations that they generalize."""


def messages(array: Any) -> list[Any]:
    """Return the messages of an array: its rows, or the array if it has one axis."""
    return [array] if array.ndim == 1 else [array[row] for row in range(len(array))]


def sendrecv(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our sendrecv; its algorithm "group" is a group of both parts."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if algorithm == "group":
        return _group(comm, messages(x), right, messages(out), left)
    if x.ndim == 1:
        return lambda stream: comm.sendrecv(
            x, dst=right, out=out, src=left, stream=stream
        )
    pairs = list(zip(messages(x), messages(out), strict=True))

    def call(stream: int) -> None:
        with comm.group():
            for message, into in pairs:
                comm.sendrecv(message, dst=right, out=into, src=left, stream=stream)

    return call


def _group(
    comm: Communicator, sent: list[Any], right: int, received: list[Any], left: int
) -> EnqueueOn:
    def call(stream: int) -> None:
        with comm.group():
            for message, into in zip(sent, received, strict=True):
                comm.send(message, dst=right, stream=stream)
                comm.recv(into, src=left, stream=stream)

    return call


barrier = factory("barrier", lambda *_: {})

MOST_ROW = 16 << 10
"""The most bytes of a token in the measurement of experts."""


def experts(*, stored: bool) -> Callable[..., EnqueueOn]:
    """Return a factory of dispatches, and combines of the received tokens as results.

    Each rank has one expert, and the tokens of shard r of ``x`` are for rank r. So the
    bytes are those of an all-to-all there, and one back, which the algorithm
    ``all_to_all`` makes instead.

    Args:
        stored: whether the results are where ``combine`` need not copy them.
    """

    def make(
        comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
    ) -> EnqueueOn:
        if algorithm == "all_to_all":
            return _there_and_back(comm, x, out)
        made, given, into = _dispatch(comm, x, out)

        def call(stream: int) -> None:
            found = made.dispatch(*given, stream=stream)
            made.combine(None if stored else found.tokens, out=into, stream=stream)

        return call

    return make


def _dispatch(comm: Communicator, x: Any, out: Any) -> tuple[Any, Any, Any]:
    """Return the experts, the arguments of a dispatch, and the output as tokens."""
    part = x.size // comm.size
    row = part * x.dtype.itemsize
    while row > MOST_ROW and row % 32 == 0:
        row //= 2
    hidden = row // x.dtype.itemsize
    each = part // hidden
    made = comm.experts(
        comm.size,
        top_k=1,
        hidden=hidden,
        tokens=comm.size * each,
        capacity=each,
        dtype=x.dtype,
    )
    ids = np.repeat(np.arange(comm.size, dtype=np.int32), each)[:, None]
    shape = comm.size * each, hidden
    return made, (x.reshape(shape), cuda.to_device(ids)), out.reshape(shape)


def _there_and_back(comm: Communicator, x: Any, out: Any) -> EnqueueOn:
    between = comm.empty(x.shape, x.dtype)
    there = comm.all_to_all_init(x, out=between)
    back = comm.all_to_all_init(between, out=out)

    def call(stream: int) -> None:
        there(stream)
        back(stream)

    return call


THREADS = 8 if SIMULATED else 512
MOST_NORM_ROW = 8 << 10
"""The most bytes of a row, if the message can be divided."""
EPSILON = np.float32(1e-12)  # 1 + EPSILON is 1


def squared(value: Any, residual: Any, weight: Any, width: Any) -> Any:
    """Return what is summed over a row."""
    return (value + residual) * (value + residual)


def normalized(value: Any, total: Any, residual: Any, weight: Any, width: Any) -> Any:
    """Return an element of the result, and one of the updated residual."""
    kept = value + residual
    mean = total / np.float32(width) + EPSILON
    return kept * weight * (np.float32(1) / np.float32(math.sqrt(mean))), kept


@cuda.jit  # type: ignore[untyped-decorator]
def normalize_rows(out: Any, residual: Any, weight: Any, kept: Any) -> None:
    """Do the same to a sum, in its place. A block takes a row."""
    partial = cuda.shared.array(THREADS, np.float32)
    row, thread, width = cuda.blockIdx.x, cuda.threadIdx.x, out.shape[1]
    total = np.float32(0)
    for at in range(thread, width, THREADS):
        value = np.float32(out[row, at]) + np.float32(residual[row, at])
        total += value * value
    partial[thread] = total
    cuda.syncthreads()
    distance = THREADS // 2
    while distance > 0:
        if thread < distance:
            partial[thread] += partial[thread + distance]
        cuda.syncthreads()
        distance //= 2
    mean = partial[0] / np.float32(width) + EPSILON
    scale = np.float32(1) / np.float32(math.sqrt(mean))
    for at in range(thread, width, THREADS):
        value = np.float32(out[row, at]) + np.float32(residual[row, at])
        kept[row, at] = value
        out[row, at] = value * scale * np.float32(weight[at])


def rms_norm(*, prepared: bool) -> Callable[..., EnqueueOn]:
    """Return a factory of calls; its algorithm "two_calls" has no epilogue."""

    def make(
        comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
    ) -> EnqueueOn:
        width = x.size
        while width * x.dtype.itemsize > MOST_NORM_ROW and width % 2 == 0:
            width //= 2
        rows = x.size // width, width
        x, out = x.reshape(rows), out.reshape(rows)
        residual, weight, kept = (
            _filled(shape, x.dtype, value)
            for shape, value in ((rows, 0), ((width,), 1), (rows, 0))
        )
        given: dict[str, Any] = {"x": x, "out": out}
        if algorithm != "two_calls":
            given |= {"out": (out, kept), "epilogue": normalized, "row_sum": squared}
            given["args"] = residual, weight, width
        reduce = made(comm, "all_reduce", given, prepared)
        if algorithm != "two_calls":
            return reduce

        def both(handle: int) -> None:
            reduce(handle)
            stream = 0 if SIMULATED else cuda.external_stream(handle)
            normalize_rows[rows[0], THREADS, stream](out, residual, weight, kept)

        return both

    return make


def _filled(shape: tuple[int, ...], dtype: Any, value: int) -> Any:
    """Return a new array of ordinary memory."""
    host = np.full(math.prod(shape), value, dtype)
    return cuda.to_device(host.view(np.uint8)).view(dtype).reshape(shape)


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
        plan=collective(ours, prepared=True),
        call=collective(ours, prepared=False),
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
        plan=gather,
        call=gather,
        algorithms=(),
    ),
    "scatter": BenchOperation(
        name="scatter",
        shapes=lambda count, ranks: _parts(count, ranks)[::-1],
        bus=lambda ranks: (ranks - 1) / ranks,
        inputs=reducible,
        expected=lambda inputs, op, rank: [_part(inputs[ROOT], rank, len(inputs))],
        plan=scatter,
        call=scatter,
        algorithms=(),
    ),
    "sendrecv": BenchOperation(
        name="sendrecv",
        shapes=lambda count, ranks: (count, count),
        bus=lambda ranks: 1,
        inputs=reducible,
        expected=lambda inputs, op, rank: [inputs[rank - 1]],
        plan=sendrecv,
        call=sendrecv,
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
        plan=barrier,
        call=barrier,
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
    plan=experts(stored=False),
    call=experts(stored=False),
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
        plan=experts(stored=True),
        call=experts(stored=True),
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
    for name, call in V_FORMS.items()
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
        plan=coded(wire, prepared=True),
        call=coded(wire, prepared=False),
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
    plan=rms_norm(prepared=True),
    call=rms_norm(prepared=False),
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
