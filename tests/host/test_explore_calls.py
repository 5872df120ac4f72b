"""Explored programs may call what the library takes, and get what it returns."""

import inspect
import re

import pytest

from numba_symm import Communicator, SymmetricMemory, device, explore
from numba_symm.device import host_atomics, sim_views
from numba_symm.errors import SymmError
from numba_symm.explore import standins
from numba_symm.explore.works import ExploredCommunicator, ExploredMemory
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
    if inspect.isfunction(method) and name[0] != "_" and name != "prepare"
]
ATOMICS = [name for name in device.__all__ if name.startswith("atomic_")]


@pytest.mark.parametrize(("product", "standin"), METHODS)
def test_a_method_has_the_parameters_of_the_librarys(product, standin):
    assert parameters(standin) == parameters(product)


def test_some_methods_and_atomics_are_compared():
    assert len(METHODS) >= 7
    assert len(ATOMICS) == 9


@pytest.mark.parametrize("name", ATOMICS)
def test_an_atomic_has_the_parameters_of_the_librarys(name):
    """Those of a GPU have another first parameter, of Numba's."""
    symm = standins.device().known[standins.DEVICE]
    found = parameters(getattr(symm, name))
    module = sim_views if name == "atomic_load" else host_atomics
    assert found == parameters(getattr(module, name))
    assert found == parameters(getattr(device, name))[1:]


def test_atomics_take_their_arguments_by_name_and_by_position(tmp_path):
    text = """
    @cuda.jit
    def kernel(old, words, floats):
        old[0] = symm.atomic_add(words, 0, value=5)
        old[1] = symm.atomic_cas(words, 0, old=5, value=7, order="acquire")
        old[2] = symm.atomic_exch(words, 0, 9, "release")
        old[3] = symm.atomic_cas(words, 0, 8, 1, "relaxed")
        old[4] = symm.atomic_load(words, -1, "acquire")
        floats[0] = symm.atomic_load(floats, 3) + symm.atomic_min(floats, 3, np.nan)
        floats[1] = symm.atomic_max(floats, 3, 5)  # of a NaN
        floats[2] = symm.atomic_max(floats, 4, value=7, order="release")

    old, words = comm.zeros(5, np.int64), comm.zeros(1, np.int64)
    floats = cuda.to_device(np.array([0, 0, 0, 1.5, -2], np.float32))
    kernel[1, 1](old, words, floats)
    assert list(old.copy_to_host()) == [0, 5, 7, 9, 9]
    assert str(floats.copy_to_host()) == "[ 3. nan -2. nan  7.]"
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
        ("1, 32, 64, 3", "expected depth to be a power of two, got 3; pass 4"),
    ],
)
def test_sizes_of_a_workspace_that_the_library_refuses(tmp_path, sizes, text):
    report = explored(tmp_path, f"comm.device_workspace({sizes})")
    assert report.fault.kind == "error", str(report)
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


BESIDE = """
r, n = comm.rank, comm.size
left, right = (r - 1) % n, (r + 1) % n
x = cuda.to_device(np.full(2, r))
a, b = cuda.device_array_like(x), cuda.device_array_like(x)

def found(array):
    return array.copy_to_host().tolist()
"""
MESSAGES = """
with comm.group():
    comm.send(x, dst=right)
    comm.send(x, dst=left)
    comm.recv(a, src=left)
    comm.recv(b, src=right)
assert (found(a), found(b)) == ([left, left], [right, right])
assert found(comm.sendrecv(x, dst=right, out=b, src=left)) == [left, left]
more, count = cuda.device_array(3, np.int64), cuda.device_array(1, np.int64)
if r < 2:
    comm.recv(more, src=1, count=count) if r == 0 else comm.send(x, dst=0)
    assert r or found(count) == [2]
with comm.group():  # a message to itself
    comm.recv(a, src=r)
    comm.send(x, dst=r)
assert found(a) == [r, r]
"""
PLANS = """
most = comm.all_reduce_init(x, op="max", out=b)
with comm.group_init() as plan:
    comm.all_reduce(x, out=b)
    comm.send(x, dst=right)
    comm.recv(a, src=left)
most()
plan()
assert (found(a), found(b)) == ([left, left], [n * (n - 1) // 2] * 2)
with comm.group():
    plan()
    most()
assert found(b) == [n - 1, n - 1]
"""
REQUESTS = """
def started():
    return comm.irecv(a, src=left), comm.isend(x, dst=right)

ns.Request.wait_all(started())
assert found(a) == [left, left]
a.copy_to_device(np.zeros(2, np.int64))
received, sent = started()
assert received.synchronize() is a
assert found(a) == [left, left]
sent.synchronize()
"""
SUMS = """
given = cuda.to_device(np.array([1e16, 1, -1e16, r]))
assert found(comm.sum(given)) == n + n * (n - 1) / 2
threes = cuda.to_device(np.full(4, 3, np.float32))
assert found(comm.dot(threes, threes)) == 36 * n
assert found(comm.norm(threes)) == np.float32(np.sqrt(36 * n))
huge = cuda.to_device(np.array([1e200, 0 if r else -np.inf]))
assert (found(comm.dot(huge, huge)), found(comm.sum(huge))) == (np.inf, -np.inf)
leaves = cuda.to_device(np.arange(8).reshape(4, 2))
assert found(comm.all_reduce(leaves, leaves=True)) == [12 * n, 16 * n]
"""
FORMS = """
assert found(comm.scan(x)) == [sum(range(r + 1))] * 2
assert found(comm.exscan(x)) == [sum(range(r))] * 2
assert found(comm.reverse_scan(x)) == [sum(range(r, n))] * 2
assert found(comm.all_reduce(x, op=lambda a, b: b)) == [n - 1] * 2
for call, root in ((comm.reduce, 1), (comm.gather, 0)):
    assert (call(x, root=root) is None) == (r != root)
every = [k for k in range(n) for _ in range(2)]
assert found(comm.all_gather_v(x, counts=[2] * n)) == every
every = comm.neighbor_all_gather(x, sources=[left], destinations=[right])
assert found(every) == [[left, left]]
shard = comm.reduce_scatter_v(cuda.to_device(np.arange(n)), counts=[1] * n)
assert found(shard) == [n * r]
whole = np.arange(n)
MPI.COMM_WORLD.Bcast(whole, root=1)
part = np.zeros(1, np.int64)
MPI.COMM_WORLD.Scatter(whole, part)
assert part[0] == r
"""


@pytest.mark.parametrize("text", [MESSAGES, PLANS, REQUESTS, SUMS, FORMS])
def test_calls_of_the_host_copy_and_order(tmp_path, text):
    again = "comm = ns.Communicator(MPI.COMM_WORLD, requests=True)\n"
    report = explored(tmp_path, BESIDE + again + text, [2, 3])
    assert report.complete, str(report)


FAULTS = {
    "comm.send(x, dst=right)\ncomm.recv(a, src=left)": (
        "deadlock", "the stream of rank 0 waits at a message from rank 0 to rank 1"
    ),
    "comm.recv(a, src=left) if r else None": (
        "deadlock", "the stream of rank 1 waits at a message from rank 0 to rank 1"
    ),
    "comm.send(x, dst=1) if r == 0 else comm.recv(cuda.device_array(3), src=0)": (
        "error", "rank 0 sends 16 bytes, and rank 1 expects 24"
    ),
    "with comm.group():\n    comm.send(x, dst=right)\n    comm.recv(x, src=left)": (
        "race", "by the stream of rank"
    ),
    "comm.all_reduce(x) if r else comm.all_reduce(x, op='max')": (
        "divergence", "all_reduce of 2 int64, op max"
    ),
    "comm.device_workspace(1, 32, 64 + comm.rank)": (
        "divergence", "of 1 blocks of 32 threads, 65 bytes"
    ),
    "comm.send(np.zeros(1), dst=1)": ("error", "expected a device array, got ndarray"),
    "comm.isend(x, dst=right)": ("error", "pass requests=True to Communicator"),
    "comm = ns.Communicator(MPI.COMM_WORLD, requests=True)\n"
    "comm.isend(x, dst=right)\ncomm.irecv(a, src=left)\nfound(a)": (
        "race", "store by the stream of rank"
    ),
    "comm.all_reduce(x, axis=0)": ("error", "unexpected keyword argument 'axis'"),
}  # fmt: skip


@pytest.mark.parametrize("line", FAULTS)
def test_wrong_calls_of_the_host_are_faults(tmp_path, line):
    kind, text = FAULTS[line]
    report = explored(tmp_path, BESIDE + line + "\ncomm.synchronize()\n")
    assert report.fault is not None
    assert (report.fault.kind, text in str(report)) == (kind, True), str(report)


def test_a_program_ends_when_its_streams_have_ended(tmp_path):
    report = explored(tmp_path, BESIDE + "comm.recv(a, src=0) if r else None")
    assert report.fault.kind == "deadlock", str(report)


STORES = """
x = comm.zeros(2)
ctx = comm.rendezvous(x).ctx

@cuda.jit
def store(ctx):
    symm.peer_array(ctx, 1 - ctx.rank, 2, np.float32)[0] = 1

comm.barrier()
"""


def test_a_collective_loads_before_it_follows_the_other_ranks(tmp_path):
    """So a peer may change its input after it, but not directly before it."""
    after = explored(tmp_path, STORES + "comm.all_reduce(x)\nstore[1, 1](ctx)\n")
    assert after.complete, str(after)
    before = explored(tmp_path, STORES + "store[1, 1](ctx)\ncomm.all_reduce(x)\n")
    assert before.fault.kind == "race"
    between = "store[1, 1](ctx)\ncomm.barrier()\ncomm.all_reduce(x)\n"
    assert explored(tmp_path, STORES + between).complete
    root = explored(tmp_path, STORES + "comm.broadcast(x)\nstore[1, 1](ctx)\n")
    assert root.fault.kind == "race"  # the root does not wait for the others


NO_STAND_INS = {
    "comm.experts(2, top_k=1, hidden=8, tokens=1)": "Communicator.experts",
    "comm.all_reduce(x, epilogue=abs)": "all_reduce with epilogue",
    "comm.all_gather_v(x, counts=x, capacity=2)": "all_gather_v with counts on the GPU",
    "comm.scan(cuda.device_array((2, 2)).T)": "scan of an array that is not in C order",
    "import numba_symm.mpi": "the module numba_symm.mpi",
    "from numba import njit": "the module numba.njit",
    "MPI.COMM_WORLD.isend(1, 1)": "MPI.Comm.isend",
    "comm.rendezvous(x).fence()": "SymmetricMemory.fence",
    "ns.Communicator(MPI.COMM_WORLD, requests=True).isend(x, dst=right).test()": (
        "a test of a request"
    ),
}


@pytest.mark.parametrize("line", NO_STAND_INS)
def test_what_has_no_stand_in_names_its_line(tmp_path, line):
    with pytest.raises(SymmError, match=r"program\.py:15: expected") as found:
        explored(tmp_path, BESIDE + line)
    assert NO_STAND_INS[line] in str(found.value)
