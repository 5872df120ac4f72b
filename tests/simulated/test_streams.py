"""The simulator accepts the same objects as streams as a GPU does."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import arguments
from numba_symm.errors import ArgumentError
from numba_symm.gpu import streams

RUBBISH = ["a", 1.0, object(), [1]]


@cuda.jit
def one(x):
    x[0] = 1


def test_launches_accept_the_streams_that_numba_accepts_on_a_gpu():
    x = cuda.to_device(np.zeros(1))
    for stream in (0, None, cuda.stream(), cuda.default_stream(), ns.Stream().core):
        one[1, 1, stream](x)
    for stream in (ns.Stream(), 123, SimpleNamespace(cuda_stream=13)):
        with pytest.raises(ArgumentError, match=r"one\[grid.* pass its attribute core"):
            one[1, 1, stream](x)


@pytest.mark.parametrize(
    "stream",
    [
        0,
        123,
        ns.Stream(),
        cuda.stream(),
        cuda.default_stream(),
        SimpleNamespace(__cuda_stream__=lambda: (0, 11)),
        SimpleNamespace(cuda_stream=13),  # torch's
        SimpleNamespace(ptr=14),  # CuPy's
        SimpleNamespace(handle=ctypes.c_void_p(16)),  # Numba's, on a GPU
    ],
)
def test_every_librarys_stream_is_the_default_one(stream):
    assert streams.handle_or_default(stream) == streams.LEGACY_DEFAULT
    assert ns.open_shared(ns.share(cuda.to_device(np.arange(3)), stream=stream))[2] == 2


@pytest.mark.parametrize("rubbish", [*RUBBISH, cuda.stream])
def test_an_object_that_is_not_a_stream_is_refused(rubbish):
    with pytest.raises(ArgumentError) as raised:
        streams.handle_or_default(rubbish)
    assert str(raised.value) == (
        f"expected a stream, got {arguments.without_addresses(repr(rubbish))}; pass a "
        "stream of Numba, cuda.core, CuPy or torch, or its handle as an int"
    )


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_every_call_refuses_an_object_that_is_not_a_stream(rubbish):
    array = cuda.to_device(np.arange(3))
    handle = ns.share(array)
    for call in (
        ns.Event().record,
        ns.Event().wait,
        ns.Stream().wait_stream,
        lambda stream: ns.share(array, stream=stream),
        lambda stream: ns.open_shared(handle, stream=stream),
    ):
        with pytest.raises(ArgumentError, match="expected a stream, got"):
            call(rubbish)
    handle.cancel()
