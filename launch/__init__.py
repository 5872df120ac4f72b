"""From processes to bound ranks: discovery, devices, exchange and descriptors."""

if __name__ != "numba_symm.launch":
    raise ImportError("import numba_symm.launch, not launch")
