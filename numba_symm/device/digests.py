"""Digests of memory: a hash of each 8-byte word and its place, and their sum.

The sum does not depend on the order or on which thread adds which words. So digests of
adjoining ranges add up to the digest of both.
"""

from numba_symm.device.intrinsics import device_function, word_of
from numba_symm.device.lanes import make_lanes
from numba_symm.dtypes import element

VECTOR = 16
"""Bytes that a thread reads at a time."""

_PLACE = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, as a signed word
_FIRST = -0x00AE502812AA7333  # factors of MurmurHash3's finalizer
_SECOND = -0x3B314601E57A13AD
_LOW = 0x7FFFFFFF  # of a word shifted by 33 bits, which repeats the sign

_load = make_lanes(element("uint8", "digest"), "sum", True, 1).load


@device_function
def hashed(word: int, place: int) -> int:
    """Return the hash of a word of 8 bytes at a place."""
    mixed = word ^ word_of((place + 1) * _PLACE)
    mixed = word_of((mixed ^ mixed >> 33 & _LOW) * _FIRST)
    mixed = word_of((mixed ^ mixed >> 33 & _LOW) * _SECOND)
    return mixed ^ mixed >> 33 & _LOW


@device_function
def sum_of_hashes(address: int, nbytes: int, first: int, end: int, step: int) -> int:
    """Return the sum, modulo 2**64, of the hashes of some vectors of 16 bytes.

    Args:
        address: of the memory, of any alignment.
        nbytes: its size. Bytes of the last vector beyond it count as zeros.
        first: the number of the first vector.
        end: the number of the vector at which the range ends.
        step: the distance between two of these vectors.
    """
    total = 0
    vector = first
    while vector < end:
        low, high = _load(address, vector, nbytes)
        total += hashed(low, 2 * vector) + hashed(high, 2 * vector + 1)
        vector += step
    return word_of(total)
