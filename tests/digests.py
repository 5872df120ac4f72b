"""The hashes of which a digest is the sum, by NumPy."""

import numpy as np


def hashes(words):
    """Return the hashes of an array of 8-byte words, in a uint64 array."""
    words = np.asarray(words).view(np.uint64)
    places = np.arange(1, len(words) + 1, dtype=np.uint64)
    mixed = words ^ places * np.uint64(0x9E3779B97F4A7C15)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ mixed >> np.uint64(33)) * np.uint64(factor)
    return mixed ^ mixed >> np.uint64(33)
