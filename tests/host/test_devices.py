import threading
from types import SimpleNamespace

import pytest
from cuda.bindings import driver

from numba_symm.collectives import lifetime
from numba_symm.errors import ArgumentError, DeviceError, PeerAccessError
from numba_symm.launch import devices
from numba_symm.launch.devices import GPU, assign
from numba_symm.launch.store import StoreExchange
from tests.threads import outcomes

SHARING = "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES"


def deal(visible, preferred=None, share=False):
    return assign(
        [list(seen) for seen in visible],
        preferred or [None] * len(visible),
        share,
    )


@pytest.mark.parametrize(
    ("visible", "dealt"),
    [
        (["a", "b", "c"], "abc"),  # one visible GPU per rank
        (["abcd"] * 4, "abcd"),  # all see all in one order
        (["abcdefgh"] * 3, "abc"),  # more GPUs than ranks
        (["ab", "a"], "ba"),  # an earlier rank moves
        (["abc", "ab", "a"], "cba"),  # two earlier ranks move
        (["a", "ab", "bc", "cd"], "abcd"),
    ],
)
def test_every_rank_gets_a_gpu_of_its_own(visible, dealt):
    assert deal(visible) == list(dealt)


@pytest.mark.parametrize("rank", range(3))
def test_a_preferred_gpu_is_given_and_the_others_make_way(rank):
    for wanted in "abc":
        preferred = [None] * 3
        preferred[rank] = wanted
        dealt = deal(["abc"] * 3, preferred)
        assert dealt[rank] == wanted
        assert sorted(dealt) == list("abc")


def test_too_few_gpus_are_refused_with_both_numbers():
    with pytest.raises(DeviceError) as raised:
        deal(["ab"] * 3)
    assert (
        "3 ranks cannot have a GPU each: ranks 0, 1, 2 can only have 2 GPU(s), a, b"
        in (str(raised.value))
    )
    assert "start fewer ranks" in str(raised.value)
    assert f"under MPS: {SHARING}=1" in str(raised.value)


def test_the_ranks_that_contend_are_named_where_others_have_plenty():
    with pytest.raises(DeviceError, match=r"4 ranks .*: ranks 0, 2, 3 can only have 2"):
        deal(["ab", "cdef", "ba", "a"])


def test_ranks_without_a_gpu_are_named():
    for share in (False, True):
        with pytest.raises(DeviceError, match=r"visible to rank 1: .*CUDASIM=1"):
            deal(["a", ""], share=share)


@pytest.mark.parametrize(
    ("visible", "preferred", "dealt"),
    [
        (["a"] * 3, None, "aaa"),
        (["ab"] * 4, None, "abab"),
        (["ab"] * 4, ["a", None, "a", None], "abab"),
        (["ab", "ab", "a", "a"], None, "bbaa"),
        (["ab"] * 2, None, "ab"),  # enough: none is shared
    ],
)
def test_gpus_are_shared_evenly_where_allowed(visible, preferred, dealt):
    assert deal(visible, preferred, share=True) == list(dealt)


def gpu(ordinal, uuid, name="NVIDIA H200", mps=None):
    return GPU(ordinal, uuid, name, "0000:00:00.0", (9, 0), True, mps)


@pytest.mark.parametrize(
    ("name", "uuid", "expected"),
    [
        ("NVIDIA H200", "GPU-1", False),
        ("NVIDIA MIGHTY", "GPU-1", False),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GPU-1", True),
        ("NVIDIA A100 MIG", "GPU-1", True),
        ("NVIDIA A100", "MIG-1", True),
    ],
)
def test_mig_slices_are_recognised(name, uuid, expected):
    assert devices.is_mig(gpu(0, uuid, name)) is expected


@pytest.fixture
def machine(monkeypatch):
    """Each rank sees the GPUs that the test sets; records those made current."""
    machine = Machine()
    monkeypatch.setattr(devices, "visible_gpus", machine.visible_gpus)
    monkeypatch.setattr(devices, "_current_ordinal", lambda: machine.context)
    monkeypatch.setattr(devices, "_make_current", machine.made_current.append)
    monkeypatch.setattr(
        devices, "_can_access", lambda a, b: (a, b) not in machine.apart
    )
    monkeypatch.delenv(SHARING, raising=False)
    return machine


class Machine:
    """Ranks see "all" GPUs, or each one only its own."""

    def __init__(self):
        self.names = ["NVIDIA H200"] * 4
        self.context = None
        self.made_current = []
        self.apart = set()

    def visible_gpus(self):
        return [gpu(i, f"GPU-{i}", name) for i, name in enumerate(self.names)]


def bound(n, device=None):
    def play(comm):
        own = device(comm.rank) if device else None
        gpu, gpus, _ = devices.bind(StoreExchange(comm, "test"), own)
        assert gpus[comm.rank] == gpu
        return gpu

    return outcomes(n, play)


def only(errors, kind):
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    (text,) = {str(error) for error in errors}
    return text


def test_a_context_in_use_is_kept(machine):
    machine.context = 2
    assert [gpu.ordinal for gpu in bound(1)] == [2]
    assert "ranks 0, 1 can only have 1 GPU(s), GPU-2" in only(bound(2), DeviceError)


def test_the_device_asked_for_goes_before_the_context_in_use(machine):
    machine.context = 2
    assert [gpu.ordinal for gpu in bound(1, device=lambda rank: 1)] == [1]


@pytest.mark.parametrize("wrong", [-1, 4, "cuda:0", 1.0])
def test_a_device_that_does_not_exist_raises_on_all(machine, wrong):
    text = only(bound(2, device=lambda rank: wrong if rank else 0), ArgumentError)
    assert "failed on 1 of 2 ranks" in text
    assert f"rank 1: device={wrong}" in text.replace("'", "")
    assert machine.made_current == []


def test_more_ranks_than_gpus_share_only_where_allowed(machine, monkeypatch):
    machine.names = machine.names[:2]
    assert f"{SHARING}=1" in only(bound(3), DeviceError)
    monkeypatch.setenv(SHARING, "1")
    assert [gpu.ordinal for gpu in bound(3)] == [0, 1, 0]


def test_one_rank_cannot_allow_sharing_for_all(machine, monkeypatch):
    machine.names = machine.names[:1]
    answers = iter([True, False])
    monkeypatch.setattr(devices, "allow_overlapping_devices", lambda: next(answers))
    assert "2 ranks cannot have a GPU each" in only(bound(2), DeviceError)


def test_a_new_thread_gets_the_gpu_of_its_rank(machine):
    machine.context = None
    devices.enter_thread(3, "all_reduce")
    assert machine.made_current == [3]


def test_a_thread_keeps_the_gpu_that_it_has(machine):
    machine.context = 3
    devices.enter_thread(3, "all_reduce")
    text = r"all_reduce: expected GPU 2, .* got GPU 3; call .*select_device\(2\)"
    with pytest.raises(ArgumentError, match=text):
        devices.enter_thread(2, "all_reduce")
    assert machine.made_current == []


def test_a_mig_slice_beside_whole_gpus_is_left_out(machine):
    machine.names[0] += " MIG 1g.18gb"
    assert sorted(gpu.ordinal for gpu in bound(3)) == [1, 2, 3]
    assert "is a MIG slice" in only(bound(2, device=lambda rank: rank), DeviceError)


def test_a_machine_without_gpus_raises(machine):
    machine.names = []
    assert "no GPU is visible to ranks 0, 1" in only(bound(2), DeviceError)
    assert "no GPU is visible" in only(bound(2, device=lambda rank: 0), DeviceError)


def test_a_gpu_that_cannot_be_made_current_fails_all(machine, monkeypatch):
    def refuse(ordinal):
        if ordinal == 1:
            raise RuntimeError("Cannot switch CUDA-context.")

    monkeypatch.setattr(devices, "_make_current", refuse)
    for error in bound(3):
        assert "rank 1: RuntimeError: Cannot switch CUDA-context." in str(error)


def reach(n, device=None):
    def play(comm):
        own = device(comm.rank) if device else None
        _, gpus, matrix = devices.bind(StoreExchange(comm, "test"), own)
        return matrix, [gpu.uuid for gpu in gpus]

    return outcomes(n, play)


def test_the_peer_matrix_is_that_of_the_driver(machine):
    machine.apart = {(0, 2), (2, 1)}
    matrix = [[True, True, False], [True] * 3, [True, False, True]]
    assert reach(3) == [(matrix, ["GPU-0", "GPU-1", "GPU-2"])] * 3


def test_gpus_that_a_process_does_not_see_are_left_open(machine, monkeypatch):
    process = threading.local()

    def own(rank):
        process.gpu = gpu(0, f"GPU-{rank}")
        return 0

    monkeypatch.setattr(devices, "visible_gpus", lambda: [process.gpu])
    matrix = [[True, None], [None, True]]
    assert reach(2, own) == [(matrix, ["GPU-0", "GPU-1"])] * 2


def test_ranks_on_one_gpu_reach_each_other(machine, monkeypatch):
    monkeypatch.setenv(SHARING, "1")
    machine.names, machine.apart = machine.names[:1], {(0, 0)}
    assert reach(2) == [([[True, True]] * 2, ["GPU-0"] * 2)] * 2


@pytest.mark.parametrize(
    ("uuids", "numbers", "asked", "limit"),
    [
        ("ab", [132, 132], None, 32),
        ("aa", [132, 132], None, 16),
        ("aaba", [132] * 4, None, 10),  # every rank's limit is that of the fullest GPU
        ("a" * 8, [132] * 8, None, 4),
        ("a" * 32, [132] * 32, None, 1),
        ("aab", [132, 132, 40], None, 9),  # or of the smallest
        ("aa", [66, 66], None, 7),  # MPS limits each rank to a half of 132
        ("aa", [132, 132], 132, 132),  # each rank has what the program asks for
    ],
)
def test_ranks_that_share_a_gpu_divide_its_limit(
    monkeypatch, uuids, numbers, asked, limit
):
    gpus = tuple(gpu(0, uuid) for uuid in uuids)
    rank = threading.local()

    def current_device():
        number = numbers[rank.number]
        return SimpleNamespace(properties=SimpleNamespace(multiprocessor_count=number))

    def settle(comm):
        rank.number = comm.rank
        island = SimpleNamespace(exchange=StoreExchange(comm, "test"), gpus=gpus)
        island.gpu = gpus[comm.rank]
        options = lifetime.Options(None, False, asked, False)
        return lifetime.agreed_settings(island, options).limit

    monkeypatch.delenv("NUMBA_SYMM_MULTIPROCESSORS", raising=False)
    monkeypatch.setattr("cuda.core.Device", current_device)
    assert outcomes(len(uuids), settle) == [limit] * len(uuids)
    if asked is None:  # each process simulates a device of its own
        monkeypatch.setattr(lifetime, "SIMULATED", True)
        whole = lifetime.MAX_BLOCKS // lifetime.HELD
        assert outcomes(len(uuids), settle) == [whole] * len(uuids)


@pytest.mark.parametrize(
    ("uuids", "mps", "warned"),
    [("ab", False, 0), ("aba", False, 1), ("aa", True, 0), ("aa", None, 0)],
)
def test_ranks_that_take_turns_on_a_gpu_cause_a_warning(
    monkeypatch, uuids, mps, warned
):
    texts = []
    monkeypatch.setattr(devices, "warn_once", texts.append)
    devices.warn_if_sliced([gpu(0, uuid, mps=mps) for uuid in uuids])
    assert len(texts) == warned
    assert all("nvidia-cuda-mps-control -d" in text for text in texts)


@pytest.mark.parametrize(("value", "mps"), [(1, True), (0, False), (None, None)])
def test_the_driver_reports_whether_mps_is_on(monkeypatch, value, mps):
    def attribute(name, device):
        assert (name, device) == (mps_enabled, "device 3")
        return (ok, value) if value is not None else (invalid, None)

    mps_enabled = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    ok = driver.CUresult.CUDA_SUCCESS
    invalid = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuDeviceGet", lambda at: (ok, f"device {at}"))
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", attribute)
    assert devices._mps(3) is mps


def test_pairs_without_access_are_named(machine):
    machine.apart = {(0, 2), (2, 0)}
    matrix, uuids = reach(3)[0]
    with pytest.raises(PeerAccessError) as caught:
        devices.refuse_missing_access(matrix, uuids)
    text = str(caught.value)
    assert "  rank 0 (GPU-0) to rank 2 (GPU-2)\n  rank 2 (GPU-2) to rank 0" in text
    assert "rank 1" not in text
    assert "nvidia-smi topo -p2p r" in text


def test_multicast_support_is_reported_by_number(machine):
    assert devices.device_has_multicast_support(3) is True
    with pytest.raises(ArgumentError, match="sees 4 GPU"):
        devices.device_has_multicast_support(4)


def test_the_simulator_shows_one_gpu_with_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(devices, "SIMULATED", True)
    devices._simulated_gpu.cache_clear()
    (first,) = devices.visible_gpus()
    assert devices.visible_gpus() == [first]
    devices._simulated_gpu.cache_clear()  # another process
    (second,) = devices.visible_gpus()
    assert first.uuid != second.uuid
    assert devices._current_ordinal() is None
    devices._make_current(0)


@pytest.mark.parametrize("code", [None, driver.CUresult.CUDA_ERROR_NO_DEVICE])
def test_without_a_driver_or_a_device_no_gpu_is_seen(monkeypatch, code):
    def start(flags):
        if code is None:
            raise RuntimeError("libcuda is not there")
        return (code,)

    monkeypatch.setattr(driver, "cuInit", start)
    assert devices.visible_gpus() == []


def test_the_error_of_a_driver_that_does_not_start_names_its_code(monkeypatch):
    code = driver.CUresult.CUDA_ERROR_SYSTEM_NOT_READY
    monkeypatch.setattr(driver, "cuInit", lambda flags: (code,))
    with pytest.raises(
        DeviceError, match="cuInit returned CUDA_ERROR_SYSTEM_NOT_READY"
    ):
        devices.visible_gpus()


@pytest.mark.parametrize(
    ("ranks", "mps", "given", "wanted"),
    [
        *((5, False, "", 0), (6, None, "", 10), (2, True, "", 0), (3, True, "", 4)),
        *((3, True, "4", 0), (4, True, "4", 6), (4, False, "4", 6)),
        *((40, False, "8", 32), (40, True, "32", 0)),
    ],
)
def test_too_few_work_queues_for_requests_cause_a_warning(
    monkeypatch, ranks, mps, given, wanted
):
    texts = []
    monkeypatch.setattr(devices, "warn_once", texts.append)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    devices.warn_if_queues_are_few([gpu(0, "a", mps=mps)] * ranks)
    cure = f"set CUDA_DEVICE_MAX_CONNECTIONS={wanted} on all ranks"
    assert [cure in text for text in texts] == [True] * bool(wanted)


def test_links_without_atomics_are_named(machine, monkeypatch):
    """A peer's GPU that this process does not see is not asked about."""
    asked = []
    monkeypatch.setattr(
        devices, "_have_atomics", lambda *pair: asked.append(pair) or pair != (1, 2)
    )
    every = devices.visible_gpus()
    mine = every[1]
    found = devices.without_atomics(mine, [*every[:3], mine, gpu(9, "GPU-unseen")])
    assert found == [f"{mine.uuid} and {every[2].uuid}"]
    assert sorted(asked) == [(1, 0), (1, 2)]
