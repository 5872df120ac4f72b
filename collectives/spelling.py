"""Errors for calls in another library's spelling, without a cost for correct calls."""

import inspect
from typing import Any


def spelled(methods: type) -> type:
    """Return the class; have Python's errors for a method's arguments begin with these.

    Python raises them before a method runs, with its qualified name. A parameter that
    takes what is misplaced would cost every call 6 ns.
    """
    for name, method in vars(methods).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            function = inspect.unwrap(method)
            first, named = _parameters(function)
            if named:
                given = ", ".join((*first, *named))
                after = f" after {first[-1]}" if first else ""
                words = f"Communicator.{name}({given}), by keyword{after}: {name}"
                function.__qualname__ = words
    return methods


def _parameters(function: Any) -> tuple[list[str], list[str]]:
    """Return a method's parameters, then those by keyword: ``x``, ``op='sum'``."""
    _, *found = inspect.signature(function).parameters.values()  # without self
    first = [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = [
        f"{each.name}={'…' if each.default is each.empty else repr(each.default)}"
        for each in found
        if each.kind is each.KEYWORD_ONLY
    ]
    return first, named


class _Misspelled:
    """An attribute that a communicator lacks; the error has the library's name of it.

    In Python 3.11, a ``__getattr__`` would make every call 50 ns slower.
    """

    def __init__(self, name: str, right: str):
        self._name = name
        self._right = right

    def __get__(self, instance: Any, kind: type) -> Any:
        right, given = getattr(kind, self._right, None), ""
        if inspect.isfunction(right):
            first, named = _parameters(right)
            given = f"({', '.join((*first, *named))})"
        raise AttributeError(
            f"Communicator.{self._name}: expected a name of this library, got "
            f"another's; write comm.{self._right}{given}, or make the call of a "
            "numba_symm.mpi.Comm, which has mpi4py's names"
        )


class OthersNames:
    """A base of communicators: the names that other libraries have for attributes."""

    def __dir__(self) -> list[str]:
        """Return the names of attributes without those of others."""
        others = vars(OthersNames)
        names = super().__dir__()
        return [n for n in names if not isinstance(others.get(n), _Misspelled)]


_CALLS = {
    "barrier": "barrier",
    "broadcast": "bcast",
    "reduce": "reduce",
    "all_reduce": "allreduce",
    "scan": "scan",
    "exscan": "exscan",
    "gather": "gather",
    "gather_v": "gatherv",
    "scatter": "scatter",
    "scatter_v": "scatterv",
    "all_gather": "allgather",
    "all_gather_v": "allgatherv",
    "all_to_all": "alltoall",
    "all_to_all_v": "alltoallv",
    "reduce_scatter": "reduce_scatter_block",
    "reduce_scatter_v": "reduce_scatter",
    "neighbor_all_gather": "neighbor_allgather",
    "neighbor_all_to_all": "neighbor_alltoall",
    "send": "send",
    "recv": "recv",
    "sendrecv": "sendrecv",
    "isend": "isend",
    "irecv": "irecv",
}
"""By method, mpi4py's name of it in lower case."""

_NAMES = {"split": "split", "dup": "dup", "close": "free"}
_NAMES |= {"rank": "get_rank", "size": "get_size"}


def _others(right: str) -> list[str]:
    """Return the names that mpi4py and NCCL have for an attribute."""
    first, *rest = right.split("_")
    camel = first + "".join(map(str.capitalize, rest))
    name = _CALLS.get(right) or _NAMES[right]
    nonblocking = [f"I{name}"] if right in _CALLS and name[0] != "i" else []
    return [*nonblocking, name, name.capitalize(), camel]


for _right in (*_CALLS, *_NAMES):
    for _name in set(_others(_right)) - {*_CALLS, *_NAMES}:
        setattr(OthersNames, _name, _Misspelled(_name, _right))
