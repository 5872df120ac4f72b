"""Mutants of device code, which the explorer should notice."""

from tests.mutants.mutant import Mutant

NEAREST = {
    "coded_sum": ("tests/explore/test_coding.py",),
    "expert_combine": (
        "tests/explore/test_expert_calls.py",
        "tests/explore/test_failures.py::test_calls_that_fail[experts-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[experts-3]",
    ),
    "expert_dispatch": (
        "tests/explore/test_expert_calls.py",
        "tests/explore/test_failures.py::test_calls_that_fail[experts-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[experts-3]",
    ),
    "mailed_combine": (
        "tests/explore/test_expert_calls.py",
        "tests/explore/test_failures.py::test_calls_that_fail[few_tokens-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[few_tokens-3]",
    ),
    "mailed_dispatch": (
        "tests/explore/test_expert_calls.py",
        "tests/explore/test_failures.py::test_calls_that_fail[few_tokens-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[few_tokens-3]",
    ),
    "few_tokens": (
        "tests/explore/test_expert_calls.py",
        "tests/explore/test_failures.py::test_calls_that_fail[few_tokens-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[few_tokens-3]",
    ),
    "mailed_epilogue": (
        "tests/explore/test_finishing.py",
        "tests/explore/test_failures.py::test_calls_that_fail[fused-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[fused-3]",
    ),
    "finishing": ("tests/explore/test_finishing.py",),
    "transfer": (
        "tests/explore/test_interleavings.py::test_messages_between_any_ranks",
        "tests/explore/test_interleavings.py::test_requests_between_any_ranks",
        "tests/explore/test_shapes.py::test_messages_through_four_channels",
        "tests/explore/test_shapes.py::test_counts_above_the_capacity_send_nothing_and_fail_on_all_ranks",
        "tests/explore/test_failures.py::test_calls_that_fail[messages-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[messages-3]",
        "tests/explore/test_failures.py::test_calls_that_fail[requests-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[requests-3]",
    ),
    "credit": (
        "tests/explore/test_interleavings.py::test_messages_between_any_ranks",
        "tests/explore/test_interleavings.py::test_requests_between_any_ranks",
        "tests/explore/test_shapes.py::test_a_message_too_long_changes_nothing_and_fails_on_all_ranks",
        "tests/explore/test_shapes.py::test_counts_above_the_capacity_send_nothing_and_fail_on_all_ranks",
        "tests/explore/test_shapes.py::test_messages_through_four_channels",
        "tests/explore/test_shapes.py::test_a_sender_fills_all_slots_without_its_receiver",
        "tests/explore/test_mismatches.py::test_calls_that_differ",
    ),
    "handshake": (
        "tests/explore/test_interleavings.py::test_calls_on_the_ranks_own_arrays",
        "tests/explore/test_copies.py",
        "tests/explore/test_failures.py::test_calls_that_fail[own_arrays-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[own_arrays-3]",
    ),
    "mailboxes": (
        "tests/explore/test_interleavings.py::test_calls_of_one_algorithm",
        "tests/explore/test_interleavings.py::test_calls_as_the_epochs_wrap_around",
        "tests/explore/test_interleavings.py::test_calls_in_which_few_threads_exchange",
    ),
    "workspace": (
        "tests/explore/test_interleavings.py::test_calls_of_one_algorithm",
        "tests/explore/test_launches.py",
        "tests/explore/test_interleavings.py::test_exchanges",
    ),
    "flags": (
        "tests/explore/test_interleavings.py::test_calls_on_shared_slots",
        "tests/explore/test_interleavings.py::test_exchanges",
    ),
    "slots": (
        "tests/explore/test_interleavings.py::test_calls_on_shared_slots",
        "tests/explore/test_interleavings.py::test_exchanges",
        "tests/explore/test_interleavings.py::test_broadcasts",
    ),
    "barriers": (
        "tests/explore/test_barriers.py",
        "tests/explore/test_failures.py::test_calls_that_fail[grids-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[grids-3]",
    ),
    "block_exchange": (
        "tests/explore/test_block_collectives.py",
        "tests/explore/test_failures.py::test_calls_that_fail[collectives_of_blocks-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[collectives_of_blocks-3]",
        "tests/explore/test_failures.py::test_every_rank_ends_when_one_is_absent[collectives_of_blocks-2]",
        "tests/explore/test_failures.py::test_every_rank_ends_when_one_is_absent[collectives_of_blocks-3]",
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
        "tests/explore/test_failures.py::test_calls_that_fail[packets-2]",
        "tests/explore/test_failures.py::test_calls_that_fail[packets-3]",
    ),
    "puts": (
        "tests/explore/test_device_copies.py",
        "tests/simulated/test_copied_rows.py",
    ),
}
"""Tests by the first word of a name."""

_MUTANTS = [
    Mutant(
        "coded_sum.1",
        "collectives/kernels/coded_sum.py",
        "at = min(group, number - 1)",
        "at = group",
    ),
    Mutant(
        "coded_sum.2",
        "collectives/kernels/coded_sum.py",
        "number *= intrinsics.ld_u64(counts + 8 * r)",
        "number *= intrinsics.ld_u64(counts)",
    ),
    Mutant(
        "expert_combine.1",
        "collectives/kernels/expert_combine.py",
        (
            "if sync_block_or(workspace.load_failure(own, block) != 0):\n"
            "            return"
        ),
        "pass",
    ),
    Mutant(
        "expert_combine.2",
        "collectives/kernels/expert_combine.py",
        "while token < tokens and not failed:",
        "while token < tokens:",
    ),
    Mutant(
        "expert_dispatch.1",
        "collectives/kernels/expert_dispatch.py",
        "if block == grid - 1 and not failed:",
        "if block == 0 and not failed:",
    ),
    Mutant(
        "expert_dispatch.2",
        "collectives/kernels/expert_dispatch.py",
        "st_u64(targets[r] + 8 * guard.rank, word_of(base[r]))",
        "st_u64(targets[r] + 8 * r, word_of(base[r]))",
    ),
    Mutant(
        "expert_dispatch.3",
        "collectives/kernels/expert_dispatch.py",
        (
            "if thread % LANES == 0:\n"
            "            for r in range(size):\n"
            "                place"
        ),
        ("if True:\n            for r in range(size):\n                place"),
    ),
    Mutant(
        "mailed_combine.1",
        "collectives/kernels/mailed_combine.py",
        "failed = between_epochs(failed)",
        "pass",
    ),
    Mutant(
        "mailed_combine.2",
        "collectives/kernels/mailed_combine.py",
        "low[k + 1], high[k + 1] = 0, 0",
        "pass",
    ),
    Mutant(
        "mailed_combine.3",
        "collectives/kernels/mailed_combine.py",
        ("if first + i < share.tiles:\n                    for k"),
        ("if True:\n                    for k"),
    ),
    Mutant(
        "mailed_combine.4",
        "collectives/kernels/mailed_combine.py",
        "failed = found != 0",
        "failed = False",
    ),
    Mutant(
        "mailed_dispatch.1",
        "collectives/kernels/mailed_dispatch.py",
        "failed = between_epochs(failed)",
        "pass",
    ),
    Mutant(
        "mailed_dispatch.2",
        "collectives/kernels/mailed_dispatch.py",
        "failed = wrong or found != 0",
        "failed = wrong",
    ),
    Mutant(
        "mailed_dispatch.3",
        "collectives/kernels/mailed_dispatch.py",
        "tag |= word_of(counts[k]) + 1 << COUNT",
        "tag |= word_of(counts[k]) << COUNT",
    ),
    Mutant(
        "mailed_dispatch.4",
        "collectives/kernels/mailed_dispatch.py",
        "first = number + tile - 1 + block + thread_index_x() == 0",
        "first = number + tile - 1 + block == 0",
    ),
    Mutant(
        "mailed_dispatch.5",
        "collectives/kernels/mailed_dispatch.py",
        ("if vector == 0:\n                    st_u32(here + room.sources"),
        ("if vector == 1:\n                    st_u32(here + room.sources"),
    ),
    Mutant(
        "mailed_dispatch.6",
        "collectives/kernels/mailed_dispatch.py",
        "st_u64(here + 8 * source, (tag >> COUNT) - 1)",
        "st_u64(here + 8 * source, 0)",
    ),
    Mutant(
        "mailed_epilogue.1",
        "collectives/kernels/mailed_epilogue.py",
        "failed = between_epochs(failed)",
        "pass",
    ),
    Mutant(
        "mailed_epilogue.2",
        "collectives/kernels/mailed_epilogue.py",
        "wipe(own, block, epoch, thread)",
        "pass",
    ),
    Mutant(
        "mailed_epilogue.3",
        "collectives/kernels/mailed_epilogue.py",
        "pair = sent(pair[0], pair[1])",
        "pass",
    ),
    Mutant(
        "mailed_epilogue.4",
        "collectives/kernels/mailed_epilogue.py",
        ("mine = array + guard.rank * shard_bytes if sends_shards else array"),
        "mine = array",
    ),
    Mutant(
        "mailed_epilogue.5",
        "collectives/kernels/mailed_epilogue.py",
        "failed, piece = mark != 0, block",
        "failed, piece = False, block",
    ),
    Mutant(
        "transfer.1",
        "collectives/kernels/transfer.py",
        "last = 1 if nbytes == 0 else vectors",
        "last = vectors",
    ),
    Mutant(
        "transfer.2",
        "collectives/kernels/transfer.py",
        "first += across * tiles",
        "first += across * tiles + THREADS",
    ),
    Mutant(
        "transfer.3",
        "collectives/kernels/transfer.py",
        "failed = stopped = nbytes == credit.ABSENT",
        "failed = nbytes == credit.ABSENT",
        equivalent=(
            "a block that has failed stops before its "
            "next chunk, and has none of this message"
        ),
    ),
    Mutant(
        "transfer.4",
        "collectives/kernels/transfer.py",
        "most, few = max(each.nbytes",
        "most, few = min(each.nbytes",
    ),
    Mutant(
        "credit.1",
        "collectives/protocols/credit.py",
        "due = (epoch - DEPTH) & LOW_HALF",
        "due = (epoch - DEPTH - 1) & LOW_HALF",
    ),
    Mutant(
        "credit.2",
        "collectives/protocols/credit.py",
        "due = (epoch - DEPTH) & LOW_HALF",
        "due = (epoch - DEPTH + 1) & LOW_HALF",
    ),
    Mutant(
        "credit.3",
        "collectives/protocols/credit.py",
        "fits = fits and 0 <= first <= limit - count",
        "fits = fits and 0 <= first <= limit",
    ),
    Mutant(
        "credit.4",
        "collectives/protocols/credit.py",
        "fits, other, number = False, peer - i - 1, earlier",
        "pass",
    ),
    Mutant(
        "credit.5",
        "collectives/protocols/credit.py",
        "st_relaxed_sys_u64(lengths + 8 * most * channel, nbytes + 1)",
        "st_relaxed_sys_u64(lengths + 8 * most * channel, nbytes + 2)",
    ),
    Mutant(
        "credit.6",
        "collectives/protocols/credit.py",
        "return nbytes > room or not whole",
        "return nbytes > room + 8 or not whole",
    ),
    Mutant(
        "few_tokens.1",
        "collectives/protocols/few_tokens.py",
        "missing = word_of((marks == UNMARKED) | (",
        "missing = word_of((",
    ),
    Mutant(
        "few_tokens.2",
        "collectives/protocols/few_tokens.py",
        "ones_of(word & (1 << lane) - 1)",
        "ones_of(word & (2 << lane) - 1)",
    ),
    Mutant(
        "few_tokens.3",
        "collectives/protocols/few_tokens.py",
        "if word_of(counts[k]) > capacity:",
        "if word_of(counts[k]) >= capacity:",
    ),
    Mutant(
        "few_tokens.4",
        "collectives/protocols/few_tokens.py",
        "if vector == 0 and token < share.tokens:",
        "if vector == 0:",
    ),
    Mutant(
        "few_tokens.5",
        "collectives/protocols/few_tokens.py",
        ("if token < share.tokens:\n        place"),
        ("if True:\n        place"),
    ),
    Mutant(
        "few_tokens.6",
        "collectives/protocols/few_tokens.py",
        (
            "            if low == EMPTY:\n"
            "                low = 0\n"
            "                marks |= 1\n"
        ),
        "",
    ),
    Mutant(
        "few_tokens.7",
        "collectives/protocols/few_tokens.py",
        ("    if marks & 2 != 0:\n        second = EMPTY\n"),
        "",
    ),
    Mutant(
        "few_tokens.8",
        "collectives/protocols/few_tokens.py",
        ("low = 0\n                marks |= 1"),
        ("low = 0\n                marks |= 2"),
    ),
    Mutant(
        "few_tokens.9",
        "collectives/protocols/few_tokens.py",
        ("if tag & PLACE != 0:\n            if low"),
        ("if True:\n            if low"),
    ),
    Mutant(
        "few_tokens.10",
        "collectives/protocols/few_tokens.py",
        "number = row * THREADS + thread_index_x() & LOW",
        "number = row * THREADS + thread_index_x() + 1 & LOW",
    ),
    Mutant(
        "finishing.1",
        "collectives/protocols/finishing.py",
        "partials + (2 * block + parity) * room",
        "partials + (block + parity) * room",
    ),
    Mutant(
        "flags.1",
        "collectives/protocols/flags.py",
        "st_relaxed_sys_u32(ring[k] + flags + 4 * rank, epoch)",
        "st_relaxed_sys_u32(ring[k] + flags + 4 * rank, epoch + 1)",
    ),
    Mutant(
        "handshake.1",
        "collectives/protocols/handshake.py",
        "if failed or first[0] == REFUSED:",
        "if failed:",
    ),
    Mutant(
        "handshake.2",
        "collectives/protocols/handshake.py",
        "ld_acquire_sys_u64(mail)",
        "ld_relaxed_sys_u64(mail)",
    ),
    Mutant(
        "handshake.3",
        "collectives/protocols/handshake.py",
        ("if not found:\n            # explore: wait"),
        ("if found:\n            # explore: wait"),
    ),
    Mutant(
        "mailboxes.1",
        "collectives/protocols/mailboxes.py",
        "set_stride = others * rank_stride",
        "set_stride = rank_stride",
    ),
    Mutant(
        "mailboxes.2",
        "collectives/protocols/mailboxes.py",
        "for index in range(sets * others * count)",
        "for index in range(sets * count)",
    ),
    Mutant(
        "mailboxes.3",
        "collectives/protocols/mailboxes.py",
        "return 1 if epoch >= last_epoch else epoch + 1",
        "return 0 if epoch >= last_epoch else epoch + 1",
    ),
    Mutant(
        "slots.1",
        "collectives/protocols/slots.py",
        "more = (signalled + 1 + (last >> 1)) & 1",
        "more = 0",
    ),
    Mutant(
        "slots.2",
        "collectives/protocols/slots.py",
        "(4 * block + 2 * half + (chunk & 1))",
        "(4 * block + 2 * half)",
    ),
    Mutant(
        "workspace.1",
        "collectives/protocols/workspace.py",
        "st_u32(own + epochs + 4 * block, epoch)",
        "st_u32(own + epochs + 4 * block, epoch + 1)",
    ),
    Mutant(
        "workspace.2",
        "collectives/protocols/workspace.py",
        "griddepcontrol_wait()  # explore: previous",
        "pass  # explore: previous",
    ),
    Mutant(
        "barriers.1",
        "numba_symm/device/barriers.py",
        "return before if sent else -1",
        "return before",
    ),
    Mutant(
        "barriers.2",
        "numba_symm/device/barriers.py",
        "st_release_sys_u64(generation, token + 1)",
        "st_release_sys_u64(generation, 1)",
    ),
    Mutant(
        "barriers.3",
        "numba_symm/device/barriers.py",
        (
            "before = ld_relaxed_sys_u64(words + 8)\n"
            "        last = atom_add_release_sys_u64(words, 1) == "
            "grid_size() - 1"
        ),
        (
            "last = atom_add_release_sys_u64(words, 1) == grid_size() - 1\n"
            "        before = ld_relaxed_sys_u64(words + 8)"
        ),
    ),
    Mutant(
        "block_exchange.1",
        "numba_symm/device/block_exchange.py",
        "st_relaxed_sys_u32(own + MARK * thread, 1)",
        "pass",
    ),
    Mutant(
        "block_exchange.2",
        "numba_symm/device/block_exchange.py",
        " or epoch == FAILED",
        "",
    ),
    Mutant(
        "block_exchange.3",
        "numba_symm/device/block_exchange.py",
        "return epoch > LAST_EPOCH - ws.depth or epoch <= ws.depth",
        "return epoch > LAST_EPOCH - ws.depth",
    ),
    Mutant(
        "block_exchange.4",
        "numba_symm/device/block_exchange.py",
        "return epoch > LAST_EPOCH - ws.depth or epoch <= ws.depth",
        "return epoch <= ws.depth",
    ),
    Mutant(
        "block_exchange.5",
        "numba_symm/device/block_exchange.py",
        "range((size - 1) * (ws.vectors + tells(ws, 0)))",
        "range(size - 1)",
    ),
    Mutant(
        "block_exchange.6",
        "numba_symm/device/block_exchange.py",
        "ws.ring[k] + box + mirror(k) * rank_stride(ws)",
        "ws.ring[k] + box + k * rank_stride(ws)",
    ),
    Mutant(
        "block_exchange.7",
        "numba_symm/device/block_exchange.py",
        "start = ws.rank * count if sends_shards else 0",
        "start = 0",
    ),
    Mutant(
        "block_exchange.8",
        "numba_symm/device/block_exchange.py",
        "at = ws.ring[size - 1] + box + i",
        "at = ws.ring[0] + box + i",
    ),
    Mutant(
        "block_exchange.9",
        "numba_symm/device/block_exchange.py",
        "while at < count and not failed:",
        "while at < count:",
    ),
    Mutant(
        "block_exchange.10",
        "numba_symm/device/block_exchange.py",
        (
            "                at += stride\n"
            "                box += tile_stride(ws)\n"
            "            if not failed"
        ),
        (
            "                at += stride\n"
            "                box += 0\n"
            "            if not failed"
        ),
    ),
    Mutant(
        "block_workspace.1",
        "numba_symm/device/block_exchange.py",
        "(epoch & (2 * ws.depth - 1)) * (ws.size - 1) * rank_stride(ws)",
        "(epoch & (2 * ws.depth - 1)) * rank_stride(ws)",
    ),
    Mutant(
        "block_workspace.2",
        "numba_symm/device/block_exchange.py",
        "MARK * ws.blocks + EPOCHS * (ws.threads * block + thread)",
        "MARK * ws.blocks + EPOCHS * (ws.threads * thread + block)",
    ),
    Mutant(
        "block_workspace.3",
        "numba_symm/device/block_exchange.py",
        "boxes = MARK * ws.blocks + EPOCHS * ws.threads * ws.blocks",
        "boxes = MARK * ws.blocks",
    ),
    Mutant(
        "counting.1",
        "numba_symm/device/signals.py",
        ("word = ld_acquire_sys_u64(address)\n    else"),
        ("word = ld_relaxed_sys_u64(address)\n    else"),
    ),
    Mutant(
        "digests.1",
        "numba_symm/device/groups.py",
        "mixed = word ^ word_of(",
        "mixed = word + word_of(",
    ),
    Mutant(
        "packet_puts.1",
        "numba_symm/device/packets.py",
        ("_wipe(mailbox, k, epoch, lanes)\n    return arrived"),
        ("_wipe(mailbox, k, epoch, lanes)\n    return True"),
    ),
    Mutant(
        "packet_puts.2",
        "numba_symm/device/packets.py",
        "0 < ((found - number) & 0xFFFFFFFF) < 0x80000000",
        "found > number",
    ),
    Mutant("packet_puts.3", "numba_symm/device/packets.py", "found != 0 and ", ""),
    Mutant(
        "puts.1",
        "numba_symm/device/puts.py",
        "head += _VECTOR if head < skipped else 0",
        "head += _VECTOR if head <= skipped else 0",
    ),
    Mutant(
        "puts.2",
        "numba_symm/device/puts.py",
        ("vectors = max(0, (nbytes - head - loaded + _VECTOR) // _VECTOR)"),
        "vectors = max(0, (nbytes - head - loaded) // _VECTOR)",
    ),
]

MUTANTS = [
    mutant._replace(tests=NEAREST[mutant.name.partition(".")[0]]) for mutant in _MUTANTS
]
