import gc
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numba_symm import process
from numba_symm.errors import ArgumentError, BackendError
from numba_symm.gpu.arrays import Memory
from numba_symm.memory import backends
from numba_symm.memory.backends import HostBackend

ROOT = Path(__file__).parents[2]
PEER = """
import sys
from numba_symm.memory.backends import HostBackend

backend, fd, nbytes = HostBackend(), int(sys.argv[1]), int(sys.argv[2])
mapping = backend.open(fd, nbytes)
print(backend.read(mapping.address, 5).decode())
backend.write(mapping.address + nbytes - 5, b"reply")
"""


@pytest.fixture
def backend():
    return HostBackend()


@pytest.fixture(autouse=True)
def no_leak():
    """Every test, its error paths included, leaves no descriptor and no mapping."""
    before = left()
    yield
    gc.collect()
    assert left() == before


def left():
    maps = Path("/proc/self/maps").read_text().splitlines()
    memory = [line.split()[0] for line in maps if "memfd:numba_symm" in line]
    return len(list(Path("/proc/self/fd").iterdir())), memory


def exported(backend, block):
    """Export, open and close the descriptor, as two ranks of one process would."""
    fd = backend.export(block)
    try:
        return backend.open(fd, block.nbytes)
    finally:
        os.close(fd)


@pytest.mark.parametrize("asked", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1])
def test_an_allocation_is_of_whole_zeroed_pages(backend, asked):
    block = backend.allocate(asked)
    assert block.address % mmap.PAGESIZE == 0
    assert block.nbytes == max(1, -(-asked // mmap.PAGESIZE)) * mmap.PAGESIZE
    assert backend.read(block.address, block.nbytes) == bytes(block.nbytes)
    backend.free(block)


def test_what_was_written_is_read_until_it_is_zeroed(backend):
    block = backend.allocate(100)
    backend.write(block.address + 7, b"hello")
    assert backend.read(block.address + 6, 7) == b"\0hello\0"
    backend.fill(block.address + 8, 3)
    assert backend.read(block.address + 6, 7) == b"\0h\0\0\0o\0"
    backend.free(block)


def test_two_processes_share_the_memory(backend):
    block = backend.allocate(10_000)
    backend.write(block.address, b"first")
    fd = backend.export(block)
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    peer = subprocess.run(
        [sys.executable, "-c", PEER, str(fd), str(block.nbytes)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        pass_fds=[fd],
        capture_output=True,
        text=True,
        check=True,
    )
    os.close(fd)
    assert peer.stdout == "first\n"
    assert backend.read(block.address + block.nbytes - 5, 5) == b"reply"
    backend.free(block)


def test_a_mapping_lies_elsewhere_and_shows_the_same_bytes(backend):
    block = backend.allocate(1)
    mapping = exported(backend, block)
    assert mapping.address != block.address
    backend.write(mapping.address, b"there")
    assert backend.read(block.address, 5) == b"there"
    backend.close(mapping)
    backend.free(block)


def test_a_peers_mapping_outlives_the_allocation(backend):
    assert backend.frees_while_mapped
    block = backend.allocate(1)
    mapping = exported(backend, block)
    backend.write(block.address, b"last words")
    backend.free(block)
    del block
    gc.collect()
    assert backend.read(mapping.address, 10) == b"last words"
    backend.close(mapping)


def test_an_array_keeps_the_memory_it_views(backend):
    block = backend.allocate(16)
    memory = Memory(block.address, block.nbytes, block)
    backend.free(block)
    del block
    gc.collect()
    fields = {"__array_interface__": memory.__cuda_array_interface__}
    interface = type("View", (), fields)()
    array = np.asarray(interface).view(np.int64)
    array[1] = 7
    assert array[:2].tolist() == [0, 7]


def test_exported_descriptors_are_not_inherited(backend):
    block = backend.allocate(1)
    fd = backend.export(block)
    assert not os.get_inheritable(fd)
    os.close(fd)
    backend.free(block)


def test_a_peers_memory_that_is_too_small_is_refused(backend):
    block = backend.allocate(1)
    fd = backend.export(block)
    asked = 2 * mmap.PAGESIZE
    with pytest.raises(BackendError) as raised:
        backend.open(fd, asked)
    assert str(raised.value) == (
        f"expected a peer's memory of {asked} bytes, got {mmap.PAGESIZE}"
    )
    os.close(fd)
    backend.free(block)


@pytest.mark.parametrize("asked", [None, 1 << 62, 1 << 64])
def test_more_than_there_is_cannot_be_allocated(backend, asked):
    # Another rank's share is what is too much of all that there is.
    asked = asked or backends.available()
    with pytest.raises(BackendError, match=r"^expected \d+ bytes on each of 2 ranks"):
        backend.allocate(asked, ranks=2)


def test_what_was_allocated_before_counts_until_it_was_written(backend, monkeypatch):
    page = mmap.PAGESIZE
    monkeypatch.setattr(backends, "available", lambda: 100 * page)
    first = backend.allocate(60 * page)
    for pages, ranks in ((41, 1), (1, 2)):
        text = f"{100 * page} bytes left for all, .* take {ranks * 60 * page};"
        with pytest.raises(BackendError, match=text):
            backend.allocate(pages * page, ranks)
    backend.free(backend.allocate(40 * page))
    backend.fill(first.address, 30 * page)
    second = backend.allocate(70 * page)
    backend.free(second)
    backend.free(first)
    backend.free(backend.allocate(50 * page, 2))


def test_memory_freed_during_an_allocation_is_not_counted(backend, monkeypatch):
    """A finalizer may free it in the same thread, between any two steps."""
    blocks = [backend.allocate(1) for _ in range(2)]
    real = os.fstat

    def freeing(fd):
        while blocks:
            backend.free(blocks.pop())
        return real(fd)

    monkeypatch.setattr(os, "fstat", freeing)
    backend.free(backend.allocate(1))


STAT = "cache 9\ninactive_file 5\nactive_file 2\ntotal_inactive_file 50\n"
FIRST = {"memory.limit_in_bytes": "1000\n", "memory.usage_in_bytes": "400"}
SECOND = {"memory.max": "500\n", "memory.current": "450"}


@pytest.mark.parametrize(
    ("cgroup", "folder", "files", "left"),
    [
        ("", "", {}, 2048),
        ("0::/a/b\n", "a/b", SECOND, 57),
        ("0::/a/b\n", "a", SECOND, 57),  # of the group above
        ("0::/hidden\n", "", SECOND, 57),  # a container's
        ("0::/a\n", "a", SECOND | {"memory.max": "max"}, 2048),
        ("4:cpu,memory:/a\n1:cpu:/\n0::/\n", "memory/a", FIRST, 650),
        ("4:memory:/hidden\n", "memory", FIRST, 650),
        ("0::/a\n", "a", FIRST, 2048),
    ],
)
def test_what_is_left_by_host_and_groups(
    monkeypatch, tmp_path, cgroup, folder, files, left
):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemFree:   9 kB\nMemAvailable:     2 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    (groups / folder).mkdir(parents=True)
    for name, text in {**files, "memory.stat": STAT}.items():
        (groups / folder / name).write_text(text)
    monkeypatch.setattr(backends, "_PROC", proc)
    monkeypatch.setattr(backends, "_GROUPS", groups)
    assert backends.available() == left


def test_too_many_open_files_raise(backend):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # every descriptor below it is in use
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(BackendError, match=r"^cannot allocate .*open files"):
            backend.allocate(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        block = backend.allocate(1)  # a mapping takes no descriptor
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    backend.free(block)


def test_a_limit_of_file_sizes_is_named(backend):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(BackendError, match="File too large") as caught:
            backend.allocate(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "(ulimit -f)" in process.advice_for(caught.value)


def test_nobody_can_change_the_size_of_a_peers_memory(backend):
    block = backend.allocate(1)
    fd = backend.export(block)
    for size in (0, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    backend.write(block.address, b"there")  # else SIGBUS
    os.close(fd)
    backend.free(block)


def test_a_backend_is_made_by_name():
    assert backends.create("host", 0).name == "host"
    assert backends.create("ipc", 0).name == "ipc"
    with pytest.raises(
        ArgumentError, match=r"^expected backend vmm, ipc or host, got 'nvshmem'"
    ):
        backends.create("nvshmem", 0)
