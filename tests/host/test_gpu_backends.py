"""The backends on GPUs, over a driver that fails at one call after another."""

import contextlib
import ctypes
import signal

import pytest
from cuda.bindings import driver as binding

from numba_symm.errors import BackendError, DriverError
from numba_symm.gpu import driver
from numba_symm.launch.board import Board
from numba_symm.memory.backends import (
    Allocation,
    IpcBackend,
    VmmBackend,
    allocation_around,
)

MIB = 1 << 20
UNDO = {
    "cuMemCreate": "cuMemRelease",
    "cuMemImportFromShareableHandle": "cuMemRelease",
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemMap": "cuMemUnmap",
    "cuMemAlloc": "cuMemFree",
    "cuIpcOpenMemHandle": "cuIpcCloseMemHandle",
    "cuMemHostRegister": "cuMemHostUnregister",
}
RESULTS = {
    "cuMemGetAllocationGranularity": 2 * MIB,
    "cuMemCreate": "block",
    "cuMemImportFromShareableHandle": "imported",
    "cuMemAddressReserve": 0xA0000000,
    "cuMemAlloc": 0xB0000000,
    "cuIpcOpenMemHandle": 0xC0000000,
    "cuMemExportToShareableHandle": 33,
    "cuMemHostGetDevicePointer": 0xD0000000,
}


class Driver:
    """A substitute for the driver: what was called, what is held, what fails next."""

    def __init__(self):
        self.calls = []
        self.held = []  # (the call that gives it back, what it is), oldest first
        self.fail = lambda name, number: False

    def call(self, name, *args):
        self.calls.append((name, *args))
        if name in UNDO.values():
            # In reverse order, what is held, and nothing twice.
            assert self.held.pop() == (name, args[0])
        if self.fail(name, len(self.calls)):
            raise DriverError(f"{name} failed: as asked")
        result = RESULTS.get(name)
        if name in UNDO:
            held = args[0] if result is None else result
            self.held.append((UNDO[name], held))
        return result

    def names(self):
        return [name for name, *_ in self.calls]


@pytest.fixture
def fake(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(driver, "call", fake.call)
    return fake


def vmm(fake):
    backend = VmmBackend(3)
    fake.calls.clear()
    return backend


STEPS = {
    "vmm allocates": (vmm, lambda backend: backend.allocate(100), 7),
    "vmm opens": (vmm, lambda backend: backend.open(33, 2 * MIB), 4),
    "ipc allocates": (lambda _: IpcBackend(), lambda backend: backend.allocate(100), 4),
    "ipc opens": (lambda _: IpcBackend(), lambda b: b.open(bytes(64), 100), 1),
}
at_each_step = pytest.mark.parametrize(
    ("what", "step"),
    [(what, step + 1) for what, (*_, steps) in STEPS.items() for step in range(steps)],
)


@pytest.mark.parametrize("what", STEPS)
def test_each_takes_the_steps_that_are_made_to_fail_below(what, fake):
    make, act, steps = STEPS[what]
    act(make(fake))
    assert len(fake.calls) == steps
    assert fake.held


@at_each_step
def test_an_error_at_any_step_leaves_nothing_behind(what, step, fake):
    make, act, _ = STEPS[what]
    backend = make(fake)
    fake.fail = lambda name, number: number == step
    with pytest.raises(DriverError, match="as asked"):
        act(backend)
    assert fake.held == []
    # The calls after the failure only undo those before it.
    acquired = [UNDO[name] for name in fake.names()[: step - 1] if name in UNDO]
    undone = [name for name in fake.names()[step:] if name != "cuCtxSynchronize"]
    assert undone == acquired[::-1]


@pytest.mark.parametrize("make", [vmm, lambda _: IpcBackend()], ids=["vmm", "ipc"])
def test_memory_that_cannot_be_waited_for_is_not_written(make, fake):
    """The memory is unmapped immediately, so a later write would be a fault."""
    backend = make(fake)
    fake.fail = lambda name, number: name == "cuCtxSynchronize"  # as in a capture
    with pytest.raises(DriverError, match="cuCtxSynchronize failed"):
        backend.allocate(100)
    assert fake.held == []
    assert "cuMemsetD8" not in fake.names()


GIVEN_BACK = {
    "vmm allocation": (vmm, lambda b: b.free(b.allocate(100))),
    "vmm mapping": (vmm, lambda b: b.close(b.open(33, 2 * MIB))),
    "ipc allocation": (lambda _: IpcBackend(), lambda b: b.free(b.allocate(100))),
    "ipc mapping": (lambda _: IpcBackend(), lambda b: b.close(b.open(bytes(64), 1))),
}


@pytest.mark.parametrize("what", GIVEN_BACK)
def test_what_is_given_back_is_given_back_whole(what, fake):
    make, act = GIVEN_BACK[what]
    act(make(fake))
    assert fake.held == []
    assert set(fake.names()) & set(UNDO.values())


@pytest.mark.parametrize("what", GIVEN_BACK)
def test_an_undo_that_fails_stops_no_other(what, fake):
    # As in a context that a kernel has broken: every call fails there.
    make, act = GIVEN_BACK[what]
    fake.fail = lambda name, number: name in UNDO.values()
    with pytest.raises(DriverError, match="as asked"):
        act(make(fake))
    assert fake.held == []


@pytest.mark.parametrize(
    ("what", "made_by"),
    [
        ("vmm allocation", "vmm allocates"),
        ("vmm mapping", "vmm opens"),
        ("ipc mapping", "ipc opens"),
    ],
)
def test_unmapping_waits_for_kernels_first_and_is_left_if_it_cannot(
    what, made_by, fake
):
    """A capture refuses the wait; kernels may still use what would be unmapped."""
    make, act = GIVEN_BACK[what]
    backend = make(fake)
    *_, steps = STEPS[made_by]
    fake.fail = lambda name, number: number > steps and name == "cuCtxSynchronize"
    with pytest.raises(DriverError, match="cuCtxSynchronize"):
        act(backend)
    assert not set(fake.names()) & set(UNDO.values())
    assert fake.held


def test_vmm_memory_is_of_whole_granules_and_zeroed_before_anyone_sees_it(fake):
    backend = vmm(fake)
    for asked, size in [(0, 2), (1, 2), (2 * MIB, 2), (2 * MIB + 1, 4)]:
        fake.calls.clear()
        block = backend.allocate(asked)
        assert (block.address, block.nbytes) == (0xA0000000, size * MIB)
        assert fake.calls[-2:] == [
            ("cuMemsetD8", block.address, 0, size * MIB),
            ("cuCtxSynchronize",),
        ]
        backend.free(block)


def test_vmm_memory_lies_on_its_gpu_and_can_be_exported_as_a_file(fake):
    vmm(fake).allocate(1)
    (name, _, properties, _) = fake.calls[0]
    assert name == "cuMemCreate"
    assert properties.location.id == 3
    kinds = binding.CUmemAllocationHandleType
    wanted = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert properties.requestedHandleTypes == wanted


@pytest.mark.parametrize("act", ["vmm allocates", "vmm opens"])
def test_vmm_memory_is_mapped_for_reading_and_writing_by_its_gpu(act, fake):
    make, act, _ = STEPS[act]
    act(make(fake))
    (arguments,) = [args for name, *args in fake.calls if name == "cuMemSetAccess"]
    (access,) = arguments[2]
    assert arguments[:2] == [0xA0000000, 2 * MIB]
    assert access.location.id == 3
    flags = binding.CUmemAccess_flags
    assert access.flags == flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def test_vmm_exports_the_block_it_created(fake):
    backend = vmm(fake)
    assert backend.export(backend.allocate(1)) == 33
    assert fake.calls[-1][:2] == ("cuMemExportToShareableHandle", "block")


def test_ipc_memory_is_of_whole_pages_so_that_no_other_data_shares_its_handle(fake):
    for asked, size in [(0, 2), (2 * MIB, 2), (2 * MIB + 1, 4)]:
        block = IpcBackend().allocate(asked)
        assert (block.address, block.nbytes) == (0xB0000000, size * MIB)


def test_an_ipc_handle_is_its_64_bytes(fake, monkeypatch):
    handle = binding.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes(range(64)), 64)
    monkeypatch.setitem(RESULTS, "cuIpcGetMemHandle", handle)
    backend = IpcBackend()
    exported = backend.export(Allocation(0xB0000000, 100, None))
    assert exported == bytes(range(64))
    backend.open(exported, 100)
    ((opened, _),) = [
        args for name, *args in fake.calls if name == "cuIpcOpenMemHandle"
    ]
    assert ctypes.string_at(opened.getPtr(), 64) == bytes(range(64))


def test_memory_that_has_no_handle_is_refused_with_what_to_do(fake):
    fake.fail = lambda name, number: name == "cuMemGetAddressRange"
    with pytest.raises(BackendError, match=r"^here: memory at 0x10 cannot be shared"):
        allocation_around(0x10, "here")


def test_an_interrupt_leaves_no_page_of_a_board_mapped(fake, monkeypatch):
    made, call = Board.__new__(Board), fake.call
    made._records, made._undo = (ctypes.c_uint64 * 2)(), contextlib.ExitStack()

    def interrupted(name, *args):
        result = call(name, *args)
        if name == "cuMemHostRegister":
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(driver, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.register()
    made._undo.close()
    assert not fake.held
