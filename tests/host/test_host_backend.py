import gc
import mmap
import os
import resource
from pathlib import Path

import pytest

from numba_symm import process
from numba_symm.errors import BackendError
from numba_symm.memory import backends
from numba_symm.memory.backends import HostBackend


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
