"""Plans: collectives that are checked and packed once, and called many times."""

from typing import Any

from numba_symm.collectives.calls import Calls
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.binding import Enqueue
from numba_symm.collectives.transfers import Stream, owned


class Plan:
    """A collective whose arguments were checked and packed: each call only launches.

    Made by ``comm.all_reduce_init`` and the other ``_init`` methods. It keeps its
    arrays. ``plan()``, or ``plan(stream=…)``, enqueues it and returns its output array.
    Every rank calls the plans of a communicator in the same order.
    """

    def __init__(
        self,
        calls: Calls,
        launch: Enqueue | None,
        arrays: tuple[Any, Any],
        stream: Stream,
        name: str,
        call: str,
    ):
        self._calls = calls
        self._name = name
        self._call = call
        self._launch = launch
        self._source, self._out = arrays  # the launch has only their addresses
        self._stream = stream

    def __repr__(self) -> str:
        return f"<Plan: {self._words()}>"

    def __call__(self, stream: Any = None) -> Any:
        """Enqueue the collective, and return its output array.

        Args:
            stream: the stream; None: the stream with which the plan was made.
        """
        calls = self._calls
        calls.begin(self._name)
        try:
            if calls.compares():
                chosen = calls.agreed("a plan", self._words, self._chosen, stream)
            else:
                calls.island.check()
                chosen = self._chosen(stream)
            calls.run(self._name, self._launch, chosen, self)
        finally:
            calls.finish()
        return self._out

    def _words(self, _: Stream | None = None) -> str:
        return f"{self._name} of {self._call}"

    def _chosen(self, stream: Any) -> Stream:
        return self._stream if stream is None else owned(stream)


def plan(
    calls: Calls,
    operation: Operation,
    x: Any,
    op: Any,
    out: Any,
    stream: Any,
    algorithm: str | None,
    root: int | None = None,
) -> Plan:
    """Prepare a call of an operation, and return its plan."""
    with calls.alone(operation.name):
        launch, out, chosen = calls.prepared(
            operation, x, op, out, stream, algorithm, root
        )
    words = operation.described(x, op, algorithm, root)
    return Plan(calls, launch, (x, out), chosen, operation.name, words)
