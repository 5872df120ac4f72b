"""The collective operations, and reductions of pairs of value and index.

Reductions of pairs of a value and an index, which find the place of an extreme.

A pair of 8 bytes is reduced as one integer, and one of 16 bytes as two words, so all
algorithms apply to them. The operator takes the pairs apart.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np
from numba.core.errors import NumbaError

from numba_symm import dtypes
from numba_symm.arguments import meant
from numba_symm.collectives import select
from numba_symm.collectives.invocation import (
    Invocation,
    are_apart,
    check_order,
    check_shards,
)
from numba_symm.collectives.kernels import (
    chunked,
    copied_exchange,
    direct,
    one_shot,
    two_shot,
    two_shot_broadcast,
)
from numba_symm.collectives.protocols import copies
from numba_symm.collectives.protocols.binding import (
    Bind,
    BindFallback,
    Call,
    Endpoint,
    Enqueue,
)
from numba_symm.collectives.protocols.exchanges import Exchange, Output
from numba_symm.collectives.protocols.mailboxes import TRANSPORTS
from numba_symm.collectives.protocols.partition import chunks_of
from numba_symm.collectives.protocols.workspace import TWO_SHOT
from numba_symm.collectives.select import GENERAL, Algorithm, Arrays, Choices, fill_in
from numba_symm.device.arithmetic import CODECS
from numba_symm.device.intrinsics import bits_of_f64, device_function, word_of
from numba_symm.dtypes import Element, Op, UserOperator
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays
from numba_symm.gpu.arrays import ArrayView
from numba_symm.launch import failures
from numba_symm.launch.devices import GPU

_VALUES = (
    "float32",
    "float64",
    *(f"{kind}{n}" for kind in ("int", "uint") for n in (16, 32, 64)),
)


class _Words(Element):
    """Two words, which may have any bits."""

    @property
    def floating(self) -> bool:
        """Whether all ones may stand for an empty mailbox; not of an index."""
        return False


_ELEMENTS = {
    8: Element(np.dtype(np.int64), np.dtype(np.int64)),
    16: _Words(np.dtype(np.complex128), np.dtype(np.complex128)),
}


def reduced(x: ArrayView, op: str, what: str) -> tuple[Element, UserOperator, int]:
    """Return the type and the operator for pairs, and the number of pairs.

    Args:
        x: an array of pairs, or whose last axis has a value and an index.
        op: ``"minloc"`` or ``"maxloc"``.
        what: the call.

    Raises:
        ArgumentError: its elements are not pairs.
    """
    fields = x.dtype.fields
    size, count = x.dtype.itemsize, x.size
    kinds: list[np.dtype[Any]] = []
    if fields is None and x.shape and x.shape[-1] == 2 and x.order == "C":
        kinds, size, count = [x.dtype] * 2, 2 * size, count // 2
    elif fields is not None and len(fields) == 2 and size in _ELEMENTS:
        places = [fields[name][1] for name in x.dtype.names or ()]
        if places == [0, size // 2]:
            kinds = [fields[name][0] for name in x.dtype.names or ()]
    if size not in _ELEMENTS or not kinds or any(k.name not in _VALUES for k in kinds):
        raise ArgumentError(
            f"{what}: expected pairs of a value and an index for op={op!r}, got "
            f"{x.dtype} of shape {x.shape}; pass 8 or 16 bytes a pair, such as "
            "np.dtype([('value', 'f4'), ('index', 'i4')]), or two columns of a type "
            "of 4 or 8 bytes"
        )
    value, index = (kind.name for kind in kinds)
    return _ELEMENTS[size], _operator(op, value, index, size), count


@functools.cache
def _operator(op: str, value: str, index: str, size: int) -> UserOperator:
    """Return the operator for pairs of ``size`` bytes of these types."""
    replaces = _replacing(op == "minloc")
    value_of, index_of = _reader(value), _reader(index)

    def of_word(a: Any, b: Any) -> Any:
        first, second = value_of(a), value_of(b)
        later = replaces(first, index_of(a >> 32), second, index_of(b >> 32))
        return b if later else a

    def of_words(a: Any, b: Any) -> Any:
        first, second = value_of(bits_of_f64(a.real)), value_of(bits_of_f64(b.real))
        here, there = index_of(bits_of_f64(a.imag)), index_of(bits_of_f64(b.imag))
        return b if replaces(first, here, second, there) else a

    function = cast(FunctionType, of_word if size == 8 else of_words)
    # The ranks compare it; the digest of the body has only the types of what it calls.
    function.__qualname__ = f"{op} of {value} and {index}"
    return UserOperator(function, commutative=True)


def _reader(kind: str) -> Callable[[int], Any]:
    """Return a device function that returns the number in a word's lowest bits."""
    number, _ = CODECS[kind]
    width = 8 * np.dtype(kind).itemsize
    mask = (1 << width) - 1 if width < 64 else -1

    @device_function
    def read(word: int) -> Any:
        return number(word_of(word) & mask)

    return read


def _replacing(lowest: bool) -> Callable[..., bool]:
    """Return a device function that checks whether the second pair wins.

    NaN is less, and greater, than all numbers, as in NumPy's argmin and argmax. Of
    equal values, the one with the lower index remains.
    """

    @device_function
    def replaces(value: Any, index: Any, other: Any, place: Any) -> bool:
        beats = other < value if lowest else other > value
        if value != value or other != other:
            beats = value == value  # only the other one is NaN
        equal = other == value or (other != other and value != value)
        return bool(beats or (equal and place < index))

    return replaces


class Operation(NamedTuple):
    """One operation.

    Attributes:
        name: the name of the communicator's method.
        exchange: what a rank sends, and what it does with the vectors of all ranks.
        shape: ``(input, ranks)`` returns the output's shape.
        algorithms: by name, ``GENERAL`` among them.
        limits_of: the operation whose limits in ``select.py`` choose the algorithm.
        without: the operators that are not defined for it.
        reduces: whether it has an operator; without one, it accepts any dtype.
        rooted: whether one rank is the root.
        at_root: whether only the root has an output.
        collective: whether all ranks make the same calls.
    """

    name: str
    exchange: Exchange
    shape: Callable[[ArrayView, int], tuple[int, ...]]
    algorithms: dict[str, Algorithm]
    limits_of: str
    without: tuple[str, ...]
    reduces: bool
    rooted: bool
    at_root: bool
    collective: bool = True

    def prepare(self, calls: Any, given: "Invocation[Operation]") -> Any:
        """Check and bind a call; see ``Calls.bound``."""
        return calls.bound(given)

    @property
    def in_place(self) -> bool:
        """Whether the output is always the input, which the root only reads."""
        return self.rooted and not self.at_root

    def shards(self, size: int) -> int:
        """Return the number of shards of the input, for a number of ranks."""
        return size if self.exchange.sends_shards else 1

    def check(self, op: Op) -> None:
        """Refuse an operator that is not defined for the operation."""
        if op in self.without:
            raise ArgumentError(
                f"{self.name}: op={op!r} is not defined, because each rank's result "
                "reduces another number of inputs; use 'sum' and divide"
            )

    def check_algorithm(self, algorithm: Any) -> None:
        """Refuse a value that is not the name of an algorithm."""
        if not isinstance(algorithm, str) or algorithm not in self.algorithms:
            known = ", ".join(repr(name) for name in self.algorithms)
            raise ArgumentError(
                f"{self.name}: expected algorithm to be {known}, or None for the "
                f"fastest one, got {algorithm!r}{meant(algorithm, self.algorithms)}"
            )

    def chosen(
        self,
        algorithm: str | None,
        nbytes: int,
        size: int,
        element: Element,
        choices: Choices,
    ) -> str:
        """Return ``algorithm``, or refuse it for this type; for None, choose one."""
        if algorithm is None:
            return select.fastest(self.limits_of, nbytes, size, element, choices)
        if self.algorithms[algorithm].floats and not element.floating:
            others = [name for name, made in self.algorithms.items() if not made.floats]
            raise ArgumentError(
                f"{self.name}: expected floats for algorithm={algorithm!r}, got "
                f"{element.name}; use one of {', '.join(map(repr, others))}"
            )
        return algorithm

    def work(
        self,
        given: "Invocation[Operation]",
        source: ArrayView,
        target: ArrayView | None,
        end: Endpoint,
        gpu: GPU,
    ) -> tuple[str, Call | None]:
        """Return the algorithm, and the call to bind; None for a call without elements.

        Args:
            given: the call, whose root and operator were checked.
            source: the input.
            target: the output; None on a rank that has none.
            end: this rank's end of the communicator.
            gpu: this rank's GPU.

        Raises:
            ArgumentError: an argument is wrong.
        """
        op, root, shards = given.op, given.root or 0, self.shards(end.size)
        if self.reduces:
            self.check(op)
            if isinstance(op, str) and op in dtypes.LOCATED:
                element, op, count = reduced(source, op, self.name)
            else:
                element, count = dtypes.element(source.dtype, self.name), source.size
                dtypes.check(op, element, self.name)
                if not SIMULATED:
                    found = gpu.compute_capability, gpu.name, self.name
                    dtypes.check_capability(element, *found)
            count //= shards
        else:
            element, count = dtypes.moved(source.dtype, source.size // shards)
        if target is not None:
            cast = given.epilogue is not None
            self.check_output(source, target, end.rank, end.size, cast)
            if target.readonly and not (self.in_place and root == end.rank):
                raise ArgumentError(
                    f"{self.name}: expected a writable out, got a read-only one"
                )
        nbytes = source.nbytes // shards
        name = self.chosen(given.algorithm, nbytes, end.size, element, end.choices)
        if count == 0:
            return name, None
        for view in filter(None, (source, target)):
            arrays.check_device(view, gpu.ordinal, self.name)
        address = 0 if target is None else target.address
        return name, Call(source.address, address, count, element, op, root)

    def check_output(
        self,
        source: ArrayView,
        target: ArrayView,
        rank: int,
        size: int,
        cast: bool = False,
    ) -> None:
        """Refuse an output that does not fit the input.

        ``cast`` is whether the output may have another dtype.
        """
        what = self.name
        arrays.dense(target, f"{what}: out")
        wanted = math.prod(self.shape(source, size))
        other = target.dtype != source.dtype
        if (other and not cast) or target.size != wanted:
            raise ArgumentError(
                f"{what}: expected out of {wanted} {source.dtype.name} for x of "
                f"{source.size}, got {target.size} {target.dtype.name}; pass such an "
                "array"
            )
        if target.order != source.order:
            raise ArgumentError(
                f"{what}: expected x and out in the same order, so that their elements "
                f"correspond, got {source.order} order and {target.order} order"
            )
        # In place, the smaller of the two is this rank's shard of the larger one.
        small, large = sorted((source, target), key=lambda view: view.nbytes)
        place = large.address + (rank * small.nbytes if large.size > small.size else 0)
        if not are_apart(small, large) and (other or small.address != place):
            raise ArgumentError(
                f"{what}: expected out to be x, this rank's shard of it, or apart from "
                "it, got arrays that overlap otherwise"
            )

    def bind(self, algorithm: str, end: Endpoint, call: Call) -> Enqueue:
        """Pack a call by that algorithm, or by ``GENERAL``; a rank alone copies."""
        alone = end.size == 1 and self.exchange.output.used(0, 1, 0)
        if alone and not dtypes.makes_truth(call.op, call.element):
            return copies.bind_alone(end, call)
        found = self.algorithms[algorithm]
        if not found.suits(end.size):
            found = self.algorithms[GENERAL]
        with compiling((call.op, call.element), self.name):
            return found.bind(end, call)


@contextmanager
def compiling(constants: Sequence[Any], what: str) -> Iterator[None]:
    """Raise ArgumentError if Numba cannot compile a user's operator.

    Args:
        constants: the kernel's, or those of a call, which may have a user's operator.
        what: the operation.
    """
    try:
        yield
    except NumbaError as error:
        for op in constants:
            if isinstance(op, dtypes.UserOperator):
                (kind,) = (each for each in constants if isinstance(each, Element))
                raise ArgumentError(
                    f"{what}: expected a function that numba.cuda compiles for two "
                    f"{kind.accumulate.name}, got op={op}: {error}"
                ) from error
        raise


def _same_shape(x: ArrayView, size: int) -> tuple[int, ...]:
    return x.shape


def _gathered_shape(x: ArrayView, size: int) -> tuple[int, ...]:
    check_order(x, "all_gather: x")
    return (size, *x.shape)


def _exchanged_shape(x: ArrayView, size: int) -> tuple[int, ...]:
    check_shards(x, size, "all_to_all")
    return x.shape


def _scattered_shape(x: ArrayView, size: int) -> tuple[int, ...]:
    check_shards(x, size, "reduce_scatter")
    return (x.shape[0] // size, *x.shape[1:])


def _operation(
    name: str,
    sends_shards: bool,
    output: Output,
    shape: Callable[[ArrayView, int], tuple[int, ...]],
    algorithms: dict[str, Algorithm] | None = None,
    words: str = "",
    limits_of: str = "",
    without: tuple[str, ...] = (),
) -> Operation:
    """Return an operation.

    Args:
        name: the name of the communicator's method.
        sends_shards: as in ``Exchange``.
        output: what a rank does with the vectors of all ranks.
        shape: as in ``Operation``.
        algorithms: all but the one-shot ones, which each operation has; None:
            ``GENERAL``, and ``copy_engine`` if nothing is reduced.
        words: what the kernels of the exchange wait for, in an error; "": ``name``.
        limits_of: as in ``Operation``; "": ``name``.
        without: as in ``Operation``.
    """
    kind = Exchange(sends_shards, output, failures.of_operation(words or name))
    found = {
        f"one_shot_{transport}": _mailed(
            "one_shot",
            transport,
            kind.operation,
            partial(one_shot.bind, transport, kind),
        )
        for transport in kind.transports
    }
    if algorithms is None:
        general = partial(chunked.bind, kind, False)
        algorithms = {GENERAL: Algorithm(general, (kind.operation,), "chunked")}
        if not output.reduces:
            algorithms["copy_engine"] = _copied(name, kind, general)
    return Operation(
        name,
        kind,
        shape,
        found | algorithms,
        limits_of or name,
        without,
        reduces=output.reduces,
        rooted=output.rooted,
        at_root=output is Output.AT_ROOT,
    )


def _copied(
    name: str, kind: Exchange, general: BindFallback, most: float = math.inf
) -> Algorithm:
    """Return the algorithm by copy engines; ``general`` binds what they refuse."""
    number = failures.of_operation(f"{name} (copy_engine)")
    gathers = kind.output is Output.SHARDS and not kind.sends_shards
    return Algorithm(
        partial(copied_exchange.bind, kind, number, general),
        waits=(number,),
        region="direct",
        most=most,
        x=Arrays.AT_ONE_PLACE,
        out=Arrays.AT_ONE_PLACE if gathers else Arrays.ANYWHERE,
        either=gathers,
        in_place=not kind.sends_shards,
        copies=True,
    )


def _mailed(
    shots: str, transport: str, number: int, bind: Bind, fewest: int = 2
) -> Algorithm:
    """Return the algorithm by mailboxes of a transport, which waits for ``number``."""
    floats = TRANSPORTS[transport].floats
    region = f"{shots}_{transport}"
    return Algorithm(bind, (number,), region, transport, fewest, floats=floats)


def _direct(
    operation: Operation,
    number: int,
    out: Arrays = Arrays.ANYWHERE,
    either: bool = False,
) -> Algorithm:
    """Return the algorithm between ranks' own arrays, which waits for ``number``."""
    kind = operation.exchange._replace(operation=number)
    fallback = cast(BindFallback, operation.algorithms[GENERAL].bind)
    return Algorithm(
        partial(direct.bind, kind, fallback),
        (number,),
        "direct",
        x=Arrays.SYMMETRIC,
        out=out,
        either=either,
        in_place=kind.output.reduces or not kind.sends_shards,
    )


_TWO_SHOT = {
    f"two_shot_{transport}": _mailed(
        "two_shot", transport, failures.TWO_SHOT, partial(two_shot.bind, transport)
    )
    for transport in TWO_SHOT
}


def _through(output: Output, number: int) -> Callable[..., Enqueue]:
    """Return what binds an operation in chunks through owners."""
    return partial(chunked.bind, Exchange(False, output, number), True)


def _all_reduce_in_chunks(end: Endpoint, call: Call, fallback_for: int = 0) -> Enqueue:
    """Bind an all-reduce in chunks."""
    return _through(Output.REDUCED, failures.CHUNKED)(end, call, fallback_for)


_reduce_through_owners = _through(Output.AT_ROOT, failures.CHUNKED_REDUCE)
_broadcast_in_chunks = _through(Output.OF_ROOT, failures.CHUNKED_BROADCAST)


def _reduce_in_chunks(end: Endpoint, call: Call, fallback_for: int = 0) -> Enqueue:
    """Bind a reduce in chunks as this number of ranks and chunks takes least time."""
    if end.size > 2:
        return _reduce_through_owners(end, call, fallback_for)
    chunks = chunks_of(call.vectors, end)
    if chunks.number == 1 and not fallback_for:
        return chunked.bind(REDUCE.exchange, False, end, call)
    # More chunks take less time if the link is used in both directions.
    return _all_reduce_in_chunks(end, call, fallback_for)


ALL_REDUCE = _operation(
    "all_reduce",
    False,
    Output.REDUCED,
    _same_shape,
    {
        **_TWO_SHOT,
        GENERAL: Algorithm(_all_reduce_in_chunks, (failures.CHUNKED,), "chunked"),
    },
    words="all_reduce (one_shot)",
)
ALL_GATHER = _operation("all_gather", False, Output.SHARDS, _gathered_shape)
ALL_TO_ALL = _operation("all_to_all", True, Output.SHARDS, _exchanged_shape)
REDUCE_SCATTER = _operation("reduce_scatter", True, Output.REDUCED, _scattered_shape)
SCAN = _operation("scan", False, Output.UP_TO_THIS, _same_shape, without=("avg",))
EXSCAN, REVERSE_SCAN = (
    _operation(name, False, output, _same_shape, limits_of="scan", without=("avg",))
    for name, output in (
        ("exscan", Output.BEFORE_THIS),
        ("reverse_scan", Output.FROM_THIS),
    )
)
REDUCE = _operation(
    "reduce",
    False,
    Output.AT_ROOT,
    _same_shape,
    {
        **_TWO_SHOT,
        GENERAL: Algorithm(
            _reduce_in_chunks,
            (
                failures.CHUNKED_REDUCE,
                failures.CHUNKED,
                failures.of_operation("reduce"),
            ),
            "chunked",
        ),
    },
)
REDUCE_SHARD = REDUCE._replace(name="reduce_scatter_v")
"""The reduction of one rank's shard in a ``reduce_scatter_v``."""
BROADCAST = _operation(
    "broadcast",
    False,
    Output.OF_ROOT,
    _same_shape,
    {
        "two_shot_marked": _mailed(
            "two_shot",
            "marked",
            failures.TWO_SHOT_BROADCAST,
            two_shot_broadcast.bind,
            fewest=3,
        ),
        GENERAL: Algorithm(
            _broadcast_in_chunks, (failures.CHUNKED_BROADCAST,), "chunked"
        ),
    },
)
ALL_REDUCE.algorithms["direct"] = _direct(
    ALL_REDUCE, failures.ALL_REDUCE_DIRECT, out=Arrays.SYMMETRIC
)
ALL_GATHER.algorithms["direct"] = _direct(
    ALL_GATHER, ALL_GATHER.exchange.operation, out=Arrays.SYMMETRIC, either=True
)
ALL_TO_ALL.algorithms["direct"] = _direct(
    ALL_TO_ALL, ALL_TO_ALL.exchange.operation, out=Arrays.SYMMETRIC, either=True
)
REDUCE_SCATTER.algorithms["direct"] = _direct(REDUCE_SCATTER, failures.REDUCE_SCATTER)
REDUCE.algorithms["direct"] = _direct(
    REDUCE, failures.REDUCE_DIRECT, out=Arrays.SYMMETRIC
)
BROADCAST.algorithms["direct"] = _direct(BROADCAST, failures.BROADCAST_DIRECT)
BROADCAST.algorithms["copy_engine"] = _copied(
    "broadcast", BROADCAST.exchange, _broadcast_in_chunks, most=2
)
OPERATIONS = {
    operation.name: operation
    for operation in (
        ALL_REDUCE,
        ALL_GATHER,
        ALL_TO_ALL,
        REDUCE_SCATTER,
        SCAN,
        EXSCAN,
        REVERSE_SCAN,
        REDUCE,
        BROADCAST,
    )
}
"""By name."""


def with_algorithms(communicator: type) -> type:
    """Fill in the algorithms in the docstrings of a class with the operations."""
    for name, operation in OPERATIONS.items():
        method = vars(communicator)[name]
        if "{algorithms}" in (method.__doc__ or ""):  # python -OO drops docstrings
            method.__doc__ = fill_in(method.__doc__, operation.algorithms)
    return communicator
