"""Stand-ins for ``numba`` and ``numba.cuda`` in explored programs."""

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from numba_symm.explore import threads
from numba_symm.explore.arrays import Array, unsupported
from numba_symm.explore.machine import running
from numba_symm.explore.memory import GPU, RELAXED
from numba_symm.explore.threads import Grid, me
from numba_symm.explore.updates import update_element

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


class ExploredKernel:
    """What ``cuda.jit`` returns for a kernel."""

    def __init__(self, function: Any):
        self.py_func = function

    def __getitem__(self, launch: Any) -> Any:
        grid, block, stream, dynamic = (
            (*launch, 0, 0)[:4] if len(launch) < 4 else launch
        )

        def enqueue(*args: Any) -> None:
            for arg in args:
                if not isinstance(arg, _SCALARS):
                    raise unsupported(
                        f"{type(arg).__name__} as a kernel's argument",
                        "pass device arrays, numbers and tuples",
                    )
            host = running().me().local
            host.check_stream(stream)
            clock = running().me().clock.copy()
            launched = Grid(self.py_func, (grid, block), args, int(dynamic), clock)
            host.stream.enqueue(launched)

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


def _of_dimensions(found: tuple[int, ...], ndim: int) -> Any:
    return found[0] if ndim == 1 else found[:ndim]


def grid(ndim: int) -> Any:
    """Stand in for ``cuda.grid``."""
    mine = me()
    parts = zip(mine.at, mine.grid.block, mine.thread, strict=True)
    return _of_dimensions(tuple(b * size + t for b, size, t in parts), ndim)


def gridsize(ndim: int) -> Any:
    """Stand in for ``cuda.gridsize``."""
    launch = me().grid
    parts = zip(launch.dim, launch.block, strict=True)
    return _of_dimensions(tuple(b * size for b, size in parts), ndim)


def _atomic(verb: str) -> Any:
    def atomic(array: Any, index: Any, *values: Any) -> Any:
        if not isinstance(array, Array):
            raise unsupported(f"cuda.atomic.{verb} of {type(array).__name__}")
        return update_element(array, index, verb, RELAXED, values, GPU)

    return atomic


def _warp(mask: int, value: Any) -> list[Any]:
    """Exchange values within a warp, which orders no accesses."""
    _check_mask(mask)
    return threads.warp(value, orders=False)


def _check_mask(mask: int) -> None:
    if int(mask) & 0xFFFFFFFF != 0xFFFFFFFF:
        raise unsupported(f"the mask {mask:#x} of a warp", "pass 0xFFFFFFFF")


def syncwarp(mask: int = 0xFFFFFFFF) -> None:
    """Stand in for ``cuda.syncwarp``."""
    _check_mask(mask)
    threads.warp()


def _shuffle(place: Any) -> Any:
    def shuffle(mask: int, value: Any, by: int) -> Any:
        found = _warp(mask, value)
        at = place(threads.lane(), int(by))
        return found[at] if 0 <= at < len(found) else value

    return shuffle


def _ballot(mask: int, value: Any) -> int:
    return sum(bool(each) << i for i, each in enumerate(_warp(mask, value)))


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


def _device_array_like(array: Any, stream: Any = 0) -> Any:
    return _host().new(array.shape, array.dtype, unset=True)


class _NoContext:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def make_cuda() -> StandIn:
    """Return the stand-in for ``numba.cuda``."""
    sync = threads.sync
    verbs = (
        "add",
        "sub",
        "min",
        "max",
        "exch",
        "inc",
        "dec",
        "and",
        "or",
        "xor",
        "cas",
    )
    atomics = {
        f"{verb}_" if verb in ("and", "or") else verb: _atomic(verb) for verb in verbs
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
        grid=grid,
        gridsize=gridsize,
        warpsize=threads.WARP,
        syncthreads=threads.syncthreads,
        syncthreads_or=lambda value: int(any(sync(bool(value)))),
        syncthreads_and=lambda value: int(all(sync(bool(value)))),
        syncthreads_count=lambda value: sum(sync(bool(value))),
        syncwarp=syncwarp,
        shfl_sync=_shuffle(lambda lane, by: by % threads.WARP),
        shfl_up_sync=_shuffle(lambda lane, by: lane - by),
        shfl_down_sync=_shuffle(lambda lane, by: lane + by),
        shfl_xor_sync=_shuffle(lambda lane, by: lane ^ by),
        ballot_sync=_ballot,
        any_sync=lambda mask, value: int(any(_warp(mask, value))),
        all_sync=lambda mask, value: int(all(_warp(mask, value))),
        threadfence=lambda: running().fence(local=True),
        threadfence_system=lambda: running().fence(),
        shared=SimpleNamespace(array=threads.shared_array),
        local=SimpleNamespace(array=threads.local_array),
        atomic=atomic,
        to_device=_to_device,
        device_array=_device_array,
        device_array_like=_device_array_like,
        synchronize=lambda: _host().drain(),
        default_stream=lambda: 0,
        defer_cleanup=_NoContext,
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
    config = SimpleNamespace(ENABLE_CUDASIM=True, CUDA_LOW_OCCUPANCY_WARNINGS=False)
    numba = StandIn("numba", cuda=cuda, config=config, types=of_types, **types)
    return {"numba": numba, "numba.cuda": cuda, "numba.types": of_types}
