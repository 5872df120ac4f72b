"""The kernels that calls need, of all sizes.

The module binds calls, as ``calls.py`` does, with arrays of many sizes and alignments.
So the kernels follow from the table of operations, the limits of ``select.py`` and the
algorithms. It compiles and loads nothing, and needs no GPU.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from numba_symm import dtypes
from numba_symm.arguments import meant
from numba_symm.collectives import operations, select
from numba_symm.collectives.binder import Binder
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.kernels import pack, transfer
from numba_symm.collectives.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    OPERATIONS,
    REDUCE_SCATTER,
    REDUCE_SHARD,
    Operation,
    compiling,
)
from numba_symm.collectives.protocols.binding import Call, Carried, Endpoint
from numba_symm.collectives.protocols.credit import Message
from numba_symm.collectives.protocols.partition import LINE
from numba_symm.collectives.protocols.workspace import (
    HELD,
    MAX_BLOCKS,
    VECTOR,
    divide_up,
)
from numba_symm.collectives.select import Choices
from numba_symm.dtypes import Element, Op
from numba_symm.errors import ArgumentError
from numba_symm.gpu import loads
from numba_symm.gpu.arrays import ArrayView
from numba_symm.gpu.kernels import (
    Kernel,
    bound,
    capability,
    key_of,
    key_on_this_gpu,
    load_cached,
    were_compiled,
)
from numba_symm.memory import pads

DTYPES = "float32", "bfloat16"
"""The element types of the default set."""

MESSAGES = (
    *("send", "recv", "sendrecv", "gather", "scatter"),
    *("all_gather_v", "gather_v", "scatter_v", "all_to_all_v"),
    *("neighbor_all_gather", "neighbor_all_to_all"),
)
"""Calls that are messages, at most one in each direction of a pair."""

REQUESTS = "isend", "irecv"
"""Messages that run beside all other calls."""

GAPS = "gaps"
"""Strided arrays, of a few axes, in any call."""

DIGESTS = "digest", "check_equal"
"""Calls that compare arrays."""

COUNTS = "counts"
"""Calls of ``all_gather_v`` and ``all_to_all_v`` with counts on the GPU."""

EXPERTS = "experts"
"""The calls of a mixture of experts, of the dtypes that it can have."""

CODED = {"wire_int8": "int8", "wire_fp8": "fp8"}
"""Quantized sums, by the name of the codes."""

LEAVES = "leaves"
"""Reductions of leaves, up to 64 of a rank, or any number of more."""

EXACT = "sum", "dot", "norm"
"""Sums that do not depend on the ranks, of the dtypes that they can have."""

SIGNALS = "signals"
"""The methods of ``SymmetricMemory`` that launch kernels."""

_OPERATIONS = {**OPERATIONS, REDUCE_SHARD.name: REDUCE_SHARD}

NAMES = (
    *(*_OPERATIONS, *MESSAGES, *REQUESTS, *DIGESTS, *EXACT),
    *("barrier", GAPS, COUNTS, EXPERTS, *CODED, LEAVES, SIGNALS),
)
"""What kernels can be listed for."""

_FAR = 1 << 40  # an output's address, apart from the input's


class _Anywhere(NamedTuple):
    """Symmetric memory that every rank sees at the same address."""

    addresses: tuple[int, ...]

    @property
    def seen(self) -> tuple[int, ...]:
        return self.addresses


def endpoint(
    size: int,
    multiprocessors: int = MAX_BLOCKS // HELD,
    choices: Choices = select.CHOICES,
) -> Endpoint:
    """Return an end of a communicator to bind calls with, which are not made.

    Args:
        size: the number of ranks.
        multiprocessors: as ``Endpoint.multiprocessors``.
        choices: as ``Endpoint.choices``.
    """
    return Endpoint(
        rank=0,
        size=size,
        guard=None,
        workspaces=tuple(range(size)),
        max_blocks=min(MAX_BLOCKS, HELD * multiprocessors),
        multiprocessors=multiprocessors,
        place=_anywhere(size),
        order=None,
        choices=choices,
    )


def _anywhere(size: int) -> Callable[[int, int], _Anywhere]:
    """Return a function for ``Endpoint.place``: all arrays are symmetric."""
    return lambda address, nbytes: _Anywhere((address,) * size)


def kernels(
    names: Sequence[str],
    given: Sequence[Any],
    ops: Sequence[Any],
    end: Endpoint,
    what: str,
    binder: Binder | None = None,
) -> list[Kernel]:
    """Return the kernels that calls need, each once.

    Args:
        names: the calls, some of ``NAMES``.
        given: the dtypes of their arrays.
        ops: the operators of those that reduce.
        end: an end of the communicator; the place of its symmetric memory is not used.
        what: the caller, for errors.
        binder: binds the calls of a communicator of several islands.

    Raises:
        ArgumentError: a name, dtype or operator is unknown, or an operator is one that
            none of the calls can have with any of the dtypes.
    """
    _check_names(names, what)
    numpy_dtypes = [dtypes.checked(each, what) for each in _several(given, what)]
    operators = [dtypes.reduction(op, what) for op in _several(ops, what)]
    binder = (binder or Binder(end)).placing(_anywhere)
    refused: list[list[ArgumentError | None]] = []  # of each reduction, by operator
    with bound() as found:
        for name in names:
            if name in _OPERATIONS:
                operation = _OPERATIONS[name]
                size = end.size
                if operation.reduces:
                    refused.append(
                        [
                            _bind_reduction(operation, numpy_dtypes, op, size, binder)
                            for op in operators
                        ]
                    )
                else:
                    for dtype in numpy_dtypes:
                        element, _ = dtypes.moved(dtype, 1)
                        _bind_sizes(operation, element, "sum", size, binder)
            elif name == "barrier":
                binder.barrier()
            elif name == GAPS:
                _bind_gaps()
            elif name in DIGESTS:
                pack.bind_digest(0, VECTOR, 0, 1, 1, 0)
            elif name == COUNTS:
                _bind_counts(numpy_dtypes, binder)
            elif name == EXPERTS:
                _bind_experts(numpy_dtypes, binder.end)
            elif name in CODED:
                _bind_coded(CODED[name], numpy_dtypes, end, binder)
            elif name == LEAVES:
                _bind_leaves(numpy_dtypes, operators, end, binder)
            elif name in EXACT:
                _bind_exact(name, numpy_dtypes, end, binder)
            elif name == SIGNALS:
                _bind_signals(binder.end.size)
            elif binder.end.size > 1:
                _bind_messages(numpy_dtypes, binder.end_of_messages, name)
    for errors in zip(*refused, strict=True):
        if errors[0] and all(errors):
            raise errors[0]
    return list(dict.fromkeys(each.kernel for each in found))


def _check_names(names: Sequence[str], what: str) -> None:
    # Comparing an object of another type may raise.
    unknown = [each for each in names if type(each) is not str or each not in NAMES]
    if unknown or not names:
        got = repr(unknown[0]) + meant(unknown[0], NAMES) if unknown else "none"
        known = ", ".join(map(repr, NAMES))
        raise ArgumentError(
            f"{what}: expected names of calls, got {got}; pass some of {known}"
        )


def _several(values: Any, what: str) -> list[Any]:
    """Return the members of a sequence of at least one."""
    members = list(values) if isinstance(values, (list, tuple)) else []
    if not members:
        raise ArgumentError(
            f"{what}: expected a list or tuple of dtypes and one of operators, got "
            f"{values!r}; pass dtypes=('float32',), ops=('sum',), for example"
        )
    return members


def _bind_reduction(
    operation: Operation,
    given: list[np.dtype[Any]],
    op: Op,
    size: int,
    binder: Binder,
) -> ArgumentError | None:
    """Bind calls of all sizes, or return why no dtype can have the operator."""
    errors = []
    for dtype in given:
        try:
            operation.check(op)
            element, found = _reduced(operation, dtype, op)
        except ArgumentError as error:
            errors.append(error)
        else:
            _bind_sizes(operation, element, found, size, binder)
    return errors[0] if len(errors) == len(given) else None


def _reduced(operation: Operation, dtype: np.dtype[Any], op: Op) -> tuple[Element, Op]:
    """Return the type and the operator for elements of a dtype, or refuse them."""
    if isinstance(op, str) and op in dtypes.LOCATED:
        pair = ArrayView(0, (1,) if dtype.names else (1, 2), dtype, "C", False)
        return operations.reduced(pair, op, operation.name)[:2]
    element = dtypes.element(dtype, operation.name)
    dtypes.check(op, element, operation.name)
    return element, op


def check_capability(
    found: Sequence[Kernel], capability: tuple[int, int], what: str
) -> None:
    """Refuse kernels with an element type that such a GPU cannot convert."""
    kinds = {each for kernel in found for each in kernel.constants}
    for kind in kinds:
        if isinstance(kind, Element):
            gpu = "a GPU of that kind"
            dtypes.check_capability(kind, capability, gpu, what)


def load(found: Sequence[Kernel], rank: int, size: int, what: str) -> None:
    """Load kernels on the current device, compiled by all ranks of the node together.

    Each rank begins with another part of them, and takes from the disk cache what the
    others have compiled by then.

    Raises:
        ArgumentError: Numba cannot compile a user's operator.
    """
    first = rank * len(found) // size
    with loads.ahead():
        for kernel in (*found[first:], *found[:first]):
            with compiling(kernel.constants, what):
                kernel.load()


def load_default(end: Endpoint) -> None:
    """Load kernels of calls with default arguments, as far as the disk cache has them.

    Which ones these are is computed once, and kept in the cache.

    Args:
        end: an end of a communicator of one island.
    """
    if not were_compiled():
        return
    limits = end.max_blocks, end.multiprocessors, sorted(end.choices.items())
    key = key_of(f"default set of {capability()}, {end.size} ranks, {limits}")
    known = loads.load(key)
    if known is None:
        names = [name for name in NAMES if name not in (*REQUESTS, EXPERTS, LEAVES)]
        found = kernels(names, DTYPES, ("sum",), end, "Communicator")
        known = "\n".join(map(key_on_this_gpu, found)).encode()
        loads.store(key, known)
    load_cached(known.decode().split())


def _bind_sizes(
    operation: Operation, element: Element, op: Op, size: int, binder: Binder
) -> None:
    root = 0 if operation.rooted else None
    choices = binder.end.choices
    for count in _counts(operation, element, size, choices):
        nbytes = count * element.itemsize
        name = operation.chosen(None, nbytes, size, element, choices)
        for off, target_off in _alignments(element):
            source, target = VECTOR + off, _FAR + target_off
            if operation.in_place:
                source = target
            call = Call(source, target, count, element, op, root or 0)
            binder.operation(operation, name, call)


def _alignments(element: Element) -> Iterator[tuple[int, int]]:
    """Yield by how many bytes input and output are off 16-byte boundaries."""
    off = element.itemsize % VECTOR
    yield from dict.fromkeys([(0, 0), (off, 0), (off, off)])


def _counts(
    operation: Operation, element: Element, size: int, choices: Choices
) -> Iterator[int]:
    """Yield numbers of elements between which no other kernels are needed.

    In the range of an algorithm, what a kernel depends on changes at most once in a
    factor of 2. So the ends of the range and two sizes in each factor need all kernels.
    At each, the message has whole vectors or not, and equal shards or not.
    """
    ends = select.limits(operation.limits_of, size, element, choices)
    last = 4 * max(ends, default=16 * VECTOR) // VECTOR
    sizes = {VECTOR << k for k in range(last.bit_length())}
    sizes |= {3 * half // 2 for half in sizes}
    sizes |= {end + more for end in ends for more in (0, VECTOR)}
    lines = {1, LINE * size, LINE * max(1, size - 1), LINE * size * max(1, size - 1)}
    counts = set()
    for vectors in {nbytes // VECTOR for nbytes in sizes}:
        for line in lines:
            for shards in (max(1, vectors // line), divide_up(vectors, line)):
                even = shards * line * element.lanes
                counts |= {even, even + element.lanes, even + 1, even - 1}
    return iter(sorted(counts - {0}))


def _bind_messages(given: list[np.dtype[Any]], end: Endpoint, name: str) -> None:
    """Bind messages of all alignments that arrays of the dtypes may have."""
    peer = (end.rank + 1) % end.size
    for dtype in given:
        width = dtypes.moved(dtype, 1)[0].itemsize
        while width <= VECTOR:
            for message in (
                Message(peer, 0, width),
                Message(peer, 0, width, VECTOR, width),
            ):
                if message.count_at and name not in _COUNTED:
                    continue
                if name in REQUESTS:
                    transfer.bind_request(end, 0, message, receiving=True)
                else:
                    transfer.bind(end, [], [message])
            width *= 2


_COUNTED = "recv", "sendrecv", "irecv"
"""Calls whose messages may be shorter than the room for them."""


def _bind_counts(given: list[np.dtype[Any]], binder: Binder) -> None:
    """Bind messages with counts on the GPU, of all alignments."""
    rank, size = binder.end.rank, binder.end.size
    for dtype in given:
        width = dtypes.moved(dtype, 1)[0].itemsize
        while width <= VECTOR // 2:
            ends = [
                Message((rank + k) % size, 0, width, VECTOR, width) for k in range(size)
            ]
            binder.messages(ends, ends)
            width *= 2


def _bind_experts(given: list[np.dtype[Any]], end: Endpoint) -> None:
    """Bind what an object of ``comm.experts`` launches, as its construction does."""
    from numba_symm.collectives.kernels import (
        expert_combine,
        expert_dispatch,
        mailed_combine,
        mailed_dispatch,
    )
    from numba_symm.collectives.protocols.few_tokens import Share
    from numba_symm.collectives.protocols.tokens import Routing, Rows, TokenRoom

    nothing, row = (0,) * end.size, (1, 0)
    routing = Routing(*(1 for _ in Routing._fields))
    room, rows = TokenRoom(*(1 for _ in TokenRoom._fields)), Rows(0, *row)
    counting = expert_dispatch.Counting(0, 0, 1)
    expert_dispatch.bind(end, 1, routing, counting, rows, room, nothing)
    share = Share(*(1 for _ in Share._fields))
    if end.size > 1:
        mailed_dispatch.bind(end, 1, share, routing, rows, room, 0, 0)
    for dtype in given:
        if dtype.name not in expert_combine.DTYPES:
            continue
        element = dtypes.element(dtype, EXPERTS)
        expert_combine.bind(end, 1, element, nothing, 0, 1, 1, row, 0)
        for choices in (0, 1):
            received = 0, 0, 0
            expert_combine.bind_stage(end, 1, element, 0, 0, received, choices, 1, row)
            if end.size > 1:
                made, into = (0, 0, 0, choices, 1), (0, 0)
                weighted = choices > 0
                mailed_combine.bind(end, 1, share, element, made, weighted, 0, into)


def _bind_coded(
    wire: str, given: list[np.dtype[Any]], end: Endpoint, binder: Binder
) -> None:
    """Bind quantized sums, of all sizes, of the dtypes that have codes."""
    from numba_symm.collectives import composed
    from numba_symm.collectives.kernels import coded_sum

    for dtype in given:
        if dtype.name not in composed.CODED_ELEMENTS:
            continue
        element = dtypes.element(dtype, wire)
        # Of a dispatch, which encodes as a sum does.
        rows = coded_sum.decode_rows_kernel(end.size, composed.WIRES[wire], element)
        coded_sum.bind(rows, end, 1, 0, 0, 0, 1, 1)
        for off, target_off in _alignments(element):
            source, target = VECTOR + off, _FAR + target_off
            call = Call(source, target, element.lanes, element, "sum")
            composed.bind_codes(end, binder, wire, call, VECTOR)
    for operation in (ALL_TO_ALL, ALL_GATHER):
        for count in _counts(operation, composed.WORDS, end.size, end.choices):
            composed.exchanging(end, binder)(
                operation, VECTOR, _FAR, count * composed.WORDS.itemsize
            )


def _bind_leaves(
    given: list[np.dtype[Any]], ops: list[Op], end: Endpoint, binder: Binder
) -> None:
    """Bind reductions of leaves, of all sizes."""
    from numba_symm.collectives import composed

    reductions = ALL_REDUCE, REDUCE_SCATTER
    for operation, dtype, each in itertools.product(reductions, given, ops):
        try:
            element, op = _reduced(operation, dtype, each)
        except ArgumentError:  # the operations themselves refuse it
            continue
        carried = Carried(Call(0, 0, 1, element, op)).element
        for count in _counts(operation, carried, end.size, end.choices):
            call = Call(VECTOR, _FAR, count, element, op)
            for number in (1, 2, 4, 8, 16, 32, 64, 128):
                calls = Invocation(operation, leaves=number)
                composed.bind_leaves(end, binder, calls, call, VECTOR)


def _bind_exact(
    name: str, given: list[np.dtype[Any]], end: Endpoint, binder: Binder
) -> None:
    """Bind exact sums of one block and of several, of the dtypes that have them."""
    from numba_symm.collectives import composed

    for dtype in given:
        if dtype.name not in composed.EXACT_ELEMENTS:
            continue
        element = dtypes.element(dtype, name)
        for count in (element.lanes, 3 * element.lanes * MAX_BLOCKS, 1 << 40):
            for off, _ in _alignments(element):
                addresses = VECTOR + off, VECTOR + off, _FAR
                composed.bind_exact_sum(
                    end, binder, name, element, addresses, count, VECTOR
                )


def _bind_gaps() -> None:
    """Bind copies of strided arrays. The last axis has the bytes of an element."""
    for axes in range(2, pack.MOST_AXES + 1):
        strides = [1 << 12 * n for n in range(axes - 1, 0, -1)]
        pack.bind(0, 0, (2,) * (axes - 1), strides, 8, True)


def _bind_signals(size: int) -> None:
    pads.barrier_kernel(size).bind(1)
    pads.put_signal_kernel(size).bind(1)
    pads.wait_signal_kernel(size).bind(1)
    pads.fence_kernel().bind(1)
