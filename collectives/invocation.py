"""A call as one value: the arguments of a public method."""

from typing import Any, Generic, NamedTuple, TypeVar

Kind = TypeVar("Kind")

NONE: tuple[Any, ...] = ()
"""No arguments of an epilogue."""


class Invocation(NamedTuple, Generic[Kind]):
    """The arguments of one call, as its caller passed them.

    The public method makes it. The checks, the agreement of the ranks, the choice of
    the algorithm, the memory of former calls and the launch read it. A step that
    replaces an argument, such as a strided array, passes on a changed copy.

    Attributes:
        operation: what is called.
        x: the input.
        out: the output; None: a new array.
        stream: the stream; None: that of the arrays.
        op: the operator, if the operation reduces.
        algorithm: its name; None: the fastest.
        root: the root, if the operation has one.
        wire: of a sum, how its elements cross the links; None: as they are.
        epilogue: the user's function of each element of the result; None: there is
            none.
        args: what the function takes besides: arrays and numbers.
        row_sum: a function whose results are summed over each row for it, or None.
        second: the output of the second result of such a function, or None.
        leaves: whether the first axis of ``x`` is leaves; their number, once checked.
        tables: of a v form, its counts and displacements: one pair, or two.
        peers: of messages, whom this rank sends to, and whom it receives from.
        count: of a message that may be shorter than ``out``, where its number of
            elements is stored.
    """

    operation: Kind
    x: Any = None
    out: Any = None
    stream: Any = None
    op: Any = "sum"
    algorithm: str | None = None
    root: Any = None
    wire: Any = None
    epilogue: Any = None
    args: Any = NONE
    row_sum: Any = None
    second: Any = None
    leaves: Any = False
    tables: tuple[Any, ...] = ()
    peers: tuple[Any, ...] = ()
    count: Any = None


OPTIONS = slice(4, 13)
"""The fields that are options. A call is remembered by its options and its arrays."""

NO_ROOT: tuple[Any, ...] = None, None, None, NONE, None, None, False
"""The options from the root on of a call that has none of them."""

NO_WIRE = NO_ROOT[1:]
"""The options after the root of a call that has none of them."""

ROOT = 2
"""Which of the options is the root."""
