"""The programs of docs and examples are explored, and their orders are needed.

Each edit removes or weakens one synchronization. Exploration finds a fault, or the edit
says why there is none.
"""

import re
import shlex
from pathlib import Path

import pytest

from numba_symm import explore
from numba_symm.errors import SymmError

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = "docs/programs/", "examples/"

COMPLETE = {
    DOCS + "ring.py": (2, 3),
    DOCS + "fused.py": (2, 3),
    DOCS + "one_shot.py": (2, 3),
    DOCS + "flag.py": (2, 3),
    DOCS + "running_sum.py": (2, 3),
    DOCS + "put.py": (2, 3),
    EXAMPLES + "conjugate_gradient.py": (2,),
}
ARGUMENTS = {EXAMPLES + "jacobi.py": ["--only", "in the kernel"]}
COMPLETE[EXAMPLES + "jacobi.py"] = (2, 3)
ARGUMENTS[EXAMPLES + "radix_exchange.py"] = ["--kernel"]
COMPLETE |= {
    EXAMPLES + "radix_exchange.py": (2, 3),
    EXAMPLES + "ring_attention.py": (2, 3),
    EXAMPLES + "row_parallel.py": (2,),
    EXAMPLES + "histogram.py": (2,),
    EXAMPLES + "rms_norm.py": (2,),
}
ARGUMENTS[EXAMPLES + "histogram.py"] = ["--chunks", "1", "--blocks", "1"]
WAYS = ["by a kernel", "by a call and a kernel", "through the host"]
ARGUMENTS[EXAMPLES + "rms_norm.py"] = ["--only", *WAYS]


@pytest.mark.parametrize("program", COMPLETE)
def test_a_program_is_explored_completely(program):
    ranks, arguments = COMPLETE[program], ARGUMENTS.get(program, ())
    report = explore.run(ROOT / program, ranks, 60, arguments)
    assert report.complete, str(report)
    assert [each.ranks for each in report.coverage] == list(ranks)
    # Two blocks take two chunks in four ways, and see the end in two orders.
    orders = 8 if program == EXAMPLES + "histogram.py" else 1
    assert {each.orders for each in report.coverage} == {orders}


def edited(file, edits, folder):
    """Return a copy of a program with some text replaced."""
    text = (ROOT / file).read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    program = folder / Path(file).name
    program.write_text(text)
    return program


def test_a_queue_of_many_blocks_is_explored_at_random():
    path, many = ROOT / EXAMPLES / "histogram.py", ["--chunks", "1", "--blocks", "4"]
    report = explore.run(path, 2, 3, many)
    assert report.fault is None, str(report)
    assert "incomplete: " in str(report)
    assert report.coverage[0].random > 0


OTHERS = {
    EXAMPLES + "frames.py": "the module multiprocessing",
    EXAMPLES + "mixture.py": "Communicator.experts",
    EXAMPLES + "jacobi.py": "Sendrecv",
    EXAMPLES + "radix_exchange.py": "counts on the GPU",
    EXAMPLES + "rms_norm.py": "all_reduce with epilogue",
}


def test_programs_with_kernels_are_explored_or_listed():
    files = [*(ROOT / DOCS).glob("*.py"), *(ROOT / EXAMPLES).glob("*.py")]
    kernels = {
        str(f.relative_to(ROOT)) for f in files if "@cuda.jit\n" in f.read_text()
    }
    known = {*COMPLETE, *OTHERS} - {DOCS + "put.py"}
    assert kernels == known
    page = (ROOT / "docs/check-kernels.md").read_text()
    for program, arguments in ARGUMENTS.items():
        assert f"explore {program} -- {shlex.join(arguments)}\n" in page
    for program, text in OTHERS.items():
        with pytest.raises(SymmError, match=text):
            explore.run(ROOT / program, 2, 20)


def test_the_page_counts_what_is_removed():
    page = (ROOT / "docs/check-kernels.md").read_text()
    rows = re.findall(r"\| `(\w+.py)` \| (\d+) \| (\d+) \|", page)
    counted = {}
    for file, _, kind in EDITS.values():
        found = counted.setdefault(file, [0, 0])
        found[kind is IMPLIED] += 1
    assert {name: (int(n), int(m)) for name, n, m in rows} == {
        name: tuple(found) for name, found in counted.items()
    }


IMPLIED = None  # the edit leaves no fault

BARRIER = "symm.barrier(ctx, cuda.blockIdx.x)"
WAIT_OF_BLOCK = "if not symm.wait_until_block(ctx, sources, channels, symm.GE, done):"
WAIT_OF_THREAD = """for place in range(2):
            if thread == 0 and sources[place] >= 0:
                symm.wait_until(ctx, sources[place], channels[place], symm.GE, done)
        if False:"""
CHANGE = "\n    x.copy_to_device(np.zeros(16, np.float32))"
EDITS = {
    "ring: no barrier": (
        "ring.py", [("symm.barrier(ctx, 0)", "pass")], "race",
    ),
    "fused: no first barrier": (
        "fused.py", [(BARRIER + "  # every rank's input", "pass  #")], "race",
    ),
    "fused: no last barrier": (
        # Only a later call could notice: the program makes one.
        "fused.py", [(BARRIER + "  # every rank has read", "pass  #")], IMPLIED,
    ),
    "fused: no last barrier, and the inputs change": (
        "fused.py",
        [
            (BARRIER + "  # every rank has read", "pass  #"),
            ("    comm.synchronize()", "    comm.synchronize()" + CHANGE),
        ],
        "race",
    ),
    "fused: one channel for all blocks": (
        "fused.py", [("ctx, cuda.blockIdx.x", "ctx, 0")], "deadlock",
    ),
    "one_shot: no barrier": (
        "one_shot.py", [("if symm.barrier(ctx, block):", "if True:")], "access",
    ),
    "one_shot: one channel for all blocks": (
        "one_shot.py", [("symm.barrier(ctx, block)", "symm.barrier(ctx, 0)")], "race",
    ),
    "one_shot: one half": (
        "one_shot.py", [("half = epoch % 2", "half = 0")], "race",
    ),
    "one_shot: no syncthreads": (
        # The barrier before has one; without data, there is no barrier.
        "one_shot.py", [("cuda.syncthreads()", "pass")], IMPLIED,
    ),
    "one_shot: no syncthreads, and no data for a block": (
        "one_shot.py",
        [("cuda.syncthreads()", "pass"), ("np.arange(40,", "np.arange(3,")],
        "race",
    ),
    "one_shot: epochs are not kept": (
        "one_shot.py", [("epochs[block] = epoch", "epochs[block] = 0")], "race",
    ),
    "flag: the store is relaxed": (
        "flag.py", [("st_release_sys_u32", "st_relaxed_sys_u32")], "race",
    ),
    "flag: the load is relaxed": (
        "flag.py", [("ld_acquire_sys_u32", "ld_relaxed_sys_u32")], "race",
    ),
    "flag: no wait": (
        "flag.py",
        [("while symm.ld_acquire_sys_u32(mine + FLAG) != step:", "if False:")],
        "race",
    ),
    "running_sum: no wait": (
        "running_sum.py",
        [("symm.wait_signal(ctx, ctx.rank - 1, 0)", "pass")],
        "access",
    ),
    "running_sum: no syncthreads after the wait": (
        "running_sum.py",
        [("cuda.syncthreads()  # now every thread", "pass  #")],
        "access",
    ),
    "running_sum: no syncthreads before the signal": (
        "running_sum.py",
        [("cuda.syncthreads()  # every thread has stored", "pass  #")],
        "race",
    ),
    "running_sum: no signal": (
        "running_sum.py",
        [("symm.put_signal(ctx, ctx.rank + 1, 0)", "pass")],
        "deadlock",
    ),
    "put: no signal": (
        "put.py", [("mem.put_signal((comm.rank + 1) % comm.size)", "pass")], "deadlock",
    ),
    "put: no wait": (
        "put.py", [("mem.wait_signal((comm.rank - 1) % comm.size)", "pass")], "race",
    ),
    "jacobi: no syncthreads before the copies": (
        "jacobi.py",
        [("        cuda.syncthreads()\n        if has_above", "        if has_above")],
        "race",
    ),
    "jacobi: no syncthreads after the copies": (
        "jacobi.py", [("cuda.syncthreads()  # the copies", "pass  #")], "race",
    ),
    "jacobi: no signal to the block above": (
        "jacobi.py",
        [("symm.signal_set(ctx, above, 2 * block_above + FROM_BELOW, done)", "pass")],
        "deadlock",
    ),
    "jacobi: no signal to the block below": (
        "jacobi.py",
        [("symm.signal_set(ctx, below, 2 * block_below + FROM_ABOVE, done)", "pass")],
        "deadlock",
    ),
    "jacobi: no wait for the block above": (
        "jacobi.py",
        [("sources = above,", "sources = -1,")],
        "race",
    ),
    "jacobi: no wait for the block below": (
        "jacobi.py",
        [("above, below if has_below else -1", "above, -1")],
        "race",
    ),
    "jacobi: no syncthreads after the waits": (
        "jacobi.py", [(WAIT_OF_BLOCK, WAIT_OF_THREAD)], "race",
    ),
    "jacobi: no barrier before the steps": (
        "jacobi.py", [("comm.barrier()  # all ranks have", "pass  #")], "race",
    ),
    "jacobi: no barrier after the steps": (
        "jacobi.py", [("comm.barrier()  # no rank starts", "pass  #")], IMPLIED,
    ),
    "histogram: no syncthreads after the chunk's number": (
        "histogram.py", [("cuda.syncthreads()  # the chunk's", "pass  #")], "access",
    ),
    "histogram: no syncthreads after the counts": (
        "histogram.py", [("cuda.syncthreads()  # all counts", "pass  #")], "race",
    ),
    "histogram: no syncthreads before the next chunk": (
        "histogram.py",
        [("cuda.syncthreads()  # counts and chunk", "pass  #")],
        IMPLIED,
    ),
    "histogram: no barrier before the kernel": (
        "histogram.py", [("comm.barrier()  # every rank's data", "pass  #")], "race",
    ),
    "histogram: no barrier after the kernel": (
        "histogram.py",
        [("comm.barrier()  # every rank has counted", "pass  #")],
        "race",
    ),
    "conjugate_gradient: no syncthreads before a partial sum": (
        "conjugate_gradient.py",
        [("cuda.syncthreads()  # the product before", "pass  #")],
        "race",
    ),
    "conjugate_gradient: no syncthreads after a partial sum": (
        "conjugate_gradient.py",
        [("= total\n    cuda.syncthreads()\n", "= total\n")],
        "access",
    ),
    "conjugate_gradient: no syncthreads between partial sums": (
        "conjugate_gradient.py",
        [("        cuda.syncthreads()\n        distance", "        distance")],
        "race",
    ),
    "conjugate_gradient: no syncthreads before the product": (
        "conjugate_gradient.py", [("cuda.syncthreads()  # p is", "pass  #")], "race",
    ),
    "row_parallel: no syncthreads after the tiles": (
        "row_parallel.py",
        [("        cuda.syncthreads()\n        if first", "        if first")],
        "access",
    ),
    "row_parallel: no syncthreads before the next tiles": (
        "row_parallel.py", [("cuda.syncthreads()  # all have read", "pass  #")], "race",
    ),
    "row_parallel: no wait": (
        "row_parallel.py",
        [('not symm.all_reduce_wait(ws, last, "sum", items=True)', "False")],
        "error",
    ),
    "row_parallel: a workspace of depth 1": (
        "row_parallel.py", [("nbytes, depth=2)", "nbytes, depth=1)")], "error",
    ),
    "ring_attention: no wait": (
        "ring_attention.py",
        [("symm.wait_until_block(ctx, (left, right), (sent, read), symm.GE, wanted)",
          "True")],
        "race",
    ),
    "ring_attention: no wait for the next rank": (
        "ring_attention.py",
        [("(left, right), (sent, read)", "(left, -1), (sent, read)")],
        "race",
    ),
    "ring_attention: no signal to the next rank": (
        "ring_attention.py",
        [("symm.signal_set(ctx, right, sent, count + 1)", "pass")],
        "deadlock",
    ),
    "ring_attention: no report to the rank before": (
        "ring_attention.py",
        [("symm.signal_set(ctx, left, read, count)", "pass")],
        "deadlock",
    ),
    "ring_attention: no syncwarp before the signal": (
        "ring_attention.py", [("cuda.syncwarp()", "pass")], "race",
    ),
    "ring_attention: no syncthreads before the report": (
        "ring_attention.py", [("cuda.syncthreads()  # all have", "pass  #")], "race",
    ),
    "radix_exchange: no wait for the numbers": (
        "radix_exchange.py",
        [("good = symm.all_gather_wait(ws, counts[:size], every[: size * size])",
          "good = True")],
        "access",
    ),
    "radix_exchange: no barrier before the puts": (
        "radix_exchange.py",
        [("arrived = symm.barrier_arrive(ctx, block)", "pass"),
         ("symm.barrier_wait(ctx, block, arrived)", "True")],
        "race",
    ),
    "radix_exchange: no barrier after the puts": (
        "radix_exchange.py", [("symm.barrier(ctx, block)  # all", "pass  #")], "race",
    ),
    "rms_norm: no syncthreads before the sum": (
        "rms_norm.py",
        [("= squares\n    cuda.syncthreads()", "= squares")],
        "access",
    ),
    "rms_norm: no syncthreads between partial sums": (
        "rms_norm.py",
        [("        cuda.syncthreads()\n        distance", "        distance")],
        "race",
    ),
    "rms_norm: no syncthreads after the sum": (
        "rms_norm.py", [("cuda.syncthreads()  # all have read", "pass  #")],
        "race",
    ),
    "radix_exchange: no syncthreads after the sums": (
        "radix_exchange.py",
        [("counts[rank] = total\n    cuda.syncthreads()", "counts[rank] = total")],
        IMPLIED,
    ),
}  # fmt: skip


OF_THREE = {
    "ring_attention: no wait for the next rank",
    "ring_attention: no syncthreads before the report",
}
"""Of two ranks, each waits for what the other one sends after it has read."""


@pytest.mark.parametrize("name", EDITS)
def test_a_removed_synchronization_is_found(name, tmp_path):
    file, edits, kind = EDITS[name]
    folder = DOCS if (ROOT / DOCS / file).exists() else EXAMPLES
    arguments = ARGUMENTS.get(folder + file, ())
    program = edited(folder + file, edits, tmp_path)
    report = explore.run(program, 3 if name in OF_THREE else 2, 20, arguments)
    if kind is IMPLIED:
        assert report.complete, str(report)
    else:
        assert report.fault is not None
        assert report.fault.kind == kind, str(report)
        assert report.fault.execution <= 3
