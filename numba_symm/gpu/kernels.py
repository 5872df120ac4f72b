"""Kernels and their arguments: compiled, packed, and launched.

Compiles kernels and launches them with little work on the host.

A factory makes a kernel: a module-level function that takes constants (world size,
dtype, operator …) and returns the function to compile. So Numba specializes and
unrolls. A cache on disk keeps the machine code. Its key is made of:

- the text of every module whose code runs on the device;
- the factory and its constants, the signature and the launch bounds;
- the versions of the compilers and the compute capability.
"""

import ctypes
import functools
import gc
import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from numba.cuda import types

from numba_symm.device.polling import Guard
from numba_symm.dtypes import UserEpilogue, UserOperator
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import compiled, driver, entry, loads


class Packed:
    """Kernel arguments in memory, and the array of pointers that the driver reads.

    Each member of a tuple is an argument, as in Numba.
    """

    def __init__(self, signature: tuple[Any, ...], args: tuple[Any, ...]):
        self.values: list[Any] = []
        for numba_type, value in zip(signature, args, strict=True):
            self._add(numba_type, value)
        pointers = [ctypes.addressof(value) for value in self.values]
        self.pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.address = ctypes.addressof(self.pointers)

    def _add(self, numba_type: Any, value: Any) -> None:
        if isinstance(numba_type, types.BaseTuple):
            for member_type, member in zip(numba_type, value, strict=True):
                self._add(member_type, member)
        else:
            self.values.append(_CTYPES[numba_type](value))


_CTYPES = {
    types.boolean: ctypes.c_uint8,
    types.int32: ctypes.c_int32,
    types.int64: ctypes.c_int64,
}


if SIMULATED:
    from numba_symm import simulator
else:
    from numba_symm.device import compiler

T = TypeVar("T")

GUARD = types.NamedTuple((types.int64,) * len(Guard._fields), Guard)
"""The Numba type of a :class:`numba_symm.device.Guard`."""

REGISTERS = 65536
"""Registers of a multiprocessor, for compute capability 8.0 and higher."""


class Kernel:
    """A kernel for given constants, compiled for the current device when needed.

    Args:
        factory: a module-level function of ``constants`` that returns the kernel.
        constants: hashable; different constants have different ``repr``.
        signature: Numba types of the kernel's arguments: scalars and tuples of them.
        threads: threads of a block along x, in every launch.
        held: most threads of a block along y.
        registers: the most registers of a thread.
    """

    def __init__(
        self,
        factory: Callable[..., Callable[..., None]],
        constants: tuple[Any, ...],
        signature: tuple[Any, ...],
        threads: int,
        held: int = 1,
        registers: int = 64,
    ):
        self.registers = registers
        self.factory = factory
        self.constants = constants
        self.signature = signature
        self.threads = threads
        self.held = held

    @functools.cached_property
    def function(self) -> Callable[..., None]:
        """The Python function that runs on the device."""
        return self.factory(*self.constants)

    @property
    def name(self) -> str:
        """Its name in texts."""
        return self.factory.__name__.removeprefix("make_")

    @property
    def cacheable(self) -> bool:
        """Whether its key determines its code, so that the disk cache may keep it.

        The code of a user's function may depend on anything.
        """
        users = UserOperator | UserEpilogue
        return not any(isinstance(each, users) for each in self.constants)

    @property
    def rounds_each(self) -> bool:
        """Whether no product and sum are contracted, in all kernels of an epilogue."""
        return any(isinstance(each, UserEpilogue) for each in self.constants)

    def bind(
        self, grid: int, *args: Any, held: int = 1, early: bool = False
    ) -> "Launch":
        """Pack ``args`` for launches.

        Args:
            grid: number of logical blocks, each of ``threads`` threads.
            args: the kernel's arguments.
            held: logical blocks of a thread block. The last ones of a launch may
                exceed the grid.
            early: whether it may start while the kernel before it runs; it must then
                begin with ``griddepcontrol.wait``.
        """
        blocks = -(-grid // held)
        found, launch = _bound.get() or ([], Launch)
        found.append(Bound(self, grid, blocks, early))
        return launch(self, blocks, held, args, early)

    def load(self) -> Any:
        """Return the kernel on the current device, as a ``CUfunction``.

        Loading at the first launch could deadlock, because it may wait for the device,
        which may be waiting for this kernel on a peer.
        """
        from cuda.core import Device

        device = Device()
        return _loaded(self, tuple(device.compute_capability), device.device_id)

    def ptx(self, cc: tuple[int, int]) -> str:
        """Compile to PTX for a compute capability; needs no GPU."""
        threads = self.threads * self.held
        bounds = threads, REGISTERS // self.registers // threads
        compile_it = functools.partial(
            compiler.kernel_ptx,
            *(self.function, self.signature, cc, bounds),
            rounds_each=self.rounds_each,
        )
        collects = gc.isenabled()
        gc.disable()  # collections take a fifth of the compiler's time
        try:
            text = _TRUTH_AS_FLOAT.sub(_selected, _with_room(compile_it))
        finally:
            if collects:
                gc.enable()
        if cc < (9, 0):  # GPUs without early launches
            return re.sub(r"griddepcontrol\.\w+;", "", text)
        return text

    def cubin(self, cc: tuple[int, int]) -> bytes:
        """Compile to machine code for a compute capability; needs no GPU."""
        from cuda.core import Linker, LinkerOptions, ObjectCode

        options = LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}")
        ptx = ObjectCode.from_ptx(self.ptx(cc).encode())
        return bytes(Linker(ptx, options=options).link("cubin").code)

    def code(self, cc: tuple[int, int]) -> bytes:
        """Return the machine code, from the disk cache or compiled; needs no GPU."""
        if not self.cacheable:
            return self.cubin(cc)
        return loads.compiled_once(self.key(cc), lambda: self._first(cc))

    def _first(self, cc: tuple[int, int]) -> bytes:
        code = self.cubin(cc)
        _leave_mark()
        return code

    def key(self, cc: tuple[int, int]) -> bytes:
        """Return a hash of everything that the machine code depends on."""
        parts = (
            f"{self.factory.__module__}.{self.factory.__qualname__}",
            repr(self.constants),
            repr(self.signature),
            repr((self.threads, self.held, self.registers)),
            repr(cc),
            _versions(),
            _device_sources(),
        )
        return hashlib.sha256("\0".join(parts).encode()).digest()


def were_compiled() -> bool:
    """Return whether the disk cache has kernels of these sources and compilers."""
    return loads.load(_mark()) is not None


@functools.cache
def _leave_mark() -> None:
    loads.store(_mark(), b"")


def _mark() -> bytes:
    """Return the key of an entry without code, which is there if any other is."""
    return key_of("")


def key_of(about: str) -> bytes:
    """Return the key of an entry that is not code, of these sources and compilers."""
    parts = about, _versions(), _device_sources()
    return hashlib.sha256("\0".join(parts).encode()).digest()


def key_on_this_gpu(kernel: Kernel) -> str:
    """Return a kernel's key for the current device, in hexadecimal digits."""
    return kernel.key(capability()).hex()


def capability() -> tuple[int, int]:
    """Return the compute capability of the current device."""
    from cuda.core import Device

    major, minor = Device().compute_capability
    return major, minor


def _with_room(call: Callable[[], T]) -> T:
    """Call a function within one chunk of memory for the frames of Python functions.

    CPython keeps frames in chunks of 16 KiB, and maps and unmaps a chunk whenever a
    call crosses the end of the one before. The compiler works hundreds of frames deep.
    Where a loop of it crosses an end, it takes up to three times as long. This function
    claims a frame of 512 KiB, so CPython maps a chunk of 1 MiB. The frames of the
    called function fit into the other half.
    """
    return call()


_with_room.__code__ = _with_room.__code__.replace(co_stacksize=1 << 16)


_TRUTH_AS_FLOAT = re.compile(
    r"selp\.u32\s+(%r\d+), 1, 0, (%p\d+);\s+cvt\.rn\.f(32|64)\.u32\s+(%fd?\d+), \1;"
)
_ONES = {"32": "0f3F800000", "64": "0d3FF0000000000000"}


def _selected(found: re.Match[str]) -> str:
    """Return PTX that selects 1.0 or 0.0 instead of converting a selected 1 or 0.

    In kernels that reduce, the assembler drops such a conversion to float32, so it
    stores the bits of the integer (ptxas and nvJitLink 13.0 and 13.5).
    """
    integer, predicate, bits, target = found.groups()
    one = _ONES[bits]
    zero = one[:2] + "0" * (len(one) - 2)
    return (
        f"selp.u32 \t{integer}, 1, 0, {predicate};\n"
        f"\tselp.f{bits} \t{target}, {one}, {zero}, {predicate};"
    )


class Launch:
    """A kernel with packed arguments, which can be launched repeatedly."""

    def __init__(
        self,
        kernel: Kernel,
        blocks: int,
        held: int,
        args: tuple[Any, ...],
        early: bool,
    ):
        self._kernel = kernel
        self._blocks = blocks
        self._held = held
        self._args = args
        self._config = compiled.launch_config(blocks, kernel.threads, held, early)
        if SIMULATED:
            self._words = compiled.stand_in(self), 0
        else:
            self._packed = Packed(kernel.signature, args)
            self._words = int(kernel.load()), self._packed.address

    @property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """The step for the compiled function; this object owns what it reads."""
        return ((entry.LAUNCH, ctypes.addressof(self._config), *self._words),)

    def simulate(self) -> None:
        """Run the kernel in the simulator."""
        simulate(self._kernel, self._blocks, self._held, self._args)

    def __call__(self, stream: int) -> None:
        """Launch on the stream with that handle; returns immediately on a GPU."""
        if SIMULATED:
            self.simulate()
            return
        self._config.stream = stream
        status = compiled.launch()(ctypes.addressof(self._config), *self._words, 0)
        if status:
            raise driver.failure("cuLaunchKernelEx", status)

    def replace(self, node: int) -> None:
        """Give these arguments to a launch of the same kernel in a graph, by its node.

        CUDA permits this while the graph is being captured.
        """
        found = driver.call("cuGraphKernelNodeGetParams", node)
        found.kernelParams = self._packed.address
        driver.call("cuGraphKernelNodeSetParams", node, found)


class _NotLoaded(Launch):
    """What a kernel is bound to while kernels are only listed."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, stream: int) -> None:
        """Refuse to launch."""
        raise AssertionError("this kernel was bound to be listed, not to be launched")


class Bound(NamedTuple):
    """How a kernel was bound.

    Attributes:
        grid: number of logical blocks.
        blocks: number of thread blocks, each on a multiprocessor of its own.
        early: whether it may start while the kernel before it runs.
    """

    kernel: Kernel
    grid: int
    blocks: int
    early: bool


_bound: ContextVar[tuple[list[Bound], type[Launch]] | None]
_bound = ContextVar("_bound", default=None)


@contextmanager
def bound(loading: bool = False) -> Iterator[list[Bound]]:
    """Yield what is bound within the block.

    Args:
        loading: whether the kernels are loaded; otherwise they cannot be launched.
    """
    found: list[Bound] = []
    token = _bound.set((found, Launch if loading else _NotLoaded))
    try:
        yield found
    finally:
        _bound.reset(token)


@functools.cache
def _loaded(kernel: Kernel, cc: tuple[int, int], device_id: int) -> Any:
    """Return the kernel from the cache or the compiler, loaded on a device."""
    key = kernel.key(cc).hex() if kernel.cacheable else "-"
    if (key, device_id) in _ahead:
        return _ahead[key, device_id]
    with loads.noted(kernel.name):
        found = _function(kernel.code(cc))
    if kernel.cacheable:
        loads.remember(key)
    return found


_ahead: dict[tuple[str, int], Any] = {}
"""Functions that were loaded before they were needed, by key and device."""


def load_listed(ranks: int) -> None:
    """Load on the current device what an earlier start of the program has loaded.

    Args:
        ranks: the number of ranks of the job.
    """
    load_cached(loads.begin(f"{_mark().hex()} {capability()}", ranks))


def load_cached(keys: Iterable[str]) -> None:
    """Load kernels on the current device, as far as the disk cache has them."""
    from cuda.core import Device

    device_id = Device().device_id
    for key in keys:
        if (key, device_id) not in _ahead:
            code = loads.load(bytes.fromhex(key))
            if code is not None:
                _ahead[key, device_id] = _function(code)


def _function(code: bytes) -> Any:
    """Return the kernel of a cubin, loaded on the current device."""
    from cuda.core import ObjectCode

    loaded = ObjectCode.from_cubin(code).get_kernel(_entry(code))
    function = driver.call("cuKernelGetFunction", loaded.handle)
    driver.call("cuFuncLoad", function)
    _keep.append(loaded)
    return function


_keep: list[Any] = []  # libraries, which own the functions


def _entry(cubin: bytes) -> str:
    """Return the name of the one kernel in a cubin, from its ``.text.`` section."""
    start = cubin.index(b".text._Z") + len(b".text.")
    return cubin[start : cubin.index(b"\0", start)].decode()


_TOOLS = (
    *("numba", "numba-cuda", "llvmlite", "cuda-core", "cuda-bindings"),
    # The wheels of CUDA 13 and 12 with the compiler library, which does not report its
    # version, and with the linker.
    *("nvidia-nvvm", "nvidia-nvjitlink"),
    *("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),
)


@functools.cache
def _versions() -> str:
    """Return the versions of everything between the Python source and machine code."""
    found = [f"{name} {_version(name)}" for name in _TOOLS]
    return ", ".join([*found, _linker(), f"python {sys.version_info[:2]}"])


def _version(name: str) -> str | None:
    # By name, because a list of all distributions reads the metadata of each (40 ms).
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _linker() -> str:
    """Return the version of nvJitLink, or of the driver if that compiles the PTX."""
    from cuda.bindings import nvjitlink

    try:
        return f"nvjitlink {nvjitlink.version()}"
    except RuntimeError:  # not installed
        return f"driver {driver.call('cuDriverGetVersion')}"


PACKAGE = Path(__file__).parents[1]

NO_KERNELS = ("__pycache__", "bench", "command", "explore", "mpi", "sharing")
"""Folders of the package without code that runs in kernels of this module."""


def _device_files() -> list[Path]:
    """Return every module whose code may run on the device, in any folder.

    This module is one of them, because it determines how they are compiled.
    """
    found = []
    for folder, folders, files in os.walk(PACKAGE, followlinks=True):
        folders[:] = [name for name in folders if name not in NO_KERNELS]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


@functools.cache
def _device_sources() -> str:
    """Return a hash of the names and texts of those modules."""
    found = hashlib.sha256()
    for file in _device_files():
        name = str(file.relative_to(PACKAGE))
        found.update(b"\0".join([name.encode(), file.read_bytes(), b""]))
    return found.hexdigest()


def simulate(kernel: Kernel, blocks: int, held: int, args: tuple[Any, ...]) -> None:
    """Run a kernel in Numba's simulator, one block after another."""
    simulator.run(kernel.function, blocks, (kernel.threads, held), args)


def most_blocks(kernel: Any, threads: int) -> int:
    """Return how many blocks of a program's kernel run together on an idle GPU.

    Raises:
        ArgumentError: it is not a kernel of ``cuda.jit``, or was never compiled.
    """
    overloads = getattr(kernel, "overloads", None)
    if overloads is None:
        raise ArgumentError(
            f"launch_limit: expected a kernel of cuda.jit, got {type(kernel).__name__}"
        )
    if SIMULATED:
        return simulator.together(threads)
    if not overloads:
        raise ArgumentError(
            f"launch_limit: expected a compiled kernel, got {kernel.__name__}; give "
            "cuda.jit its signature, or launch it once with one block"
        )
    every = overloads.values()
    return min(int(each.max_cooperative_grid_blocks(threads)) for each in every)
