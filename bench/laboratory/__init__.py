"""Models and single measurements behind the lab book; not a part of the wheel.

Run them from a checkout: ``python -m numba_symm.bench.laboratory.model``.
"""
