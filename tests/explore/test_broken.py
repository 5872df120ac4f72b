"""Broken variants of the protocols, which the search must find."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from explore.scenarios import (
    all_reduces,
    all_reduces_at_the_wrap,
    breaks,
    by_anything_and_by_result,
    calls_after_many,
    calls_of,
    calls_on_own_arrays,
    each_transport,
    exchanges_between_barriers,
    mailed_calls,
    messages,
    plain_stores_between_barriers,
    words_by_signals,
    worlds,
)
from explore.source import SMALL, device_code
from explore.world import ALGORITHMS, MAILED
from numba_symm.collectives.kernels import (
    chunked_all_reduce,
    chunked_broadcast,
    chunked_exchange,
    chunked_reduce,
)

# What is broken: the algorithms that it must spoil, and the edits (module, text that
# must be there, text instead) that break them.

FENCE = "        fence_acq_rel_sys()\n"
SYNC = "        failed = syncthreads_or(failed)\n"
NEXT_ROUND = SYNC + FENCE
LAST = "LAST_EPOCH = 2**32 - 2"
RELAXED = (
    ("signals", "while (ld_acquire_sys_u32(flag)", "while (ld_relaxed_sys_u32(flag)"),
    (
        "signals",
        "    ld_acquire_sys_u32,",
        "    ld_acquire_sys_u32, ld_relaxed_sys_u32,",
    ),
)


def turns_parts(module, *begins):
    """Return the parts of a kernel's turns, which begin so."""
    text = Path(module.__file__).read_text()
    begins = [*begins, r"keep\("]
    places = [re.search(r"\n *" + begin, text).start() + 1 for begin in begins]
    return [text[a:b] for a, b in pairwise(places)]


GATHER, AWAIT, SCATTER, REDUCE = turns_parts(
    chunked_all_reduce,
    "if turn >= 2:",
    "if turn == 1:",
    "if turn < chunks:",
    "if 1 <= turn <= chunks:",
)
_, EXCHANGE_TAKE, EXCHANGE_TELL = turns_parts(
    chunked_exchange,
    r"if turn < chunks and not .*:\n +slot",
    "if turn >= 1:",
    r"if turn < chunks:\n +failed",
)
TURNS = {
    module: turns_parts(
        module,
        "if turn < chunks( and is_root)?:",
        "if turn >= 1:",
        "if 1 <= turn <= chunks and",
        "if turn >= (2|hops) and",
        r"if turn (<= chunks:|< chunks \+)",
    )
    for module in (chunked_reduce, chunked_broadcast)
}

SENTINEL, LL, MARKED = MAILED[:4:2], MAILED[1:4:2], MAILED[4:]
NOT_TWO_LL = [name for name in MAILED if name != "two_shot_ll"]
CLEARED = [*SENTINEL, *MARKED]
FLAGGED = ALGORITHMS[6:]

MAILBOXES_BROKEN = {
    # By LL, two flights are in step without all this: a thread answers its twin only
    # after it has read what the twin sent, and nothing is cleared.
    "one half": (NOT_TWO_LL, ("mailboxes", "(epoch & 1) * half_stride", "0")),
    "no syncthreads between rounds": (NOT_TWO_LL, ("mailboxes", NEXT_ROUND, FENCE)),
    "no fence between rounds": (CLEARED, ("mailboxes", NEXT_ROUND, SYNC)),
    "a fence before the threads meet": (
        CLEARED,
        ("mailboxes", NEXT_ROUND, FENCE + SYNC),
    ),
    "not cleared": (
        CLEARED,
        ("mailboxes", "clear(first + k * rank_stride)", "pass"),
    ),
    "cleared after the next post": (
        CLEARED,
        (
            "mailboxes",
            "clear(first + k * rank_stride)",
            "clear(first + k * rank_stride + (1 - 2 * (epoch & 1)) * half_stride)",
        ),
    ),
    "one word not looked at": (SENTINEL, ("mailboxes", "(low == EMPTY) | ", "")),
    "the other not looked at": (SENTINEL, ("mailboxes", " | (high == EMPTY)", "")),
    "one word sent as it is": (SENTINEL, ("mailboxes", "if low == EMPTY", "if False")),
    "the other sent as it is": (
        SENTINEL,
        ("mailboxes", "if high == EMPTY", "if False"),
    ),
    "one of the marked words not looked at": (
        MARKED,
        ("mailboxes", "(first == EMPTY) | ", ""),
    ),
    "the other of the marked words not looked at": (
        MARKED,
        ("mailboxes", " | (second == EMPTY)", ""),
    ),
    "marks not looked at": (MARKED, ("mailboxes", " | unmarked", "")),
    "one mark not set": (MARKED, ("mailboxes", "marks = 1\n", "marks = 0\n")),
    "the other mark not set": (MARKED, ("mailboxes", "marks += 2", "marks += 0")),
    "one marked word sent as it is": (
        MARKED,
        ("mailboxes", "        first = 0\n", "        first = EMPTY\n"),
    ),
    "marks left as they were": (
        MARKED,
        ("mailboxes", "st_relaxed_sys_u32(_marks(box), UNMARKED)", "pass"),
    ),
    "one place for the marks of all threads": (
        MARKED,
        (
            "mailboxes",
            "(VECTOR - MARK) * thread_index_x()",
            "VECTOR * thread_index_x()",
        ),
    ),
    "the sender goes on with another NaN": (
        SENTINEL,
        ("one_shot", "= sent(words[0], words[1])", "= words"),
        (
            "two_shot",
            "store(target, mine, count, result[0], result[1])",
            "store(target, mine, count, packed[0], packed[1])",
        ),
    ),
    **{
        f"{name} flag not looked at": (LL, ("mailboxes", *edit))
        for name, edit in {
            "the first": ("(first ^ flag) | ", ""),
            "the second": ("(second ^ flag) | ", ""),
            "the third": ("(third ^ flag) | ", ""),
            "the fourth": (" | (fourth ^ flag)", ""),
        }.items()
    },
    "one set of mailboxes": (
        ("two_shot_sentinel", "two_shot_ll", "two_shot_marked"),
        ("mailboxes", " + which * set_stride", ""),
    ),
}
OF_TWO_RANKS = {  # who have more than one step
    "one mailbox for all steps": (MAILED, ("mailboxes", " + step * line", "")),
}
OF_THREE_RANKS = {  # who have more than one neighbour
    "one flag for all ranks": (
        FLAGGED,
        ("flags", "ring[k] + flags + 4 * rank", "ring[k] + flags"),
        ("flags", "flags + 4 * peer", "flags"),
    ),
    "neighbours counted as their receiver does": (
        MAILED,
        ("mailboxes", "(others - 1 - k) * rank_stride", "k * rank_stride"),
    ),
    "vectors in the ring's order": (
        ALGORITHMS[:-1],
        ("order", "turning = rank >> bit & 1 != 0", "turning = False"),
    ),
    "one mailbox for all ranks": (
        MAILED,
        ("mailboxes", "rank_stride = count * line", "rank_stride = 0"),
    ),
    "slots counted as their receiver does": (
        ("chunked_all_reduce",),
        (
            "chunked_all_reduce",
            "# The sender is its k-th neighbour's (n - 2 - k)-th.\n"
            "                            there = slot + (others - 1 - k) * rank_stride",
            "there = slot + k * rank_stride",
        ),
    ),
}
WRAP_BROKEN = {
    "nothing wiped": (LL, ("mailboxes", "if epoch >= last_epoch - 1:", "if False:")),
    "one half wiped": (
        LL,
        ("mailboxes", "epoch >= last_epoch - 1:", "epoch >= last_epoch:"),
    ),
    "the other half wiped": (
        LL,
        ("mailboxes", "epoch >= last_epoch - 1:", "epoch == last_epoch - 1:"),
    ),
    "half a packet wiped": (
        LL,
        ("mailboxes", "    st_relaxed_sys_v2_u64(box + ROW, (0, 0))\n", ""),
    ),
    "one set wiped": (
        ("two_shot_ll",),
        ("mailboxes", "range(sets * others * count)", "range(others * count)"),
    ),
    "no fence between rounds": (LL, ("mailboxes", NEXT_ROUND, SYNC)),
    "an odd last epoch": (MAILED, ("mailboxes", LAST, "LAST_EPOCH = 2**32 - 1")),
}

FLAGS_BROKEN = {
    "no fence before the flags": (
        FLAGGED,
        ("flags", "            fence_acq_rel_sys()\n", "            pass\n"),
    ),
    "no syncthreads before the flags": (
        FLAGGED,
        ("flags", "failed = syncthreads_or(failed)\n        thread", "thread"),
    ),
    "flags loaded relaxed": (FLAGGED, *RELAXED),
    "no syncthreads after the flags": (
        FLAGGED,
        ("flags", "return syncthreads_or(failed)", "return failed"),
    ),
    "one half": (
        FLAGGED,
        ("chunked_all_reduce", "(2 * block + (epoch & 1))", "2 * block"),
        ("one_shot_pull", "(2 * block + (epoch & 1))", "2 * block"),
    ),
    "slots by element": (
        ("one_shot_pull",),
        (
            "one_shot_pull",
            "half = slots + (2 * block + (epoch & 1)) * half_bytes",
            f"half = slots + (epoch & 1) * {SMALL.blocks} * half_bytes"
            f" + 16 * (start % ({SMALL.blocks} * PULL.rows * THREADS))",
        ),
    ),
    "one set of slots": (
        ("chunked_all_reduce",),
        ("chunked_all_reduce", "half + which * set_stride", "half"),
    ),
    "one set of flags": (
        ("chunked_all_reduce",),
        ("chunked_all_reduce", "which * flag_set + ", ""),
    ),
    "scatter before gather": (
        ("chunked_all_reduce",),
        (
            "chunked_all_reduce",
            GATHER + AWAIT + SCATTER,
            AWAIT + SCATTER + GATHER,
        ),
    ),
    "gather last": (
        ("chunked_all_reduce",),
        (
            "chunked_all_reduce",
            GATHER + AWAIT + SCATTER + REDUCE,
            AWAIT + SCATTER + REDUCE + GATHER,
        ),
    ),
}
FENCED = "fence_acq_rel_sys()\n            "


PARTS_BROKEN = {
    "one half": ("half = (before + 1 + (chunk >> 1)) & 1", "half = 1"),
    "one set of slots": (" + (chunk & 1)", ""),
    "chunks in turn in the halves": ("(chunk >> 1)) & 1", "chunk) & 1"),
}


def turns_broken(module):
    """Return what breaks the turns of a kernel that has parts of the slots in turn."""
    _, wait, *work, tell = TURNS[module]
    work = "".join(work)
    return {
        "told before the work": (work + tell, tell + work),
        "used before all have told": (wait + work, work + wait),
    }


REDUCE_BROKEN = {
    **turns_broken(chunked_reduce),
    "slots counted as their receiver does": (
        "to = ring[k] + slot + (others - 1 - k) * rank_stride",
        "to = ring[k] + slot + k * rank_stride",
    ),
    "the root forgotten": ("if k == root:", "if k == 0:"),
    "shards counted from this rank": (
        "target, k * share + at",
        "target, number * share + at",
    ),
}
BROADCAST_BROKEN = turns_broken(chunked_broadcast)
BROADCAST_OF_THREE_BROKEN = {
    "relayed to the next": ("if k != to_root:", "if k != 0:"),
    "shards counted from the root": (
        "there = owner * share + vector + step * THREADS",
        "there = k * share + vector + step * THREADS",
    ),
}
EXCHANGE_BROKEN = {
    "the chunk before awaited": (
        "own + flag, block, last, failed",
        "own + flag, block, last - 1, failed",
    ),
    "told before it is taken": (
        EXCHANGE_TAKE + EXCHANGE_TELL,
        EXCHANGE_TELL + EXCHANGE_TAKE,
    ),
}
FEW_BROKEN = {
    "thread 0 exchanges no more than the others": [
        ("sent_to if rooted and thread != 0 else", "sent_to if rooted else"),
        ("got_of if rooted and thread != 0 else", "got_of if rooted else"),
    ],
    "the threads meet before thread 0's fence": [
        ("if rooted and thread == 0:", "if False:")
    ],
}
NEXT_BROKEN = {  # calls that disturb the next one, or the one before
    "chunked_all_reduce": ("chunked_all_reduce", AWAIT, ""),
    "gather": ("slots", "more = (told", "more = 0 * (told"),
    "reduce": ("slots", "more = (told", "more = 0 * (told"),
    "broadcast": ("slots", "more = (told", "more = 0 * (told"),
}
SYNCED = {
    "a flag before all have written": (
        "# What the whole block has written of the piece comes before its flag.\n"
        + 8 * " "
    ),
    "a credit before all have read": (
        "# What the whole block has read of the piece, it has read before it says so.\n"
        + 8 * " "
    ),
}
TRANSFER_BROKEN = {
    "no credit": ("failed = not wait_for_epoch(guard, credit, due, record)", "pass"),
    "too much credit": ("due = (epoch - DEPTH)", "due = (epoch - DEPTH - 1)"),
    "the block does not wait": ("stopped = syncthreads_or(failed)", "pass"),
    **{what: (text + "syncthreads()", "pass") for what, text in SYNCED.items()},
    "no fence before a flag": (
        FENCED + "st_relaxed_sys_u64",
        "st_relaxed_sys_u64",
    ),
    "no fence before a credit": (
        FENCED + "st_relaxed_sys_u32",
        "st_relaxed_sys_u32",
    ),
    "a flag awaited relaxed": (
        "while ld_acquire_sys_u64(flag)",
        "while ld_relaxed_sys_u64(flag)",
    ),
}
DIRECT_BROKEN = {
    "no fence before the addresses": (
        "handshake",
        "fence_acq_rel_sys()\n        for k",
        "pass\n        for k",
    ),
    "no fence after them": (
        "handshake",
        "fence_acq_rel_sys()\n        # The epoch counts",
        "pass\n        # The epoch counts",
    ),
    "a refusal of one's own forgotten": (
        "handshake",
        "elif first[0] == REFUSED:",
        "elif False:",
    ),
    "another's refusal forgotten": ("handshake", "lowest = min(lowest, first)", "pass"),
    "what was refused left undone": (
        "chunked_reduce",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) or True)",
    ),
    "what was not refused done twice": (
        "chunked_reduce",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) and False)",
    ),
    "the digest not looked at": ("handshake", " | late", ""),
    "nobody waits for the others' loads and stores": (
        "handshake",
        "failed = told(guard, own + flags, 0, epoch, failed)",
        "pass",
    ),
    "what is refused worked on": ("direct_broadcast", "refused(own) or", ""),
    "what is refused reduced": ("direct_reduce", "refused(own) or", ""),
    "what was refused not relayed": (
        "chunked_broadcast",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) or True)",
    ),
    "the input taken for the output": (
        "direct_reduce",
        "_, into = ld_v2_u64",
        "into, _ = ld_v2_u64",
    ),
}
DIRECT_OF_TWO_BROKEN = {
    "what was refused left undone": (
        "chunked_all_reduce",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) or True)",
    ),
    "what was not refused done twice": (
        "chunked_all_reduce",
        "not left(guard, ring, own, block)",
        "(left(guard, ring, own, block) and False)",
    ),
    "nobody waits for the other's loads": DIRECT_BROKEN[
        "nobody waits for the others' loads and stores"
    ],
    "no fence before the addresses": DIRECT_BROKEN["no fence before the addresses"],
    "no fence after them": DIRECT_BROKEN["no fence after them"],
}
EPOCH_BROKEN = {  # flags have a syncthreads of their own
    "the epoch changed before all have read it": (
        MAILED,
        ("workspace", "epoch, syncthreads_or(failed))", "epoch, failed)"),
    ),
}
BARRIER_BROKEN = {
    "no fence before the flags": FLAGS_BROKEN["no fence before the flags"][1:],
    "flags loaded relaxed": RELAXED,
}
SIGNALS_BROKEN = {
    "stored without waiting for 0": [
        ("taken = _wait_for_slot(ctx.guard, slot, 0, record)", "taken = True")
    ],
    "taken without waiting for 1": [
        ("arrived = _wait_for_slot(ctx.guard, slot, 1, record)", "arrived = True")
    ],
    "stored relaxed": [
        ("st_release_sys_u32(slot, 1)", "st_relaxed_sys_u32(slot, 1)"),
        ("    st_release_sys_u32,", "    st_release_sys_u32, st_relaxed_sys_u32,"),
    ],
    "awaited relaxed": [
        ("    ld_acquire_sys_u32,", "    ld_relaxed_sys_u32 as ld_acquire_sys_u32,")
    ],
}
IN_KERNEL_BROKEN = {
    "no syncthreads before": [
        (
            "# All writes of this block come before its release of the signals below.\n"
            "    syncthreads()",
            "",
        )
    ],
    "no syncthreads after": [("return not syncthreads_or(not met)", "return met")],
    "no waiting": [
        ("met = wait_signal(ctx, peer, channel)", "pass"),
    ],
}


def each(table, ranks=(2, 3)):
    """Run a test for each broken thing, algorithm that it must spoil, and world."""
    cases = [
        pytest.param(algorithm, edits, n, id=f"{what}-{algorithm}-{n}")
        for what, (algorithms, *edits) in table.items()
        for algorithm in algorithms
        for n in ranks
    ]
    return pytest.mark.parametrize(("algorithm", "edits", "ranks"), cases)


@each(MAILBOXES_BROKEN)
def test_mailboxes_broken_are_found(algorithm, edits, ranks):
    breaks(all_reduces(device_code(*edits), algorithm), ranks)


@each(OF_TWO_RANKS, [2])
def test_steps_broken_are_found(algorithm, edits, ranks):
    breaks(all_reduces(device_code(*edits), algorithm), ranks)


@by_anything_and_by_result
@each(OF_THREE_RANKS, [3])
def test_the_ring_broken_is_found(algorithm, edits, ranks, races):
    breaks(all_reduces(device_code(*edits), algorithm), ranks, races=races)


@each(WRAP_BROKEN)
def test_what_is_broken_at_the_wrap_is_found(algorithm, edits, ranks):
    breaks(all_reduces_at_the_wrap(device_code(*edits), algorithm), ranks)


@by_anything_and_by_result
@each(FLAGS_BROKEN)
def test_flags_broken_are_found(algorithm, edits, ranks, races):
    breaks(all_reduces(device_code(*edits), algorithm), ranks, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", REDUCE_BROKEN)
def test_reductions_broken_are_found(what, races):
    code = device_code(("chunked_reduce", *REDUCE_BROKEN[what]))
    breaks(calls_of(code, "reduce"), 3, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", EXCHANGE_BROKEN)
def test_exchanges_broken_are_found(what, races, ranks):
    code = device_code(("chunked_exchange", *EXCHANGE_BROKEN[what]))
    breaks(calls_of(code, "gather", "scan", "chunked_all_reduce"), ranks, races=races)


@worlds
@each_transport
@pytest.mark.parametrize("what", FEW_BROKEN)
def test_few_threads_exchanging_broken_are_found(what, transport, ranks):
    if (what, transport) == ("the threads meet before thread 0's fence", "ll"):
        pytest.skip("nothing is cleared, and loads are never late here")
    code = device_code(*(("exchange", *edit) for edit in FEW_BROKEN[what]))
    breaks(mailed_calls(code, transport), ranks)


@by_anything_and_by_result
@pytest.mark.parametrize("name", ["gather", "reduce"])
@pytest.mark.parametrize("what", PARTS_BROKEN)
def test_parts_broken_are_found(what, name, races):
    code = device_code(("slots", *PARTS_BROKEN[what]))
    breaks(calls_of(code, name), 3, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("name", NEXT_BROKEN)
def test_calls_that_disturb_each_other_are_found(name, races):
    code = device_code(NEXT_BROKEN[name])
    breaks(calls_of(code, name, "gather"), 3, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", BROADCAST_BROKEN)
def test_broadcasts_broken_are_found(what, races, ranks):
    code = device_code(("chunked_broadcast", *BROADCAST_BROKEN[what]))
    breaks(calls_of(code, "broadcast"), ranks, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", BROADCAST_OF_THREE_BROKEN)
def test_broadcasts_of_three_ranks_broken_are_found(what, races):
    code = device_code(("chunked_broadcast", *BROADCAST_OF_THREE_BROKEN[what]))
    breaks(calls_of(code, "broadcast"), 3, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", DIRECT_BROKEN)
def test_calls_on_own_arrays_broken_are_found(what, races):
    code = device_code(DIRECT_BROKEN[what])
    breaks(calls_on_own_arrays(code), 3, races=races)


@by_anything_and_by_result
@pytest.mark.parametrize("what", DIRECT_OF_TWO_BROKEN)
def test_reductions_of_two_ranks_own_arrays_broken_are_found(what, races):
    code = device_code(DIRECT_OF_TWO_BROKEN[what])
    breaks(calls_on_own_arrays(code), 2, races=races)


@by_anything_and_by_result
def test_flags_that_refused_calls_did_not_renew_are_found(races):
    told = "failed = tell(ring, flags, guard.rank, epoch, failed)"
    code = device_code(
        ("handshake", told, f"if found != REFUSED:\n                {told}")
    )
    breaks(calls_on_own_arrays(code, 2**31, 2**31 - 1), 3, races=races)


@worlds
@by_anything_and_by_result
def test_results_counted_with_the_calls_of_others_are_found(races, ranks):
    edit = ("chunked_all_reduce", "= ld_u32(results_at)", "= before")
    breaks(calls_after_many(device_code(edit), 2**31 + 10), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", TRANSFER_BROKEN)
def test_messages_broken_are_found(what, races, ranks):
    if what == "no fence before a credit" and not races:
        pytest.skip("loads are never late here, so that no result is wrong")
    code = device_code(("transfer", *TRANSFER_BROKEN[what]))
    breaks(messages(code), ranks, races=races)


@each(EPOCH_BROKEN)
def test_an_epoch_changed_too_early_is_found(algorithm, edits, ranks):
    breaks(all_reduces(device_code(*edits), algorithm), ranks)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", BARRIER_BROKEN)
def test_the_barrier_on_a_stream_broken_is_found(what, races, ranks):
    code = device_code(*BARRIER_BROKEN[what])
    breaks(plain_stores_between_barriers(code), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", IN_KERNEL_BROKEN)
def test_the_barrier_in_a_kernel_broken_is_found(what, races, ranks):
    code = device_code(*(("signals", *edit) for edit in IN_KERNEL_BROKEN[what]))
    breaks(exchanges_between_barriers(code), ranks, races=races)


@worlds
@by_anything_and_by_result
@pytest.mark.parametrize("what", SIGNALS_BROKEN)
def test_signals_broken_are_found(what, races, ranks):
    code = device_code(*(("signals", *edit) for edit in SIGNALS_BROKEN[what]))
    breaks(words_by_signals(code), ranks, races=races)
