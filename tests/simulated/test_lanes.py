"""Words of every dtype, as the simulator runs them, against NumPy."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from numba_symm import dtypes
from numba_symm.device.lanes import make_lanes

DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64"]
OPS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
CANARY = 0xA5

every_dtype = pytest.mark.parametrize("name", DTYPES)


def element(name):
    return dtypes.element(getattr(ml_dtypes, name, name), "test")


def special(dtype):
    if dtype.kind == "i":
        info = np.iinfo(dtype)
        values = [0, 1, -1, info.min, info.max, info.max - 1, 2**16 + 1]
    else:
        info = ml_dtypes.finfo(dtype)
        values = [0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, float(info.max)]
        values += [float(info.tiny), float(info.smallest_subnormal)]
    return np.array(values).astype(dtype)


def operands(name):
    """Return two arrays of whole words: random numbers, and all special pairs."""
    dtype = element(name).dtype
    pairs = np.array(list(itertools.product(special(dtype), repeat=2)))
    random = np.random.default_rng(1).integers(0, 256, (2, 400 * dtype.itemsize))
    a, b = random.astype(np.uint8).view(dtype)
    a, b = np.append(a, pairs[:, 0]), np.append(b, pairs[:, 1])
    whole = len(a) // 4 * 4
    return a[:whole].astype(dtype), b[:whole].astype(dtype)


def words(array):
    return array.view(np.int64).tolist()


def wide(array):
    """Return an array in a type whose NaNs NumPy knows to be equal."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return array.astype(np.int64 if array.dtype.kind == "i" else np.float64)


@every_dtype
def test_a_word_unpacks_into_its_elements_in_the_accumulation_type(name):
    lanes, kind = make_lanes(element(name), "sum"), element(name)
    a, _ = operands(name)
    found = np.array([lanes.unpack(word) for word in words(a)])
    assert found.dtype == kind.accumulate
    assert found.shape == (a.size // kind.lanes, kind.lanes)
    np.testing.assert_array_equal(found.ravel(), a.astype(kind.accumulate))


@every_dtype
def test_packing_undoes_unpacking(name):
    lanes = make_lanes(element(name), "sum")
    a, _ = operands(name)
    a = a[wide(a) == wide(a)]  # a NaN's bits may change
    a = a[: len(a) // 4 * 4]
    assert [lanes.pack(lanes.unpack(word)) for word in words(a)] == words(a)


@every_dtype
@pytest.mark.parametrize("op", OPS)
def test_words_combine_as_numpy_combines_arrays(name, op):
    kind = element(name)
    lanes = make_lanes(kind, op)
    a, b = operands(name)
    found = [
        lanes.pack(lanes.combine(lanes.unpack(x), lanes.unpack(y)))
        for x, y in zip(words(a), words(b), strict=True)
    ]
    with np.errstate(all="ignore"):
        wanted = OPS[op](a.astype(kind.accumulate), b.astype(kind.accumulate))
        wanted = wanted.astype(kind.dtype)
    found = np.array(found, np.int64).view(kind.dtype)
    np.testing.assert_array_equal(wide(found), wide(wanted))


@every_dtype
def test_integers_wrap_and_halves_keep_their_sums_precision(name):
    kind = element(name)
    lanes = make_lanes(kind, "sum")
    last = {"i": np.iinfo, "f": np.finfo}.get(kind.dtype.kind, ml_dtypes.finfo)(
        kind.dtype
    ).max
    one = np.full(kind.lanes, last, kind.dtype)
    (word,) = words(one)
    total = lanes.unpack(word)
    for _ in range(2):
        total = lanes.combine(total, lanes.unpack(word))
    found = np.array([lanes.pack(total)]).view(kind.dtype)
    with np.errstate(all="ignore"):
        wide = one.astype(kind.accumulate)
        wanted = (wide + wide + wide).astype(kind.dtype)
    assert np.array_equal(found, wanted)


def placed(kind, offset, count):
    """Return memory full of canaries, and the address of an array in it."""
    memory = np.full(16 + 3 * 8 + 16, CANARY, np.uint8)
    start = 16 - memory.ctypes.data % 8 + offset * kind.itemsize
    return memory, slice(start, start + count * kind.itemsize)


def places(kind):
    for offset in range(kind.lanes):
        for count in range(1, 2 * kind.lanes + 2):
            for word in range(-(-count // kind.lanes)):
                yield offset, count, word


@every_dtype
def test_a_word_is_stored_and_nothing_else(name):
    kind = element(name)
    lanes = make_lanes(kind, "sum")
    value = int.from_bytes(bytes([0xF1, 2, 3, 4, 5, 6, 7, 0xF8]), "little", signed=True)
    pattern = value.to_bytes(8, "little", signed=True)
    for offset, count, word in places(kind):
        for aligned in {False, offset == 0}:
            memory, part = placed(kind, offset, count)
            wanted = memory.copy()
            inside = slice(
                part.start + 8 * word, min(part.start + 8 * (word + 1), part.stop)
            )
            size = inside.stop - inside.start
            wanted[inside] = np.frombuffer(pattern[:size], np.uint8)
            address = memory.ctypes.data + part.start
            lanes.store_word(address, word, count, aligned, value)
            assert np.array_equal(memory, wanted), (offset, count, word, aligned)


@every_dtype
def test_a_word_is_loaded_with_zeros_past_the_arrays_end(name):
    kind = element(name)
    lanes = make_lanes(kind, "sum")
    for offset, count, word in places(kind):
        for aligned in {False, offset == 0}:
            memory, part = placed(kind, offset, count)
            content = np.arange(0xE0, 0xE0 + part.stop - part.start, dtype=np.uint8)
            memory[part] = content
            wanted = content.tobytes()[8 * word : 8 * (word + 1)].ljust(8, b"\0")
            address = memory.ctypes.data + part.start
            found = lanes.load_word(address, word, count, aligned)
            assert found.to_bytes(8, "little", signed=True) == wanted
