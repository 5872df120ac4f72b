"""Mutants of host code, chosen by hand, where a mistake is likely."""

from tests.mutants.mutant import Mutant

NEAREST = {
    "streams": (
        "tests/host/test_stream_order.py",
        "tests/host/test_guarded_order.py",
        "tests/host/test_watchdog.py",
        "tests/host/test_entry.py",
    ),
    "enqueueing": (
        "tests/host/test_calls.py",
        "tests/host/test_stream_order.py",
        "tests/host/test_guarded_order.py",
        "tests/host/test_record.py",
    ),
    "record": ("tests/host/test_record.py", "tests/host/test_entry.py"),
    "heap": (
        "tests/host/test_heap.py",
        "tests/simulated/test_symmetric_bytes.py",
        "tests/ranks/memory/test_memory.py",
        "tests/ranks/memory/test_blocks.py",
        "tests/ranks/mpi/test_mpi_shortcuts.py",
    ),
    "trees": (
        "tests/host/test_trees.py",
        "tests/host/test_store.py",
    ),
    "staging": (
        "tests/host/test_guarded_order.py",
        "tests/host/test_calls.py",
        "tests/host/test_staging.py",
        "tests/ranks/test_random_calls.py",
    ),
    "sends": (
        "tests/host/test_mpi_limit.py",
        "tests/host/test_guarded_order.py",
        "tests/ranks/mpi/test_mpi_flow.py",
        "tests/ranks/mpi/test_mpi_memory.py",
        "tests/ranks/mpi/test_mpi_failures.py",
        "tests/ranks/mpi/test_mpi_messages.py",
    ),
    "buffers": (
        "tests/host/test_mpi_buffers.py",
        "tests/ranks/mpi/test_mpi_collectives.py",
    ),
    "win": (
        "tests/host/test_window_locks.py",
        "tests/ranks/mpi/test_mpi_win.py",
    ),
    "board": (
        "tests/host/test_board.py",
        "tests/host/test_board_races.py",
        "tests/host/test_waits.py",
    ),
    "tagged": ("tests/host/test_tagged.py",),
    "moves": ("tests/host/test_island_schedules.py",),
    "rails": ("tests/host/test_island_schedules.py",),
}
"""Tests by the first word of a name."""

_MUTANTS = [
    Mutant(
        "streams.no_wait",
        "numba_symm/gpu/entry.py",
        'self.driver("cuStreamWaitEvent", stream, event, _I64(0))',
        "pass",
    ),
    Mutant(
        "streams.capture_no_wait",
        "numba_symm/gpu/streams.py",
        "if self.place is not None and place != self.place:",
        "if False:",
    ),
    Mutant(
        "streams.follow_wrong_stream",
        "numba_symm/gpu/streams.py",
        ('driver.call("cuStreamWaitEvent", self.stream, self._events[event], 0)'),
        ('driver.call("cuStreamWaitEvent", stream, self._events[event], 0)'),
    ),
    Mutant(
        "streams.fill_high_half",
        "numba_symm/gpu/streams.py",
        "self.number >> 32 * n & 0xFFFFFFFF",
        "self.number & 0xFFFFFFFF",
    ),
    Mutant(
        "streams.spoil_no_query",
        "numba_symm/gpu/streams.py",
        (
            '    driver.function("cuStreamQuery")(stream)  # a query '
            "invalidates a capture\n"
        ),
        "",
    ),
    Mutant(
        "streams.leave_no_record",
        "numba_symm/gpu/entry.py",
        'self.driver("cuEventRecord", self.of_gate("event"), stream)',
        "pass",
    ),
    Mutant(
        "streams.eager_no_record",
        "numba_symm/gpu/streams.py",
        "self._eager.end(stream)",
        "pass",
    ),
    Mutant(
        "enqueueing.capture_not_recorded",
        "collectives/enqueueing.py",
        "self.record.note_captured(call.about, stream)",
        "pass",
    ),
    Mutant(
        "enqueueing.step_left_out",
        "collectives/enqueueing.py",
        "status = self.enqueue(stream, entry.FIRST + step + 1)",
        "status = self.enqueue(stream, entry.FIRST + step + 2)",
    ),
    Mutant(
        "record.chain_of_one_call",
        "numba_symm/gpu/entry.py",
        "b.add(b.mul(e.load(book, Book.chain.offset), _I64(31)), digest)",
        "digest",
    ),
    Mutant(
        "record.number_once",
        "numba_symm/gpu/entry.py",
        "number = b.add(e.load(book, at), _I64(1))",
        "number = e.load(book, at)",
    ),
    Mutant(
        "heap.remove_keeps_places",
        "numba_symm/memory/allocator.py",
        "self._forget_places()  # other memory may be mapped there next",
        "pass",
    ),
    Mutant(
        "heap.around_off_by_one",
        "numba_symm/memory/allocator.py",
        ("if address - entry.block.address >= max(entry.block.nbytes, 1):"),
        "if address - entry.block.address > max(entry.block.nbytes, 1):",
    ),
    Mutant(
        "heap.place_off_by_one",
        "numba_symm/memory/allocator.py",
        "inside = offset + nbytes <= entry.block.nbytes\n",
        "inside = offset + nbytes <= entry.block.nbytes + 1\n",
    ),
    Mutant(
        "heap.pads_not_returned",
        "numba_symm/memory/allocator.py",
        (
            "self._free_pads += [entry.pad for entry in entries if "
            "entry.pad is not None]"
        ),
        "pass",
    ),
    Mutant(
        "heap.pad_not_zeroed",
        "numba_symm/memory/allocator.py",
        "self.island.backend.fill(own, nbytes)",
        "pass",
    ),
    Mutant(
        "heap.misses_ignored",
        "numba_symm/memory/allocator.py",
        "if self._misses.meet(block.address, block.allocation.nbytes):",
        "if False:",
    ),
    Mutant(
        "heap.alloc_failure_not_released",
        "numba_symm/memory/allocator.py",
        (
            "if frees or exchange.is_everybodys(error):\n"
            "                        self.allocator.release(block)"
        ),
        ("if frees:\n                        self.allocator.release(block)"),
    ),
    Mutant(
        "heap.count_not_set",
        "numba_symm/memory/allocator.py",
        "self._count = first + _MAPPED",
        "pass",
    ),
    Mutant(
        "trees.too_many_children",
        "launch/waiting.py",
        "while rank + distance < size and not rank & distance:",
        "while rank + distance < size:",
    ),
    Mutant(
        "trees.not_compressed",
        "launch/waiting.py",
        "return zlib.compress(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))",
        "return zlib.compress(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), 0)",
    ),
    Mutant(
        "staging.line",
        "collectives/staging.py",
        "self.used += -(-nbytes // _LINE) * _LINE",
        "self.used += nbytes",
    ),
    Mutant(
        "staging.room_off_by_one",
        "collectives/staging.py",
        "self.used + nbytes > whole:",
        "self.used + nbytes > whole + 1:",
    ),
    Mutant(
        "staging.out_not_packed",
        "collectives/staging.py",
        (
            "            self.out = found.array\n"
            "            self.before.append(found.pack)\n"
        ),
        "            self.out = found.array\n",
    ),
    Mutant(
        "staging.extent_item",
        "collectives/staging.py",
        ("nbytes = sum(map(abs, steps)) + dtype.itemsize * (0 not in shape)"),
        "nbytes = sum(map(abs, steps))",
    ),
    Mutant(
        "staging.capture_allowed",
        "collectives/staging.py",
        "if not SIMULATED and streams.is_capturing(stream):",
        "if False:",
    ),
    Mutant(
        "sends.failed_no_word",
        "numba_symm/mpi/rooms.py",
        "e.store(_I64(NOWHERE), line, 8 * BLOCK)",
        "pass",
    ),
    Mutant(
        "sends.not_counted",
        "numba_symm/mpi/rooms.py",
        "e.count(unread, nbytes)",
        "pass",
    ),
    Mutant(
        "buffers.high",
        "numba_symm/mpi/buffers.py",
        "high = found.first + layout.high + max(0, reach)",
        "high = found.first + layout.high",
    ),
    Mutant(
        "buffers.low",
        "numba_symm/mpi/buffers.py",
        "low = found.first + layout.low + min(0, reach)",
        "low = found.first + layout.low",
    ),
    Mutant(
        "buffers.uneven",
        "numba_symm/mpi/buffers.py",
        "(number % blocks > block)",
        "(number % blocks >= block)",
    ),
    Mutant(
        "buffers.displ_bound",
        "numba_symm/mpi/buffers.py",
        "if first > length:",
        "if first >= length:",
    ),
    Mutant(
        "win.rank_bound",
        "numba_symm/mpi/win.py",
        "if not 0 <= rank < len(self._memory):",
        "if not 0 <= rank <= len(self._memory):",
    ),
    Mutant(
        "win.bytes_unchecked",
        "numba_symm/mpi/win.py",
        "if found.nbytes != origin.nbytes:",
        "if False:",
    ),
    Mutant(
        "win.atomic_no_settle",
        "numba_symm/mpi/win.py",
        (
            "                yield\n"
            "            finally:\n"
            "                self._settle()\n"
        ),
        ("                yield\n            finally:\n                pass\n"),
    ),
    Mutant(
        "win.free_keeps_maps",
        "numba_symm/mpi/win.py",
        ("                self._memory[rank] = None\n                memory.close()\n"),
        "                self._memory[rank] = None\n",
    ),
    Mutant(
        "board.gate_ignores_record",
        "launch/board.py",
        ("if self._reached(arrived, wait) and not self._records[self._rank]:"),
        "if self._reached(arrived, wait):",
    ),
    Mutant("board.turn", "launch/board.py", "self._turn ^= 1", "pass"),
    Mutant(
        "board.closed_ignored",
        "launch/board.py",
        (
            "            and not memory.closed[rank]  # a rank stores it "
            "before it drops its lock\n"
        ),
        "",
    ),
    Mutant(
        "board.reports_raced",
        "launch/board.py",
        "if not self.alive.runs(rank) and rank in self._absent(step):",
        "if not self.alive.runs(rank):",
    ),
    Mutant(
        "board.abandon_late",
        "launch/board.py",
        ("self.abandon(error, wait.what)  # before the others see the vote"),
        "pass",
    ),
    Mutant(
        "board.load_after_failure",
        "launch/board.py",
        (
            "if self._memory is not None and not "
            "self._records[self._rank]:\n"
            "            mine = self._memory.notes"
        ),
        ("if self._memory is not None:\n            mine = self._memory.notes"),
    ),
    Mutant(
        "tagged.retired_reused",
        "launch/ranks.py",
        ("return self._retired | sum(1 << number for number in self._uses)"),
        "return sum(1 << number for number in self._uses)",
    ),
    Mutant(
        "tagged.most",
        "launch/ranks.py",
        "(highest + 1) // TAGS - 1",
        "(highest + 1) // TAGS",
    ),
    Mutant(
        "tagged.holder",
        "launch/ranks.py",
        "self._holder = by if by == min(self._deciding) else None",
        "self._holder = by",
    ),
    Mutant(
        "moves.chain_last_sends",
        "collectives/islands/moves.py",
        "if place < m - 1 else []",
        "",
    ),
    Mutant(
        "moves.chained",
        "collectives/islands/moves.py",
        "return chunks > 1 and chunks + m - 2 < ticks + (site.largest > 1)",
        "return chunks > 1 and chunks + m - 2 <= ticks + (site.largest > 1)",
        equivalent=("both ways take about equally long then"),
    ),
    Mutant(
        "rails.sent_of_the_last_group",
        "collectives/islands/rails.py",
        "max(0, rest - distance)",
        "0",
    ),
]

MUTANTS = [
    mutant._replace(tests=NEAREST[mutant.name.partition(".")[0]]) for mutant in _MUTANTS
]
