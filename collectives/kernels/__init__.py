"""A file for each algorithm: the kernel, and below it the kernel's host code."""
