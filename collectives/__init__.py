"""Collective operations: one file an algorithm, kernel above, host code below."""

if __name__ != "numba_symm.collectives":
    raise ImportError("import numba_symm.collectives, not collectives")
