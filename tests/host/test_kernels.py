import copy
import ctypes
import importlib.metadata
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core.utils import FileStreamProgramCache
from numba.cuda import types

from numba_symm import dtypes
from numba_symm.collectives.kernels import (
    barrier,
    chunked,
    direct,
    one_shot,
    two_shot,
)
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols import handshake
from numba_symm.device import Context, Guard, signals
from numba_symm.gpu import compiled, kernels, loads
from numba_symm.gpu.kernels import GUARD, Kernel, Packed
from numba_symm.launch import locks
from numba_symm.launch.failures import BARRIER
from numba_symm.memory import pads

BFLOAT16 = dtypes.element(ml_dtypes.bfloat16, "test")
FLOAT32 = dtypes.element(np.float32, "test")
ALL, SCATTER, REDUCE, BROADCAST = (
    OPERATIONS[name].exchange
    for name in ("all_reduce", "reduce_scatter", "reduce", "broadcast")
)
KERNELS = {
    "one_shot_sentinel": one_shot.kernel(4, BFLOAT16, "sum", True, "sentinel", 2, ALL),
    "one_shot_ll": one_shot.kernel(4, FLOAT32, "min", False, "ll", 1, ALL),
    "two_shot_sentinel": two_shot.kernel(4, FLOAT32, "prod", False, "sentinel", 1),
    "one_shot_marked": one_shot.kernel(4, FLOAT32, "min", True, "marked", 2, ALL),
    "two_shot_marked": two_shot.kernel(4, BFLOAT16, "sum", False, "marked", 1),
    "chunked": chunked.kernel(4, FLOAT32, "sum", False, ALL, True),
    "handshake": handshake.handshake_kernel(3),
    "broadcast_direct": direct.kernel(4, FLOAT32, "sum", True, BROADCAST),
    "reduce_direct": direct.kernel(4, BFLOAT16, "sum", True, REDUCE),
    "all_reduce_direct": direct.kernel(4, BFLOAT16, "sum", True, ALL),
    "reduce_scatter_direct": direct.kernel(4, FLOAT32, "max", False, SCATTER),
    "barrier": barrier.kernel(4, BARRIER),
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


CHANGES = {
    "factory": {"factory": other_factory},
    "constants": {"constants": (3,)},
    "signature": {"signature": (GUARD, types.UniTuple(types.int64, 3), types.int64)},
    "threads": {"threads": 256},
    "registers": {"registers": 128},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_changes_with_the_definition(change):
    assert changed(**CHANGES[change]).key((9, 0)) != changed().key((9, 0))


def test_the_key_changes_with_the_compute_capability():
    assert changed().key((9, 0)) != changed().key((10, 0))


@pytest.mark.parametrize("part", ["_device_sources", "_versions"])
def test_the_key_changes_with_the_sources_and_the_versions(part, monkeypatch):
    before = changed().key((9, 0))
    text = getattr(kernels, part)()
    monkeypatch.setattr(kernels, part, lambda: text + " ")
    assert changed().key((9, 0)) != before


def test_the_versions_are_those_of_what_is_installed():
    own = kernels._versions.__wrapped__()
    for name in ("numba-cuda", "llvmlite", "nvidia-nvvm"):
        assert f"{name} {importlib.metadata.version(name)}," in own
    assert "nvidia-cuda-nvcc-cu12 None," in own


def test_the_compiler_runs_within_one_chunk_of_frames():
    def leaf():
        return None

    # A frame of 1.6 KB, so that some depth of calls leaves a chunk too little room.
    leaf.__code__ = leaf.__code__.replace(co_stacksize=200)

    def faults(depth):
        if depth:
            return faults(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(500):
            leaf()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    depths = range(250)  # more than a chunk of 16 KiB
    assert max(map(faults, depths)) >= 500  # each call maps a chunk
    assert kernels._with_room(lambda: max(map(faults, depths))) < 500


def test_keys_are_equal_in_every_process():
    # A memory address in a repr, or the order of a set, would differ.
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
    """Collect the modules of a function and of our functions that it may call."""
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
def test_the_sources_contain_every_module_of_a_kernel(name):
    modules = set(modules_used_by(KERNELS[name].function, {}).values())
    device = Path(signals.__file__).parent
    assert device in {Path(module.__file__).parent for module in modules}
    for module in modules:
        assert Path(module.__file__) in kernels._device_files()


def test_the_key_changes_with_a_module_in_any_folder_of_kernels(tmp_path, monkeypatch):
    package = tmp_path / "package"
    linked = tmp_path / "algorithms"
    for folder in (package / "bench", linked / "kernels" / "new"):
        folder.mkdir(parents=True)
    (package / "algorithms").symlink_to(linked)
    monkeypatch.setattr(kernels, "PACKAGE", package)
    sources = kernels._device_sources.__wrapped__
    monkeypatch.setattr(kernels, "_device_sources", sources)
    keys = [changed().key((9, 0))]
    for name in ("a.py", "algorithms/a.py", "algorithms/kernels/new/a.py"):
        for text in ("x = 1", "x = 2"):
            (package / name).write_text(text)
            keys.append(changed().key((9, 0)))
    assert len(set(keys)) == len(keys)
    (package / "bench" / "a.py").write_text("x = 1")  # a folder without kernels
    assert changed().key((9, 0)) == keys[-1]


@pytest.mark.parametrize("folder", kernels.NO_KERNELS)
def test_folders_that_the_key_leaves_out_have_no_kernels(folder):
    for file in (kernels.PACKAGE / folder).glob("**/*.py"):
        text = file.read_text()
        assert not re.search(r"\bKernel\(", text), file
        # Numba compiles the kernels of cuda.jit, and keeps none of them on disk.
        assert "device_function" not in text or "cuda.jit" in text, file


@pytest.mark.parametrize("name", ["put_signal", "barrier"])
def test_the_entry_is_the_name_of_the_kernel(name):
    kernel = copy.copy(KERNELS[name])
    text = kernel.ptx((9, 0))
    kernel.ptx = lambda cc: text  # a new compilation would have another name
    (entry,) = re.findall(r"\.entry (\w+)\(", text)
    assert kernel.function.__name__ in entry
    assert kernels._entry(kernel.cubin((9, 0))) == entry


@pytest.mark.parametrize("early", [False, True])
def test_an_early_launch_has_an_attribute_of_the_driver(early):
    config = compiled.launch_config(7, 128, 2, early)
    found = driver.CUlaunchConfig(ctypes.addressof(config))
    assert (found.gridDimX, found.gridDimY, found.gridDimZ) == (7, 1, 1)
    assert (found.blockDimX, found.blockDimY, found.blockDimZ) == (128, 2, 1)
    assert (found.sharedMemBytes, found.numAttrs) == (0, int(early))
    if early:
        attribute = driver.CUlaunchAttribute(config.attributes)
        kind = driver.CUlaunchAttributeID
        expected = kind.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert attribute.id == expected
        assert attribute.value.programmaticStreamSerializationAllowed == 1


def stored(packed):
    """Return the size and value of each argument that the driver reads."""
    count = len(packed.values)
    pointers = (ctypes.c_void_p * count).from_address(packed.address)
    sizes = [ctypes.sizeof(value) for value in packed.values]
    memory = map(ctypes.string_at, pointers, sizes)
    return [(len(m), int.from_bytes(m, "little", signed=True)) for m in memory]


def test_arguments_are_packed_member_by_member():
    guard = Guard(board=1 << 40, rank=1, size=2, timeout=-3)
    ctx = Context(1, 2, (10, 11), (20, 21), guard)
    signature = (pads.context_type(2), types.int32, types.boolean, types.boolean)
    packed = Packed(signature, (ctx, -7, True, False))
    scalars = [1, 2, 10, 11, 20, 21, 1 << 40, 1, 2, -3]
    assert stored(packed) == [
        *((8, scalar) for scalar in scalars),
        *[(4, -7), (1, 1), (1, 0)],
    ]


@pytest.mark.parametrize("name", ["one_shot_ll", "chunked", "put_signal"])
def test_arguments_have_the_sizes_of_the_kernels_parameters(name):
    kernel = KERNELS[name]
    packed = Packed(kernel.signature, zeros(kernel.signature))
    bits = re.findall(r"\.param \.[a-z](\d+)", kernel.ptx((9, 0)))
    assert [8 * size for size, _ in stored(packed)] == [int(width) for width in bits]


def zeros(signature):
    return tuple(
        zeros(member) if isinstance(member, types.BaseTuple) else 0
        for member in signature
    )


@pytest.fixture(scope="module")
def cubin():
    return KERNELS["put_signal"].cubin((9, 0))


@pytest.fixture
def fake_driver(monkeypatch, cubin, tmp_path):
    """Record the driver's calls and the loaded cubins."""
    import cuda.core

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loads.folder().mkdir(parents=True)
    file = loads.folder() / loads._LOCKS
    seen = SimpleNamespace(calls=[], cache={}, compiled=0, locked=[])

    class Loaded:
        def __init__(self, code):
            self.code = code

        def get_kernel(self, name):
            return SimpleNamespace(handle=(self.code, name))

    class Object:
        from_cubin = staticmethod(Loaded)

    def call(name, *args):
        seen.calls.append((name, *args))
        seen.locked.append(is_locked(file, KERNELS["put_signal"]))
        return ("function", *args) if name == "cuKernelGetFunction" else None

    def compile_once(kernel, cc):
        seen.compiled += 1
        seen.locked.append(is_locked(file, kernel))
        return cubin

    monkeypatch.setattr(cuda.core, "ObjectCode", Object)
    monkeypatch.setattr(kernels.driver, "call", call)
    monkeypatch.setattr(loads, "_files", lambda: seen.cache)
    monkeypatch.setattr(Kernel, "cubin", compile_once)
    monkeypatch.setattr(kernels, "_leave_mark", lambda: None)
    kernels._loaded.cache_clear()
    yield seen
    kernels._loaded.cache_clear()


def is_locked(file, kernel):
    """Return whether processes that need the kernel wait for this one."""
    if not file.exists():
        return False
    with file.open("r+") as opened:
        byte = loads._byte(kernel.key((9, 0)))
        return locks.is_locked(opened.fileno(), byte)


def test_a_kernel_is_locked_while_it_is_compiled_and_not_while_it_is_loaded(
    fake_driver,
):
    kernels._loaded(KERNELS["put_signal"], (9, 0), 0)
    names = ["cubin", *(name for name, *_ in fake_driver.calls)]
    assert names == ["cubin", "cuKernelGetFunction", "cuFuncLoad"]
    assert fake_driver.locked == [True, False, False]


def test_a_kernel_is_compiled_once_and_then_read_from_disk(fake_driver, cubin):
    for _ in "12":
        kernels._loaded.cache_clear()  # the state of a new process
        kernels._loaded(KERNELS["put_signal"], (9, 0), 0)
    assert fake_driver.compiled == 1
    key = KERNELS["put_signal"].key((9, 0))
    (entry,) = fake_driver.cache.values()
    assert entry.endswith(cubin)
    assert loads.load(key) == cubin


def load_twice():
    """Load two kernels, as a new process would."""
    for name in ("put_signal", "wait_signal"):
        kernels._loaded.cache_clear()
        kernels._loaded(KERNELS[name], (9, 0), 0)


@pytest.fixture
def cache(fake_driver, monkeypatch, tmp_path):
    """Return the folder of a new cache on disk."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(loads, "_warned", False)
    monkeypatch.setattr(loads, "_files", lambda: FileStreamProgramCache(folder))
    return folder


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: b"",
        lambda entry: entry[:100],
        lambda entry: os.urandom(5000),
        lambda entry: entry[: len(entry) // 2].ljust(len(entry), b"\0"),
    ],
    ids=["empty", "truncated", "garbage", "half of it zeros"],
)
def test_a_damaged_entry_is_compiled_again_and_replaced(fake_driver, cache, damage):
    load_twice()
    files = [file for file in cache.glob("entries/*/*") if file.is_file()]
    assert len(files) == fake_driver.compiled == 2
    whole = [file.read_bytes() for file in files]
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(RuntimeWarning, match="damaged entry") as warned:
        load_twice()
    assert len(warned) == 1
    assert fake_driver.compiled == 4
    assert [file.read_bytes() for file in files] == whole
    load_twice()
    assert fake_driver.compiled == 4


def test_an_entry_of_another_kernel_is_not_used(fake_driver, cache):
    load_twice()
    one, other = [file for file in cache.glob("entries/*/*") if file.is_file()]
    one.write_bytes(other.read_bytes())
    with pytest.warns(RuntimeWarning, match="damaged entry"):
        load_twice()


def no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("without", ["folder", "home", "space", "right to read"])
def test_without_a_usable_cache_kernels_are_compiled(
    fake_driver, cache, monkeypatch, without
):
    if without == "folder":
        cache.write_text("a file")
    elif without == "home":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: Path("~nobody-here").expanduser())
        monkeypatch.setattr(loads, "_files", FileStreamProgramCache)
    elif without == "space":
        monkeypatch.setattr(tempfile, "mkstemp", no_space)
    else:
        load_twice()
        for file in cache.glob("entries/*/*"):
            file.unlink()
            file.mkdir()
    compiled = fake_driver.compiled
    with pytest.warns(RuntimeWarning, match=r"cannot be (read|written).*XDG") as warned:
        load_twice()
    assert len(warned) == 1
    assert fake_driver.compiled == compiled + 2


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


def test_numbas_decorator_keeps_its_options_on_gpus():
    """The simulator replaces it, but must not be imported on GPUs."""
    program = (
        "from numba import cuda; own = cuda.jit; import numba_symm, numba_symm.mpi; "
        "from numba_symm.device import ptx; assert cuda.jit is own; "
        "assert ptx.device_function(lambda: None).targetoptions['forceinline']"
    )
    environ = os.environ | {"NUMBA_ENABLE_CUDASIM": "0"}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)
