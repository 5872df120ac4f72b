"""The machine code of users' kernels that call ``numba_symm.device``, without a GPU.

The kernels are those that ``tests/ranks/memory`` runs. See ``test_machine_code.py``.
"""

import functools
import itertools
import re
import runpy
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda import types
from numba.cuda.typing.typeof import typeof

from numba_symm import device as symm
from numba_symm.collectives.protocols import handshake
from numba_symm.device import Context, Guard, Team, WorkspaceContext, instructions
from numba_symm.device.block_exchange import CheckedWorkspaceContext, TeamGuard
from numba_symm.device.signals import CheckedContext
from numba_symm.gpu.kernels import REGISTERS, Kernel
from numba_symm.memory.pads import context_type
from tests.machine_code import Code, opcodes
from tests.ranks.memory import test_device_atomics as atomics
from tests.ranks.memory import test_device_barriers as barriers
from tests.ranks.memory import test_device_collectives as collectives
from tests.ranks.memory import test_device_copies as copies
from tests.ranks.memory import test_device_counting as counting
from tests.ranks.memory import test_device_debug as debugging
from tests.ranks.memory import test_device_elements as elements
from tests.test_mpirun import ROOT
from tests.whole import WHOLE

WORDS = types.Array(types.int64, 1, "C")
TABLE = types.Array(types.int64, 2, "C")
ACCESSES = r"(LDG|STG|CCTL|MEMBAR)\b.*"
FENCE = r"MEMBAR\.(ALL|SC)\.SYS"


@pytest.fixture(autouse=True)
def compute_capability(monkeypatch):
    """Answer Numba's question for the current device, for which it needs a driver."""
    device = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: device)


@functools.cache
def compiled(kernel, *signature, context=None):
    """Return the machine code of a kernel, whose first argument is a context."""
    context = context or context_type(2)
    user = Kernel(lambda: kernel.py_func, (), (context, *signature), 32)
    return Code(user, (9, 0))


def updates(code):
    """Return the atomic operations, and what is between each and the next one."""
    places = [*code.find(r"ATOMG\..*"), len(code.instructions)]
    return [
        (code.instructions[here].opcode, code.between(here, there))
        for here, there in itertools.pairwise(places)
    ]


def test_every_update_is_one_instruction_at_system_scope():
    code = compiled(atomics.update_all, types.int64, TABLE)
    found = [opcode for opcode, _ in updates(code)]
    assert all(".STRONG.SYS" in opcode for opcode in found)
    extra = r"^ATOMG\.E\.|\.STRONG\.SYS|\.(RN|FTZ)"
    kinds = [re.sub(extra, "", each) for each in found]
    assert sorted(set(kinds)) == sorted(EXPECTED)
    assert not code.find(r"(ATOM|ATOMS|RED|REDG)\b.*")


EXPECTED = ["ADD", "ADD.64", "ADD.F32", "ADD.F64", "AND", "CAS", "CAS.64"]
EXPECTED += ["EXCH.64", "MAX", "MAX.64", "MIN.S32", "MIN.S64", "OR", "XOR.64"]


def test_a_users_kernel_changes_no_options_of_the_librarys_functions():
    """Numba turns SSA form off in the options of what it inlines functions into."""
    compiled(atomics.update_all, types.int64, TABLE)
    handshake.handshake_kernel.__wrapped__(2).ptx((9, 0))


def test_an_acquire_drops_what_l1_holds_and_a_release_waits_for_stores():
    code = compiled(atomics.count_under_a_lock, types.int64, WORDS)
    *tries, (last, after), (exchange, _) = updates(code)  # the compiler peels the loop
    for opcode, following in [*tries, (last, after)]:
        assert ".CAS." in opcode
        assert opcodes(following, ACCESSES)[0] == "CCTL.IVALL"
    assert ".EXCH." in exchange
    accesses = [each for each in opcodes(after, ACCESSES) if "CTA" not in each]
    assert accesses[:3] == ["CCTL.IVALL", "LDG.E.64", "STG.E.64"]
    assert re.fullmatch(FENCE, accesses[-1])
    assert len(accesses) == 4


def test_a_strong_load_is_one_instruction():
    code = compiled(atomics.load_all, WORDS)
    accesses = opcodes(code.instructions, r"(LDG\S*STRONG|CCTL)\S*")
    wide, narrow = "LDG.E.64.STRONG.SYS", "LDG.E.STRONG.SYS"
    assert sorted(accesses) == [*["CCTL.IVALL"] * 3, *[wide] * 3, *[narrow] * 3]


def test_atomics_are_refused_where_links_have_none(monkeypatch):
    monkeypatch.setattr(instructions, "_missing", ["GPU-a and GPU-b"])
    text = "native atomics .NVLink., got none between GPU-a and GPU-b; give each rank"
    with pytest.raises(TypingError, match=text):
        compiled(atomics.last_one_adds, WORDS)


@cuda.jit
def add_in_an_unknown_order(ctx, words):
    symm.atomic_add(words, 0, 1, order="acq_rel")


def test_another_order_of_an_atomic_does_not_compile():
    text = "atomic_add: expected order to be 'relaxed', 'acquire', 'release', got .*acq"
    with pytest.raises(TypingError, match=text):
        compiled(add_in_an_unknown_order, WORDS)


def waits(code):
    """Return the accesses of each loop that polls at system scope."""
    loops = [code.loop(load) for load in code.find(r"LDG\.E(\.64)?\.STRONG\.SYS")]
    found = [
        opcodes(loop, r"(STG|BAR|ATOMG)\b.*|" + ACCESSES) for loop in loops if loop
    ]
    return [
        each for each in found if not any(re.match("STG|BAR|ATOMG", a) for a in each)
    ]


def follows_a_fence(code, place):
    """Return whether the last access before an instruction is a fence."""
    before = opcodes(code.instructions[:place], ACCESSES + r"|(BAR|ATOMG)\b.*")
    return re.fullmatch(FENCE, before[-1]) is not None


def test_a_signal_that_counts_is_a_release_and_its_wait_an_acquire():
    code = compiled(counting.pipeline, types.int64, types.int64, TABLE)
    assert waits(code).count(["LDG.E.64.STRONG.SYS", "CCTL.IVALL"]) == 2
    adds = r"(ATOMG|REDG)\..*ADD\.64\.STRONG\.SYS"
    assert len(code.find(adds)) == 1
    assert follows_a_fence(code, code.find(adds)[0])
    # The words that are set; records on boards follow loads of the clock.
    sets = code.find(r"STG\.E\.64\.STRONG\.SYS")
    assert any(follows_a_fence(code, place) for place in sets)


TEAM = types.NamedTuple(
    (types.int64, types.int64, types.UniTuple(types.int64, 2)), Team
)


def test_waits_of_a_block_meet_once_each_and_keep_no_local_arrays():
    code = compiled(counting.wait_for_many, TEAM, types.int64, WORDS)
    meetings = [code.instructions[place].opcode for place in code.find(r"BAR\..*")]
    # Nine waits, and a barrier, which also meets before it signals.
    assert sum(each.startswith("BAR.RED.OR") for each in meetings) == 10
    assert len(meetings) == 11
    assert code.usage["LOCAL"] == "0"


def test_waits_for_words_poll_what_they_compare():
    code = compiled(counting.wait_for_words, WORDS)
    wide, narrow = ([f"LDG.E{width}.STRONG.SYS", "CCTL.IVALL"] for width in (".64", ""))
    assert waits(code).count(narrow) == waits(code).count(wide) == 2


def test_a_barrier_of_grids_sends_one_signal_to_each_rank():
    code = compiled(barriers.sum_over_all, types.int64, types.int64, TABLE)
    # Two barriers. In each, a block counts itself, after a release.
    counts = code.find(r"(ATOMG|REDG)\..*ADD\.64\.STRONG\.SYS")
    assert len(counts) == 2
    assert all(follows_a_fence(code, place) for place in counts)
    narrow, wide = ([f"LDG.E{width}.STRONG.SYS", "CCTL.IVALL"] for width in ("", ".64"))
    # The last block waits for empty slots, the first one for signals, and the others
    # for the generation.
    assert waits(code).count(narrow) == 4
    assert waits(code).count(wide) == 2
    signals = code.find(r"STG\.E\.STRONG\.SYS")
    assert len(signals) == 4
    assert all(follows_a_fence(code, place) for place in signals)
    assert code.usage["LOCAL"] == "0"


def test_a_barrier_of_a_team_has_its_signals_only():
    code = compiled(barriers.sum_over_teams, TEAM, TEAM, WORDS)
    assert len(code.find(r"STG\.E\.STRONG\.SYS")) == 2 * 3
    assert code.usage["LOCAL"] == "0"


def records(code):
    """Return the threads that end right after they have stored to the boards."""
    ends = code.find(r"EXIT")
    accesses = r"(LDG|STG|BAR|ATOMG|REDG)\b.*"
    last = [opcodes(code.instructions[:place], accesses)[-1:] for place in ends]
    return last.count(["STG.E.64.STRONG.SYS"])


def test_arguments_are_checked_in_debug_mode_only():
    guard = Guard(5, 0, 2, 6)
    plain = typeof(Context(0, 2, (1 << 40, 2 << 40), (3, 4), guard))
    debug = typeof(CheckedContext(0, 2, (1 << 40, 2 << 40), (3, 4), guard, 64, 9))
    assert debug.fields == (*plain.fields, "nbytes", "pad_channels")
    assert len(set(debug.fields)) == len(debug.fields)  # a kernel finds each by name
    signature = TEAM, types.int64, WORDS
    checked = compiled(debugging.misuse, *signature, context=debug)
    unchecked = compiled(debugging.misuse, *signature, context=plain)
    # Of a slot twice, a rank, a buffer, a copy, a comparison and a team.
    assert records(checked) - records(unchecked) >= 6
    assert len(checked.instructions) - len(unchecked.instructions) > 50


FLOATS = types.Array(types.float32, 1, "C")


def test_8_bit_floats_are_converted_by_the_hardware():
    kernel = elements.storing(elements.DTYPES[1])
    code = compiled(kernel, FLOATS, FLOATS, types.int64)
    assert code.find(r"F2FP\.(SATFINITE\.)?\w*(E4M3|E5M2).*")
    assert code.find(r"F2FP\.F16\.(E4M3|E5M2)\.UNPACK_B|HADD2\.F32")
    assert code.find(r"STG?\.E\.U8")


BYTES = types.Array(types.uint8, 2, "C")


@cuda.jit
def copy_a_matrix(ctx, target, source):
    symm.put_block(ctx, target, source)


def test_copies_of_boxes_keep_no_local_arrays():
    box = types.Array(types.int32, 3, "C")
    mailbox = types.Array(types.uint64, 1, "C")
    code = compiled(copies.copy_boxes, box, mailbox, box)
    assert code.usage["LOCAL"] == "0"


def test_copies_access_16_bytes_whatever_the_alignment():
    code = compiled(copy_a_matrix, BYTES, BYTES)
    loops = [code.loop(store) for store in code.find(r"ST\.E\.128")]
    found = [sorted(opcodes(loop, r"(LD|ST|LDL|STL)\b.*")) for loop in loops]
    load, store = ["LD.E.128"], ["ST.E.128"]
    # Vectors that are shifted need two loads. A batch has the loads of four vectors.
    assert [each for each in found if each.count(*store) == 4] == [
        *4 * [8 * load + 4 * store],
        *4 * [4 * load + 4 * store],
    ]
    assert [each for each in found if each.count(*store) == 1] == [
        2 * load + store,
        load + store,
    ]
    assert len(found) == 10
    # Words are shifted by the hardware's funnel shift.
    assert len(code.find(r"SHF\.R\.U64")) == 2 * 5 * 2


MATRIX = types.Array(types.float32, 2, "C")


def test_packets_need_no_fence():
    kernel = copies.mailing(np.float32, copies.WARP, 96)
    code = compiled(kernel, types.int64, MATRIX, MATRIX)
    stores = code.find(r"STG\.E\.128\.STRONG\.SYS")
    loads = code.find(r"LDG\.E\.128\.STRONG\.SYS")
    posts = stores[:2]  # the others clear mailboxes before numbers repeat
    assert len(stores) == 4
    assert len(loads) >= 2
    orders = r"(MEMBAR|BAR|CCTL)\b.*"
    assert not opcodes(code.between(*posts), orders)
    # Of a vector's two packets: its data is used without a fence after the load.
    assert not opcodes(code.between(loads[0], loads[1]), orders)
    # Only the credit is a release.
    assert len(code.find(FENCE)) == 1
    # The warp agrees.
    assert set(opcodes(code.instructions, r"VOTE\b.*")) == {"VOTE.ANY"}
    assert code.usage["LOCAL"] == "0"


REFUSED = [
    (types.Array(types.int32, 2, "C"), types.Array(types.int64, 2, "C")),
    (types.Array(types.int64, 4, "C"), types.Array(types.int64, 4, "C")),
    (types.Array(types.int64, 2, "C", readonly=True), types.Array(types.int64, 2, "C")),
    (types.Array(types.int64, 2, "C"), types.int64),
]


@pytest.mark.parametrize("arrays", REFUSED, ids=str)
def test_copies_between_other_arrays_do_not_compile(arrays):
    with pytest.raises(
        TypingError, match="a copy: expected two arrays of one to three"
    ):
        compiled(copy_a_matrix, *arrays)


def workspace(kind=WorkspaceContext):
    two, team = (1 << 40, 2 << 40), Team(0, 2, (0, 1))
    fields = 0, 2, two, two, TeamGuard(5, 0, 2, 6, (1, 0)), team, two, 8, 128, 1, 1
    return typeof(kind(*fields, *(9, 9) * kind.checked))


@cuda.jit
def repeat(ws, x, out, times):
    held = cuda.local.array(4, np.float32)
    first = 4 * cuda.grid(1)
    for i in range(4):
        held[i] = x[first + i]
    good = True
    for _ in range(times):
        good = symm.all_reduce(ws, held, "avg", items=True)
        if not good:
            break
    if good:
        for i in range(4):
            out[first + i] = held[i]


def test_a_collective_in_a_kernel_is_its_packets():
    """No fence, no barrier of the block but the one at its end, no local memory."""
    code = compiled(repeat, FLOATS, FLOATS, types.int64, context=workspace())
    (meeting,) = code.find(r"BAR\..*")
    assert code.instructions[meeting].opcode.startswith("BAR.RED.OR")
    packets = code.find(r"STG\.E\.128\.STRONG\.SYS")
    posts = packets[:2]
    # Each vector is two packets. The others clear mailboxes when the epochs overflow.
    first, second = (code.instructions[place] for place in posts)
    assert "+0x200]" in second.operands
    assert "RZ" not in first.operands + second.operands
    polls = code.find(r"LDG\.E\.128\.STRONG\.SYS")
    assert posts[1] < polls[0] < polls[1] < meeting
    # The loop passes the fences only when the epochs overflow.
    fences = code.find(FENCE)
    assert len(fences) == 2
    assert not any(posts[0] < place < polls[1] for place in fences)
    assert code.usage["LOCAL"] == code.usage["STACK"] == "0"


def test_collectives_that_are_started_and_awaited_meet_once_each():
    """Each of six starts and of five waits, and none keeps local arrays."""
    code = compiled(
        collectives.starting(2),
        ROWS,
        types.Array(types.float32, 3, "C"),
        types.int64,
        TABLE,
        context=workspace(),
    )
    meetings = [code.instructions[place].opcode for place in code.find(r"BAR\..*")]
    assert len(meetings) == 11
    assert sum(each.startswith("BAR.RED.OR") for each in meetings) == 5
    assert code.usage["LOCAL"] == "0"


def test_ranges_of_ranks_keep_no_local_arrays():
    numbers, words = 3 * [WORDS], types.Array(types.float32, 3, "C")
    signature = *numbers, ROWS, words, TABLE
    code = compiled(collectives.ranging(2), *signature, context=workspace())
    # Four starts and waits of a block's arrays, and two waits of items.
    assert len(code.find(r"BAR\..*")) == 10
    assert code.usage["LOCAL"] == "0"


def test_collectives_of_a_block_meet_twice():
    kernel = collectives.reducing("sum")
    rows, flags = types.Array(types.float16, 2, "C"), TABLE
    plain, debug = (
        compiled(kernel, rows, flags, context=workspace(kind))
        for kind in (WorkspaceContext, CheckedWorkspaceContext)
    )
    meetings = [plain.instructions[place].opcode for place in plain.find(r"BAR\..*")]
    assert len(meetings) == 2
    assert sum(each.startswith("BAR.RED.OR") for each in meetings) == 1
    assert plain.usage["LOCAL"] == "0"
    # Of the grid, the bytes, the root and the arrays' sizes.
    assert records(debug) - records(plain) >= 3


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (0, "all_reduce: expected the context of a workspace, got .*Context"),
        (1, "all_reduce: expected an operator of float32, got op='band'"),
        (2, "all_gather: expected an output of int64, got one of float32"),
        (3, "all_reduce: expected contiguous arrays of a known dtype, got array"),
        (4, "all_reduce: expected a constant name of an operator or a function"),
        (5, "a count for each of 2 ranks, all of one type of integers, got Tuple"),
    ],
)
def test_wrong_arguments_of_collectives_do_not_compile(what, text):
    context = context_type(2) if what == 0 else workspace()
    kernel = collectives.WRONG[what]
    with pytest.raises(TypingError, match=text):
        compiled(kernel, types.int64, WORDS, FLOATS, context=context)


ROWS, DOUBLES = types.Array(types.float32, 2, "C"), types.Array(types.float64, 1, "C")
EXAMPLES = {
    "jacobi.relax_all": (context_type(2), types.int64, types.int64),
    "radix_exchange.in_a_kernel": (
        context_type(2),
        workspace(),
        types.Array(types.uint32, 2, "C"),
        WORDS,
    ),
    "ring_attention.in_a_ring": (
        context_type(2),
        *(types.Array(types.float32, ndim, "C") for ndim in (3, 3, 4, 3)),
        types.int64,
    ),
    "row_parallel.fused": (workspace(), ROWS, ROWS, FLOATS, ROWS),
    "rms_norm.fused": (workspace(), ROWS, ROWS, FLOATS, ROWS),
    "conjugate_gradient.solve": (workspace(), *[DOUBLES] * 4, WORDS),
    "histogram.count": (*[context_type(2)] * 3, types.int64, WORDS),
}


@pytest.mark.parametrize("name", EXAMPLES if WHOLE else ["conjugate_gradient.solve"])
def test_the_examples_threads_have_enough_registers(name):
    """A thread block of more than that cannot be launched."""
    file, _, kernel = name.partition(".")
    module = runpy.run_path(str(ROOT / f"examples/{file}.py"), run_name=file)
    user = Kernel(lambda: module[kernel].py_func, (), EXAMPLES[name], 32, registers=255)
    per_thread = -(-int(Code(user, (9, 0)).usage["REG"]) // 8) * 8
    assert per_thread * module["THREADS"] <= REGISTERS
