"""Processes that need the same kernel: one compiles it, the others wait for it."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from numba_symm.collectives.kernels import chunked
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.dtypes import UserOperator, element
from numba_symm.gpu import loads
from numba_symm.launch import locks

KEY = b"the key of a kernel"

PROGRAM = """
import sys, time
from pathlib import Path
from numba_symm.gpu import loads

key, log, seconds = sys.argv[1].encode(), Path(sys.argv[2]), float(sys.argv[3])

def compile_it():
    with log.open("a") as lines:
        lines.write("compiled\\n")
    time.sleep(seconds)
    return b"code"

print(loads.compiled_once(key, compile_it))
"""


@pytest.fixture
def log(tmp_path):
    """Return the file in which a line is written when a compilation starts."""
    file = tmp_path / "log"
    file.write_text("")
    return file


@pytest.fixture
def start(cache, log):
    """Return a function that starts a process: which key, how long it compiles."""
    with ExitStack() as stack:

        def started(key=KEY, seconds=0.5):
            args = [sys.executable, "-c", PROGRAM, key, log, str(seconds)]
            process = stack.enter_context(
                subprocess.Popen(args, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)  # before its context waits for it
            return process

        yield started


def compilations(log):
    return log.read_text().count("\n")


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def wait_until(condition):
    for polls in count():
        if condition():
            return
        assert polls < 15000
        time.sleep(0.02)


def test_processes_that_start_together_compile_once(start, log):
    processes = [start() for _ in range(3)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert outputs == ["b'code'\n"] * 3
    assert compilations(log) == 1


def test_if_the_process_that_compiles_is_killed_the_next_one_does(start, log):
    first = start(seconds=60)
    wait_until(lambda: compilations(log) == 1)
    second = start()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=2)
    assert compilations(log) == 1
    first.kill()
    assert second.communicate(timeout=300)[0] == "b'code'\n"
    assert compilations(log) == 2


def test_a_process_that_is_stopped_is_not_waited_for_indefinitely(
    start, log, monkeypatch
):
    first = start(seconds=600)
    wait_until(lambda: compilations(log) == 1)
    os.kill(first.pid, signal.SIGSTOP)
    monkeypatch.setattr(loads, "LONGEST_WAIT", 0.3)
    begun = time.monotonic()
    with pytest.warns(RuntimeWarning, match="was it stopped"):
        assert loads.compiled_once(KEY, lambda: b"mine") == b"mine"
    assert 0.3 < time.monotonic() - begun < 300
    assert loads.load(KEY) == b"mine"


@pytest.fixture
def asked(monkeypatch):
    """Count looks at the disk and at the key's lock: "disk" or "key", by thread."""
    found = Counter()
    load, is_locked = loads.load, locks.is_locked

    def loading(key):
        found["disk", threading.get_ident()] += 1
        return load(key)

    def asking(descriptor, byte):
        assert byte == loads._byte(KEY)
        found["key", threading.get_ident()] += 1
        return is_locked(descriptor, byte)

    monkeypatch.setattr(loads, "load", loading)
    monkeypatch.setattr(locks, "is_locked", asking)
    return lambda what: sorted(n for (kind, _), n in found.items() if kind == what)


def waiting(number):
    """Start threads that need the kernel; each returns its thread."""
    threads = [
        threading.Thread(target=loads.compiled_once, args=(KEY, lambda: b"code"))
        for _ in range(number)
    ]
    for thread in threads:
        thread.start()
    return threads


def test_those_who_wait_read_the_disk_twice(start, log, asked):
    start()
    wait_until(lambda: compilations(log) == 1)
    for thread in waiting(3):
        thread.join(300)
    assert asked("disk") == [2, 2, 2]  # before the wait, and after it
    assert all(number >= 3 for number in asked("key"))


def test_a_wait_can_be_interrupted(start, log, monkeypatch):
    start(seconds=60)
    wait_until(lambda: compilations(log) == 1)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(loads.time, "sleep", interrupt)
    before = open_files()
    with pytest.raises(KeyboardInterrupt):
        loads.compiled_once(KEY, lambda: b"mine")
    assert open_files() == before


def test_a_lock_ends_with_the_compilation_even_if_that_fails(cache):
    def fail():
        raise ValueError

    for _ in "12":
        with pytest.raises(ValueError, match=r"^$"):
            loads.compiled_once(KEY, fail)
    assert loads.compiled_once(KEY, lambda: b"code") == b"code"
    files = [file.name for file in cache.iterdir() if file.is_file()]
    assert files == [loads._LOCKS]  # one for all kernels


def test_where_nothing_can_be_locked_every_process_compiles(cache, monkeypatch):
    def unsupported(descriptor, byte):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks, "try_lock", unsupported)
    with pytest.warns(RuntimeWarning, match=r"cannot be locked.*No locks"):
        assert loads.compiled_once(KEY, lambda: b"code") == b"code"
    assert loads.load(KEY) == b"code"


@pytest.mark.parametrize("where", ["a file", "no home"])
def test_without_a_cache_every_process_compiles(cache, monkeypatch, where):
    if where == "a file":
        cache.parent.mkdir()
        cache.write_text("")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "~nobody-here")
        monkeypatch.setattr("pathlib.Path.home", no_home)
    with pytest.warns(RuntimeWarning, match="cannot be read") as warned:
        assert loads.compiled_once(KEY, lambda: b"code") == b"code"
    assert [each.filename for each in warned] == [__file__]


def test_a_kernel_with_a_users_operator_is_compiled_by_every_process(cache):
    op = UserOperator(lambda a, b: a - b)
    kind = OPERATIONS["all_reduce"].exchange
    kernel = chunked.kernel(2, element(np.float32, "test"), op, False, kind, True)
    kernel.cubin = lambda cc: b"code"
    assert kernel.code((9, 0)) == b"code"
    assert not cache.exists()


def no_home():
    raise RuntimeError("no home")


def test_a_child_forked_meanwhile_keeps_no_lock(cache, start, monkeypatch):
    """The child inherits the description of the locks, and outlives the compilation."""
    children = []

    def forking():
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        children.append(child)
        return b"code"

    monkeypatch.setattr(loads, "LONGEST_WAIT", 600)
    try:
        loads.compiled_once(KEY, forking)
        (cache / loads._LOCKS).touch()
        for entry in (cache / "entries").rglob("*"):
            if entry.is_file():
                entry.unlink()
        began = time.monotonic()
        assert loads.compiled_once(KEY, lambda: b"again") == b"again"
        assert time.monotonic() - began < loads.LONGEST_WAIT / 2
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_without_room_for_an_entry_those_who_waited_compile_together(
    cache, asked, monkeypatch
):
    """If they compiled one after another, the last of many ranks would be late."""
    monkeypatch.setattr(loads, "store", lambda key, code: None)
    together, compiling = threading.Barrier(4), threading.Event()

    def first():
        compiling.set()
        wait_until(lambda: len(asked("key")) == 4)  # the others wait for its lock
        return b"code"

    def later():
        together.wait(300)
        return b"code"

    threads = [
        threading.Thread(target=loads.compiled_once, args=(KEY, each))
        for each in (first, *4 * [later])
    ]
    for thread in threads:
        thread.start()
        assert compiling.wait(300)  # it has the lock, not only the file
    for thread in threads:
        thread.join(300)
    assert not together.broken
