"""Hides these tests from a plain pytest, as they need Numba's CUDA simulator.

``tests/host/test_simulated_device.py`` starts them. By hand:
``NUMBA_ENABLE_CUDASIM=1 pytest tests/simulated``.
"""

from numba_symm.environment import SIMULATED

if not SIMULATED:
    collect_ignore_glob = ["test_*.py"]
