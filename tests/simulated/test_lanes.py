"""Vectors of every dtype in the simulator, compared with NumPy."""

import itertools

import numpy as np
import pytest

from numba_symm import dtypes
from numba_symm.device import lanes as device_lanes
from numba_symm.device import order
from numba_symm.device.lanes import make_lanes
from tests.operators import ELEMENTS, PAIRS, random, same, special, wanted

CANARY = 0xA5

every_dtype = pytest.mark.parametrize("name", ELEMENTS)
every_pair = pytest.mark.parametrize(("name", "op"), PAIRS)


@pytest.fixture(autouse=True)
def quiet():
    """Disable NumPy's warnings, as in the threads of a kernel."""
    with np.errstate(all="ignore"):
        yield


def rows(name, size):
    """Return ``size`` arrays of whole vectors: all special pairs, and random ones."""
    values = special(name)
    if len(values) > 20:
        values = values[:: len(values) // 20]
    tuples = np.array(list(itertools.product(values, repeat=2)), values.dtype)
    found = []
    for row in range(size):
        array = np.append(tuples[:, row % 2], random(name, 800, row))
        found.append(array[: len(array) // 16 * 16])
    return found


def vectors(array):
    """Return the words of each vector, in the types that a kernel has them."""
    return list(array.view(np.int64).reshape(-1, 2))


def array_of(words, name):
    return np.array(words, np.int64).reshape(-1).view(ELEMENTS[name].dtype)


def reduced(inputs, name, op):
    """Return the device functions' reduction of all ranks' inputs."""
    lanes = make_lanes(ELEMENTS[name], op, False, len(inputs))
    found = []
    total = order.make_total(len(inputs), lanes)
    for words in zip(*map(vectors, inputs), strict=True):
        low, high = zip(*words, strict=True)
        found.append(total(low, high, 0))
    return array_of(found, name)


def folded(inputs, name, op):
    """Return the reduction of all ranks' inputs by slices."""
    lanes = make_lanes(ELEMENTS[name], op, False, len(inputs))
    rows = [row.view(device_lanes.VECTOR) for row in inputs]
    return lanes.fold(rows).view(ELEMENTS[name].dtype)


def check(found, expected, inputs):
    wrong = np.flatnonzero(~same(found, expected))
    assert not wrong.size, (
        f"{found[wrong[:5] % found.size]} instead of "
        f"{expected[wrong[:5] % found.size]} at {wrong[:5]} of {wrong.size}"
    )


@every_pair
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_vectors_reduce_as_numpy_reduces_arrays(name, op, size):
    inputs = rows(name, size)
    check(reduced(inputs, name, op), wanted(inputs, op), inputs)
    check(folded(inputs, name, op), wanted(inputs, op), inputs)


@every_dtype
def test_packing_undoes_unpacking(name):
    (a,) = rows(name, 1)
    check(reduced([a], name, "sum"), a, [a])


@every_dtype
def test_a_vector_unpacks_into_elements_in_the_accumulation_type(name):
    kind = ELEMENTS[name]
    (a,) = rows(name, 1)

    def flat(elements):
        if isinstance(elements, tuple):
            return [each for part in elements for each in flat(part)]
        return [elements]

    lanes = make_lanes(kind, dtypes.UserOperator(lambda a, b: a), False, 2)
    found = flat(lanes.unpack(*vectors(a)[3]))
    assert {each.dtype for each in found} == {kind.accumulate}
    part = a[3 * kind.lanes : 4 * kind.lanes].astype(kind.accumulate)
    np.testing.assert_array_equal(found, part)


@every_dtype
def test_a_users_function_takes_elements_and_its_result_is_cast(name):
    kind = ELEMENTS[name]
    seen = set()

    def first(a, b):
        seen.update({type(a), type(b)})
        return a

    inputs = rows(name, 3)
    for reduction in (reduced, folded):
        check(reduction(inputs, name, dtypes.UserOperator(first)), inputs[0], inputs)
        assert seen == {kind.accumulate.type}
        seen.clear()


def test_a_users_function_may_return_any_number():
    for name, value, expected in [
        ("int8", 2**40 + 3, 3),
        ("float16", 1e300, np.inf),
        ("uint64", -1, 2**64 - 1),
        ("complex64", 2, 2),
        ("bool", 7, True),
    ]:
        inputs = [np.zeros(16, ELEMENTS[name].dtype)] * 2
        op = dtypes.UserOperator(lambda a, b, value=value: value)
        assert set(reduced(inputs, name, op).tolist()) == {expected}, name


@every_dtype
def test_the_identity_changes_nothing(name):
    kind = ELEMENTS[name]
    (a,) = rows(name, 1)
    for op in dtypes.operators(kind):
        if op == "avg" or (op == "prod" and kind.complex):
            continue  # avg divides; inf * 0 is NaN
        neutral = np.full_like(a, dtypes.identity(op, kind.dtype))
        expected = wanted([a], op)  # a logical operator returns 0 or 1
        check(reduced([neutral, a], name, op), expected, [a])
        check(reduced([a, neutral], name, op), expected, [a])


def test_8_bit_floats_overflow_as_in_ml_dtypes():
    for name, factors in [("float8_e4m3fn", (448, 1.0)), ("float8_e5m2", (57344, 2.0))]:
        dtype = ELEMENTS[name].dtype
        for step in range(64):
            pair = [np.full(16, factors[0], dtype), np.full(16, step / 2, dtype)]
            for reduction in (reduced, folded):
                check(reduction(pair, name, "sum"), wanted(pair, "sum"), pair)
                check(reduction(pair, name, "prod"), wanted(pair, "prod"), pair)


def placed(offset, nbytes):
    """Return memory filled with canaries, and an array within it."""
    memory = np.full(16 + 16 + nbytes + 32, CANARY, np.uint8)
    start = 16 - memory.ctypes.data % 16 + offset
    return memory, slice(start, start + nbytes)


def places(kind):
    size, lanes = kind.itemsize, kind.lanes
    for offset in range(0, 16, min(size, 8)):
        for count in {1, 2, lanes - 1, lanes, lanes + 1, 2 * lanes + 1} - {0}:
            for vector in range(-(-count // lanes)):
                yield offset, count, vector


@every_dtype
def test_a_store_of_a_vector_changes_no_other_bytes(name):
    kind = ELEMENTS[name]
    lanes = make_lanes(kind, "sum", True, 2)
    pattern = bytes(range(0xE1, 0xF1))
    low, high = np.frombuffer(pattern, np.int64).tolist()
    for offset, count, vector in places(kind):
        memory, part = placed(offset, count * kind.itemsize)
        expected = memory.copy()
        start = part.start + 16 * vector
        inside = slice(start, min(start + 16, part.stop))
        size = inside.stop - inside.start
        expected[inside] = np.frombuffer(pattern[:size], np.uint8)
        address = memory.ctypes.data + part.start
        lanes.store(address, vector, count, low, high)
        assert np.array_equal(memory, expected), (offset, count, vector)


@every_dtype
def test_a_vector_is_loaded_with_zeros_past_the_arrays_end(name):
    kind = ELEMENTS[name]
    lanes = make_lanes(kind, "sum", True, 2)
    for offset, count, vector in places(kind):
        memory, part = placed(offset, count * kind.itemsize)
        memory[part] = np.arange(part.stop - part.start) + 0xC0
        content = memory[part].tobytes()[16 * vector : 16 * (vector + 1)]
        address = memory.ctypes.data + part.start
        found = np.array(lanes.load(address, vector, count), np.int64).tobytes()
        assert found == content.ljust(16, b"\0"), (offset, count, vector)


@every_dtype
def test_slices_access_what_loads_and_stores_of_vectors_access(name):
    """Vectors a stride apart, up to the last one of an array and beyond it."""
    kind = ELEMENTS[name]
    ragged = make_lanes(kind, "sum", True, 2)
    whole = make_lanes(kind, "sum", False, 2)
    for offset, first, stride, short in itertools.product(
        range(0, 16, min(kind.itemsize, 8)), (0, 2, 9), (1, 3), (0, 1, 2)
    ):
        lanes = ragged if offset or short else whole
        count = 7 * kind.lanes - short * (kind.lanes - 1)  # ends within a vector
        at = range(first, 9 if lanes is ragged else 7, stride)
        memory, part = placed(offset, count * kind.itemsize)
        memory[part] = np.arange(part.stop - part.start) + 1
        address = memory.ctypes.data + part.start
        words = [lanes.load(address, vector, count) for vector in at]
        found = lanes.slices.read(address, at, count)
        assert found.tobytes() == np.array(words, np.int64).tobytes(), (count, at)
        pattern = np.arange(16 * len(at), dtype=np.uint8) + 0x40
        other = memory.copy()
        lanes.slices.write(address, at, count, pattern.view(device_lanes.VECTOR))
        after, memory[:] = memory.copy(), other
        for vector, (low, high) in zip(
            at, pattern.view(np.int64).reshape(-1, 2).tolist(), strict=True
        ):
            lanes.store(address, vector, count, low, high)
        assert np.array_equal(after, memory), (count, at)


@every_dtype
def test_whole_vectors_are_loaded_and_stored(name):
    lanes = make_lanes(ELEMENTS[name], "sum", False, 2)
    memory, part = placed(0, 32)
    memory[part] = np.arange(32)
    address = memory.ctypes.data + part.start
    low, high = lanes.load(address, 1, 0)
    lanes.store(address, 0, 0, low, high)
    assert memory[part].tolist() == [*range(16, 32)] * 2
