import copy
import ctypes
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from numba.cuda import types

from numba_symm import dtypes, kernels, pads
from numba_symm.collectives import (
    agreement,
    barrier,
    broadcast_direct,
    copy_engine,
    direct,
    one_shot,
    one_shot_pull,
    reduce_direct,
    two_shot,
    two_shot_signalled,
)
from numba_symm.device import Context, Guard, signals
from numba_symm.kernels import GUARD, Kernel

BFLOAT16 = dtypes.element(ml_dtypes.bfloat16, "test")
FLOAT32 = dtypes.element(np.float32, "test")
KERNELS = {
    "one_shot_sentinel": one_shot.kernel(4, BFLOAT16, "sum", True, "sentinel", 2),
    "one_shot_ll": one_shot.kernel(4, FLOAT32, "min", False, "ll", 1),
    "two_shot_sentinel": two_shot.kernel(4, FLOAT32, "prod", False, "sentinel", 1),
    "one_shot_marked": one_shot.kernel(4, FLOAT32, "min", True, "marked", 2),
    "two_shot_marked": two_shot.kernel(4, BFLOAT16, "sum", False, "marked", 1),
    "two_shot_ll": two_shot.kernel(4, BFLOAT16, "sum", True, "ll", 2),
    "two_shot_signalled": two_shot_signalled.kernel(4, FLOAT32, "sum", False),
    "one_shot_pull": one_shot_pull.kernel(4, FLOAT32, "max", True),
    "copy_engine": copy_engine.kernel(4, FLOAT32, "sum", False),
    "meet": direct.meet_kernel(3),
    "broadcast_direct": broadcast_direct.kernel(4, FLOAT32, True),
    "reduce_direct": reduce_direct.kernel(4, BFLOAT16, "sum", True),
    "agreement": agreement.kernel(4),
    "barrier": barrier.kernel(4),
    "pad_barrier": pads.barrier_kernel(4),
    "put_signal": pads.put_signal_kernel(4),
    "wait_signal": pads.wait_signal_kernel(4),
    "fence": pads.fence_kernel(),
}


def other_factory(size):
    return lambda out: None


def changed(**fields):
    own = {"factory": barrier.make_barrier, "constants": (2,), "threads": 512}
    own["signature"] = (GUARD, types.UniTuple(types.int64, 2), types.int64)
    return Kernel(**(own | fields))


FOR_ONE_RANK = {"signature": barrier.kernel(1).signature}

CHANGES = {
    "factory": {"factory": other_factory},
    "constants": {"constants": (3,)},
    "signature": {"signature": (GUARD, types.UniTuple(types.int64, 3), types.int64)},
    "threads": {"threads": 256},
    "registers": {"registers": 128},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_changes_with_the_kernels(change):
    assert changed(**CHANGES[change]).key((9, 0)) != changed().key((9, 0))


def test_the_key_changes_with_all_that_a_kernel_is_made_for():
    variants = [
        one_shot.kernel(2, element, op, ragged, transport, steps)
        for element in (BFLOAT16, FLOAT32)
        for op in dtypes.REDUCTIONS
        for ragged in (False, True)
        for transport in ("sentinel", "marked", "ll")
        for steps in (1, 2)
    ]
    assert len({variant.key((9, 0)) for variant in variants}) == len(variants)


def test_the_key_changes_with_the_accumulation_type():
    other = dataclasses.replace(BFLOAT16, accumulate=BFLOAT16.dtype)
    keys = {
        changed(constants=(2, element, "sum")).key((9, 0))
        for element in (BFLOAT16, other)
    }
    assert len(keys) == 2


def test_the_key_changes_with_the_compute_capability():
    assert changed().key((9, 0)) != changed().key((10, 0))


@pytest.mark.parametrize("part", ["_device_sources", "_versions"])
def test_the_key_changes_with_the_sources_and_the_versions(part, monkeypatch):
    before = changed().key((9, 0))
    text = getattr(kernels, part)()
    monkeypatch.setattr(kernels, part, lambda: text + " ")
    assert changed().key((9, 0)) != before


def test_equal_kernels_have_equal_keys():
    assert changed().key((9, 0)) == changed().key((9, 0))


def test_every_process_finds_the_same_keys():
    # A repr with a memory address in it, or the order of a set, would differ.
    code = (
        "from tests.host.test_kernels import KERNELS\n"
        "for kernel in KERNELS.values(): print(kernel.key((9, 0)).hex())"
    )
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    own = [kernel.key((9, 0)).hex() for kernel in KERNELS.values()]
    assert answer.stdout.split() == own


def modules_used_by(function, seen):
    """Collect the modules of a function and of all of ours that it may call."""
    seen[function] = sys.modules[function.__module__]
    names = function.__code__.co_names
    used = [function.__globals__.get(name) for name in names]
    modules = [each for each in used if isinstance(each, ModuleType)]
    used += [getattr(module, name, None) for module in modules for name in names]
    used += [cell.cell_contents for cell in function.__closure__ or ()]
    for each in used:
        each = getattr(each, "py_func", getattr(each, "_defn", each))
        ours = str(getattr(each, "__module__", "")).startswith("numba_symm")
        if isinstance(each, FunctionType) and ours and each not in seen:
            modules_used_by(each, seen)
    return seen


@pytest.mark.parametrize("name", KERNELS)
def test_the_sources_hold_every_module_that_a_kernel_runs(name):
    modules = set(modules_used_by(KERNELS[name].function, {}).values())
    device = Path(signals.__file__).parent
    assert device in {Path(module.__file__).parent for module in modules}
    for module in modules:
        assert Path(module.__file__).read_text() in kernels._device_sources()


def test_the_sources_hold_how_kernels_are_compiled():
    assert Path(kernels.__file__).read_text() in kernels._device_sources()


@pytest.mark.parametrize("name", ["put_signal", "barrier"])
def test_the_entry_is_the_kernels_name(name):
    kernel = copy.copy(KERNELS[name])
    text = kernel.ptx((9, 0))
    kernel.ptx = lambda cc: text  # Numba counts compilations in the name
    (entry,) = re.findall(r"\.entry (\w+)\(", text)
    assert kernel.function.__name__ in entry
    assert kernels._entry(kernel.cubin((9, 0))) == entry


def test_a_block_has_no_more_threads_than_the_kernel_was_compiled_for():
    assert ".maxntid 32" in KERNELS["put_signal"].ptx((9, 0))


def test_a_fence_is_of_system_scope():
    assert KERNELS["fence"].ptx((9, 0)).count("fence.acq_rel.sys;") == 1


@pytest.mark.parametrize("registers", [64, 128])
def test_the_compiler_is_told_how_many_blocks_must_fit(registers):
    kernel = changed(constants=(1,), threads=128, registers=registers, **FOR_ONE_RANK)
    assert f".minnctapersm {65536 // 128 // registers}" in kernel.ptx((9, 0))


def test_grids_that_may_be_early_wait_where_the_gpu_can_launch_them_so():
    kernel = KERNELS["barrier"]
    for instruction in ("wait", "launch_dependents"):
        assert f"griddepcontrol.{instruction};" in kernel.ptx((9, 0))
        assert "griddepcontrol" not in kernel.ptx((8, 0))


@pytest.mark.parametrize("early", [False, True])
def test_an_early_launch_says_so_to_the_driver(early):
    config = kernels._config(7, 128, early)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (7, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    allowed = [a.value.programmaticStreamSerializationAllowed for a in config.attrs]
    assert allowed == ([1] if early else [])
    assert config.numAttrs == len(allowed)


def stored(packed):
    """Return the size and value of each argument, as the driver reads them."""
    count = len(packed.values)
    pointers = (ctypes.c_void_p * count).from_address(packed.address)
    sizes = [ctypes.sizeof(value) for value in packed.values]
    memory = map(ctypes.string_at, pointers, sizes)
    return [(len(m), int.from_bytes(m, "little", signed=True)) for m in memory]


def test_arguments_are_packed_member_by_member():
    guard = Guard(board=1 << 40, rank=1, world_size=2, timeout=-3)
    ctx = Context(1, 2, (10, 11), (20, 21), guard)
    signature = (pads.context_type(2), types.int32, types.boolean, types.boolean)
    packed = kernels._Packed(signature, (ctx, -7, True, False))
    scalars = [1, 2, 10, 11, 20, 21, 1 << 40, 1, 2, -3]
    assert stored(packed) == [
        *((8, scalar) for scalar in scalars),
        *[(4, -7), (1, 1), (1, 0)],
    ]


@pytest.mark.parametrize("name", ["one_shot_ll", "one_shot_pull", "put_signal"])
def test_arguments_are_packed_as_the_compiled_kernel_reads_them(name):
    kernel = KERNELS[name]
    packed = kernels._Packed(kernel.signature, zeros(kernel.signature))
    bits = re.findall(r"\.param \.[a-z](\d+)", kernel.ptx((9, 0)))
    assert [8 * size for size, _ in stored(packed)] == [int(width) for width in bits]


def zeros(signature):
    return tuple(
        zeros(member) if isinstance(member, types.BaseTuple) else 0
        for member in signature
    )


@pytest.mark.parametrize(
    "args", [(1,), (1, 2, 3), ((1, 2), 3), ((1, 2, 3, 4), 5)], ids=str
)
def test_arguments_that_do_not_fit_the_signature_are_refused(args):
    signature = (types.UniTuple(types.int64, 3), types.int64)
    with pytest.raises((ValueError, TypeError)):
        kernels._Packed(signature, args)


@pytest.fixture(scope="module")
def cubin():
    return KERNELS["put_signal"].cubin((9, 0))


@pytest.fixture
def fake_driver(monkeypatch, cubin):
    """Keep the calls, and the cubins that would be loaded on a GPU."""
    import cuda.core

    seen = SimpleNamespace(calls=[], cache={}, compiled=0)

    class Loaded:
        def __init__(self, code):
            self.code = code

        def get_kernel(self, name):
            return SimpleNamespace(handle=(self.code, name))

    class Object:
        from_cubin = staticmethod(Loaded)

    def call(name, *args):
        seen.calls.append((name, *args))
        return ("function", *args) if name == "cuKernelGetFunction" else None

    def compile_once(kernel, cc):
        seen.compiled += 1
        return cubin

    monkeypatch.setattr(cuda.core, "ObjectCode", Object)
    monkeypatch.setattr(kernels.driver, "call", call)
    monkeypatch.setattr(kernels, "_disk_cache", lambda: seen.cache)
    monkeypatch.setattr(Kernel, "cubin", compile_once)
    kernels._loaded.cache_clear()
    yield seen
    kernels._loaded.cache_clear()


def test_a_kernel_is_compiled_once_and_then_read_from_disk(fake_driver, cubin):
    for _ in "12":
        kernels._loaded.cache_clear()  # what the next process starts with
        kernels._loaded(KERNELS["put_signal"], (9, 0), 0)
    assert fake_driver.compiled == 1
    key = KERNELS["put_signal"].key((9, 0))
    assert fake_driver.cache == {key: cubin}


def test_a_kernel_is_loaded_before_its_first_launch(fake_driver, cubin):
    function = kernels._loaded(KERNELS["put_signal"], (9, 0), 0)
    handle = (cubin, kernels._entry(cubin))
    assert function == ("function", handle)
    assert fake_driver.calls == [
        ("cuKernelGetFunction", handle),
        ("cuFuncLoad", function),
    ]


def test_a_kernel_is_loaded_on_each_device(fake_driver):
    for device_id in (0, 1, 0):
        kernels._loaded(KERNELS["put_signal"], (9, 0), device_id)
    loads = [name for name, *_ in fake_driver.calls if name == "cuFuncLoad"]
    assert len(loads) == 2
