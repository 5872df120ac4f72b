"""What touches CUDA: its calls, streams and events, kernels and arrays."""
