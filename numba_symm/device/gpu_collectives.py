"""What Numba's compiler calls for the collectives of ``block_collectives.py``.

The device function follows from the types of the arguments, and from the operator and
``items``, which are constants of the kernel's source.
"""

from typing import Any

from numba_symm.device import block_collectives
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
    kind: BlockCollective, part: str, ws: Any, x: Any, out: Any, op: Any, items: Any
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
    dtype: Any = dtype_of(x.dtype)
    other: Any = dtype_of(out.dtype)
    try:
        return block_collectives.exchange_for(
            size, dtype, other, function, kind, is_items
        )
    except ArgumentError as error:
        raise Refusal(str(error)) from error


@specialized(block_collectives.collective)
def _collective(
    name: Any, part: Any, ws: Any, x: Any, out: Any, op: Any, root: Any, items: Any
) -> Any:
    if (constant := constant_of(name)) is None:
        return None  # Numba tries types without values after a refusal
    what = constant_of(part)
    start, wait = _found(KINDS[constant], what, ws, x, out, op, items)

    def begin(
        name: Any, part: Any, ws: Any, x: Any, out: Any, op: Any, root: Any, items: Any
    ) -> Any:
        return start(ws, x, root)

    def end(
        name: Any, part: Any, ws: Any, x: Any, out: Any, op: Any, root: Any, items: Any
    ) -> Any:
        return wait(ws, x, out, root)

    def both(
        name: Any, part: Any, ws: Any, x: Any, out: Any, op: Any, root: Any, items: Any
    ) -> Any:
        start(ws, x, root)
        return wait(ws, x, out, root)

    return {START: begin, WAIT: end}.get(what, both)
