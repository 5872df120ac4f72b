"""One name for each instruction: ``ptx.py``, or ``sim.py`` under the simulator.

The choice is made once, when the module is imported.
"""

from typing import TYPE_CHECKING

from numba_symm.environment import SIMULATED

if SIMULATED or TYPE_CHECKING:
    from numba_symm.device.sim import *  # noqa: F403
else:
    from numba_symm.device.ptx import *  # noqa: F403
