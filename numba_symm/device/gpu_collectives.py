"""What Numba's compiler calls for the collectives of ``block_collectives.py``.

The device function follows from the types of the arguments, and from the operator and
``items``, which are constants of the kernel's source.
"""

from typing import Any

from numba_symm.device import block_collectives, block_exchange
from numba_symm.device.block_exchange import BlockCollective
from numba_symm.device.block_workspace import WorkspaceContext
from numba_symm.device.compiler import Refusal, constant_of, specialized
from numba_symm.device.ptx_views import dtype_of
from numba_symm.errors import ArgumentError


def _found(
    kind: BlockCollective, ws: Any, x: Any, out: Any, op: Any, items: Any
) -> Any:
    """Return the device function for arguments of these types, or raise Refusal."""
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
    if not out.mutable:
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


@specialized(block_collectives.all_reduce)
def _all_reduce(ws: Any, x: Any, op: Any = "sum", items: Any = False) -> Any:
    exchange = _found(block_exchange.ALL_REDUCE, ws, x, x, op, items)

    def call(ws: Any, x: Any, op: Any = "sum", items: Any = False) -> Any:
        return exchange(ws, x, x, 0)

    return call


@specialized(block_collectives.reduce_scatter)
def _reduce_scatter(
    ws: Any, x: Any, out: Any, op: Any = "sum", items: Any = False
) -> Any:
    exchange = _found(block_exchange.REDUCE_SCATTER, ws, x, out, op, items)

    def call(ws: Any, x: Any, out: Any, op: Any = "sum", items: Any = False) -> Any:
        return exchange(ws, x, out, 0)

    return call


@specialized(block_collectives.all_gather)
def _all_gather(ws: Any, x: Any, out: Any, items: Any = False) -> Any:
    exchange = _found(block_exchange.ALL_GATHER, ws, x, out, "sum", items)

    def call(ws: Any, x: Any, out: Any, items: Any = False) -> Any:
        return exchange(ws, x, out, 0)

    return call


@specialized(block_collectives.broadcast)
def _broadcast(ws: Any, x: Any, root: Any, items: Any = False) -> Any:
    exchange = _found(block_exchange.BROADCAST, ws, x, x, "sum", items)

    def call(ws: Any, x: Any, root: Any, items: Any = False) -> Any:
        return exchange(ws, x, x, root)

    return call


@specialized(block_collectives.all_to_all)
def _all_to_all(ws: Any, x: Any, out: Any, items: Any = False) -> Any:
    exchange = _found(block_exchange.ALL_TO_ALL, ws, x, out, "sum", items)

    def call(ws: Any, x: Any, out: Any, items: Any = False) -> Any:
        return exchange(ws, x, out, 0)

    return call
