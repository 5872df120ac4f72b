"""Kernels of every kind, for the tests of their machine code.

A *case* is a kernel's name, a number of ranks, and an element type and an operator if
the kernel has them. Each list has the cases that a test looks at. The kernels of the
operations' table that are not named here are cases, too.
"""

import math

import ml_dtypes
import numpy as np

from numba_symm import dtypes
from numba_symm.collectives.composed import WIRES as CODES
from numba_symm.collectives.kernels import (
    barrier,
    chunked,
    coded_sum,
    direct,
    epilogue,
    exact_sum,
    expert_combine,
    expert_dispatch,
    mailed_combine,
    mailed_dispatch,
    mailed_epilogue,
    message_copy,
    one_shot,
    pack,
    transfer,
    two_shot,
    two_shot_broadcast,
)
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols import few_tokens, handshake
from numba_symm.collectives.protocols.workspace import TWO_SHOT
from numba_symm.device import puts
from numba_symm.dtypes import UserEpilogue
from numba_symm.launch.failures import BARRIER
from numba_symm.memory import pads
from tests.kernels import bound_kernels, named

ALL, GATHER, SCATTER, SCAN, EXSCAN, REDUCE, BROADCAST = (
    OPERATIONS[name].exchange
    for name in (
        *("all_reduce", "all_gather", "reduce_scatter", "scan", "exscan"),
        *("reduce", "broadcast"),
    )
)


def two_shot_of(transport):
    def make(n, element, op):
        tiles = TWO_SHOT[transport].tiles(n)
        return two_shot.kernel(n, element, op, False, transport, tiles)

    return make


ALGORITHMS = {
    "one_sentinel": lambda *a: one_shot.kernel(*a, False, "sentinel", 1, ALL),
    "one_ll": lambda *a: one_shot.kernel(*a, False, "ll", 1, ALL),
    "one_marked": lambda *a: one_shot.kernel(*a, False, "marked", 1, ALL),
    "two_sentinel": two_shot_of("sentinel"),
    "two_marked": two_shot_of("marked"),
    "chunked": lambda *a: chunked.kernel(*a, False, ALL, True),
    "gather_ll": lambda *a: one_shot.kernel(*a, False, "ll", 1, GATHER),
    "gather_marked": lambda *a: one_shot.kernel(*a, False, "marked", 1, GATHER),
    "scatter_sentinel": lambda *a: one_shot.kernel(*a, False, "sentinel", 1, SCATTER),
    "gather_signalled": lambda *a: chunked.kernel(*a, False, GATHER, False),
    "scan_sentinel": lambda *a: one_shot.kernel(*a, False, "sentinel", 1, SCAN),
    "exscan_ll": lambda *a: one_shot.kernel(*a, False, "ll", 1, EXSCAN),
    "reduce_ll": lambda *a: one_shot.kernel(*a, False, "ll", 1, REDUCE),
    "broadcast_marked": lambda *a: one_shot.kernel(*a, False, "marked", 1, BROADCAST),
    "relayed_marked": lambda n, e, op: two_shot_broadcast.kernel(n, e, False, 1),
    "scan_signalled": lambda *a: chunked.kernel(*a, False, SCAN, False),
    "reduce_signalled": lambda *a: chunked.kernel(*a, False, REDUCE, True),
    "broadcast_signalled": lambda *a: chunked.kernel(*a, False, BROADCAST, True),
    "reduce_of_two": lambda *a: chunked.kernel(*a, False, REDUCE, False),
    "reduce_direct": lambda *a: direct.kernel(*a, False, REDUCE),
    "broadcast_direct": lambda *a: direct.kernel(*a, False, BROADCAST),
    "gather_direct": lambda *a: direct.kernel(*a, False, GATHER),
    "all_reduce_direct": lambda *a: direct.kernel(*a, False, ALL),
    "scatter_direct": lambda *a: direct.kernel(*a, False, SCATTER),
    "finish": lambda n, e, op: pack.convert_kernel(n, e, e, op, n),
    "reduce_shards": pack.reduce_shards_kernel,
    "reduce_leaves": lambda n, e, op: pack.leaves_kernel(
        n, e, dtypes.element(e.accumulate, "test"), op
    ),
    "encode": lambda n, e, op: coded_sum.encode_kernel(n, CODES[op], e, False),
    "add": lambda n, e, op: coded_sum.add_kernel(n, CODES[op], n),
    "decode": lambda n, e, op: coded_sum.decode_kernel(n, CODES[op], e, True),
    "apply": lambda n, e, op: epilogue.kernel(n, *EPILOGUES[op](e), False, False),
    "decode_rows": lambda n, e, op: coded_sum.decode_rows_kernel(n, CODES[op], e),
    "mailed_apply": lambda n, e, op: mailed_epilogue.kernel(
        *(n, "sum", *EPILOGUES[op](e), False, False, "ll", 1),
        SCATTER if n == 4 else ALL,
    ),
    "combine": lambda n, e, op: expert_combine.kernel(n, e),
    "stage": lambda n, e, op: expert_combine.stage_kernel(n, e, False),
    "stage_weighted": lambda n, e, op: expert_combine.stage_kernel(n, e, True),
    "mailed": lambda n, e, op: mailed_combine.kernel(n, e, n > 2),
    "largest": lambda n, e, op: exact_sum.reduce_kernel(n, op, e, True, False),
    "add_exactly": lambda n, e, op: exact_sum.reduce_kernel(n, op, e, True, True),
    "add_whole": lambda n, e, op: exact_sum.reduce_kernel(n, op, e, False, True),
    "round": lambda n, e, op: exact_sum.round_kernel(n, op, 8 * e.itemsize),
}


def squared(value, residual, weight):
    return (value + residual) * (value + residual)


def normalize(value, total, residual, weight):
    kept = value + residual
    return kept * weight / np.float32(math.sqrt(total)), kept


def affine(value, factor, offset):
    return value * factor + offset


def epilogues_of(made, outputs):
    """Return what makes the constants of an epilogue's kernel of so many outputs."""

    def make(kind):
        others = puts.Operand(kind, puts.EACH), puts.Operand(FLOAT32, puts.COLUMNS)
        return made, kind, outputs * (kind,), others

    return make


FLOAT32 = dtypes.element("float32", "test")
EPILOGUES = {
    "affine": epilogues_of(UserEpilogue(affine), 1),
    "norm": epilogues_of(UserEpilogue(normalize, squared), 2),
}
SPILLS = dict.fromkeys(
    [
        *(("relayed_marked", 8), ("one_marked", 8), ("two_marked", 8)),
        *(("gather_marked", 8), ("broadcast_marked", 8), ("broadcast_signalled", 8)),
        *(("transfer_counted", 2), ("transfer_counted", 8)),
        *(("transfer_asked", 2), ("transfer_asked", 8)),
    ],
    160,
)
SPILLS |= {("chunked", 8): 24, ("reduce_signalled", 8): 24, ("scan_signalled", 8): 16}
"""With eight ranks' vectors, or for the ragged end of an array, these need more
registers than a block's share. They spill at most so many bytes to the stack."""
INDEXED = {("mailed_dispatch", n): 8 * n * few_tokens.GROUPS for n in (2, 8)}
"""The bytes of arrays of a thread that it indexes by a token."""

HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
FLOATS = [(2, "float16", "sum"), (4, "float32", "sum"), (8, "bfloat16", "sum")]
OTHERS = [(2, "int64", "prod"), (8, "bfloat16", "sum")]
SIGNALS = {
    "barrier": lambda n: barrier.kernel(n, BARRIER),
    "handshake": handshake.handshake_kernel,
    "pad_barrier": pads.barrier_kernel,
    "put_signal": pads.put_signal_kernel,
    "wait_signal": pads.wait_signal_kernel,
    "fence": lambda n: pads.fence_kernel(),
    "transfer": lambda n: transfer.kernel(n, 8, False, 1, 1, False),
    "pack": lambda n: pack.kernel(n),
    "digest": lambda n: pack.digest_kernel(),
    "transfer_alone": lambda n: transfer.kernel(n, 8, False, 1, 8, False, alone=True),
    "transfer_counted": lambda n: transfer.kernel(n, 8, True, 1, 1, True),
    "transfer_asked": lambda n: transfer.kernel(n, 8, True, 1, 1, True, True),
    "counted_copy": lambda n: pack.counted_copy_kernel(n, 8),
    "message_copy": lambda n: message_copy.kernel(),
    "dispatch": expert_dispatch.kernel,
    "mailed_dispatch": mailed_dispatch.kernel,
}


def cases(*names):
    return [
        (name, *case)
        for name in names
        for case in (FLOATS if "sentinel" in name else OTHERS)
    ]


EXCHANGED = ("gather_ll", "scatter_sentinel", "scan_sentinel", "exscan_ll", "reduce_ll")
EXCHANGED += ("gather_marked", "broadcast_marked", "relayed_marked")
ROOTED = ("reduce_ll", "broadcast_marked", "relayed_marked")
SIGNALLED = "gather_signalled", "scan_signalled", "reduce_signalled"
SIGNALLED += ("broadcast_signalled",)
ALIKE = (*EXCHANGED, *SIGNALLED, "combine", "stage", "stage_weighted")
ALIKE += "mailed", "mailed_dispatch"
"""Kernels that share most code with others, so that fewer tests check them."""
ONE_SHOT = cases("one_sentinel", "one_marked", "one_ll", *EXCHANGED)
MAILBOXES = [*ONE_SHOT, *cases("two_sentinel", "two_marked")]
PADS = [
    (name, n) for name in ("pad_barrier", "put_signal", "wait_signal") for n in (2, 8)
]
FENCE = [("fence", 2)]
MOVING = "gather_ll", "gather_marked", "broadcast_marked", "relayed_marked"
MOVING += ("gather_signalled", "broadcast_signalled")
# The reduction is of three ranks and more.
BLOCK_FLAGS = [
    case
    for case in cases("chunked", *SIGNALLED)
    if case[0] != "reduce_signalled" or case[1] > 2
]
BLOCK_FLAGS += [("reduce_of_two", 2, "int64", "prod")]
BLOCK_FLAGS += [("barrier", 2), ("barrier", 8)]
SHARDS = [
    (name, *case)
    for name in ("all_reduce_direct", "scatter_direct", "reduce_direct")
    for case in FLOATS
]
DIRECT = [("broadcast_direct", *case) for case in FLOATS if case[0] > 2]
DIRECT += SHARDS
GATHERS = cases("gather_direct")
DIRECT += GATHERS
HANDSHAKES = [("handshake", 2), ("handshake", 8)]
TRANSFERS = "transfer", "transfer_counted", "transfer_asked", "transfer_alone"
MESSAGES = [(name, n) for name in TRANSFERS for n in (2, 8)]
DISPATCHES = [("dispatch", 2), ("dispatch", 8)]
COMBINES = [("combine", 2, "float16", "sum"), ("combine", 8, "bfloat16", "sum")]
STAGES = [("stage", 2, "float32", "sum"), ("stage_weighted", 2, "float16", "sum")]
MAILED = [("mailed_dispatch", 2), ("mailed_dispatch", 8)]
MAILED += [("mailed", 2, "float16", "sum"), ("mailed", 8, "bfloat16", "sum")]
FLAGGED = [*BLOCK_FLAGS, *DISPATCHES, *COMBINES, *PADS, *MESSAGES]
EXPERTS = [*DISPATCHES, *COMBINES, *STAGES, *MAILED]
COLLECTIVE = [*MAILBOXES, *BLOCK_FLAGS, *DIRECT, *HANDSHAKES, *MESSAGES]
CODED = [(name, 4, "float32", "int8") for name in ("encode", "add", "decode")]
CODED += [(name, 8, "bfloat16", "fp8") for name in ("encode", "add", "decode")]
CODED += [("decode_rows", 8, "bfloat16", "fp8")]
FINISHED = [("apply", 2, "float32", "affine"), ("apply", 2, "bfloat16", "norm")]
FINISHED += [("mailed_apply", 2, "float32", "affine")]
FINISHED += [("mailed_apply", 4, "bfloat16", "norm")]
EXACT = [("largest", 2, "float32", "sum"), ("largest", 8, "float32", "dot")]
EXACT += [("add_exactly", 2, "bfloat16", "sum"), ("add_exactly", 8, "float64", "dot")]
EXACT += [("add_whole", 8, "float32", "norm")]
EXACT += [("round", 2, "float32", "dot"), ("round", 8, "float64", "norm")]
COLLECTIVE += EXPERTS + CODED + FINISHED + EXACT
GAPS = [("pack", 2), ("pack", 3)]
DIGEST = ("digest", 2)
OWN = [("counted_copy", 2), ("message_copy", 2)]
EVERY = [
    *COLLECTIVE,
    *PADS,
    *cases("finish", "reduce_shards", "reduce_leaves"),
    *GAPS,
    DIGEST,
    *OWN,
]


def element(dtype):
    return dtypes.element(HALVES.get(dtype, dtype), "test")


def kernel(name, n, dtype=None, op=None):
    if name in SIGNALS:
        return SIGNALS[name](n)
    if name in ALGORITHMS:
        return ALGORITHMS[name](n, element(dtype), op)
    return bound_kernels(n)[name]


# Kernels of the operations' table that have no case above.
REST = [
    (name, n)
    for n in (3, 8)
    for name in bound_kernels(n).keys()
    - {named(kernel(*case).factory) for case in EVERY}
]
COLLECTIVE += sorted(REST)
EVERY += sorted(REST)
