"""Device code that kernels share, and the binding of a kernel to a call."""
