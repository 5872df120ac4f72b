"""The digest of an array on this rank's GPU. The kernel waits for no rank.

Each block adds the hashes of one range, so ranges can be compared between ranks.
"""

import functools
from typing import Any

from numba import cuda
from numba.cuda import types

from numba_symm.collectives.protocols import binding, workspace
from numba_symm.collectives.protocols.workspace import THREADS
from numba_symm.device import digests, intrinsics
from numba_symm.kernels import Kernel, Launch


def make_digest() -> Any:
    """Return the kernel, whose threads store sums of the hashes of vectors."""
    sum_of_hashes, st_u64 = digests.sum_of_hashes, intrinsics.st_u64

    def digest(
        address: int, nbytes: int, first: int, end: int, span: int, sums: int
    ) -> None:
        block, thread = intrinsics.block_index(), cuda.threadIdx.x
        start = first + block * span
        stop = min(start + span, end)
        total = sum_of_hashes(address, nbytes, start + thread, stop, THREADS)
        st_u64(sums + 8 * (block * THREADS + thread), total)

    return digest


@functools.cache
def kernel() -> Kernel:
    """Return the kernel, compiled when first bound."""
    signature = binding.ADDRESS, *(types.int64,) * 4, binding.ADDRESS
    return Kernel(make_digest, (), signature, THREADS)


def bind(
    address: int, nbytes: int, first: int, end: int, span: int, sums: int
) -> Launch:
    """Return the launch for the digests of ranges of an array.

    Args:
        address: the array's address.
        nbytes: its size.
        first: the vector of 16 bytes at which the first range begins.
        end: the vector at which the last range ends, more than ``first``.
        span: the vectors of each range but the last, which may have fewer.
        sums: the address of one 8-byte word for each thread. A range's digest is the
            sum, modulo 2**64, of its block's words.
    """
    blocks = workspace.divide_up(end - first, span)
    return kernel().bind(blocks, address, nbytes, first, end, span, sums)
