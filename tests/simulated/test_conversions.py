"""The simulator's conversions and accesses, compared with NumPy and ml_dtypes."""

import struct

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

from numba_symm.device import sim, sim_views
from numba_symm.errors import ArgumentError

PATTERNS = np.arange(1 << 16, dtype=np.uint16)
HALVES = {
    "float16": (np.float16, sim.f32_of_f16, sim.f16_of_f32),
    "bfloat16": (ml_dtypes.bfloat16, sim.f32_of_bf16, sim.bf16_of_f32),
}
LIMITS = [65504, 65519, 65520, 3.4028235e38, 3.3961776e38, 1.1754944e-38]
TINY = [1e-45, 6e-8, 2.98e-8, 2**-25]
SPECIAL = np.array([0.0, 1.0, np.inf, np.nan, *LIMITS, *TINY], np.float32)
SPECIAL = np.append(SPECIAL, -SPECIAL)


def bits(value):
    return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize("half", HALVES)
def test_every_half_is_widened_exactly(half):
    kind, widen, _ = HALVES[half]
    wanted = PATTERNS.view(kind).astype(np.float32)
    found = np.array([widen(pattern) for pattern in PATTERNS.tolist()])
    assert found.dtype == np.float32
    nan = np.isnan(wanted)
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


@pytest.mark.parametrize("half", HALVES)
def test_a_round_trip_returns_every_half(half):
    kind, widen, narrow = HALVES[half]
    found = np.array([narrow(widen(p)) for p in PATTERNS.tolist()], np.uint16)
    nan = np.isnan(PATTERNS.view(kind).astype(np.float32))
    assert np.array_equal(found[~nan], PATTERNS[~nan])
    assert np.isnan(found[nan].view(kind).astype(np.float32)).all()


def between(kind):
    """Return the float32 halfway from each half to the next, and its neighbours."""
    with np.errstate(all="ignore"):
        lower = PATTERNS.view(kind).astype(np.float64)
        upper = (PATTERNS + np.uint16(1)).view(kind).astype(np.float64)
        middle = ((lower + upper) / 2).astype(np.float32)
    middle = middle[np.isfinite(middle)][::5]
    below, above = (
        np.nextafter(middle, toward, dtype=np.float32) for toward in (-np.inf, np.inf)
    )
    return np.concatenate([below, middle, above])


def numbers(kind):
    random = np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint32)
    return np.concatenate([random.view(np.float32), SPECIAL, between(kind)])


def to_float16(value):
    """Round by Python's own conversion, which raises on overflow."""
    try:
        return int.from_bytes(struct.pack("<e", value), "little")
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00


def to_bfloat16(value):
    return int(np.float32(value).astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize(
    ("half", "reference"), [("float16", to_float16), ("bfloat16", to_bfloat16)]
)
def test_rounding_is_to_nearest_with_ties_to_even(half, reference):
    kind, _, narrow = HALVES[half]
    values = numbers(kind)
    values = values[~np.isnan(values)]
    wrong = [value for value in values if narrow(value) != reference(float(value))]
    assert not wrong


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF])
def test_every_nan_stays_a_nan(half, pattern):
    kind, _, narrow = HALVES[half]
    rounded = np.uint16(narrow(np.uint32(pattern).view(np.float32))).view(kind)
    assert np.isnan(rounded.astype(np.float32))


def test_bits_and_float32_are_two_views():
    for value in SPECIAL:
        assert sim.bits_of_f32(value) == bits(value)
        signed = int(value.view(np.int32))
        for word in (bits(value), signed):  # including the low half of a negative word
            assert bits(sim.f32_of_bits(word)) == bits(value)


def test_bits_and_float64_are_two_views():
    for value in SPECIAL.astype(np.float64):
        assert sim.bits_of_f64(value) == int(value.view(np.uint64))
        found = sim.f64_of_bits(int(value.view(np.int64)))
        assert found.view(np.int64) == value.view(np.int64)


@pytest.mark.parametrize("bits", [0, 1, 1 << 63, (1 << 64) - 1, 5 << 64 | 7, -1])
def test_a_word_is_a_signed_integer_of_8_bytes(bits):
    wanted = int.from_bytes((bits % (1 << 64)).to_bytes(8, "little"), "little")
    assert sim.word_of(bits) == (wanted if wanted < 1 << 63 else wanted - (1 << 64))


@pytest.fixture
def memory():
    """64 bytes, and the address of the one in the middle."""
    array = np.full(64, 0xA5, np.uint8)
    return array, array.ctypes.data + 32


def written(array):
    """Return the changed bytes; check that they are contiguous from the address on."""
    changed = np.flatnonzero(array != 0xA5)
    assert changed[0] == 32
    assert np.array_equal(changed, np.arange(32, 32 + len(changed)))
    return array[changed].tobytes()


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["u16"]),
        (4, ["u32", "relaxed_sys_u32"]),
        (8, ["u64", "relaxed_sys_u64"]),
    ],
)
def test_a_store_writes_only_its_bytes_and_a_load_reads_them(size, names, memory):
    array, address = memory
    for name in names:
        value = int.from_bytes(bytes(range(1, size + 1)), "little")
        getattr(sim, f"st_{name}")(address, value)
        assert written(array) == bytes(range(1, size + 1))
        assert getattr(sim, f"ld_{name}")(address) == value


@pytest.mark.parametrize(
    ("size", "access"),
    [
        (2, sim.ld_u16),
        (2, lambda at: sim.st_u16(at, 0)),
        (4, sim.ld_acquire_sys_u32),
        (4, lambda at: sim.st_u32(at, 0)),
        (8, sim.ld_relaxed_sys_u64),
        (8, lambda at: sim.st_release_sys_u64(at, 0)),
        (16, sim.ld_v2_u64),
        (16, lambda at: sim.st_relaxed_sys_v2_u64(at, (0, 0))),
        (4, lambda at: sim_views.array_at(at, 1, np.float32)),
        (8, lambda at: sim_views.array_at(at, 1, np.complex128)),
    ],
)
def test_an_access_at_half_its_width_is_refused(size, access, memory):
    array, address = memory
    with pytest.raises(ArgumentError, match=f"{address + size // 2:#x}.* of {size};"):
        access(address + size // 2)
    assert (array == 0xA5).all()
    access(address)


@pytest.mark.parametrize("name", ["u32", "u64"])
def test_releases_and_acquires_are_stores_and_loads(name, memory):
    _, address = memory
    getattr(sim, f"st_release_sys_{name}")(address, 7)
    assert getattr(sim, f"ld_acquire_sys_{name}")(address) == 7


@pytest.mark.parametrize("word", [-1, -2, 1 << 62])
def test_words_keep_their_sign(word, memory):
    _, address = memory
    sim.st_u64(address, word)
    assert sim.ld_u64(address) == word
    sim.st_v2_u64(address, (word, 3))
    assert sim.ld_v2_u64(address) == (word, 3)


def test_a_vector_is_two_words(memory):
    array, address = memory
    sim.st_v2_u64(address, (0x0807060504030201, 0x100F0E0D0C0B0A09))
    assert written(array) == bytes(range(1, 17))


def test_a_packet_is_two_signed_words(memory):
    array, address = memory
    words = (0x0807060504030201, -0x0FF0F1F2F3F4F5F7)
    sim.st_relaxed_sys_v2_u64(address, words)
    assert written(array) == struct.pack("<2q", *words)
    assert sim.ld_relaxed_sys_v2_u64(address) == words


def test_an_array_views_its_address():
    host = np.arange(6, dtype=np.float32)
    array = sim_views.array_at(host.ctypes.data, (2, 3), np.float32)
    array[1, 2] = 60
    assert host.tolist() == [0, 1, 2, 3, 4, 60]


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ([2], np.float32, r"shape to be an int or a tuple of ints, got \[2\]"),
        (2.0, np.float32, "shape to be an int or a tuple of ints, got 2.0"),
        (2, "float32", "dtype to be a NumPy scalar type .*, got 'float32'"),
        (2, float, "dtype to be a NumPy scalar type .*, got <class 'float'>"),
    ],
)
def test_what_a_gpu_cannot_compile_is_refused(shape, dtype, text):
    host = np.zeros(2)
    with pytest.raises(ArgumentError, match=text):
        sim_views.array_at(host.ctypes.data, shape, dtype)
    assert sim_views.array_at(host.ctypes.data, np.int64(2), host.dtype).tolist() == [
        0,
        0,
    ]


def test_threads_have_an_index_over_all_dimensions():
    @cuda.jit
    def kernel(out):
        thread = cuda.threadIdx.x + 2 * (cuda.threadIdx.y + 3 * cuda.threadIdx.z)
        out[sim.thread_index()] = 100 * thread + sim.block_size()

    out = cuda.to_device(np.zeros(24, np.int64))
    kernel[1, (2, 3, 4)](out)
    assert out.copy_to_host().tolist() == [100 * thread + 24 for thread in range(24)]


def test_the_clock_counts_nanoseconds_and_never_decreases():
    first = sim.globaltimer()
    sim.poll_pause(0)
    assert 50_000 < sim.globaltimer() - first < 60e9
