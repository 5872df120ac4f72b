"""Explore the orders of a program's communication, without a GPU.

``run`` executes a program as it stands, its host's part and its kernels, in all orders
in which its ranks may communicate. It finds races, deadlocks and missing fences::

    from numba_symm import explore

    def test_my_kernel():
        report = explore.run("my_kernel.py", ranks=[2, 3], seconds=20)
        assert report.complete, str(report)

The command is ``numba-symm explore my_kernel.py -n 2,3``.
"""

from typing import TYPE_CHECKING, Any

from numba_symm.errors import SymmError
from numba_symm.explore.findings import Coverage, ExploreReport, FaultPlace, FoundFault

if TYPE_CHECKING:
    from numba_symm.explore.exploration import replay, run

__all__ = ["Coverage", "ExploreReport", "FaultPlace", "FoundFault", "replay", "run"]


def __getattr__(name: str) -> Any:
    """Import what needs greenlet when it is first used."""
    if name not in ("replay", "run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from numba_symm.explore import exploration
    except ModuleNotFoundError as error:
        if error.name != "greenlet":
            raise
        raise SymmError(
            "explore: expected the package greenlet, got none; pip install greenlet"
        ) from None
    return getattr(exploration, name)
