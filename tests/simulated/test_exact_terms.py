"""The device functions of exact sums have the bits of the model."""

import math

import numpy as np
import pytest
from numba import njit

from numba_symm.device import arithmetic
from numba_symm.device.sim import f32_of_bits, f64_of_bits, fma_rn_f64, word_of
from tests.exact import DTYPES, NAMES, drawn, model, result_type
from tests.operators import same


def summed(name, x, y):
    """Return what one thread makes of whole arrays."""
    width = 64 if x.dtype == np.float64 else 32
    weigh, add, state_of = arithmetic.make_terms(name, width)
    kind = result_type(x.dtype)
    terms = list(zip(x.astype(kind), y.astype(kind), strict=True))
    found = total = 0, 0, 0
    for term in terms:
        found = weigh(found, *term, None)
    top, plus, minus = map(int, found)
    assert 0 <= top < 1 << arithmetic.EXPONENT_BITS
    if not (plus or minus):
        for n, term in enumerate(terms, 1):
            total = add(total, *term, state_of(top))
            assert max(map(abs, total)) <= n * 2**33
    bits = arithmetic.make_result(name, width)(
        top, plus, minus, *arithmetic.carried(0, *total)
    )
    return f64_of_bits(word_of(bits)) if width == 64 else f32_of_bits(bits)


@pytest.mark.parametrize("specials", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_the_model(name, dtype, specials):
    for seed in range(150):
        x, y = (drawn([seed, which], seed % 13, dtype, specials) for which in (0, 1))
        y = x if name == "norm" else y
        assert same(np.array([summed(name, x, y)]), np.array([model(name, x, y)])), (
            f"seed {seed}"
        )


def test_a_product_and_a_sum_are_rounded_once():
    a = np.float64(1 + 2.0**-52)
    assert fma_rn_f64(a, a, -(a * a)) == 2.0**-104
    assert fma_rn_f64(np.float64(3.0), np.float64(0.5), np.float64(-1.5)) == 0
    assert math.copysign(1, fma_rn_f64(a, -a, a * a)) == -1


@pytest.mark.parametrize("name", ["sum", "dot", "norm"])
def test_no_word_of_a_result_wraps(monkeypatch, name):
    """Compiled for the CPU, whose integers wrap as a GPU's do, unlike Python's."""
    plain = arithmetic.make_result(name, 64)
    monkeypatch.setattr(arithmetic, "device_function", njit)
    monkeypatch.setattr(
        arithmetic,
        "bits_of_f64",
        njit(lambda value: np.float64(value).view(np.int64)),
    )
    for each in ("carried", "_shifted", "_root"):
        monkeypatch.setattr(arithmetic, each, njit(getattr(arithmetic, each)))
    made = arithmetic.make_result.__wrapped__(name, 64)
    random = np.random.default_rng(3)
    for top in (2046, 2047, 2100, 3170, 4220):
        for digits in (
            *random.integers(0, 2**32, (50, 4)).tolist(),
            *([high, *3 * [2**32 - 1]] for high in (1, 3, 2**31 - 1, 2**32 - 1)),
        ):
            found = int(made(top, False, False, *digits))
            wanted = int(plain(top, False, False, *digits))
            assert found % 2**64 == wanted % 2**64, (top, digits)
            assert 0 <= found <= 0x7FF << 52
