"""Measurements of the collectives, and their recorded results in ``results/``."""

if __name__ != "numba_symm.bench":
    raise ImportError("import numba_symm.bench, not bench")
