"""Plans: calls that are checked and packed once, and called many times."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from numba_symm.collectives import messages, vector_forms
from numba_symm.collectives.call_streams import HeldStream, owned
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.transfers import Pending, Prepared
from numba_symm.errors import ArgumentError

Start = Callable[..., None]
"""Enqueues a packed call on a stream. What follows is kept until then."""


class Plan:
    """A call whose arguments were checked and packed once.

    ``comm.all_reduce_init`` and the other ``_init`` methods return plans. A plan keeps
    its arrays alive. ``plan()``, or ``plan(stream=…)``, enqueues the call and returns
    its output array. Every rank calls the plans of collectives in the same order.
    """

    def __init__(
        self,
        calls: Calls,
        name: str,
        call: str,
        start: Start | None,
        stream: HeldStream | None,
        arrays: tuple[Any, ...],
        out: Any = None,
        compared: bool = True,
    ):
        self._calls = calls
        self._name = name
        self._call = call
        self._start = start
        self._stream = stream
        self._arrays = arrays  # the launch has only their addresses
        self._out = out
        self._compared = compared

    def __repr__(self) -> str:
        return f"<Plan: {self._words()}>"

    def __call__(self, stream: Any = None) -> Any:
        """Enqueue the call, or add it to the open group. Return its output array.

        Args:
            stream: the stream; None: the stream with which the plan was made.

        Raises:
            ArgumentError: the ``with`` block of :meth:`Communicator.group_init` has not
                ended, or ended with an exception.
        """
        calls, start = self._calls, self._start
        if start is None:
            raise ArgumentError(
                f"{self._name}: expected a plan whose with block has ended, got one "
                "before its end, or after an exception; call it after the block"
            )
        calls.thread.begin(self._name)
        try:
            if self._compared and calls.agreement.debug:
                checked = calls.agreement.checked
                chosen = checked("a plan", self._words, self._chosen, stream)
            else:
                calls.members.check()
                chosen = self._chosen(stream)
            start(chosen, self)
        finally:
            calls.thread.finish()
        return self._out

    def detached(self) -> "Detached":
        """Return the call without its arrays. It is not for debug mode or groups."""
        assert self._start is not None
        return Detached(self._calls, self._name, self._start)

    def _words(self, *_: object) -> str:
        return f"{self._name} of {self._call}"

    def _chosen(self, stream: Any) -> HeldStream | None:
        if stream is None:
            return self._stream
        try:
            return owned(stream)
        except ArgumentError as error:
            raise ArgumentError(
                f"{self._name}: {error}; a plan keeps its arrays: copy into them, or "
                "make another plan for other arrays"
            ) from None


class Detached:
    """The call of a plan, which keeps no arrays.

    Its caller passes arrays at the places of those of the plan, of the same types and
    shapes. Other memory may have been mapped there since.
    """

    def __init__(self, calls: Calls, name: str, start: Start):
        self._calls = calls
        self._name = name
        self._start = start
        self._generation = calls.heap.generation

    def __call__(self, stream: HeldStream, *arrays: Any) -> bool:
        """Enqueue the call, unless symmetric memory was unmapped since it was packed.

        Returns:
            Whether it was enqueued.
        """
        calls = self._calls
        if calls.heap.generation != self._generation:
            return False
        calls.thread.begin(self._name)
        try:
            calls.members.check()
            self._start(stream, *arrays)
        finally:
            calls.thread.finish()
        return True


def plan(calls: Calls, given: Invocation[Operation]) -> Plan:
    """Prepare a call of an operation, and return its plan."""
    what = given.operation.name
    with calls.thread.alone(what):
        launch, out, chosen, about = calls.prepared(given)
    start = partial(calls.enqueuer.run, about, launch)
    return Plan(
        calls, what, about.words, start, chosen, (given.x, out, *given.args), out
    )


def of_messages(calls: Calls, given: messages.MessageCall) -> Plan:
    """Prepare a ``send``, ``recv`` or ``sendrecv``, and return its plan."""
    what = given.operation.name
    with calls.thread.alone(what), calls.staging.apart():
        return _packed(calls, what, messages.prepared(calls, given), compared=False)


def of_collective(calls: Calls, given: vector_forms.FormCall) -> Plan:
    """Prepare a collective that consists of messages, and return its plan."""
    what = given.operation.name
    with calls.thread.alone(what), calls.staging.apart():
        return _packed(calls, what, vector_forms.prepared(calls, given), compared=True)


def _packed(calls: Calls, what: str, call: Prepared, compared: bool) -> Plan:
    if call.transfers.complete:  # otherwise the plan is for a group
        calls.agreement.made(what, call.packed, calls.binder.messages, what)
    bare = call._replace(keep=(), result=None)

    def start(stream: HeldStream, *keep: Any) -> None:
        calls.transfer(what, bare._replace(stream=stream, keep=keep))

    words = call.transfers.words or "messages"
    return Plan(
        calls,
        what,
        words,
        start,
        stream=call.stream,
        arrays=call.keep,
        out=call.result,
        compared=compared,
    )


def of_shards(calls: Calls, given: Invocation[Operation]) -> Plan:
    """Prepare a ``reduce_scatter_v``, and return its plan."""
    what = given.operation.name
    with calls.thread.alone(what):
        about, launch, chosen, out = vector_forms.shards(calls, given)
    start = partial(calls.enqueuer.run, about, launch)
    return Plan(calls, what, about.words, start, chosen, (given.x, out), out)


@contextmanager
def of_group(calls: Calls) -> Iterator[Plan]:
    """Prepare the calls within a ``with`` block; see Communicator.group_init."""
    made = Plan(calls, "group", "calls", None, None, (), compared=False)

    def fill(found: Pending) -> None:
        if found.stream is not None:
            transfers = messages.transfers_of(calls, found)
            calls.agreement.made(
                "group", transfers.packed, calls.binder.messages, "group"
            )
        made._arrays = tuple(found.kept)
        made._start = partial(messages.start_group, calls, found)

    with calls.staging.apart(), messages.collecting(calls, "group_init", fill):
        yield made
