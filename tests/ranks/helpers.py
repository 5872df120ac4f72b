"""Helpers of the rank tests: copies, exact results, refusals on every rank."""

import hashlib
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from numba_symm.environment import SIMULATED

needs_peers = pytest.mark.skipif(
    "config.pluginmanager.get_plugin('agreement').comm.size == 1",
    reason="one rank has no peers",
)

on_few_numbers = pytest.mark.skipif(
    f"config.pluginmanager.get_plugin('agreement').comm.size in (2, 4) and {SIMULATED}",
    reason="simulated on one rank and on three only, for the sake of time",
)

of_one_island = pytest.mark.skipif(
    "NUMBA_SYMM_ISLAND_SIZE" in os.environ,
    reason="of one island: its limits, its memory, its launches, requests, lengths",
)

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
UNSIGNED[16] = np.uint64  # two of them


def bits(array):
    """View a host or device array as unsigned integers.

    Numba copies no bfloat16, and makes no views of arrays without axes.
    """
    if not array.shape:
        array = array.reshape(1)
    return array.view(UNSIGNED[array.dtype.itemsize])


def put(array, host):
    """Copy a host array into a device array of its shape."""
    if host.size:
        bits(array).copy_to_device(bits(host))


def get(array):
    """Return a device array's contents."""
    if not array.size:
        return np.empty(tuple(array.shape), array.dtype)
    return bits(array).copy_to_host().view(array.dtype).reshape(tuple(array.shape))


def array_of(comm, host, symmetric):
    """Return a new device array of a flat host array's contents."""
    new = comm.empty if symmetric else ordinary
    x = new(host.size, host.dtype)
    put(x, host)
    return x


def wait_for_all(comm, world):
    """Wait until every rank has finished, so that no rank fails in the next step."""
    comm.synchronize()
    world.barrier()


def ordinary(shape, dtype, order="C"):
    """Return a new array of device memory that no peer can reach."""
    return cuda.device_array(shape, dtype, order=order)


def transposed(array):
    """Return a view: Numba's own ``T`` copies an array of two axes."""
    if SIMULATED or isinstance(array, np.ndarray):
        return array.T
    facts = {"shape": array.shape[::-1], "strides": array.strides[::-1]}
    found = array.__cuda_array_interface__ | facts
    view = SimpleNamespace(__cuda_array_interface__=found, array=array)
    return cuda.as_cuda_array(view)


class Window:
    """Elements in the middle of a device buffer; nothing may write around them."""

    MARGIN = 5
    CANARY = 0xA5

    def __init__(self, buffer, offset, count):
        assert buffer.size == offset + count + self.MARGIN
        self.array = buffer[offset : offset + count]
        self._buffer = buffer
        self._inside = slice(offset, offset + count)

    def fill(self, host):
        """Put ``host`` inside and canaries around it."""
        whole = np.full(self._buffer.size * host.itemsize, self.CANARY, np.uint8)
        whole = whole.view(host.dtype)
        whole[self._inside] = host
        put(self._buffer, whole)

    def read(self):
        """Return what is inside, having checked the canaries."""
        whole = get(self._buffer)
        around = np.delete(bits(whole), self._inside).tobytes()
        assert set(around) == {self.CANARY}, "written outside of the output"
        return whole[self._inside]


PERIOD = 65521  # elements; a prime, so that misplaced data is found


def values(seed, count, dtype):
    """Return random elements of all sizes.

    They repeat after ``PERIOD``, or large messages would take minutes to make.
    """
    if count > PERIOD:
        return np.resize(values(seed, PERIOD, dtype), count)
    random, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, count, dtype, endpoint=True)
    found = random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count)
    with np.errstate(over="ignore"):
        return found.astype(dtype)


def same(actual, wanted):
    """Return whether two arrays have the same bits; all NaNs are equal."""
    if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
        return False
    equal = bits(np.ascontiguousarray(actual)) == bits(np.ascontiguousarray(wanted))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        nan = (actual != actual) & (wanted != wanted)
    return bool(np.all(equal | nan))


def digest(*arrays):
    """Return a short text that two ranks share only if they hold the same bits."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def wait_for(true, seconds=300):
    """Wait until a condition is true."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(1e-3)


def refused(world, kind, call, *texts):
    """Check that ``call`` raises ``kind``, saying ``texts``, on every rank.

    Returns:
        Every rank's text.
    """
    try:
        call()
        outcome = (False, "no error", "")
    except Exception as error:
        outcome = (isinstance(error, kind), type(error).__name__, str(error))
    everyone = world.allgather(outcome)
    for rank, (right, name, said) in enumerate(everyone):
        assert right, f"rank {rank}: {name}: {said}"
        for text in texts:
            assert text in said, f"rank {rank} does not say {text!r}: {said}"
    return [said for *_, said in everyone]


def check_works(comm):
    """Check that all-reduces and barriers of a communicator still work."""
    mine = comm.empty(3, np.int64)
    put(mine, np.arange(3) + comm.rank)
    wanted = np.arange(3) * comm.size + comm.size * (comm.size - 1) // 2
    for algorithm in (None, "one_shot_ll", "chunked", "direct"):
        assert get(comm.all_reduce(mine, algorithm=algorithm)).tolist() == [*wanted]
    comm.barrier()
    comm.synchronize()
