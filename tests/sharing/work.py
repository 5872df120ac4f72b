"""Helpers of the tests' processes: kernels, contents, messages, resource counts."""

import gc
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
from numba import cuda

from numba_symm import device as symm
from numba_symm import sharing
from numba_symm.environment import SIMULATED

PATIENCE = 300  # seconds that anything may take to become true
THREADS = 4 if SIMULATED else 32  # those of Numba's simulator poll
OVER = "ClosedError: this array is no longer shared"
SIZE = 1000


@cuda.jit
def fill_kernel(x, value, nanoseconds):
    started = symm.globaltimer()
    while symm.globaltimer() - started < nanoseconds:
        pass
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] = value


@cuda.jit
def copy_kernel(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = x[i]


def fill(x, value, stream=None, milliseconds=0):
    """Enqueue a kernel that fills the 1-D ``x`` after some time has passed."""
    core = 0 if stream is None else stream.core
    fill_kernel[1, THREADS, core](x, x.dtype.type(value), milliseconds * 1_000_000)


def copied(x, stream=None):
    """Enqueue a copy of the 1-D ``x`` and return it."""
    y = cuda.device_array(x.shape, x.dtype)
    copy_kernel[1, THREADS, 0 if stream is None else stream.core](x, y)
    return y


def to_device(host):
    """Return a copy on the device, arrived for every stream."""
    array = cuda.to_device(host)
    cuda.synchronize()
    return array


def numbers(count, first=0):
    """Return ``count`` float32 on the device: first, first + 1, …"""
    return to_device(np.arange(first, first + count, dtype=np.float32))


def are(x, count, first=0):
    """Return whether ``x`` is what :func:`numbers` gives."""
    return x.copy_to_host().tolist() == list(range(first, first + count))


def say(comm, value=None):
    """Return the value of the one rank that passes one; all ranks call it."""
    said = [one for one in comm.allgather(value) if one is not None]
    return said[0] if said else None


def error_of(call, *args, **options):
    """Return the error that a call raises, as "Class: text", or ""."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def becomes(condition):
    """Return whether a condition becomes true in time, maybe by another process."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def nothing_is_shared():
    """Return whether this process shares nothing, after collecting."""
    sharing.collect()
    return sharing.stats() == sharing.Stats(0, 0, 0, 0, 0)


def open_files():
    """Count this process' open files by name, the driver's own left out."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            names.append(re.sub(r"\d+", "#", str(link.readlink())))
        except FileNotFoundError:  # the listing's own
            continue
    return Counter(name for name in names if not name.startswith("/dev/nvidia"))


def resources():
    """Return what must not grow: files, shared files, mappings, memory in MiB."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1024
    free = 0 if SIMULATED else cuda.current_context().get_memory_info().free / 2**20
    maps = Path("/proc/self/maps").read_text().splitlines()
    shm = sorted(str(file) for file in Path("/dev/shm").iterdir())
    return {
        "files": open_files(),
        "shm": [name for name in shm if "numba_symm" in name],
        "maps": len(maps),
        "resident": resident,
        "device": -free,
    }


def growth(before, after):
    """Return what has grown by more than it varies by itself."""
    allowed = {"maps": 40, "resident": 24, "device": 64}
    grown = {
        name: (before[name], after[name])
        for name, room in allowed.items()
        if after[name] > before[name] + room
    }
    for name in ("files", "shm"):
        if after[name] != before[name]:
            grown[name] = (before[name], after[name])
    return grown
