"""Epilogues in NumPy: see ``docs/epilogues.md``."""

import numpy as np

from numba_symm import dtypes
from numba_symm.collectives.protocols.workspace import THREADS


def finished(reduced, target, function, row_sum, args, threads=THREADS):
    """Return what an epilogue makes of an array of reduced elements.

    Args:
        reduced: the array, rounded to its type.
        target: the output's dtype, or a pair of those of two outputs.
        function: the epilogue, which also takes arrays.
        row_sum: the function whose results are summed over rows, or None.
        args: host arrays and numbers.
        threads: of a block.
    """
    kind = dtypes.element(reduced.dtype, "test").accumulate
    wide = reduced.astype(kind)
    others = [widened(each, kind) for each in args]
    with np.errstate(all="ignore"):
        totals = ()
        if row_sum is not None:
            terms = np.broadcast_to(row_sum(wide, *others), wide.shape).astype(kind)
            totals = (row_sums(terms, 16 // reduced.dtype.itemsize, threads),)
        found = function(wide, *totals, *others)

        def stored(numbers, dtype):
            last = dtypes.element(dtype, "test").accumulate
            return np.broadcast_to(numbers, wide.shape).astype(last).astype(dtype)

        if isinstance(target, tuple):
            return tuple(map(stored, found, target))
        return stored(found, target)


def widened(value, kind):
    """Return an argument in the type in which the functions get it."""
    if isinstance(value, np.ndarray):
        return value.astype(dtypes.element(value.dtype, "test").accumulate)
    if type(value) is float:
        return (
            np.float64 if kind.itemsize // (1 + (kind.kind == "c")) == 8 else np.float32
        )(value)
    return np.int64(value) if type(value) is int else value


def row_sums(terms, lanes, threads):
    """Return the sum of each row, with the last axis of length 1.

    Thread t adds the elements of the runs t, t + threads and so on, in their order.
    """
    rows = terms.reshape(-1, terms.shape[-1])
    partial = np.zeros((threads, len(rows)), terms.dtype)
    for i in range(rows.shape[1]):
        partial[i // lanes % threads] += rows[:, i]
    chains = np.zeros((4, len(rows)), terms.dtype)
    for thread in range(threads):
        chains[thread % 4] += partial[thread]
    total = (chains[0] + chains[1]) + (chains[2] + chains[3])
    return total.reshape(*terms.shape[:-1], 1)
