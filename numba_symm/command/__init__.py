"""The command ``numba-symm``, and what it needs of the rest of the package."""
