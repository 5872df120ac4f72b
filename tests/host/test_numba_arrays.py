"""Numba's own arrays in host memory, which a driver replaced by one copies to."""

import contextlib
import ctypes

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver as bindings
from numba.cuda.cudadrv import devices, driver
from numba.cuda.cudadrv.driver import MemoryPointer

from numba_symm.gpu import arrays

TYPES = ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


class Driver:
    """Its device memory is the host's."""

    @staticmethod
    def cuMemcpyHtoD(device, host, nbytes):
        ctypes.memmove(int(device), host, nbytes)

    @staticmethod
    def cuMemcpyDtoH(host, device, nbytes):
        ctypes.memmove(host, int(device), nbytes)


@pytest.fixture(autouse=True)
def host_driver(monkeypatch):
    monkeypatch.setattr(driver, "driver", Driver)
    monkeypatch.setattr(devices._runtime, "ensure_context", contextlib.nullcontext)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_arrays_of_every_type_copy_to_and_from_given_host_arrays(name, shape):
    """So do their slices and reshaped ones; a wrong type is refused, as by Numba."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    memory = ctypes.create_string_buffer(64)
    place = bindings.CUdeviceptr(ctypes.addressof(memory))
    strides = arrays.dense_strides(shape, dtype.itemsize)
    pointer = MemoryPointer(None, place, 64, owner=memory)
    x = arrays.device_array(shape, strides, dtype, pointer)
    host = np.arange(1, 13)[: x.size].reshape(shape).astype(dtype)
    x.copy_to_device(host)
    found = np.zeros(shape, dtype)
    assert x.copy_to_host(found) is found
    assert found.tobytes() == x.copy_to_host().tobytes() == host.tobytes()
    assert x.copy_to_host().dtype == dtype
    with pytest.raises(TypeError, match="incompatible dtype"):
        x.copy_to_device(np.zeros(shape, np.uint16))
    with pytest.raises(TypeError, match="incompatible dtype"):
        x.copy_to_host(np.zeros(shape, np.uint16))
    if shape:
        x[1:3].copy_to_device(host[:2])
        assert x.copy_to_host()[1:3].tobytes() == host[:2].tobytes()
        flat = host.ravel()[::-1]  # with gaps, and read-only
        flat.flags.writeable = False
        x.reshape(x.size).copy_to_device(flat)
        assert x.ravel().copy_to_host(np.empty(x.size, dtype)).tolist() == [*flat]


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((8, 1), (4, 0), "C"),  # of cuda.to_device(x[:, None])
        ((1, 8), (0, 4), "C"),
        ((1, 2, 3), (0, 4, 8), "F"),
        ((2, 3), (16, 4), None),
        ((2, 3), (12, 6), None),
    ],
)
def test_strides_of_axes_of_length_1_do_not_matter(shape, strides, order):
    """As for NumPy. Numba's own flags differ."""
    place = MemoryPointer(None, bindings.CUdeviceptr(1 << 40), 64)
    x = arrays.device_array(shape, strides, np.dtype("f4"), place)
    assert arrays.fields(x, "x")[3] == order


def test_dense_strides():
    assert arrays.dense_strides((2, 3, 4), 8) == (96, 32, 8)
    assert arrays.dense_strides((2, 3, 4), 8, "F") == (8, 16, 48)
    assert arrays.dense_strides((), 8) == ()
