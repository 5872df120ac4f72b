"""Checks of the device functions' arguments, on GPUs or in the simulator."""

from typing import TYPE_CHECKING

from numba_symm.environment import SIMULATED

if SIMULATED or TYPE_CHECKING:
    from numba_symm.device.sim_checks import *  # noqa: F403
else:
    from numba_symm.device.gpu_checks import *  # noqa: F403
