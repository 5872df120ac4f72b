"""The model of sums of divided arrays: its bounds, and that no order matters.

``tests/simulated/test_exact_terms.py`` and
``tests/ranks/operations/test_exact_sums.py`` show that the kernels have its bits.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.exact import (
    DIGITS,
    DTYPES,
    NAMES,
    bound,
    drawn,
    exact_terms,
    exponent_of,
    model,
    nearest,
    result_type,
    root,
)
from tests.whole import WHOLE

DRAWS = 840 if WHOLE else 120  # of each call and type: 10080 together, or 1440


def half_unit(value, kind):
    """Return half a unit in the last place of a result."""
    digits, least, _ = DIGITS[kind]
    power = least
    if value:
        power = max(least, exponent_of(Fraction(float(value))) - digits + 1)
    return Fraction(2) ** (power - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_within_its_bound(name, dtype):
    kind = result_type(dtype)
    for seed in range(DRAWS):
        count = seed % 23
        x, y = (drawn([seed, which], count, dtype) for which in (0, 1))
        found = model(name, x, y)
        total = sum(exact_terms(name, x, y), Fraction(0))
        most = bound(name, x, y)
        if name == "norm":  # the root of a total within the bound, rounded
            ends = max(total - most, 0), total + most
            low, high = (nearest(root(each), kind) if each else 0.0 for each in ends)
            assert low <= found <= high
        elif math.isinf(found):
            assert nearest(abs(total) + most, kind) == math.inf
        else:
            off = abs(Fraction(float(found)) - total)
            assert off <= most + half_unit(found, kind)


def test_sums_of_like_magnitudes_are_correctly_rounded():
    for seed in range(1000):
        x = np.random.default_rng(seed).standard_normal(seed % 50)
        assert model("sum", x) == math.fsum(x)
