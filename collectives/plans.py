"""Plans: calls that are checked and packed once, and called many times.

The methods that make plans are made from those that make calls (:func:`init_of`). They
run with :class:`Planning` in the place of ``Calls``, which keeps a call instead of
enqueueing it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, Concatenate, ParamSpec

from numba_symm.collectives import messages
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.collectives.invocation import Cache, Invocation
from numba_symm.collectives.staging import BoundCall, Pending
from numba_symm.errors import ArgumentError
from numba_symm.gpu import entry, streams

P = ParamSpec("P")

Start = Callable[..., None]
"""Makes a call that is not plain on a stream. What follows is kept until then."""


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
        words: str,
        start: Start | None,
        stream: int | None,
        arrays: tuple[Any, ...],
        out: Any = None,
        compared: bool = True,
        call: PackedCall | None = None,
    ):
        self._calls = calls
        self._name = name
        self._call_words = words
        self._start = start
        self._stream = stream
        self._arrays = arrays  # the launch has only their addresses
        self._out = out
        self._compared = compared
        self.call = call

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
        calls, call, chosen, start = self._calls, self.call, self._stream, self._start
        if stream is not None:
            try:
                chosen = streams.handle_or_default(stream)
            except ArgumentError:
                call = None  # what is called below raises it
        if call is not None and chosen is not None:
            status = call.enqueue(chosen)
            if status == entry.DONE or calls.made(status, call, chosen, self):
                return self._out
        if start is None:
            raise ArgumentError(
                f"{self._name}: expected a plan whose with block has ended, got one "
                "before its end, or after an exception; call it after the block"
            )
        with calls.thread.alone(self._name):
            if self._compared and calls.agreement.debug:
                checked = calls.agreement.checked
                chosen = checked("a plan", self._words, self._chosen, stream)
            else:
                calls.members.check()
                chosen = self._chosen(stream)
            start(chosen, self)
        return self._out

    def _words(self, *_: object) -> str:
        return f"{self._name} of {self._call_words}"

    def _chosen(self, stream: Any) -> int | None:
        if stream is None:
            return self._stream
        try:
            return streams.handle_or_default(stream)
        except ArgumentError as error:
            raise ArgumentError(
                f"{self._name}: {error}; a plan keeps its arrays: copy into them, or "
                "make another plan for other arrays"
            ) from None


class Planning:
    """The calls of a communicator, to a method that is to make a plan."""

    def __init__(self, calls: Calls):
        self._real = calls
        self.memory = Cache(0)  # a call that is remembered is not made either

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    operate = Calls.operate  # ends in :meth:`call`, as nothing is remembered

    def call(self, given: Invocation[Any], key: Any = None) -> Plan:
        """Return the plan of a call; the arguments are those of ``Calls``."""
        calls, what, call = self._real, given.operation.name, None
        made = calls.prepared(given)
        if isinstance(made, BoundCall):
            call = made.call
        elif made.transfers.complete:  # otherwise the plan is for a group
            call = calls.agreement.made(what, calls.packed_messages, what, made)
        bare = made._replace(keep=(), result=None)

        def start(stream: int, *keep: Any) -> None:
            calls.enqueue(what, bare._replace(stream=stream, keep=keep))

        words = made.words
        return Plan(
            calls,
            what,
            words or "messages",
            start,
            stream=made.stream,
            arrays=made.keep,
            out=made.result,
            compared=bool(words),
            call=call,
        )


def init_of(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[Concatenate[Any, P], Plan]:
    """Return the method that makes a plan of what a method of a communicator calls."""
    name = f"{method.__name__}_init"
    made = FunctionType(  # whose errors for arguments have its own name
        method.__code__, method.__globals__, name, method.__defaults__
    )
    made.__kwdefaults__ = method.__kwdefaults__
    made.__qualname__ = f"Communicator.{name}"

    def init(self: Any, /, *args: P.args, **options: P.kwargs) -> Plan:
        calls: Calls = self._calls
        with calls.thread.alone(method.__name__), calls.staging.apart():
            planning = SimpleNamespace(_calls=Planning(calls))
            return made(planning, *args, **options)  # type: ignore[no-any-return]

    made.__annotations__ = {**method.__annotations__, "return": Plan}
    made.__module__, made.__doc__ = (
        method.__module__,
        _DOCSTRING.format(method.__name__),
    )
    return functools.update_wrapper(init, made)


_DOCSTRING = """Return a plan of :meth:`{0}`, which makes the call when it is called.

        The arguments and errors are those of :meth:`{0}`. ``plan()``, or
        ``plan(stream=…)``, makes the call; the ranks that must make it together are
        those that must call :meth:`{0}` together. MPI calls plans persistent
        operations. To make a plan is collective only in debug mode.
        """


@contextmanager
def of_group(calls: Calls) -> Iterator[Plan]:
    """Prepare the calls within a ``with`` block; see Communicator.group_init."""
    made = Plan(calls, "group", "calls", None, None, (), compared=False)

    def fill(found: Pending) -> None:
        if found.stream is not None:
            call = messages.prepared_group(calls, found)
            packed = calls.agreement.made("group", calls.packed_messages, "group", call)
            if not found.launches:
                made._stream, made.call = found.stream, packed
        made._arrays = tuple(found.kept)
        made._start = partial(messages.start_group, calls, found)

    with calls.staging.apart(), messages.Group(calls, "group_init", fill):
        yield made
