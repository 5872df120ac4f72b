"""The machine code of the kernels, for three architectures, without a GPU.

SASS is read as nvdisasm prints it. A flag's load is ``LDG.E.STRONG.SYS``, a packet's
``LDG.E.128.STRONG.SYS``; an acquire adds ``CCTL.IVALL`` (drop what the L1 cache holds)
after the load, a release ``MEMBAR.ALL.SYS`` before the store. ``ACQBULK`` waits for
the grid before, ``PREEXIT`` lets the next one start.
"""

import functools
import itertools
import re

import pytest

from numba_symm.collectives.kernels import direct, one_shot, transfer
from tests.kernel_cases import (
    ALIKE,
    ALL,
    BLOCK_FLAGS,
    CODED,
    COLLECTIVE,
    DIGEST,
    DIRECT,
    EVERY,
    EXACT,
    EXPERTS,
    FENCE,
    FINISHED,
    FLAGGED,
    GAPS,
    GATHERS,
    HALVES,
    HANDSHAKES,
    INDEXED,
    MAILBOXES,
    MAILED,
    MESSAGES,
    MOVING,
    ONE_SHOT,
    OWN,
    PADS,
    ROOTED,
    SHARDS,
    SPILLS,
    element,
    kernel,
)
from tests.machine_code import Code, branches, flag_stores, opcodes, read_together
from tests.whole import WHOLE


def on(cases):
    """Run a test for each kernel on Hopper, for some small ones on its neighbours.

    Except in full, run it for each kernel on Hopper with the most ranks only.
    """
    if WHOLE:
        chosen = [(case, (9, 0)) for case in cases]
        small = [case for case in cases if case[1] == 2 and case[0] not in ALIKE]
        chosen += [(case, cc) for cc in ((8, 0), (10, 0)) for case in small]
    else:
        most = {case[0]: case for case in sorted(cases, key=lambda case: case[1])}
        chosen = [(case, (9, 0)) for case in most.values()]

    def shown(value):
        if isinstance(value[0], str):
            return "-".join(map(str, value))
        return f"sm_{value[0]}{value[1]}"

    return pytest.mark.parametrize(("case", "cc"), chosen, ids=shown)


@pytest.fixture(scope="module", autouse=True)
def read(request):
    """Read the machine code of the cases of all tests that are to run."""
    items = (item for item in request.session.items if item.path == request.path)
    found = (getattr(item, "callspec", None) for item in items)
    params = [each.params for each in found if each and "case" in each.params]
    cases = dict.fromkeys((each["case"], each.get("cc", (9, 0))) for each in params)
    read_together([(kernel(*case), cc) for case, cc in cases])


@functools.cache
def compiled(case, cc):
    return Code(kernel(*case), cc)


@on(EVERY)
def test_everything_stays_in_registers_and_a_block_fits(case, cc):
    code = compiled(case, cc)
    assert int(code.usage["REG"]) <= code.kernel.registers
    assert code.usage["LOCAL"] == "0"
    stack = int(code.usage["STACK"])
    assert stack <= SPILLS.get(case[:2], 0) + INDEXED.get(case[:2], 0)


@on(COLLECTIVE)
def test_a_collective_waits_for_the_grid_before_it_accesses_memory(case, cc):
    code = compiled(case, cc)
    waits, starts = code.find(r"ACQBULK.*"), code.find(r"PREEXIT.*")
    if cc < (9, 0):
        assert not waits
        assert not starts
    else:
        assert len(waits) == 1
        assert waits[0] < min(code.find(r"(LDG|STG)\b.*"))
        assert waits[0] < starts[0]
        # A call between the ranks' own arrays starts its last launch when it has moved.
        assert len(starts) < 3
        assert all(start > max(code.find(r"STG\.E\.128")) for start in starts[1:])
        if code.kernel.factory is direct.make_direct:
            assert len(starts) == 1
            assert starts[0] > max(code.find(r"STG\.E\.128"))


@on(EVERY)
def test_memory_is_global_and_nothing_is_atomic(case, cc):
    code = compiled(case, cc)
    assert code.find(r"LDG\b.*")
    assert code.find(r"STG\b.*")
    # The blocks of a message's copy count themselves in their own GPU's memory.
    counted = 1 if case[0] == "message_copy" else 0
    found = code.find(r"(LD|ST|ATOM|ATOMG|ATOMS|RED|REDG)(\..*)?")
    assert len(found) == counted


@on([case for case in EVERY if case not in (*GAPS, *CODED, *FINISHED)])
def test_nothing_is_called(case, cc):
    # A division by what is not constant is a call of some hundred instructions. The
    # copies of arrays with gaps have one for each axis, codes one for each group. An
    # epilogue calls what the user's functions call, and has one for each run. Threads
    # that vote apart from their warp call a function.
    code = compiled(case, cc)
    calls = [code.instructions[i].operands for i in code.find(r"CALL\.ABS.*")]
    assert not [name for name in calls if "votesync_ballot" not in name]


# These read many words before they store: those of a digest, counts to add up, codes.
BY_ONE = DIGEST, *OWN, *EXPERTS, *CODED, *FINISHED, *EXACT


@on([case for case in EVERY if case not in BY_ONE])
def test_no_plain_load_is_polled(case, cc):
    # A loop that loads data stores some, or is that of epochs; one that waits does not.
    code = compiled(case, cc)
    # The one with counts loads the ragged end of an array in a loop without a deadline.
    loads = range(len(code.instructions))
    if case[0] in ("transfer_counted", "transfer_asked"):
        loads = code.waiting()
        assert set(code.find(r"LDG\b.*STRONG\.SYS")).intersection(loads)
    # Vectors that are polled have a test of their own.
    for load in code.find(r"LDG\b(?!.*(STRONG\.SYS|128)).*"):
        loop = code.loop(load)
        if loop and load in loads:
            assert opcodes(loop, r"(STG|BAR)\b.*"), code.instructions[load]


@on(FLAGGED)
def test_a_wait_polls_its_flag_and_nothing_else(case, cc):
    code = compiled(case, cc)
    loops = [code.loop(load) for load in code.find(r"LDG\.E\.STRONG\.SYS")]
    waits = [loop for loop in loops if loop and not opcodes(loop, r"(STG|BAR)\b.*")]
    assert waits
    for wait in waits:
        accesses = opcodes(wait, r"(LDG|STG|LDS|STS|CCTL|MEMBAR)\b.*")
        assert accesses == ["LDG.E.STRONG.SYS", "CCTL.IVALL"]


@on(FLAGGED)
def test_every_flag_is_loaded_with_acquire(case, cc):
    code = compiled(case, cc)
    loads = code.find(r"LDG\.E\.STRONG\.SYS")
    polled = [load for load in loads if code.loop(load)]
    assert polled
    for load in polled:
        following = code.instructions[load + 1 :]
        accesses = opcodes(following, r"(LDG|STG|LDS|STS|CCTL|MEMBAR|BAR)\b.*")
        assert accesses[0] == "CCTL.IVALL"


@on(FLAGGED)
def test_every_flag_is_stored_after_a_fence(case, cc):
    code = compiled(case, cc)
    stores = flag_stores(code)
    fences = code.find(r"MEMBAR\.(ALL|SC)\.SYS")
    assert stores
    assert fences[0] < stores[0]
    for store in stores:
        fence = max(i for i in fences if i < store)
        data = r"(LDG|STG|BAR)\b(?!.*STRONG\.SYS).*"
        assert not opcodes(code.between(fence, store), data)


@on(BLOCK_FLAGS)
def test_all_flags_of_a_block_share_a_fence(case, cc):
    code = compiled(case, cc)
    flags = flag_stores(code)
    fences = code.find(r"MEMBAR\.(ALL|SC)\.SYS")
    assert len(fences) * (case[1] - 1) == len(flags)


@on(PADS)
def test_signals_access_memory_at_system_scope_only(case, cc):
    code = compiled(case, cc)
    accesses = code.find(r"(LDG|STG)\b.*")
    assert accesses == code.find(r"(LDG|STG)\.E(\.64)?\.STRONG\.SYS")


@on(MESSAGES)
def test_a_flag_and_a_credit_follow_a_fence_each(case, cc):
    code = compiled(case, cc)
    fences = code.find(r"MEMBAR\.(ALL|SC)\.SYS")
    stored = code.find(r"STG\.E(\.64)?\.STRONG\.SYS")
    following = [min(store for store in stored if store > fence) for fence in fences]
    # A flag has the message's length beside its epoch, a credit the epoch only.
    kinds = sorted(code.instructions[store].opcode for store in following)
    assert kinds == ["STG.E.64.STRONG.SYS", "STG.E.STRONG.SYS"]
    for fence, store in zip(fences, following, strict=True):
        assert not opcodes(code.between(fence, store), r"(LDG|STG|BAR)\b.*")


@on(FENCE)
def test_a_fence_is_nothing_else(case, cc):
    code = compiled(case, cc)
    assert len(code.find(r"MEMBAR\.(ALL|SC)\.SYS")) == 1
    assert not code.find(r"(LDG|STG|LD|ST|BAR|ATOM|RED)\b.*")


@on([("barrier", 2), ("barrier", 8)])
def test_a_barrier_has_one_plain_load_and_store_for_its_own_epoch(case, cc):
    code = compiled(case, cc)
    assert len(code.find(r"LDG\b(?!.*STRONG).*")) == 1
    assert len(code.find(r"STG\b(?!.*STRONG).*")) == 1


MARKING = r"STG\.E\.STRONG\.SYS"


@on(ONE_SHOT)
def test_one_shot_posts_a_vector_to_each_other_rank(case, cc):
    code = compiled(case, cc)
    stores = code.find(r"STG\.E\.128\.STRONG\.SYS")
    packets = 2 if "ll" in case[0] else 1
    # What is stored before the first wait is posted; mailboxes are cleared after it.
    first_poll = code.find(r"LDG\.E\.128\.STRONG\.SYS")[0]
    posted = [store for store in stores if store < first_poll]
    assert len(posted) == packets * (case[1] - 1)
    marks = [mark for mark in code.find(MARKING) if mark < first_poll]
    assert len(marks) == ("marked" in case[0]) * (case[1] - 1)


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("transport", ["sentinel", "marked"])
def test_two_tiles_are_loaded_before_a_post_and_more_one_at_a_time(transport, tiles):
    kernel = one_shot.kernel(2, element("float32"), "sum", False, transport, tiles, ALL)
    code = Code(kernel, (9, 0))
    posts = code.find(r"STG\.E\.128\.STRONG\.SYS")[:tiles]
    edges = [-1, *posts]
    loads = [
        len(opcodes(code.between(*each), r"LDG\.E\.128(\.CONSTANT)?"))
        for each in itertools.pairwise(edges)
    ]
    assert loads == {2: [2, 0], 4: [1, 1, 1, 1]}[tiles]
    assert int(code.usage["STACK"]) == 0


@on(ONE_SHOT)
def test_a_block_takes_its_index_from_one_lane(case, cc):
    # For sm_80, the compiler does so twice in kernels of 2 ranks.
    assert len(compiled(case, cc).find(r"SHFL\.IDX")) in (1, 2)


@on(MAILBOXES)
def test_all_mailboxes_are_polled_together(case, cc):
    # Nothing waits between the loads: polling all takes one latency, not n.
    code = compiled(case, cc)
    loads = code.find(r"LDG\.E\.128\.STRONG\.SYS")
    together = (2 if "ll" in case[0] else 1) * (case[1] - 1)
    polls = loads[:together]
    assert not branches(code.between(polls[0], polls[-1]))
    for load in polls:
        accesses = opcodes(code.loop(load), r"(LDG|STG|MEMBAR|BAR)\b.*")
        marks = ["LDG.E.STRONG.SYS"] * ("marked" in case[0]) * together
        assert sorted(accesses) == ["LDG.E.128.STRONG.SYS"] * together + marks


@on(MAILBOXES)
def test_an_epoch_of_mailboxes_has_no_fence(case, cc):
    code = compiled(case, cc)
    # Between epochs; one more for what thread 0 alone has received.
    assert len(code.find(r"MEMBAR\..*SYS")) == (2 if case[0] in ROOTED else 1)
    assert len(code.find(r"BAR\..*")) == 2  # there, and before the epoch changes


@on(MAILED)
def test_few_tokens_are_posted_and_received_without_a_fence(case, cc):
    code = compiled(case, cc)
    polls = code.find(r"LDG\.E\.128\.STRONG\.SYS")
    (fence,) = code.find(r"MEMBAR\..*SYS")  # between two epochs only
    assert polls[-1] < fence
    posts = code.find(r"STG\.E\.128\.STRONG\.SYS")
    assert posts[case[1] - 2] < polls[0]  # a vector to each other rank


@on([*HANDSHAKES, *DIRECT])
def test_addresses_are_sent_after_a_fence_and_used_after_an_acquire(case, cc):
    code = compiled(case, cc)
    packets = code.find(r"STG\.E\.128\.STRONG\.SYS")
    assert len(packets) == 4 * (case[1] - 1)  # two vectors to each other rank
    polls = code.find(r"LDG\.E\.128\.STRONG\.SYS")
    fence = code.find(r"MEMBAR\.(ALL|SC)\.SYS")[0]
    assert fence < packets[0]
    assert packets[-1] < polls[0]
    # The addresses, kept for the block; again where they are not the known ones.
    kept = code.find(r"STG\.E\.128")
    acquires = [at for at in code.find(r"CCTL\.IVALL") if at > fence + 8]
    assert polls[-1] < acquires[0] < kept[0]


@on(SHARDS)
def test_a_shard_of_all_ranks_is_loaded_before_any_is_reduced(case, cc):
    name, size = case[:2]
    code = compiled(case, cc)
    loads, (kept, *stores) = code.find(r"LDG\.E\.128"), code.find(r"STG\.E\.128")
    assert kept < loads[0]  # the addresses
    batch = direct.LOADS // size
    assert len(loads) == batch * size
    assert not branches(code.between(loads[0], loads[-1]))
    assert not opcodes(code.between(loads[0], loads[-1]), r"[FH](ADD|FMA)\d*\b.*")
    assert len(stores) == batch * (size if name == "all_reduce_direct" else 1)
    assert loads[-1] < stores[0]


@on(GATHERS)
def test_a_batch_of_all_inputs_is_loaded_before_any_is_stored(case, cc):
    code = compiled(case, cc)
    loads, (kept, *stores) = code.find(r"LDG\.E\.128"), code.find(r"STG\.E\.128")
    assert kept < loads[0]  # the addresses
    batch = {2: 3, 4: 1, 8: 1}[case[1]]
    assert len(stores) == batch * case[1]
    addresses, loads = loads[: -len(stores)], loads[-len(stores) :]
    assert len(addresses) in (0, case[1] - 1)  # those of many ranks are loaded again
    assert len(loads) == len(stores)
    assert not branches(code.between(loads[0], loads[-1]))
    assert loads[-1] < stores[0]


@on([case for case in EVERY if case[0] in ("transfer", "transfer_alone")])
def test_a_batch_of_a_message_is_loaded_before_it_is_stored(case, cc):
    # Of two loads into one register, the second would wait for the first.
    code = compiled(case, cc)
    moves = [code.instructions[i] for i in sorted(code.find(r"(LDG|STG)\.E\.128"))]
    for _, batch in itertools.groupby(moves, lambda move: move.opcode):
        found = [re.search(r"R\d+(?!\S*\])", move.operands)[0] for move in batch]
        assert len(found) == len(set(found)) == transfer.LOADS


ROUNDS = {  # two floats to 16 bits; on sm_80 float16's has no name
    "bfloat16": r"F2FP\.BF16(\.F32)?\.PACK_AB",
    "float16": r"F2FP(\.F16\.F32)?\.PACK_AB",
}


@on(
    [
        case
        for case in MAILBOXES + BLOCK_FLAGS[:-2]
        if case[2] in HALVES and case[0] not in MOVING
    ]
)
def test_halves_are_rounded_by_the_hardware(case, cc):
    code = compiled(case, cc)
    assert code.find(ROUNDS[case[2]])
    assert code.find(r"FADD(2|\.FTZ)?")


@pytest.mark.parametrize("dtype", HALVES)
def test_a_predicates_0_or_1_is_rounded_too(dtype):
    """If one float is converted alone, ptxas (13.0) keeps only the predicate."""
    code = compiled(("one_ll", 2, dtype, "land"), (9, 0))
    assert len(code.find(ROUNDS[dtype])) >= 8
