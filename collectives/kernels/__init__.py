"""One file an algorithm: the kernel above, its host code below."""
