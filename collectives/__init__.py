"""Collective operations: a file for each algorithm, the kernel above its host code."""

if __name__ != "numba_symm.collectives":
    raise ImportError("import numba_symm.collectives, not collectives")
