"""Single measurements behind the lab book; not in the wheel.

Run these from a checkout: ``python -m numba_symm.bench.laboratory.packages``.
"""
