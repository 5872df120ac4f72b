"""Stand-ins for Numba and device intrinsics, and the imports of a program.

Imports of an explored program: stand-ins, and modules that only it sees.

The program's own modules and those of ``numba_symm.device`` are executed for it, with
an ``__import__`` of their own. So this process keeps the modules that it has, and no
state of one execution reaches the next one.

``numba_symm.device`` for explored programs: its own code, on other instructions.

The modules are executed once more, as in the simulator. Only the instructions of
``sim.py`` are replaced, and the loops that poll: these are waits here.
"""

import builtins
import functools
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from numba_symm import environment
from numba_symm.device import Context, Team, WorkspaceContext
from numba_symm.device.instructions import ATOMIC_ORDERS, ATOMICS, atomic_name
from numba_symm.explore import threads
from numba_symm.explore.machine import running
from numba_symm.explore.memory import (
    ACQUIRE,
    AWAIT,
    GPU,
    LOAD,
    RELAXED,
    STORE,
    SYSTEM,
    UPDATE,
    Area,
    CodePlace,
    Fault,
    Strong,
)
from numba_symm.explore.threads import (
    Array,
    Grid,
    me,
    unsupported,
)
from numba_symm.launch.failures import describe

_SCALARS = (int, float, complex, bool, np.generic, str, type(None), tuple, Array)


class StandIn(ModuleType):
    """A module of which a program may use what has a stand-in."""

    def __init__(self, name: str, **names: Any):
        super().__init__(name)
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unsupported(f"{self.__name__}.{name}")


def _check_awaited(args: Any) -> None:
    """Refuse a kernel that has started a collective and has not awaited it."""
    module = device_module("block_exchange")
    for ws in args:
        if isinstance(ws, WorkspaceContext):
            first = ws.ring[-1] + module.epoch_of(ws, 0, 0)
            region, offset = running().memory.at(first, 1)
            nbytes = module.EPOCHS * ws.threads * ws.blocks
            words = region.buffer[offset : offset + nbytes].view(np.uint32)
            found = module.not_awaited(ws, words)
            if found:
                text, start = found
                raise Fault(
                    "error", text, sites=[(f"rank {ws.rank}", CodePlace(*start))]
                )


class ExploredKernel:
    """What ``cuda.jit`` returns for a kernel."""

    def __init__(self, function: Any):
        self.py_func = function

    def __getitem__(self, launch: Any) -> Any:
        grid, block, stream, dynamic = (*launch, 0, 0)[:4]

        def enqueue(*args: Any) -> None:
            for arg in args:
                if not isinstance(arg, _SCALARS):
                    raise unsupported(
                        f"{type(arg).__name__} as a kernel's argument",
                        "pass device arrays, numbers and tuples",
                    )
            caller = running().me()
            caller.local.check_stream(stream)
            check = functools.partial(_check_awaited, args)
            given = (grid, block), args, int(dynamic), caller.clock.copy(), check
            caller.local.stream.enqueue(Grid(self.py_func, *given))

        return enqueue

    def __call__(self, *_: Any) -> Any:
        """Refuse a call without a grid."""
        raise unsupported("a call of a kernel without a grid")

    def __getattr__(self, name: str) -> Any:
        raise unsupported(f"the attribute {name} of a kernel")


def jit(function: Any = None, device: bool = False, **options: Any) -> Any:
    """Stand in for ``cuda.jit``."""
    if options.get("link") or options.get("cooperative"):
        raise unsupported("cuda.jit with link or cooperative")
    if not callable(function):  # options or signatures
        return lambda given: jit(given, device)
    return function if device else ExploredKernel(function)


class _Index:
    """``threadIdx`` and the like."""

    def __init__(self, read: Any):
        self._read = read

    x = property(lambda self: self._read()[0])
    y = property(lambda self: self._read()[1])
    z = property(lambda self: self._read()[2])


def _per_axis(value: Callable[..., int]) -> Callable[[int], Any]:
    """Return ``cuda.grid`` or the like: a number, or one for each axis."""

    def found(ndim: int) -> Any:
        mine = me()
        parts = zip(mine.at, mine.grid.dim, mine.grid.block, mine.thread, strict=True)
        each = tuple(value(*part) for part in parts)[:ndim]
        return each if ndim > 1 else each[0]

    return found


def _atomic(verb: str) -> Any:
    return lambda array, index, *values: _of_element(
        verb, array, index, values, RELAXED, GPU
    )


def _warp(mask: int, value: Any = None, *, orders: bool = False) -> Any:
    """Exchange values within a warp."""
    if int(mask) & 0xFFFFFFFF != 0xFFFFFFFF:
        raise unsupported(f"the mask {mask:#x} of a warp", "pass 0xFFFFFFFF")
    return threads.warp(value, orders=orders)


def _shuffle(place: Any) -> Any:
    def shuffle(mask: int, value: Any, by: int) -> Any:
        found = _warp(mask, value)
        at = place(threads.lane(), int(by))
        return found[at] if 0 <= at < len(found) else value

    return shuffle


def _bits(values: list[Any]) -> int:
    return sum(bool(each) << i for i, each in enumerate(values))


def _host() -> Any:
    return running().me().local


def _device_array(
    shape: Any, dtype: Any = np.float64, strides: Any = None, order: str = "C",
    stream: Any = 0,
) -> Any:  # fmt: skip
    if strides is not None or order != "C":
        raise unsupported("device_array with strides or another order")
    return _host().new(shape, dtype, unset=True)


def _to_device(obj: Any, stream: Any = 0, copy: bool = True, to: Any = None) -> Any:
    given = obj if isinstance(obj, Array) else np.asarray(obj)
    found = to if to is not None else _host().new(given.shape, given.dtype)
    _host().copy_in(found, given)
    return found


def make_cuda() -> StandIn:
    """Return the stand-in for ``numba.cuda``."""
    sync = threads.sync
    atomics = {
        f"{verb}_" if verb in ("and", "or") else verb: _atomic(verb)
        for verb in threads.UPDATES
    }
    atomic = StandIn(
        "cuda.atomic",
        compare_and_swap=lambda array, old, value: _atomic("cas")(
            array, (0,) * array.ndim, old, value
        ),
        **atomics,
    )
    return _NumbaCuda(
        "numba.cuda",
        jit=jit,
        threadIdx=_Index(lambda: me().thread),
        blockIdx=_Index(lambda: me().at),
        blockDim=_Index(lambda: me().grid.block),
        gridDim=_Index(lambda: me().grid.dim),
        grid=_per_axis(lambda at, dim, block, thread: at * block + thread),
        gridsize=_per_axis(lambda at, dim, block, thread: dim * block),
        warpsize=threads.WARP,
        syncthreads=sync,
        syncthreads_or=lambda value: int(any(sync(bool(value)))),
        syncthreads_and=lambda value: int(all(sync(bool(value)))),
        syncthreads_count=lambda value: sum(sync(bool(value))),
        syncwarp=lambda mask=0xFFFFFFFF: _warp(mask, orders=True),
        shfl_sync=_shuffle(lambda lane, by: by % threads.WARP),
        shfl_up_sync=_shuffle(lambda lane, by: lane - by),
        shfl_down_sync=_shuffle(lambda lane, by: lane + by),
        shfl_xor_sync=_shuffle(lambda lane, by: lane ^ by),
        ballot_sync=lambda mask, value: _bits(_warp(mask, value)),
        any_sync=lambda mask, value: int(any(_warp(mask, value))),
        all_sync=lambda mask, value: int(all(_warp(mask, value))),
        threadfence=lambda: running().fence(local=True),
        threadfence_system=lambda: running().fence(),
        shared=SimpleNamespace(array=threads.shared_array),
        local=SimpleNamespace(array=threads.local_array),
        atomic=atomic,
        to_device=_to_device,
        device_array=_device_array,
        device_array_like=lambda array, stream=0: _host().new(
            array.shape, array.dtype, unset=True
        ),
        synchronize=lambda: _host().drain(),
        default_stream=lambda: 0,
        defer_cleanup=nullcontext,
        is_available=lambda: True,
        popc=lambda value: int(value).bit_count(),
        fma=lambda a, b, c: a * b + c,
        selp=lambda condition, a, b: a if condition else b,
    )


class _NumbaCuda(StandIn):
    """``numba.cuda``, whose lane is that of the thread."""

    laneid = property(lambda self: threads.lane())


_TYPES = (
    "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip


def make_numba(cuda: StandIn) -> dict[str, Any]:
    """Return the stand-ins for ``numba`` and what it contains, by name."""
    types = {name: getattr(np, name) for name in _TYPES}
    of_types = StandIn("numba.types", **types)
    vars(cuda)["types"] = of_types
    known = {"cuda": cuda, "config": SimpleNamespace(ENABLE_CUDASIM=True)}
    numba = StandIn("numba", types=of_types, **known, **types)
    return {"numba": numba, "numba.cuda": cuda, "numba.types": of_types}


PACKAGE = Path(__file__).parents[1]


def module_path(folder: Path, name: str) -> Path | None:
    """Return the file of a module or package in a folder."""
    place = folder.joinpath(*name.split("."))
    for path in (place / "__init__.py", place.with_suffix(".py")):
        if path.is_file():
            return path
    return None


class Modules:
    """What one program, or the library within it, can import.

    Attributes:
        known: the modules so far, by name.
        find: returns the file of a module, or None: it is imported as usual.
        compiled: returns the code of a file.
        names: more names that modules have as built-in ones.
        prepare: is called with each executed module.
    """

    def __init__(
        self,
        known: Mapping[str, Any],
        find: Callable[[str], Path | None],
        compiled: Callable[[Path], CodeType],
        names: Mapping[str, Any],
    ):
        self.known, self._find, self._compiled = dict(known), find, compiled
        self._builtins = {
            **vars(builtins),
            "__import__": self._import,
            **names,
        }
        self.prepare: Callable[[ModuleType], Any] = lambda module: None

    def execute(self, name: str, path: Path) -> Any:
        """Execute a module, and return it."""
        module = ModuleType(name)
        module.__dict__["__builtins__"] = self._builtins
        module.__file__, package = str(path), path.stem == "__init__"
        module.__package__ = name if package else name.rpartition(".")[0]
        self.known[name] = module
        exec(self._compiled(path), module.__dict__)
        self.prepare(module)
        return module

    def load(self, name: str) -> Any:
        """Return a module that is known or has a file; None: there is none."""
        if name in self.known:
            return self.known[name]
        parent, _, last = name.rpartition(".")
        if parent and parent.partition(".")[0] in self.known:
            self.load(parent)
        path = self._find(name)
        if path is None:
            return None
        module = self.execute(name, path)
        if parent in self.known and isinstance(self.known[parent], ModuleType):
            setattr(self.known[parent], last, module)
        return module

    def _import(
        self,
        name: str,
        given: Any = None,
        local: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if level:
            name = importlib.util.resolve_name("." * level + name, given["__package__"])
        module = self.load(name)
        if module is None:
            return builtins.__import__(name, given, local, fromlist, 0)
        if not fromlist:
            return self.load(name.partition(".")[0])
        for each in fromlist:
            if each not in vars(module):
                self.load(f"{name}.{each}")
        return module


DEVICE = "numba_symm.device"
_INSIDE = f"{DEVICE}."


def word_of(bits: int) -> int:
    """Return bits as a signed word of 8 bytes."""
    return ((int(bits) & 0xFFFFFFFFFFFFFFFF) ^ 1 << 63) - (1 << 63)


def located(address: int, nbytes: int) -> tuple[Area, int]:
    """Return the region of a word, and its offset there."""
    if address % nbytes:
        raise Fault(
            "access",
            f"an access of {nbytes} bytes, {address % nbytes} bytes after a multiple "
            f"of {nbytes}",
        )
    return running().memory.at(int(address), nbytes)


def op_at(kind: str, address: int, nbytes: int, order: str) -> Strong:
    """Return a strong access to the word at an address."""
    place = located(address, nbytes)
    return Strong(kind, *place, nbytes, order, running().site())


def _shown(bits: int, nbytes: int) -> int:
    """Return what device functions get of bits."""
    return word_of(bits) if nbytes == 8 else int(bits)


def _weak(nbytes: int, address: int, value: int | None = None) -> int:
    """Load, or store, the word at an address."""
    region, offset = located(address, nbytes)
    if value is None:
        running().weak(region, offset, nbytes, None)
    else:
        stored = (int(value) & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "little")
        running().weak(region, offset, nbytes, lambda: stored)
        region.put_bits(offset, nbytes, value)
    return _shown(region.bits(offset, nbytes), nbytes)


def _load(nbytes: int, order: str, address: int) -> int:
    """Make a strong load."""
    thread = running().me()
    if thread.peek is not None:  # of a wait's predicate
        thread.probed = *located(address, nbytes), nbytes, order
        return _shown(thread.peek, nbytes)
    op, state = op_at(LOAD, address, nbytes, order), threads.state(running().files)
    return _shown(running().access(op, state), nbytes)


def _store(nbytes: int, order: str, address: int, value: int) -> None:
    """Make a strong store."""
    op = op_at(STORE, address, nbytes, order)
    op.bits = int(value)
    running().access(op, None)


_COMMUTE = ("add", "sub", "min", "max", "and", "or", "xor")


def _updated(
    verb: str, dtype: np.dtype[Any], order: str, scope: str, address: int, *values: Any
) -> Any:
    """Make an atomic operation on the element at an address; return the old one."""
    op = op_at(UPDATE, address, dtype.itemsize, order)
    op.scope, op.change = scope, threads.changed(verb, dtype, values)
    commutes = verb in _COMMUTE and dtype.kind in "iu" and order != ACQUIRE
    if commutes and threads.drops_result():
        op.silent = verb
    old = running().access(op, threads.state(running().files))
    return threads.of_bits(dtype, old)


def _update(verb: str, kind: str, order: str) -> Callable[..., Any]:
    """Return an atomic operation on the word at an address."""

    def update(address: int, *values: Any) -> Any:
        old = _updated(verb, _dtype(kind), order, SYSTEM, address, *values).item()
        return word_of(old) if kind == "u64" else old

    return update


def _of_element(
    verb: str, array: Any, index: Any, values: Any, order: str, scope: str
) -> Any:
    """Make an atomic operation on an array's element."""
    known = {_dtype(kind) for kind in ATOMICS.get(verb, ())}
    if not isinstance(array, Array) or (scope == SYSTEM and array.dtype not in known):
        raise unsupported(
            f"an atomic {verb} of {getattr(array, 'dtype', type(array).__name__)}",
            "pass a device array of such a dtype",
        )
    if order not in ATOMIC_ORDERS:
        raise unsupported(f"an atomic {verb} with order={order!r}")
    address = array.address_of(index)
    if scope == GPU and located(address, 1)[0].rank not in (-1, running().me().rank):
        raise unsupported(
            f"cuda.atomic.{verb} of another rank's array",
            f"call symm.atomic_{verb}, which is atomic between GPUs",
        )
    return _updated(verb, array.dtype, order, scope, address, *values)


def _device_atomic(verb: str) -> Callable[..., Any]:
    """Return an atomic operation on an array's element."""
    if verb == "cas":
        return lambda array, index, old, value, order=RELAXED: _of_element(
            verb, array, index, (old, value), order, SYSTEM
        )
    return lambda array, index, value, order=RELAXED: _of_element(
        verb, array, index, (value,), order, SYSTEM
    )


def _dtype(kind: str) -> np.dtype[Any]:
    return np.dtype(f"{kind[0].replace('s', 'i')}{int(kind[1:]) // 8}")


def make_wait(has_arrived: Callable[[int, Any], bool]) -> Callable[..., bool]:
    """Replace ``polling.make_wait``: deadlines never pass."""

    def wait(guard: Any, address: int, expected: Any, record: int) -> bool:
        compared = expected if isinstance(expected, tuple) else None
        running().wait(lambda: has_arrived(address, expected), compared)
        return True

    return wait


def _packet_word(address: int, holds: Callable[[int], bool], peer: int) -> int:
    """Wait for half of a packet pair: 4 bytes of data, and above them the epoch."""
    op = op_at(AWAIT, address, 8, RELAXED)
    op.wanted = f"packets of rank {peer}, which it has not sent"
    return running().await_word(op, lambda word: holds(word >> 32)) & 0xFFFFFFFF


def _vector(
    box: int, stride: int, holds: Callable[[int], bool], peer: int
) -> tuple[int, int]:
    """Wait for a vector's packets, one word after another; return its two words."""
    words = [_packet_word(box + at, holds, peer) for at in (0, 8, stride, stride + 8)]
    return word_of(words[0] | words[1] << 32), word_of(words[2] | words[3] << 32)


def make_poll(size: int, peek: Any, late_rank: Any) -> Callable[..., bool]:
    """Replace ``packets.make_poll``.

    It waits for one word after another. A program that polls all of them in turn may
    see the same values: each load of its last round is a load here.
    """

    def poll(
        guard: Any, operation: int, first: int, rank_stride: int, epoch: int,
        block: int, low: Any, high: Any, wanted: int,
    ) -> bool:  # fmt: skip
        thread = running().me()
        flag = epoch & 0xFFFFFFFF
        for k in range(size - 1):
            box = first + k * rank_stride
            thread.peek = 0
            peek(box, epoch)
            thread.peek = None
            region, offset, _, _ = thread.probed  # the last word of the vector
            stride = region.base + offset - 8 - box
            if wanted >> k & 1:
                peer = late_rank(guard, k)
                low[k + 1], high[k + 1] = _vector(box, stride, flag.__eq__, peer)
            else:
                low[k + 1], high[k + 1], _ = peek(box, epoch)
        return True

    return poll


def _receive(guard: Any, box: int, number: int, record: int, lost: int) -> Any:
    """Replace ``packets._receive``: a later epoch is a fault."""
    site = running().site()  # the search calls what follows outside of the program

    def ends(epoch: int) -> bool:
        if epoch and 0 < (epoch - number & 0xFFFFFFFF) < 0x80000000:
            fail(guard, lost, site)
        return epoch == number & 0xFFFFFFFF

    return *_vector(box, 16, ends, record >> 40 & 0xFF), True


def fail(guard: Any, record: int, site: CodePlace | None = None) -> None:
    """Replace ``polling.fail``: what a kernel reports is a fault."""
    sites = [(f"rank {guard.rank}", site or running().site())]
    raise Fault("result", describe(record).text, sites=sites)


def _no_clock() -> int:
    raise unsupported("globaltimer", "an exploration has no time")


def _instructions() -> dict[str, Any]:
    """Return what replaces the functions of ``sim.py``."""
    found: dict[str, Any] = {}
    for name, nbytes in (("u8", 1), ("u16", 2), ("u32", 4), ("u64", 8)):
        for infix in ("", "any_"):
            found[f"ld_{infix}{name}"] = functools.partial(_weak, nbytes)
            found[f"st_{infix}{name}"] = functools.partial(_weak, nbytes)
    for name, nbytes in (("u32", 4), ("u64", 8)):
        for order in ATOMIC_ORDERS:
            load = functools.partial(_load, nbytes, order)
            store = functools.partial(_store, nbytes, order)
            found[f"ld_{order}_sys_{name}"] = load
            found[f"st_{order}_sys_{name}"] = store

    def ld_v2(address: int) -> tuple[int, int]:
        bits = _weak(16, address)
        return word_of(bits), word_of(bits >> 64)

    def st_v2(address: int, words: tuple[int, int]) -> None:
        low, high = (int(word) & 0xFFFFFFFFFFFFFFFF for word in words)
        _weak(16, address, high << 64 | low)

    def ld_v4(address: int) -> tuple[int, ...]:
        bits = _weak(16, address)
        return tuple(bits >> at & 0xFFFFFFFF for at in (0, 32, 64, 96))

    load, store = found["ld_relaxed_sys_u64"], found["st_relaxed_sys_u64"]

    def ld_pair(address: int) -> tuple[int, int]:
        return load(address), load(address + 8)

    def st_pair(address: int, words: tuple[int, int]) -> None:
        store(address, words[0])
        store(address + 8, words[1])

    found |= {"ld_v2_u64": ld_v2, "ld_any_v2_u64": ld_v2, "ld_v4_u32": ld_v4}
    found |= {"st_v2_u64": st_v2, "st_any_v2_u64": st_v2}
    found |= {"ld_relaxed_sys_v2_u64": ld_pair, "st_relaxed_sys_v2_u64": st_pair}
    return found | {
        "sliced": lambda form: lambda function: function,
        "array_at": Array.at,
        "fence_acq_rel_sys": lambda: running().fence(),
        "globaltimer": _no_clock,
        "poll_pause": lambda polls: None,
        "syncthreads": threads.sync,
        "syncthreads_or": lambda condition: any(threads.sync(bool(condition))),
        "bar_sync": threads.bar_sync,
        "bar_red_or": lambda bar, count, condition: any(
            threads.bar_sync(bar, count, bool(condition))
        ),
        "warp_or": lambda condition: any(threads.warp(bool(condition))),
        "votes": lambda condition: _bits(threads.warp(condition, orders=False)),
        "thread_index": lambda: threads.me().index,
        "thread_index_x": lambda: threads.me().thread[0],
        "thread_index_y": lambda: threads.me().thread[1],
        "block_index": lambda: threads.me().block_index,
        "grid_index": lambda: threads.me().block_index,
        "block_size": lambda: threads.me().grid.threads,
        "grid_size": lambda: threads.me().grid.blocks,
        "later_blocks": lambda: 0,
        "check_grid": lambda: None,
    }


def _replace(functions: dict[str, Any], module: ModuleType) -> None:
    """Replace what a module of device functions defines or imports."""
    for name in functions.keys() & module.__dict__.keys():
        setattr(module, name, functions[name])


def _atomics() -> ModuleType:
    """Return what replaces ``host_atomics.py``."""
    module = ModuleType(f"{DEVICE}.host_atomics")
    for verb, kinds in ATOMICS.items():
        setattr(module, f"atomic_{verb}", _device_atomic(verb))
        for order in ATOMIC_ORDERS:
            for kind in kinds:
                update = _update(verb, kind, order)
                setattr(module, atomic_name(verb, order, kind), update)
    return module


def _find(name: str) -> Path | None:
    return module_path(PACKAGE.parent, name) if f"{name}.".startswith(_INSIDE) else None


def _compiled(path: Path) -> CodeType:
    return compile(path.read_text(), str(path), "exec")


@functools.cache
def device() -> Modules:
    """Return the modules of ``numba_symm.device`` for explored programs."""
    simulated = ModuleType("numba_symm.environment")
    vars(simulated).update(vars(environment), SIMULATED=True)
    types = SimpleNamespace(**{name: np.dtype(name) for name in ("int64", "uint64")})
    numba = SimpleNamespace(cuda=SimpleNamespace(types=types))
    known = {
        "numba_symm": ModuleType("numba_symm"),
        "numba_symm.environment": simulated,
        f"{DEVICE}.host_atomics": _atomics(),
        "numba": numba,
        "numba.cuda": numba.cuda,
    }
    modules = Modules(known, _find, _compiled, {})
    functions = make_wait, make_poll, fail, _receive, Context, Team, WorkspaceContext
    replaced = _instructions() | {each.__name__: each for each in functions}
    modules.prepare = functools.partial(_replace, replaced)
    modules.load(DEVICE)
    return modules


def device_module(name: str = "") -> Any:
    """Return one of these modules; ``""``: the package."""
    return device().known[f"{DEVICE}.{name}".rstrip(".")]
