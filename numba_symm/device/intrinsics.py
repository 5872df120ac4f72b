"""One name for each instruction: from ``ptx.py``, or in the simulator from ``sim.py``.

The choice is made when the module is imported. The docstrings are the same for both.
"""

from typing import TYPE_CHECKING

from numba_symm.environment import SIMULATED

if SIMULATED or TYPE_CHECKING:
    from numba_symm.device.sim import *  # noqa: F403
else:
    from numba_symm.device.ptx import *  # noqa: F403

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
    for name, text in texts.items():
        found = globals().get(name)
        if found is not None:
            found.__name__, found.__doc__ = name, text


_document()
