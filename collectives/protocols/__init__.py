"""Device code that kernels share, and what binds a kernel to a call."""
