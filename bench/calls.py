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
