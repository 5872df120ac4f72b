"""Sums of divided arrays, in Python's integers: see ``docs/bits.md``."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

DTYPES = (np.float64, np.float32, ml_dtypes.bfloat16, np.float16)
NAMES = ("sum", "dot", "norm")
DIGITS = {
    np.dtype(np.float64): (53, -1074, 1024),
    np.dtype(np.float32): (24, -149, 128),
}
"""By the type of the result: its bits, the power of its unit, and that of its end."""


def result_type(dtype):
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def wide(array):
    """Return an array's elements in float64, as which all types are exact."""
    return array.astype(np.float64).tolist()


def exact_terms(name, x, y):
    """Return the terms as fractions; of finite arrays."""
    x, y = wide(x), wide(y)
    if name == "sum":
        return [Fraction(a) for a in x]
    other = x if name == "norm" else y
    return [Fraction(a) * Fraction(b) for a, b in zip(x, other, strict=True)]


def nearest(value, kind, sign=1.0):
    """Return a fraction rounded to nearest even, with that sign if it is 0."""
    digits, least, end = DIGITS[kind]
    if value == 0:
        return kind.type(sign * 0.0)
    power = max(exponent_of(value) - digits + 1, least)
    kept = round(value / Fraction(2) ** power)
    if abs(kept) >= 2 ** (end - power):
        return kind.type(math.copysign(math.inf, kept))
    return kind.type(math.copysign(math.ldexp(abs(kept), power), value))


def root(value):
    """Return a square root that is rounded as the exact one is."""
    scale = 2 * max(0, 130 - exponent_of(value) // 2)
    scaled = value * 2**scale
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    more = whole * whole != scaled
    return Fraction(2 * whole + more, 2 ** (scale // 2 + 1))


def exponent_of(value):
    """Return the exponent of a fraction, which is not 0."""
    value = abs(value)
    found = value.numerator.bit_length() - value.denominator.bit_length()
    return found - (value < Fraction(2) ** found)


def special(name, x, y):
    """Return the result if a term is not finite, or None."""
    x, y = wide(x), wide(y)
    if name == "sum":
        terms = [a for a in x if not math.isfinite(a)]
    else:
        both = zip(x, x if name == "norm" else y, strict=True)
        # Signs, so that no product of finite numbers overflows.
        small = lambda a: a if not math.isfinite(a) or a == 0 else math.copysign(1, a)  # noqa: E731
        terms = [small(a) * small(b) for a, b in both]
        terms = [term for term in terms if not math.isfinite(term)]
    if not terms:
        return None
    signs = {math.copysign(1, term) for term in terms if term == term}
    undefined = len(signs) != 1 or any(term != term for term in terms)
    return math.nan if undefined else math.inf * signs.pop()


def model(name, x, y=None):
    """Return the result for whole arrays, as a scalar of its type."""
    kind = result_type(x.dtype)
    y = x if y is None else y
    found = special(name, x, y)
    if found is not None:
        return kind.type(found)
    total = rounded_total(name, x, y)
    if name == "norm" and total:
        total = root(total)
    return nearest(total, kind)


def rounded_total(name, x, y):
    """Return the sum of all terms, each rounded to a multiple of the unit."""
    terms = exact_terms(name, x, y)
    if not any(terms):
        return Fraction(0)
    pairs = name != "sum" and x.dtype == np.float64
    if pairs:
        other = x if name == "norm" else y
        both = zip(wide(x), wide(other), strict=True)
        tops = [
            exponent_of(Fraction(a)) + exponent_of(Fraction(b)) + 1
            for a, b in both
            if a and b
        ]
    else:
        tops = [max(exponent_of(term), -1022) for term in terms if term]
    unit = Fraction(2) ** (max(tops) + 1 - 96)
    total = 0
    for term in terms:
        if pairs:
            high = significant(term)
            total += round(high / unit) + round((term - high) / unit)
        else:
            total += round(term / unit)
    return total * unit


def significant(value):
    """Return a fraction rounded to 53 bits, whatever its exponent."""
    if value == 0:
        return value
    unit = Fraction(2) ** (exponent_of(value) - 52)
    return round(value / unit) * unit


def bound(name, x, y=None):
    """Return the bound of the error before the result is rounded."""
    terms = exact_terms(name, x, x if y is None else y)
    most = max(map(abs, terms), default=Fraction(0))
    return len(terms) * most * Fraction(2) ** -94


def drawn(seed, count, dtype, specials=False):
    """Return elements of all sizes and signs; the special ones among them, if asked."""
    random, dtype = np.random.default_rng(seed), np.dtype(dtype)
    limits = ml_dtypes.finfo(dtype)
    spread = random.choice([0, 3, 30, 400])
    low, high = max(-spread, limits.minexp - limits.nmant), min(spread, limits.maxexp)
    powers = random.integers(low, high, count, endpoint=True)
    found = random.choice([-1, 1], count) * random.uniform(0.5, 1, count)
    with np.errstate(all="ignore"):
        found = np.ldexp(found, powers).astype(dtype)
    if count > 3 and random.random() < 0.5:  # ill-conditioned
        found[count // 2 :] = -found[: count - count // 2]
        found[-1] = np.array(random.standard_normal(), dtype)
    ends = [limits.max, limits.smallest_normal, limits.smallest_subnormal, 0.0, -0.0]
    several = [[np.nan], [np.inf], [-np.inf], [np.inf, -np.inf]]
    chosen = np.array([*ends, *several[seed[-1] % 4]] if specials else ends, dtype)
    at = random.integers(0, count, random.integers(0, 4) if count else 0)
    found[at] = random.choice(chosen, len(at))
    if specials and count:
        found[random.integers(0, count)] = chosen[-1]
    return found
