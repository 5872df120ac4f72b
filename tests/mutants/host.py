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

CHANGES = {
    "numba_symm/gpu/entry.py": {
        "streams.no_wait": (
            'self.driver("cuStreamWaitEvent", stream, event, _I64(0))',
            "pass",
        ),
        "streams.leave_no_record": (
            'self.driver("cuEventRecord", self.of_gate("event"), stream)',
            "pass",
        ),
        "record.chain_of_one_call": (
            "b.add(b.mul(e.load(book, Book.chain.offset), _I64(31)), digest)",
            "digest",
        ),
        "record.number_once": (
            "number = b.add(e.load(book, at), _I64(1))",
            "number = e.load(book, at)",
        ),
    },
    "numba_symm/gpu/streams.py": {
        "streams.capture_no_wait": (
            "if trail.place is not None and place != trail.place:",
            "if False:",
        ),
        "streams.follow_wrong_stream": (
            'driver.call("cuStreamWaitEvent", self.stream, self._events[event], 0)',
            'driver.call("cuStreamWaitEvent", stream, self._events[event], 0)',
        ),
        "streams.fill_high_half": (
            "self.number >> 32 * n & 0xFFFFFFFF",
            "self.number & 0xFFFFFFFF",
        ),
        "streams.spoil_no_query": (
            '    driver.function("cuStreamQuery")(stream)  # a query invalidates a '
            "capture\n",
            "",
        ),
        "streams.eager_no_record": ("self._eager.end(stream)", "pass"),
    },
    "collectives/enqueueing.py": {
        "enqueueing.capture_not_recorded": (
            "self.record.note_captured(call.about, stream)",
            "pass",
        ),
        "enqueueing.step_left_out": (
            "status = self.enqueue(stream, entry.FIRST + step + 1)",
            "status = self.enqueue(stream, entry.FIRST + step + 2)",
        ),
    },
    "numba_symm/memory/allocator.py": {
        "heap.remove_keeps_places": (
            "self._forget_places()  # other memory may be mapped there next",
            "pass",
        ),
        "heap.around_off_by_one": (
            "if address - entry.block.address >= max(entry.block.nbytes, 1):",
            "if address - entry.block.address > max(entry.block.nbytes, 1):",
        ),
        "heap.place_off_by_one": (
            "inside = offset + nbytes <= entry.block.nbytes\n",
            "inside = offset + nbytes <= entry.block.nbytes + 1\n",
        ),
        "heap.pads_not_returned": (
            "self._free_pads += [entry.pad for entry in entries if entry.pad is "
            "not None]",
            "pass",
        ),
        "heap.pad_not_zeroed": ("self.island.backend.fill(own, nbytes)", "pass"),
        "heap.misses_ignored": (
            "if self._misses.meet(block.address, block.allocation.nbytes):",
            "if False:",
        ),
        "heap.alloc_failure_not_released": (
            "if frees or exchange.is_everybodys(error):\n"
            "                        self.allocator.release(block)",
            "if frees:\n                        self.allocator.release(block)",
        ),
        "heap.count_not_set": ("self._count = first + _MAPPED", "pass"),
    },
    "launch/waiting.py": {
        "trees.too_many_children": (
            "while rank + distance < size and not rank & distance:",
            "while rank + distance < size:",
        ),
        "trees.not_compressed": (
            "return zlib.compress(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))",
            "return zlib.compress(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), 0)",
        ),
    },
    "collectives/staging.py": {
        "staging.line": (
            "self.used += -(-nbytes // _LINE) * _LINE",
            "self.used += nbytes",
        ),
        "staging.room_off_by_one": (
            "self.used + nbytes > whole:",
            "self.used + nbytes > whole + 1:",
        ),
        "staging.out_not_packed": (
            "            self.out = found.array\n"
            "            self.before.append(found.pack)\n",
            "            self.out = found.array\n",
        ),
        "staging.extent_item": (
            "nbytes = sum(map(abs, steps)) + dtype.itemsize * (0 not in shape)",
            "nbytes = sum(map(abs, steps))",
        ),
        "staging.capture_allowed": (
            "if not SIMULATED and streams.is_capturing(stream):",
            "if False:",
        ),
    },
    "numba_symm/mpi/rooms.py": {
        "sends.failed_no_word": ("e.store(number, line, 8 * FAILED)", "pass"),
        "sends.not_counted": ("e.count(unread, nbytes)", "pass"),
    },
    "numba_symm/mpi/buffers.py": {
        "buffers.high": (
            "high = found.first + layout.high + max(0, reach)",
            "high = found.first + layout.high",
        ),
        "buffers.low": (
            "low = found.first + layout.low + min(0, reach)",
            "low = found.first + layout.low",
        ),
        "buffers.uneven": ("(number % blocks > block)", "(number % blocks >= block)"),
        "buffers.displ_bound": ("if first > length:", "if first >= length:"),
    },
    "numba_symm/mpi/win.py": {
        "win.rank_bound": (
            "if not 0 <= rank < len(self._memory):",
            "if not 0 <= rank <= len(self._memory):",
        ),
        "win.bytes_unchecked": ("if found.nbytes != origin.nbytes:", "if False:"),
        "win.atomic_no_settle": (
            "                yield\n            finally:\n"
            "                self._settle()\n",
            "                yield\n            finally:\n                pass\n",
        ),
        "win.free_keeps_maps": (
            "                self._memory[rank] = None\n"
            "                memory.close()\n",
            "                self._memory[rank] = None\n",
        ),
    },
    "launch/board.py": {
        "board.gate_ignores_record": (
            "if self._reached(arrived, wait) and not self._records[self._rank]:",
            "if self._reached(arrived, wait):",
        ),
        "board.turn": ("self._turn ^= 1", "pass"),
        "board.closed_ignored": (
            "            and not memory.closed[rank]  # a rank stores it before it "
            "drops its lock\n",
            "",
        ),
        "board.reports_raced": (
            "if not self.alive.runs(rank) and rank in self._absent(step):",
            "if not self.alive.runs(rank):",
        ),
        "board.abandon_late": (
            "self.abandon(error, wait.what)  # before the others see the vote",
            "pass",
        ),
        "board.load_after_failure": (
            "if self._memory is not None and not self._records[self._rank]:\n"
            "            mine = self._memory.notes",
            "if self._memory is not None:\n            mine = self._memory.notes",
        ),
    },
    "launch/ranks.py": {
        "tagged.retired_reused": (
            "return self._retired | sum(1 << number for number in self._uses)",
            "return sum(1 << number for number in self._uses)",
        ),
        "tagged.most": ("(highest + 1) // TAGS - 1", "(highest + 1) // TAGS"),
        "tagged.holder": (
            "self._holder = by if by == min(self._deciding) else None",
            "self._holder = by",
        ),
    },
    "collectives/islands/moves.py": {
        "moves.chain_last_sends": ("if place < m - 1 else []", ""),
        "moves.chained": (
            "return chunks > 1 and chunks + m - 2 < ticks + (site.largest > 1)",
            "return chunks > 1 and chunks + m - 2 <= ticks + (site.largest > 1)",
        ),
    },
    "collectives/islands/rails.py": {
        "rails.sent_of_the_last_group": ("max(0, rest - distance)", "0"),
    },
}
"""By file and name, the texts before and after."""

EQUIVALENT = {"moves.chained": "both ways take about equally long then"}

MUTANTS = [
    Mutant(
        name,
        file,
        old,
        new,
        tests=NEAREST[name.partition(".")[0]],
        equivalent=EQUIVALENT.get(name, ""),
    )
    for file, changes in CHANGES.items()
    for name, (old, new) in changes.items()
]
