"""Sums whose bits do not depend on the ranks: ``sum``, ``dot`` and ``norm``.

The sums are exact sums of integers (``device/exact.py``), so neither the order of the
elements nor their division among threads, blocks, ranks and islands matters. The steps
of a call:

1. Each rank finds the largest exponent of its terms, and whether it has infinities.
2. The ranks exchange the maximum with an ``all_reduce``.
3. Each rank adds its terms as integers, whose unit follows from that exponent.
4. The ranks add these sums with an ``all_reduce`` of integers.
5. One thread rounds the sum to the result, on each rank the same.

All but the result is in the staging memory, as for ``wires.py``.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numba_symm import arrays, dtypes, libraries, loads
from numba_symm.arrays import ArrayView
from numba_symm.cache import UNKNOWN
from numba_symm.collectives import staging, wires
from numba_symm.collectives.binder import Binder
from numba_symm.collectives.checks import check_length
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.kernels import exact_sum, reduce_shards
from numba_symm.collectives.kernels.exact_sum import LARGEST, TOTAL
from numba_symm.collectives.operations import ALL_REDUCE
from numba_symm.collectives.protocols.binding import Endpoint, Enqueue, Series
from numba_symm.collectives.protocols.workspace import MAX_BLOCKS, VECTOR
from numba_symm.collectives.transfers import BoundCall
from numba_symm.device import exact
from numba_symm.dtypes import Element
from numba_symm.errors import ArgumentError

ELEMENTS = "float64", "float32", "bfloat16", "float16"
"""The types of elements that can be summed."""

ROOM = MAX_BLOCKS * (LARGEST + TOTAL)
"""Bytes of staging memory of a call."""


class ExactSum(NamedTuple):
    """The kind of a call.

    Attributes:
        name: the name of the communicator's method.
        collective: whether all ranks make the same calls.
    """

    name: str
    collective: bool = True

    def prepare(self, calls: Any, given: "Invocation[ExactSum]") -> BoundCall:
        """Check and bind a call of ``Calls``, of arrays with or without gaps."""
        what = self.name
        both = {what: given.x} | {f"{what}: y": each for each in given.args}
        calls.staging.stream = chosen = calls.streams.of(given.stream, given.x)
        if calls.enqueuer.group is None:
            calls.staging.used = 0
        views = [arrays.view(each, name) for name, each in both.items()]
        self._check(views)
        dtype = np.dtype(np.float32 if views[0].dtype.itemsize < 4 else views[0].dtype)
        out = target = given.out
        if out is None:
            like = ArrayView(0, (), dtype, "C", False)
            target = calls.new(None, like, (), chosen, what)
            out = libraries.as_that_of(given.x, target)
        written = arrays.view(out, f"{what}: out")
        check_length(written, 1, f"{what}: out", "the sum")
        if written.dtype != dtype:
            raise ArgumentError(
                f"{what}: expected out of {dtype.name} for x of {views[0].dtype.name}, "
                f"got {written.dtype.name}; pass such an array, or omit out="
            )
        staged = []
        if {view.order for view in views} not in ({"C"}, {"F"}):
            pack = partial(staging.stage, calls, written=False, message=False)
            staged = [pack(each, name) for name, each in both.items()]
            views = [arrays.view(each.array, what) for each in staged]
        call = _packed(calls, what, dict(zip(both, views, strict=True)), written)
        call = calls.enqueuer.around([each.pack for each in staged], call, ())
        keep = (*both.values(), *staged, target, out, given.stream)
        return BoundCall(call, chosen, keep, out)

    def _check(self, views: list[ArrayView]) -> None:
        """Refuse arrays of other types, or two that differ."""
        x, y = views[0], views[-1]
        if x.dtype.name not in ELEMENTS:
            raise ArgumentError(
                f"{self.name}: expected x of {', '.join(ELEMENTS)}, got {x.dtype.name};"
                " convert the array, or sum it on each rank and call all_reduce"
            )
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ArgumentError(
                f"{self.name}: expected y of x's shape {x.shape} and dtype "
                f"{x.dtype.name}, got shape {y.shape} and {y.dtype.name}"
            )


SUM, DOT, NORM = map(ExactSum, (exact.SUM, exact.DOT, exact.NORM))


def _packed(
    calls: Any, what: str, views: dict[str, ArrayView], out: ArrayView
) -> PackedCall:
    """Return the packed call, remembered or new; the views are by name, for errors."""
    key = what, *views.values(), out
    call: PackedCall = calls.memory.get(key)
    if call is UNKNOWN:
        read = [calls.usable(view, name) for name, view in views.items()]
        x, y = read[0], read[-1]
        calls.usable(out, f"{what}: out", written=True)
        element, addresses = dtypes.element(x.dtype, what), (x.address, y.address)
        room = calls.staging.scratch(ROOM, what)
        calls.members.check()  # after a failure, do not compile a kernel
        given = what, element, (*addresses, out.address), x.size, room
        with loads.of(what):
            launch = bind(calls.end, calls.binder, *given)
        about = calls.descriptions.of(what, element.name, element.name)
        call = calls.enqueuer.pack(about, launch)
        calls.memory.put(key, call)
    return call


def bind(
    end: Endpoint,
    binder: Binder,
    name: str,
    element: Element,
    addresses: tuple[int, int, int],
    count: int,
    room: int,
) -> Enqueue:
    """Return what enqueues the steps.

    Args:
        end: this rank's end of the communicator.
        binder: binds the exchanges.
        name: which sum.
        element: the type of the arrays.
        addresses: of x, of y (or x again), and of the result.
        count: the number of elements on this rank.
        room: the address of ``ROOM`` bytes.
    """
    own, exchange = binder.end, wires.exchanging(end, binder)
    x, y, out = addresses
    ragged = (x | y) % VECTOR != 0 or count % element.lanes != 0
    grid = exact_sum.grid_of(own, element, count)
    found, total = room, room + MAX_BLOCKS * LARGEST
    steps: list[Enqueue] = []
    for records, nbytes, op in ((found, LARGEST, "max"), (total, TOTAL, "sum")):
        kernel = exact_sum.reduce_kernel(
            own.size, name, element, ragged, records == total
        )
        steps.append(exact_sum.bind(kernel, own, grid, x, y, count, found, records))
        left = grid
        while left > 1:  # into the first records
            number = min(left, exact_sum.FOLDED)
            left //= number
            given = nbytes // VECTOR * left, 0, number, exact_sum.WORD, op
            steps.append(reduce_shards.bind(own, records, *given))
        steps.append(exchange(ALL_REDUCE, records, records, nbytes, op))
    last = exact_sum.round_kernel(own.size, name, exact_sum.width_of(element))
    return Series(*steps, exact_sum.bind(last, own, 1, found, total, out))
