"""The quantized sum, in NumPy: see ``docs/wires.md``."""

import ml_dtypes
import numpy as np

from tests.operators import in_tree

GROUP, LEAST = 128, np.float32(2**-100)
LARGEST = {"int8": np.float32(127), "fp8": np.float32(448)}
FLOAT8 = ml_dtypes.float8_e4m3fn


def coded(values, wire):
    """Return what whole groups of float32 become, as codes and back."""
    with np.errstate(all="ignore"):
        groups = values.reshape(-1, GROUP)
        most = np.abs(groups).max(axis=1, keepdims=True)
        step = np.float32(1) / LARGEST[wire]
        scale = np.where(np.isfinite(most), np.maximum(most, LEAST) * step, np.nan)
        scale = scale.astype(np.float32)
        scaled = groups * (np.float32(1) / scale)
        if wire == "int8":
            codes = np.rint(scaled)
        else:
            codes = np.clip(scaled, -448, 448).astype(FLOAT8).astype(np.float32)
        # An int8 has one zero.
        return (codes + np.float32(0 if wire == "int8" else -0.0)) * scale


def coded_sum(inputs, wire):
    """Return the all-reduce of all ranks' inputs."""
    count, dtype = inputs[0].size, inputs[0].dtype
    padded = np.zeros((len(inputs), -(-count // GROUP) * GROUP), np.float32)
    for row, each in zip(padded, inputs, strict=True):
        row[:count] = each.astype(np.float32)
    with np.errstate(all="ignore"):
        each = {rank: coded(row, wire) for rank, row in enumerate(padded)}
        total = in_tree(np.add, each)
        return coded(total, wire).ravel()[:count].astype(dtype)


def bound(inputs, wire):
    """Return the largest difference from the exact sum, by element.

    Args:
        inputs: all ranks' inputs, finite.
        wire: the name of the codes.
    """
    wide = [each.astype(np.float64) for each in inputs]
    found = sum(rounding(each, wire) for each in wide)
    return found + rounding(sum(np.abs(wide)) + found, wire)


def rounding(values, wire):
    """Return the most by which codes differ from the values that they stand for."""
    padded = np.zeros(-(-values.size // GROUP) * GROUP)
    padded[: values.size] = np.abs(values)
    groups = padded.reshape(-1, GROUP)
    most = np.maximum(groups.max(axis=1, keepdims=True), float(LEAST))
    step = most / 254 if wire == "int8" else np.maximum(groups / 16, most / 458752)
    step = step * (1 + 2.0**-14)  # 127 times six roundings of float32, and more
    return np.broadcast_to(step, groups.shape).ravel()[: values.size]
