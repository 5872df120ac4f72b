"""One name for each instruction: from ``ptx.py``, or in the simulator from ``sim.py``.

The choice is made when the module is imported. The docstrings are the same for both.
"""

from typing import TYPE_CHECKING

from numba_symm.device.instructions import ATOMIC_ORDERS
from numba_symm.device.links import atomic_function
from numba_symm.environment import SIMULATED

if SIMULATED or TYPE_CHECKING:
    from numba_symm.device.sim import *  # noqa: F403
    from numba_symm.device.sim_views import *  # noqa: F403
else:
    from numba_symm.device import float8  # noqa: F401  # types of elements
    from numba_symm.device.ptx import *  # noqa: F403
    from numba_symm.device.ptx_views import *  # noqa: F403

_WIDTHS = {
    "u8": ("1 byte, as a uint16", "any address"),
    "u16": ("a uint16", "a multiple of 2"),
    "u32": ("a uint32", "a multiple of 4"),
    "u64": ("8 bytes, as an int64", "a multiple of 8"),
    "v2_u64": ("16 bytes, as two int64", "a multiple of 16"),
}
_ORDERS = {
    "": "Weak: signals, flags or ``syncthreads`` must order it with other threads.",
    "relaxed_sys_": "Atomic for all GPUs and the host, in units of up to 8 bytes. Does "
    "not order\nother accesses.",
    "acquire_sys_": "Atomic for all GPUs and the host. Writes before the release whose "
    "value it loads\nare visible to this thread's later accesses.",
    "release_sys_": "Atomic for all GPUs and the host. Writes that this thread made or "
    "saw before it are\nvisible to the thread that acquires its value.",
}
_UPDATES = {
    "add": ("Add to", "int32, uint32, int64, uint64, float32 or float64"),
    "min": ("Store the minimum into", "int32, uint32, int64 or uint64"),
    "max": ("Store the maximum into", "int32, uint32, int64 or uint64"),
    "and": ("Store the bitwise and into", "int32, uint32, int64 or uint64"),
    "or": ("Store the bitwise or into", "int32, uint32, int64 or uint64"),
    "xor": ("Store the exclusive or into", "int32, uint32, int64 or uint64"),
    "exch": ("Exchange", "int32, uint32, int64 or uint64"),
    "cas": (
        "Store, if the old value is ``old``, into",
        "int32, uint32, int64 or uint64",
    ),
}
_ATOMIC_ORDERS = {
    "relaxed": "It orders no other accesses.",
    "acquire": "Writes before the release whose value it loads are visible to this "
    "thread's later\naccesses.",
    "release": "Writes that this thread made or saw before it are visible to the "
    "thread that\nacquires its value. It waits until they have reached memory.",
}


def _atomic_text(verb: str, order: str, what: tuple[str, str]) -> str:
    """Return the docstring of an atomic operation."""
    name = atomic_function(verb, order)
    old = "1, " * (verb == "cas")
    return (
        f"{what[0]} an element, atomically for all GPUs and the host.\n\n"
        f"Any thread calls it. {_ATOMIC_ORDERS[order]}\n"
        "An update of a peer's element takes about as long as a load of it. It needs a "
        "link\nwith native atomics (NVLink).\n\n"
        f"Args:\n    array: an array of {what[1]}, in global\n"
        "        memory: a device array, or a :func:`peer_array`.\n"
        "    index: an int, or a tuple of ints. A GPU does not check it.\n"
        + "    old: the expected value.\n"
        * (verb == "cas")
        + "    value: the value; converted to the array's type.\n\n"
        "Returns:\n    The old value.\n\n"
        "Example:\n"
        "    >>> @cuda.jit\n"
        "    ... def kernel(ctx, old):\n"
        "    ...     there = symm.peer_array(ctx, 0, 4, np.int32)\n"
        f"    ...     old[0] = symm.{name}(there, 2, {old}5)\n"
        "    >>> kernel[1, 1](ctx, old)\n"
        "    >>> int(old[0])\n"
        "    0\n"
    )


def _document() -> None:
    """Set the docstrings of loads, stores and functions without one."""
    texts = {
        "fence_acq_rel_sys": "Order this thread's accesses before it with those after, "
        "for all GPUs\nand the host: PTX's ``fence.acq_rel.sys``.",
        "globaltimer": "Return nanoseconds of a clock that never steps back.",
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
        for order in ATOMIC_ORDERS:
            texts[atomic_function(verb, order)] = _atomic_text(verb, order, update)
    for name, text in texts.items():
        found = globals().get(name)
        if found is not None:
            found.__name__, found.__doc__ = name, text


_document()
