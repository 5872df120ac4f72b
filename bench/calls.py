"""Our calls: factories for (communicator, input, output, reduction, algorithm)."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.operations import Operation

EnqueueOn = Callable[[int], object]
"""Enqueues one collective on the stream with the given handle."""

ROOT = 0
"""The root of rooted operations."""


def collective(operation: Operation, *, prepared: bool) -> Callable[..., EnqueueOn]:
    """Return a factory of calls of an operation of the library's table."""

    def make(
        comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
    ) -> EnqueueOn:
        given: dict[str, Any] = {"algorithm": algorithm}
        if operation.reduces:
            given["op"] = op
        if operation.rooted:
            given["root"] = ROOT
        if not operation.in_place:
            given["out"] = None if operation.at_root and comm.rank != ROOT else out
        array = out if operation.in_place else x
        if prepared:
            plan: EnqueueOn = getattr(comm, f"{operation.name}_init")(array, **given)
            return plan
        call = functools.partial(getattr(comm, operation.name), array, **given)
        return lambda stream: call(stream=stream)

    return make


def coded(wire: str, *, prepared: bool) -> Callable[..., EnqueueOn]:
    """Return a factory of quantized all-reduces; its algorithm "plain" is without."""

    def make(
        comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
    ) -> EnqueueOn:
        given = {"out": out, "wire": None if algorithm == "plain" else wire}
        if prepared:
            plan: EnqueueOn = comm.all_reduce_init(x, **given)
            return plan
        return lambda stream: comm.all_reduce(x, stream=stream, **given)

    return make


def of_parts(
    name: str, arguments: Callable[[Communicator, Any, Any, str], dict[str, Any]]
) -> Callable[..., EnqueueOn]:
    """Return a factory of calls of a gather, a scatter or a v form.

    Args:
        name: the name of our method.
        arguments: returns its arguments, but the stream.
    """

    def make(
        comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
    ) -> EnqueueOn:
        given = arguments(comm, x, out, op)
        call = functools.partial(getattr(comm, name), **given)
        return lambda stream: call(stream=stream)

    return make


def _at_root(comm: Communicator, array: Any) -> Any:
    return array if comm.rank == ROOT else None


def _equal(comm: Communicator, whole: Any) -> list[int]:
    """Return the counts of equal ranges of an array, one for each rank."""
    return [whole.size // comm.size] * comm.size


gather = of_parts(
    "gather",
    lambda comm, x, out, op: {"x": x, "root": ROOT, "out": _at_root(comm, out)},
)
scatter = of_parts(
    "scatter",
    lambda comm, x, out, op: {"x": _at_root(comm, x), "root": ROOT, "out": out},
)

V_FORMS = {
    "all_gather": of_parts(
        "all_gather_v",
        lambda comm, x, out, op: {"x": x, "counts": _equal(comm, out), "out": out},
    ),
    "reduce_scatter": of_parts(
        "reduce_scatter_v",
        lambda comm, x, out, op: {
            "x": x,
            "counts": _equal(comm, x),
            "op": op,
            "out": out,
        },
    ),
    "all_to_all": of_parts(
        "all_to_all_v",
        lambda comm, x, out, op: {
            "x": x,
            "send_counts": _equal(comm, x),
            "recv_counts": _equal(comm, x),
            "out": out,
        },
    ),
    "gather": of_parts(
        "gather_v",
        lambda comm, x, out, op: {
            "x": x,
            "counts": _equal(comm, out),
            "root": ROOT,
            "out": _at_root(comm, out),
        },
    ),
    "scatter": of_parts(
        "scatter_v",
        lambda comm, x, out, op: {
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


def barrier(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our barrier."""
    return lambda stream: comm.barrier(stream=stream)


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
