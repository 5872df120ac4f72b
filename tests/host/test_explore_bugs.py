"""Bugs of public trackers, as small kernels: exploration finds each of them."""

from pathlib import Path

import pytest

from numba_symm import explore

BUGS = Path(__file__).parents[1] / "bugs"

KINDS = {
    "flashinfer_2996": (
        "divergence",
        "2 threads of rank 0 block 0 wait at syncthreads",
    ),
    "hipfire_575": ("race", "Is a syncthreads missing between lines"),
    "mori_494": ("deadlock", "waits for memory[0] of rank 0 to change, which is 0"),
    "mscclpp_553": ("deadlock", "words[0] of rank 0 to change, which is -1"),
    "nvshmem_98": ("deadlock", "memory[0] of rank 0 to change, which is 0"),
    "primus_turbo_482": ("race", "is a release missing at line"),
    "pytorch_137257": ("race", "in launch 2, that rank 1"),
    "pytorch_196546": ("race", "pad[0]"),
    "tokenspeed_1017": ("race", "has loaded: is a barrier, or a signal back, missing"),
    "tt_metal_54590": ("deadlock", "of rank 0 on channel 0 to be == 1, which is 2"),
    "tvm_16797": ("deadlock", "memory[0] of rank 0 to be >= 2, which is 1"),
    "vllm_2760": ("race", "is a release missing at line"),
    "vllm_57059": ("race", "is a release missing at line"),
    "vllm_8558": ("deadlock", "memory[0] of rank 1 to change, which is 2"),
}


def test_every_bug_has_a_row():
    assert {path.stem for path in BUGS.glob("*.py")} == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_a_bug_is_found_at_once_and_repeated(name, tmp_path):
    report = explore.run(BUGS / f"{name}.py", ranks=2, seconds=600)
    kind, text = KINDS[name]
    assert report.fault is not None
    assert report.fault.kind == kind
    assert text in str(report)
    assert report.fault.execution <= 30
    file = tmp_path / "report.json"
    file.write_text(report.json())
    steps = explore.replay(file)
    for step, known in zip(steps, report.fault.trace, strict=False):
        assert (step["thread"], step["line"]) == (known["thread"], known["line"])
    assert len(steps) >= len(report.fault.trace)
