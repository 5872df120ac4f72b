"""What Numba's compiler calls for functions whose code follows from their arguments.

For a collective, it follows from the types of the arguments, and from the operator and
``items``, which are constants of the kernel's source.
"""

from typing import Any

from numba.cuda import types

from numba_symm.device import block_collectives, signals
from numba_symm.device.block_collectives import KINDS, START, WAIT
from numba_symm.device.block_exchange import (
    BlockCollective,
    ExchangeParts,
    WorkspaceContext,
)
from numba_symm.device.compiler import Refusal, constant_of, specialized
from numba_symm.device.ptx import dtype_of
from numba_symm.errors import ArgumentError


def _found(
    kind: BlockCollective,
    part: str,
    ws: Any,
    x: Any,
    out: Any,
    op: Any,
    items: Any,
    counts: Any,
) -> ExchangeParts:
    """Return the device functions for arguments of these types, or raise Refusal."""
    made_by = getattr(ws, "instance_class", None)
    if not (isinstance(made_by, type) and issubclass(made_by, WorkspaceContext)):
        raise Refusal(
            f"{kind.name}: expected the context of a workspace, got {ws}; pass "
            "comm.device_workspace(…).ctx"
        )
    for array in (x, out):
        known = dtype_of(getattr(array, "dtype", None))
        if known is None or getattr(array, "layout", "") != "C" or array.ndim < 1:
            raise Refusal(
                f"{kind.name}: expected contiguous arrays of a known dtype, got {array}"
            )
    if part != START and not out.mutable:
        raise Refusal(f"{kind.name}: expected an array to write to, got {out}")
    is_items, function = constant_of(items), constant_of(op)
    if not isinstance(is_items, bool):
        raise Refusal(f"{kind.name}: expected items to be True or False, got {items}")
    if function is None:
        raise Refusal(
            f"{kind.name}: expected a constant name of an operator or a function of "
            f"cuda.jit(device=True), got op={op}"
        )
    size = len(ws.types[ws.fields.index("ring")])
    given = [each for each in counts if _form_of(each) != "others"]
    if len(given) == 1:
        raise Refusal(f"{kind.name}: {block_collectives.BOTH_COUNTS}")
    for each in given:
        few = isinstance(each, types.BaseTuple) and len(each) != size
        of = getattr(types.unliteral(each), "dtype", None)  # one of all, or none
        if few or not isinstance(of, types.Integer):
            raise Refusal(
                f"{kind.name}: expected a count for each of {size} ranks, all of one "
                f"type of integers, got {each}; convert each, as by np.int64(count)"
            )
    dtype: Any = dtype_of(x.dtype)
    other: Any = dtype_of(out.dtype)
    try:
        return block_collectives.exchange_for(
            size, dtype, other, function, kind, is_items, bool(given)
        )
    except ArgumentError as error:
        raise Refusal(str(error)) from error


@specialized(block_collectives.collective)
def _collective(
    name: Any,
    part: Any,
    ws: Any,
    x: Any,
    out: Any,
    op: Any,
    root: Any,
    items: Any,
    sent: Any = None,
    received: Any = None,
) -> Any:
    if (constant := constant_of(name)) is None:
        return None  # Numba tries types without values after a refusal
    what = constant_of(part)
    counts = sent, received
    start, wait = _found(KINDS[constant], what, ws, x, out, op, items, counts)

    def begin(
        name: Any,
        part: Any,
        ws: Any,
        x: Any,
        out: Any,
        op: Any,
        root: Any,
        items: Any,
        sent: Any = None,
        received: Any = None,
    ) -> Any:
        return start(ws, x, root, (sent, received))

    def end(
        name: Any,
        part: Any,
        ws: Any,
        x: Any,
        out: Any,
        op: Any,
        root: Any,
        items: Any,
        sent: Any = None,
        received: Any = None,
    ) -> Any:
        return wait(ws, x, out, root, (sent, received))

    def both(
        name: Any,
        part: Any,
        ws: Any,
        x: Any,
        out: Any,
        op: Any,
        root: Any,
        items: Any,
        sent: Any = None,
        received: Any = None,
    ) -> Any:
        start(ws, x, root, (sent, received))
        return wait(ws, x, out, root, (sent, received))

    return {START: begin, WAIT: end}.get(what, both)


def _form_of(values: Any) -> str:
    if values is None or isinstance(values, types.NoneType | types.Omitted):
        return "others"
    if hasattr(values, "instance_class"):
        return "team"
    return "tuple" if isinstance(values, types.BaseTuple) else "one"


@specialized(signals.length_of)
def _length_of(ctx: Any, values: Any) -> Any:
    def others(ctx: Any, values: Any) -> Any:
        return len(ctx.pads) - 1

    def team(ctx: Any, values: Any) -> Any:
        return len(values.ranks)

    def several(ctx: Any, values: Any) -> Any:
        return len(values)

    def one(ctx: Any, values: Any) -> Any:
        return 1

    forms = {"others": others, "team": team, "tuple": several, "one": one}
    return forms[_form_of(values)]


@specialized(signals.item_of)
def _item_of(ctx: Any, values: Any, place: Any) -> Any:
    def others(ctx: Any, values: Any, place: Any) -> Any:
        return (ctx.rank + 1 + place) % len(ctx.pads)

    def team(ctx: Any, values: Any, place: Any) -> Any:
        return -1 if values.ranks[place] == ctx.rank else values.ranks[place]

    def several(ctx: Any, values: Any, place: Any) -> Any:
        return values[place]

    def one(ctx: Any, values: Any, place: Any) -> Any:
        return values

    forms = {"others": others, "team": team, "tuple": several, "one": one}
    return forms[_form_of(values)]
