"""Mutants of device code, which the explorer should notice."""

from tests.mutants.mutant import Mutant

ALL = "tests/explore/test_interleavings.py::"
LARGER = "tests/explore/test_shapes.py::"


def failing(name: str, test: str = "calls_that_fail") -> tuple[str, ...]:
    """Return the tests of calls of one kind that fail, on 2 and on 3 ranks."""
    file = "tests/explore/test_failures.py"
    return tuple(f"{file}::test_{test}[{name}-{ranks}]" for ranks in (2, 3))


_EXPERTS = ("tests/explore/test_expert_calls.py", *failing("experts"))
_FEW_TOKENS = ("tests/explore/test_expert_calls.py", *failing("few_tokens"))
NEAREST = {
    "coded_sum": ("tests/explore/test_coding.py",),
    "expert_combine": _EXPERTS,
    "expert_dispatch": _EXPERTS,
    "mailed_combine": _FEW_TOKENS,
    "mailed_dispatch": _FEW_TOKENS,
    "few_tokens": _FEW_TOKENS,
    "mailed_epilogue": ("tests/explore/test_finishing.py", *failing("fused")),
    "finishing": ("tests/explore/test_finishing.py",),
    "transfer": (
        f"{ALL}test_messages_between_any_ranks",
        f"{ALL}test_requests_between_any_ranks",
        f"{LARGER}test_messages_through_four_channels",
        f"{LARGER}test_counts_above_the_capacity_send_nothing_and_fail_on_all_ranks",
        *failing("messages"),
        *failing("requests"),
    ),
    "credit": (
        f"{ALL}test_messages_between_any_ranks",
        f"{ALL}test_requests_between_any_ranks",
        f"{LARGER}test_a_message_too_long_changes_nothing_and_fails_on_all_ranks",
        f"{LARGER}test_counts_above_the_capacity_send_nothing_and_fail_on_all_ranks",
        f"{LARGER}test_messages_through_four_channels",
        f"{LARGER}test_a_sender_fills_all_slots_without_its_receiver",
        "tests/explore/test_mismatches.py::test_calls_that_differ",
    ),
    "handshake": (
        f"{ALL}test_calls_on_the_ranks_own_arrays",
        "tests/explore/test_copies.py",
        *failing("own_arrays"),
    ),
    "mailboxes": (
        f"{ALL}test_calls_of_one_algorithm",
        f"{ALL}test_calls_as_the_epochs_wrap_around",
        f"{ALL}test_calls_in_which_few_threads_exchange",
    ),
    "workspace": (
        f"{ALL}test_calls_of_one_algorithm",
        "tests/explore/test_launches.py",
        f"{ALL}test_exchanges",
    ),
    "flags": (f"{ALL}test_calls_on_shared_slots", f"{ALL}test_exchanges"),
    "slots": (
        f"{ALL}test_calls_on_shared_slots",
        f"{ALL}test_exchanges",
        f"{ALL}test_broadcasts",
    ),
    "barriers": ("tests/explore/test_barriers.py", *failing("grids")),
    "block_exchange": (
        "tests/explore/test_block_collectives.py",
        *failing("collectives_of_blocks"),
        *failing("collectives_of_blocks", "every_rank_ends_when_one_is_absent"),
    ),
    "block_workspace": ("tests/explore/test_block_collectives.py",),
    "counting": ("tests/explore/test_counting.py",),
    "digests": (
        "tests/explore/test_every_kernel.py::test_every_kernel_is_explored",
        "tests/explore/test_mismatches.py::test_calls_that_differ",
    ),
    "packet_puts": (
        "tests/explore/test_device_copies.py",
        "tests/simulated/test_copied_rows.py",
        *failing("packets"),
    ),
    "puts": (
        "tests/explore/test_device_copies.py",
        "tests/simulated/test_copied_rows.py",
    ),
}
"""Tests by the first word of a name."""

FILES = {
    "coded_sum": "collectives/kernels/coded_sum.py",
    "expert_combine": "collectives/kernels/expert_combine.py",
    "expert_dispatch": "collectives/kernels/expert_dispatch.py",
    "mailed_combine": "collectives/kernels/mailed_combine.py",
    "mailed_dispatch": "collectives/kernels/mailed_dispatch.py",
    "mailed_epilogue": "collectives/kernels/mailed_epilogue.py",
    "transfer": "collectives/kernels/transfer.py",
    "credit": "collectives/protocols/credit.py",
    "few_tokens": "collectives/protocols/few_tokens.py",
    "finishing": "collectives/protocols/finishing.py",
    "flags": "collectives/protocols/flags.py",
    "handshake": "collectives/protocols/handshake.py",
    "mailboxes": "collectives/protocols/mailboxes.py",
    "slots": "collectives/protocols/slots.py",
    "workspace": "collectives/protocols/workspace.py",
    "barriers": "numba_symm/device/barriers.py",
    "block_exchange": "numba_symm/device/block_exchange.py",
    "block_workspace": "numba_symm/device/block_exchange.py",
    "counting": "numba_symm/device/signals.py",
    "digests": "numba_symm/device/groups.py",
    "packet_puts": "numba_symm/device/packets.py",
    "puts": "numba_symm/device/puts.py",
}
"""What they change, by the first word."""

CHANGES = {
    "coded_sum": [
        ("at = min(group, number - 1)", "at = group"),
        (
            "number *= intrinsics.ld_u64(counts + 8 * r)",
            "number *= intrinsics.ld_u64(counts)",
        ),
    ],
    "expert_combine": [
        (
            "if sync_block_or(workspace.load_failure(own, block) != 0):\n"
            "            return",
            "pass",
        ),
        ("while token < tokens and not failed:", "while token < tokens:"),
    ],
    "expert_dispatch": [
        ("if block == grid - 1 and not failed:", "if block == 0 and not failed:"),
        (
            "st_u64(targets[r] + 8 * guard.rank, word_of(base[r]))",
            "st_u64(targets[r] + 8 * r, word_of(base[r]))",
        ),
        (
            "if thread % LANES == 0:\n            for r in range(size):\n"
            "                place",
            "if True:\n            for r in range(size):\n                place",
        ),
    ],
    "mailed_combine": [
        ("failed = between_epochs(failed)", "pass"),
        ("low[k + 1], high[k + 1] = 0, 0", "pass"),
        (
            "if first + i < share.tiles:\n                    for k",
            "if True:\n                    for k",
        ),
        ("failed = found != 0", "failed = False"),
    ],
    "mailed_dispatch": [
        ("failed = between_epochs(failed)", "pass"),
        ("failed = wrong or found != 0", "failed = wrong"),
        (
            "tag |= word_of(counts[k]) + 1 << COUNT",
            "tag |= word_of(counts[k]) << COUNT",
        ),
        (
            "first = number + tile - 1 + block + thread_index_x() == 0",
            "first = number + tile - 1 + block == 0",
        ),
        (
            "if vector == 0:\n                    st_u32(here + room.sources",
            "if vector == 1:\n                    st_u32(here + room.sources",
        ),
        (
            "st_u64(here + 8 * source, (tag >> COUNT) - 1)",
            "st_u64(here + 8 * source, 0)",
        ),
    ],
    "mailed_epilogue": [
        ("failed = between_epochs(failed)", "pass"),
        ("wipe(own, block, epoch, thread)", "pass"),
        ("pair = sent(pair[0], pair[1])", "pass"),
        (
            "mine = array + guard.rank * shard_bytes if sends_shards else array",
            "mine = array",
        ),
        ("failed, piece = mark != 0, block", "failed, piece = False, block"),
    ],
    "transfer": [
        ("last = 1 if nbytes == 0 else vectors", "last = vectors"),
        ("first += across * tiles", "first += across * tiles + THREADS"),
        (
            "failed = stopped = nbytes == credit.ABSENT",
            "failed = nbytes == credit.ABSENT",
        ),
        ("most, few = max(each.nbytes", "most, few = min(each.nbytes"),
    ],
    "credit": [
        ("due = (epoch - DEPTH) & LOW_HALF", "due = (epoch - DEPTH - 1) & LOW_HALF"),
        ("due = (epoch - DEPTH) & LOW_HALF", "due = (epoch - DEPTH + 1) & LOW_HALF"),
        (
            "fits = fits and 0 <= first <= limit - count",
            "fits = fits and 0 <= first <= limit",
        ),
        ("fits, other, number = False, peer - i - 1, earlier", "pass"),
        (
            "st_relaxed_sys_u64(lengths + 8 * most * channel, nbytes + 1)",
            "st_relaxed_sys_u64(lengths + 8 * most * channel, nbytes + 2)",
        ),
        ("return nbytes > room or not whole", "return nbytes > room + 8 or not whole"),
    ],
    "few_tokens": [
        ("missing = word_of((marks == UNMARKED) | (", "missing = word_of(("),
        ("ones_of(word & (1 << lane) - 1)", "ones_of(word & (2 << lane) - 1)"),
        ("if word_of(counts[k]) > capacity:", "if word_of(counts[k]) >= capacity:"),
        ("if vector == 0 and token < share.tokens:", "if vector == 0:"),
        ("if token < share.tokens:\n        place", "if True:\n        place"),
        (
            "            if low == EMPTY:\n                low = 0\n"
            "                marks |= 1\n",
            "",
        ),
        ("    if marks & 2 != 0:\n        second = EMPTY\n", ""),
        ("low = 0\n                marks |= 1", "low = 0\n                marks |= 2"),
        ("if tag & PLACE != 0:\n            if low", "if True:\n            if low"),
        (
            "number = row * THREADS + thread_index_x() & LOW",
            "number = row * THREADS + thread_index_x() + 1 & LOW",
        ),
    ],
    "finishing": [
        (
            "partials + (2 * block + parity) * room",
            "partials + (block + parity) * room",
        ),
    ],
    "flags": [
        (
            "st_relaxed_sys_u32(ring[k] + flags + 4 * rank, epoch)",
            "st_relaxed_sys_u32(ring[k] + flags + 4 * rank, epoch + 1)",
        ),
    ],
    "handshake": [
        ("if failed or first[0] == REFUSED:", "if failed:"),
        ("ld_acquire_sys_u64(mail)", "ld_relaxed_sys_u64(mail)"),
        (
            "if not found:\n            # explore: wait",
            "if found:\n            # explore: wait",
        ),
    ],
    "mailboxes": [
        ("set_stride = others * rank_stride", "set_stride = rank_stride"),
        (
            "for index in range(sets * others * count)",
            "for index in range(sets * count)",
        ),
        (
            "return 1 if epoch >= last_epoch else epoch + 1",
            "return 0 if epoch >= last_epoch else epoch + 1",
        ),
    ],
    "slots": [
        ("more = (signalled + 1 + (last >> 1)) & 1", "more = 0"),
        ("(4 * block + 2 * half + (chunk & 1))", "(4 * block + 2 * half)"),
    ],
    "workspace": [
        (
            "st_u32(own + epochs + 4 * block, epoch)",
            "st_u32(own + epochs + 4 * block, epoch + 1)",
        ),
        ("griddepcontrol_wait()  # explore: previous", "pass  # explore: previous"),
    ],
    "barriers": [
        ("return before if sent else -1", "return before"),
        (
            "st_release_sys_u64(generation, token + 1)",
            "st_release_sys_u64(generation, 1)",
        ),
        (
            "before = ld_relaxed_sys_u64(words + 8)\n"
            "        last = atom_add_release_sys_u64(words, 1) == grid_size() - 1",
            "last = atom_add_release_sys_u64(words, 1) == grid_size() - 1\n"
            "        before = ld_relaxed_sys_u64(words + 8)",
        ),
    ],
    "block_exchange": [
        ("st_relaxed_sys_u32(own + MARK * thread, 1)", "pass"),
        (" or epoch == FAILED", ""),
        (
            "return epoch > LAST_EPOCH - ws.depth or epoch <= ws.depth",
            "return epoch > LAST_EPOCH - ws.depth",
        ),
        (
            "return epoch > LAST_EPOCH - ws.depth or epoch <= ws.depth",
            "return epoch <= ws.depth",
        ),
        ("range((size - 1) * (ws.vectors + tells(ws, 0)))", "range(size - 1)"),
        (
            "ws.ring[k] + box + mirror(k) * rank_stride(ws)",
            "ws.ring[k] + box + k * rank_stride(ws)",
        ),
        ("start = ws.rank * count if sends_shards else 0", "start = 0"),
        ("at = ws.ring[size - 1] + box + i", "at = ws.ring[0] + box + i"),
        ("while at < count and not failed:", "while at < count:"),
        (
            "                at += stride\n                box += tile_stride(ws)\n"
            "            if not failed",
            "                at += stride\n                box += 0\n"
            "            if not failed",
        ),
    ],
    "block_workspace": [
        (
            "(epoch & (2 * ws.depth - 1)) * (ws.size - 1) * rank_stride(ws)",
            "(epoch & (2 * ws.depth - 1)) * rank_stride(ws)",
        ),
        (
            "MARK * ws.blocks + EPOCHS * (ws.threads * block + thread)",
            "MARK * ws.blocks + EPOCHS * (ws.threads * thread + block)",
        ),
        (
            "boxes = MARK * ws.blocks + EPOCHS * ws.threads * ws.blocks",
            "boxes = MARK * ws.blocks",
        ),
    ],
    "counting": [
        (
            "word = ld_acquire_sys_u64(address)\n    else",
            "word = ld_relaxed_sys_u64(address)\n    else",
        ),
    ],
    "digests": [
        ("mixed = word ^ word_of(", "mixed = word + word_of("),
    ],
    "packet_puts": [
        (
            "_wipe(mailbox, k, epoch, lanes)\n    return arrived",
            "_wipe(mailbox, k, epoch, lanes)\n    return True",
        ),
        ("0 < ((found - number) & 0xFFFFFFFF) < 0x80000000", "found > number"),
        ("found != 0 and ", ""),
    ],
    "puts": [
        (
            "head += _VECTOR if head < skipped else 0",
            "head += _VECTOR if head <= skipped else 0",
        ),
        (
            "vectors = max(0, (nbytes - head - loaded + _VECTOR) // _VECTOR)",
            "vectors = max(0, (nbytes - head - loaded) // _VECTOR)",
        ),
    ],
}
"""The texts before and after, numbered from 1 by the first word."""

EQUIVALENT = {
    "transfer.3": (
        "a block that has failed stops before its next chunk, "
        "and has none of this message"
    ),
}

MUTANTS = [
    Mutant(
        f"{word}.{number}",
        FILES[word],
        old,
        new,
        tests=NEAREST[word],
        equivalent=EQUIVALENT.get(f"{word}.{number}", ""),
    )
    for word, changes in CHANGES.items()
    for number, (old, new) in enumerate(changes, 1)
]
