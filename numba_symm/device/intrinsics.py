"""One name for each instruction: from ``ptx.py``, or in the simulator from ``sim.py``.

The choice is made when the module is imported. The docstrings are the same for both.
"""

from typing import TYPE_CHECKING

from numba_symm.environment import SIMULATED

if SIMULATED or TYPE_CHECKING:
    from numba_symm.device.host_atomics import *  # noqa: F403
    from numba_symm.device.sim import *  # noqa: F403
    from numba_symm.device.sim_views import *  # noqa: F403
else:
    from numba_symm.device import float8  # noqa: F401  # types of elements
    from numba_symm.device.ptx import *  # noqa: F403

_WIDTHS = {
    "u8": ("1 byte, as a uint16", "any address"),
    "u16": ("a uint16", "a multiple of 2"),
    "u32": ("a uint32", "a multiple of 4"),
    "u64": ("8 bytes, as an int64", "a multiple of 8"),
    "v2_u64": ("16 bytes, as two int64", "a multiple of 16"),
}
_INTEGERS = "int32, uint32, int64 or uint64"
_NUMBERS = "int32, uint32, int64, uint64, float32 or float64"
_ORDERS = {
    "": "A weak access: signals, flags or ``syncthreads`` must order it with accesses "
    "of other\nthreads.",
    "relaxed_sys_": "An atomic access for all GPUs and the host, in units of up to 8 "
    "bytes. It does not\norder other accesses.",
    "acquire_sys_": "An atomic access for all GPUs and the host. Writes before the "
    "release whose value it\nloads are visible to this thread's later accesses.",
    "release_sys_": "An atomic access for all GPUs and the host. Writes that this "
    "thread made or saw before\nit are visible to the thread that acquires its value.",
}
_UPDATES = {
    "add": ("Add a value to an element", _NUMBERS),
    "min": ("Set an element to the minimum of itself and a value", _NUMBERS),
    "max": ("Set an element to the maximum of itself and a value", _NUMBERS),
    "and": ("Set an element to the bitwise and of itself and a value", _INTEGERS),
    "or": ("Set an element to the bitwise or of itself and a value", _INTEGERS),
    "xor": ("Set an element to the exclusive or of itself and a value", _INTEGERS),
    "exch": ("Set an element to a value", _INTEGERS),
    "cas": ("Set an element to a value if it equals ``old``", _INTEGERS),
}


def _atomic_text(verb: str, what: tuple[str, str]) -> str:
    """Return the docstring of an atomic operation."""
    old = "1, " * (verb == "cas")
    floats = (
        "Of floats, the result is NaN if the element or the value is. A GPU compares "
        "and swaps\nfloats until no other thread has updated the element meanwhile.\n\n"
    )
    return (
        f"{what[0]}, atomically for all GPUs and the host.\n\n"
        "Any thread may call it. An update of a peer's element takes about as long as "
        "a load of\nthat element. It needs a link with atomic operations (NVLink).\n\n"
        + floats
        * (verb in ("min", "max"))
        + f"Args:\n    array: an array of {what[1]}, in global\n"
        "        memory: a device array, or a :func:`peer_array`.\n"
        "    index: an int, or a tuple of ints. GPUs do not check it.\n"
        + "    old: the expected value.\n"
        * (verb == "cas")
        + "    value: the value; converted to the array's type.\n"
        "    order: a constant. ``relaxed`` orders no other accesses. ``acquire``: "
        "writes before\n"
        "        the release whose value the call loads are visible to this thread's "
        "later\n"
        "        accesses. ``release``: writes that this thread made or saw before the "
        "call are\n"
        "        visible to the thread that acquires its value; the call waits until "
        "they have\n"
        "        reached memory.\n\n"
        "Returns:\n    The old value.\n\n"
        "Example:\n"
        "    >>> @cuda.jit\n"
        "    ... def kernel(ctx, old):\n"
        "    ...     there = symm.peer_array(ctx, 0, 4, np.int32)\n"
        f'    ...     old[0] = symm.atomic_{verb}(there, 2, {old}5, order="release")\n'
        "    >>> kernel[1, 1](ctx, old)\n"
        "    >>> int(old[0])\n"
        "    0\n"
    )


_LOAD = f"""Load an element, as one access for all GPUs and the host.

Any thread may call it. It needs no link with atomic operations.

Args:
    array: an array of {_NUMBERS}, in global
        memory: a device array, or a :func:`peer_array`.
    index: an int, or a tuple of ints. GPUs do not check it.
    order: a constant, ``relaxed`` or ``acquire``; as for :func:`atomic_add`.

Returns:
    The element.

Example:
    >>> @cuda.jit
    ... def kernel(ctx, old):
    ...     there = symm.peer_array(ctx, 0, 4, np.int32)
    ...     symm.atomic_add(there, 2, 5, order="release")
    ...     old[0] = symm.atomic_load(there, 2, order="acquire")
    >>> kernel[1, 1](ctx, old)
    >>> int(old[0])
    5
"""


def _document() -> None:
    """Set the docstrings of loads, stores and functions without one."""
    texts = {
        "fence_acq_rel_sys": "Order this thread's earlier accesses before its later "
        "ones, for all GPUs\nand the host: PTX's ``fence.acq_rel.sys``.",
        "globaltimer": "Return the nanoseconds of a clock that never steps back.",
        "atomic_load": _LOAD,
    }
    for width, (what, address) in _WIDTHS.items():
        for order, meaning in _ORDERS.items():
            ptx = f"{order}global_{width}".replace("_", ".")
            texts[f"ld_{order}{width}"] = (
                f"Load {what}: PTX's ``ld.{ptx}``.\n\n{meaning}\n\n"
                f"Args:\n    address: an int64, {address}."
            )
            texts[f"st_{order}{width}"] = (
                f"Store {what}: PTX's ``st.{ptx}``.\n\n{meaning}\n\n"
                f"Args:\n    address: an int64, {address}.\n"
                "    value: the value; for two int64, a tuple of two."
            )
    for verb, update in _UPDATES.items():
        texts[f"atomic_{verb}"] = _atomic_text(verb, update)
    for name, text in texts.items():
        found = globals().get(name)
        if found is not None:
            found.__name__, found.__doc__ = name, text


_document()
