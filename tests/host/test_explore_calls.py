"""Explored programs may call what the library takes, and get what it returns."""

import inspect
import re

import pytest

from numba_symm import Communicator, SymmetricMemory, device, explore
from numba_symm.device import host_atomics
from numba_symm.explore import standins
from numba_symm.explore.host import ExploredCommunicator, ExploredMemory
from numba_symm.memory import allocator

HEAD = """
import numpy as np
from mpi4py import MPI
from numba import cuda
import numba_symm as ns
from numba_symm import device as symm
comm = ns.Communicator(MPI.COMM_WORLD)
"""


def explored(tmp_path, text, ranks=2):
    path = tmp_path / "program.py"
    path.write_text(HEAD + inspect.cleandoc(text))
    return explore.run(path, ranks, 20)


def parameters(function):
    """Return the names, kinds and defaults of a function's parameters."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


STANDINS = (Communicator, ExploredCommunicator), (SymmetricMemory, ExploredMemory)
METHODS = [
    (getattr(product, name), method)
    for product, standin in STANDINS
    for name, method in vars(standin).items()
    if inspect.isfunction(method) and not name.startswith("_")
] + [(Communicator.__init__, ExploredCommunicator.__init__)]
ATOMICS = [name for name in device.__all__ if name.startswith("atomic_")]


@pytest.mark.parametrize(("product", "standin"), METHODS)
def test_a_method_has_the_parameters_of_the_librarys(product, standin):
    assert parameters(standin) == parameters(product)


def test_some_methods_and_atomics_are_compared():
    assert len(METHODS) >= 20
    assert len(ATOMICS) == 8


@pytest.mark.parametrize("name", ATOMICS)
def test_an_atomic_has_the_parameters_of_the_librarys(name):
    """Those of a GPU have another first parameter, of Numba's."""
    symm = standins.device().known[standins.DEVICE]
    found = parameters(getattr(symm, name))
    assert found == parameters(getattr(host_atomics, name))
    assert found == parameters(getattr(device, name))[1:]


def test_atomics_take_their_arguments_by_name_and_by_position(tmp_path):
    text = """
    @cuda.jit
    def kernel(old, words):
        old[0] = symm.atomic_add(words, 0, value=5)
        old[1] = symm.atomic_cas(words, 0, old=5, value=7, order="acquire")
        old[2] = symm.atomic_exch(words, 0, 9, "release")
        old[3] = symm.atomic_cas(words, 0, 8, 1, "relaxed")
        old[4] = words[0]

    old, words = comm.zeros(5, np.int64), comm.zeros(1, np.int64)
    kernel[1, 1](old, words)
    assert list(old.copy_to_host()) == [0, 5, 7, 9, 9]
    """
    report = explored(tmp_path, text, 1)
    assert report.complete, str(report)


@pytest.mark.parametrize("threads", [1, 33, 128])
def test_a_workspace_holds_as_many_bytes_as_the_librarys(tmp_path, threads):
    """In a collective of all its threads; one vector more is refused."""
    text = f"""
    @cuda.jit
    def kernel(ws, x):
        symm.all_reduce(ws, x)

    ws = comm.device_workspace(1, {threads}, bytes={32 * threads})
    assert ws.ctx.vectors == {allocator.vectors(threads, 32 * threads)} == 2
    assert ws.ctx.threads == {allocator.warps(threads)}
    kernel[1, {threads}](ws.ctx, comm.zeros(LENGTH, np.uint8))
    comm.synchronize()
    """
    right = explored(tmp_path, text.replace("LENGTH", str(32 * threads)), 1)
    assert right.complete, str(right)
    longer = str(32 * threads + 1)
    wrong = explored(tmp_path, text.replace("LENGTH", longer), 1)
    assert "a thread has 3 vectors of 16 bytes" in str(wrong)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ("0, 32, 64", "device_workspace: expected blocks to be an integer from 1 to"),
        ("1, 1025, 64", "threads to be an integer from 1 to 1024, got 1025"),
        ("1, 32, 0.5", r"bytes to be an integer from 1 to .*, got 0.5"),
        (
            "1, 32, 64 + comm.rank",
            r"pass .*\(1, 32, 64, 1\), \(1, 32, 65, 1\).*; pass equal",
        ),
        ("1, 32, 64, 3", "expected depth to be a power of two, got 3; pass 4"),
    ],
)
def test_sizes_of_a_workspace_that_the_library_refuses(tmp_path, sizes, text):
    report = explored(tmp_path, f"comm.device_workspace({sizes})")
    assert report.fault.kind == "error"
    assert re.search(text, str(report)), str(report)


def test_a_broadcast_is_from_rank_0_unless_it_names_another(tmp_path):
    text = """
    x = cuda.to_device(np.full(3, comm.rank))
    comm.broadcast(x)
    assert list(x.copy_to_host()) == [0, 0, 0]
    """
    report = explored(tmp_path, text)
    assert report.complete, str(report)


AVERAGES = {
    "int8": ([[100, -100, -1, 127], [100, -101, 0, 127]], [100, -100, 0, 127]),
    "uint8": ([[255, 1], [255, 0]], [255, 0]),
    "int16": ([[-32768, 7], [-32767, 8]], [-32767, 7]),
    "int32": ([[2**31 - 1, -3], [2**31 - 1, 0]], [2**31 - 1, -1]),
    "uint32": ([[2**32 - 1], [2**32 - 2]], [2**32 - 2]),
    # Only these sums wrap around.
    "int64": ([[2**62 + 1, 2**62], [2**62, -1]], [1 - 2**62, 2**61 - 1]),
    "uint64": ([[2**63, 2**62 + 1], [2**63, 2**62]], [0, 2**62]),
    "float32": ([[0.5, 1], [1, 2]], [0.75, 1.5]),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_is_that_of_the_library(tmp_path, kind):
    inputs, wanted = AVERAGES[kind]
    text = f"""
    x = cuda.to_device(np.array({inputs}[comm.rank], np.{kind}))
    found = comm.all_reduce(x, op="avg").copy_to_host()
    assert found.dtype == x.dtype and list(found) == {wanted}, list(found)
    """
    report = explored(tmp_path, text)
    assert report.complete, str(report)
