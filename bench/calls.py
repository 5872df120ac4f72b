"""Our calls: factories for (communicator, input, output, reduction, algorithm)."""

import functools
from collections.abc import Callable
from typing import Any

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


def gather(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our gather."""
    into = out if comm.rank == ROOT else None
    return lambda stream: comm.gather(x, root=ROOT, out=into, stream=stream)


def scatter(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our scatter."""
    whole = x if comm.rank == ROOT else None
    return lambda stream: comm.scatter(whole, root=ROOT, out=out, stream=stream)


def messages(array: Any) -> list[Any]:
    """Return the messages of an array: its rows, or the array if it has one axis."""
    return [array] if array.ndim == 1 else [array[row] for row in range(len(array))]


def sendrecv(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our sendrecv."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
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


def barrier(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our barrier."""
    return lambda stream: comm.barrier(stream=stream)


def all_gather_v(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our all_gather_v."""
    counts = _equal(comm, out)
    return lambda stream: comm.all_gather_v(x, counts=counts, out=out, stream=stream)


def reduce_scatter_v(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our reduce_scatter_v."""
    counts = _equal(comm, x)
    call = functools.partial(comm.reduce_scatter_v, x, counts=counts, op=op, out=out)
    return lambda stream: call(stream=stream)


def all_to_all_v(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our all_to_all_v."""
    counts = _equal(comm, x)
    return lambda stream: comm.all_to_all_v(
        x, send_counts=counts, recv_counts=counts, out=out, stream=stream
    )


def gather_v(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our gather_v."""
    counts, into = _equal(comm, out), out if comm.rank == ROOT else None
    call = functools.partial(comm.gather_v, x, counts=counts, root=ROOT, out=into)
    return lambda stream: call(stream=stream)


def scatter_v(
    comm: Communicator, x: Any, out: Any, op: str, algorithm: str | None
) -> EnqueueOn:
    """Return a call of our scatter_v."""
    counts, whole = _equal(comm, x), x if comm.rank == ROOT else None
    call = functools.partial(comm.scatter_v, whole, counts=counts, root=ROOT, out=out)
    return lambda stream: call(stream=stream)


def _equal(comm: Communicator, whole: Any) -> list[int]:
    """Return the counts of equal ranges of an array, one for each rank."""
    return [whole.size // comm.size] * comm.size
