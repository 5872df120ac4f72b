"""The results of operators by NumPy, for every dtype."""

import itertools
import os

import ml_dtypes
import numpy as np

from numba_symm import dtypes

ELEMENTS = {
    name: dtypes.element(getattr(ml_dtypes, name, name), "test")
    for name in [
        *("bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"),
        *("float32", "float64", "complex64", "complex128"),
    ]
}
PAIRS = [(name, op) for name in ELEMENTS for op in dtypes.operators(ELEMENTS[name])]
"""Every dtype with every operator that it has."""

NUMPYS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}


def special(name):
    """Return elements that often reveal faults."""
    kind = ELEMENTS[name]
    if name == "bool":
        return np.array([False, True])
    if not kind.floating:
        info = np.iinfo(kind.dtype)
        values = [0, 1, 2, 3, info.min, info.min + 1, info.max, info.max - 1]
        return np.array(values, kind.dtype)
    real = np.float32 if name == "complex64" else np.float64
    info = ml_dtypes.finfo(real if kind.complex else kind.dtype)
    values = [0.0, 1.0, 1.5, np.inf, np.nan, float(info.max)]
    values += [float(info.smallest_normal), float(info.smallest_subnormal)]
    values += [-value for value in values]
    if kind.complex:
        values = [complex(*pair) for pair in itertools.product(values, repeat=2)]
    with np.errstate(all="ignore"):
        return np.array(values).astype(kind.dtype)


def random(name, count, seed):
    """Return elements of any bits, for a bool 0 or 1."""
    kind, lot = ELEMENTS[name], np.random.default_rng(seed)
    if name == "bool":
        return lot.integers(0, 2, count).astype(bool)
    return lot.integers(0, 256, count * kind.itemsize, np.uint8).view(kind.dtype)


def in_tree(function, leaves):
    """Reduce leaves by number: neighbours in pairs, then neighbouring pairs, and so on.

    A leaf or a result whose neighbour is missing stays as it is.
    """
    while len(leaves) > 1 or min(leaves):
        pairs = {}
        for number, each in sorted(leaves.items()):
            at = number // 2
            pairs[at] = function(pairs[at], each) if at in pairs else each
        leaves = pairs
    return leaves[0]


def over_islands(function, parts, inputs):
    """Reduce ranks' inputs, by rank: within each island by its tree, then the islands.

    Args:
        function: of two arrays.
        parts: the ranks of each island.
        inputs: by rank.
    """
    totals = [
        in_tree(function, {k: inputs[r] for k, r in enumerate(part) if r in inputs})
        for part in parts
        if not inputs.keys().isdisjoint(part)
    ]
    return in_tree(function, dict(enumerate(totals)))


def in_order(function, inputs, first=0):
    """Reduce ranks' inputs: over islands; see :func:`over_islands`.

    Islands are those that NUMBA_SYMM_ISLAND_SIZE pretends; ``first`` is the number of
    the first of these ranks.
    """
    end = first + len(inputs)
    size = int(os.environ.get("NUMBA_SYMM_ISLAND_SIZE", end))
    parts = [range(at, min(at + size, end)) for at in range(0, end, size)]
    return over_islands(function, parts, dict(enumerate(inputs, first)))


def wanted(inputs, op, first=0):
    """Return the reduction of ranks' inputs, rounded once; see ``in_order``."""
    dtype = inputs[0].dtype
    kind = dtypes.element(dtype, "test")
    # NumPy's integers wrap around as they are; an average must not.
    wide = kind.floating or op == "avg"
    kept = kind.accumulate if wide else dtype
    with np.errstate(all="ignore"):
        inputs = [array.astype(kept) for array in inputs]
        function = _product if kind.complex and op == "prod" else NUMPYS[op]
        if op in ("min", "max"):
            function = _first_of(op)
        total = in_order(function, inputs, first)
        if op == "avg":
            total = _divided(total, len(inputs), kind)
        if op in dtypes.LOGICAL:
            total = total != 0
        return total.astype(kept).astype(dtype)


def _first_of(op):
    def first_of(a, b):
        # As numpy.minimum and numpy.maximum; of 0.0 and -0.0 the later one.
        first = a < b if op == "min" else a > b
        return np.where(first | (a != a), a, b)

    return first_of


def _product(a, b):
    # NumPy's own may be fused.
    found = np.empty_like(a)
    found.real = a.real * b.real - a.imag * b.imag
    found.imag = a.real * b.imag + a.imag * b.real
    return found


def _divided(total, ranks, kind):
    if kind.complex:
        found = np.empty_like(total)
        found.real, found.imag = total.real / ranks, total.imag / ranks
        return found
    if kind.floating:
        return total / total.dtype.type(ranks)
    exact = [int(value) for value in total.tolist()]
    return np.array([abs(v) // ranks * (-1 if v < 0 else 1) for v in exact], object)


def same(found, expected):
    """Return where two arrays have the same bits; all NaNs are equal."""
    if found.dtype.kind == "c":
        parts = np.float32 if found.dtype.itemsize == 8 else np.float64
        return same(found.view(parts), expected.view(parts))
    unsigned = f"u{found.dtype.itemsize}"
    equal = found.view(unsigned) == expected.view(unsigned)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return equal | ((found != found) & (expected != expected))
