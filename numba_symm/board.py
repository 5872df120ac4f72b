"""The status board: one 8-byte record a rank, in host memory that every GPU reaches.

A kernel that gives up writes what it waited for into every rank's record. The host
reads its own with a plain load, so asking costs nothing; kernels that wait look at
their rank's now and then, so all leave soon after the first.
"""

import ctypes
import math
import mmap
import os
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

from numba_symm import driver
from numba_symm.device import signals
from numba_symm.environment import SIMULATED
from numba_symm.errors import CallMismatch, CollectiveError, CollectiveTimeout, RankLeft
from numba_symm.launch.exchange import StoreExchange
from numba_symm.launch.fds import IpcChannel

_OPERATIONS = {
    signals.PUT_SIGNAL: ("put_signal", "channel"),
    signals.WAIT_SIGNAL: ("wait_signal", "channel"),
    signals.BARRIER: ("barrier", "block"),
    signals.ONE_SHOT_PULL: ("all_reduce (one_shot_pull)", "block"),
    signals.ONE_SHOT_SENTINEL: ("all_reduce (one_shot_sentinel)", "block"),
    signals.ONE_SHOT_MARKED: ("all_reduce (one_shot_marked)", "block"),
    signals.ONE_SHOT_LL: ("all_reduce (one_shot_ll)", "block"),
    signals.TWO_SHOT_SENTINEL: ("all_reduce or reduce (two_shot_sentinel)", "block"),
    signals.TWO_SHOT_MARKED: ("all_reduce or reduce (two_shot_marked)", "block"),
    signals.TWO_SHOT_LL: ("all_reduce or reduce (two_shot_ll)", "block"),
    signals.ALL_GATHER: ("all_gather", "block"),
    signals.ALL_TO_ALL: ("all_to_all", "block"),
    signals.REDUCE_SCATTER: ("reduce_scatter", "block"),
    signals.SCAN: ("scan", "block"),
    signals.EXSCAN: ("exscan", "block"),
    signals.REDUCE: ("reduce", "block"),
    signals.BROADCAST: ("broadcast", "block"),
    signals.REDUCE_SIGNALLED: ("reduce (signalled)", "block"),
    signals.AGREEMENT: ("all_reduce (copy_engine)", "block"),
    signals.ALL_GATHER_COPIES: ("all_gather (copy_engine)", "block"),
    signals.ALL_TO_ALL_COPIES: ("all_to_all (copy_engine)", "block"),
    signals.BROADCAST_COPIES: ("broadcast (copy_engine)", "block"),
    signals.BROADCAST_SIGNALLED: ("broadcast (signalled)", "block"),
    signals.BROADCAST_DIRECT: ("broadcast (direct)", "block"),
    signals.REDUCE_DIRECT: ("reduce (direct)", "block"),
    signals.TRANSFER: ("a message or a collective made of them", "channel"),
    signals.TWO_SHOT_SIGNALLED: ("all_reduce or reduce (two_shot_signalled)", "block"),
}
_CLOSE, _ABANDONED = 126, 127  # operations of the host, not of kernels
_POLL_SECONDS = 2e-4
_DIFFERED = (
    "If that rank was not late, their calls differed: Communicator(…, debug=True) says "
    "where"
)
_UNANSWERED = "If that rank was not late, it has no call that answers this one"
_UNMATCHED = (
    "If that rank was not late, it sends or receives something else: two ranks that "
    "both send first do so by sendrecv or in a group; of gather, scatter and the v "
    "forms Communicator(…, debug=True) says where"
)
_HINTS = {
    signals.PUT_SIGNAL: _UNANSWERED,
    signals.WAIT_SIGNAL: _UNANSWERED,
    signals.TRANSFER: _UNMATCHED,
}
_DEVICEMAP = 0x02  # CU_MEMHOSTREGISTER_DEVICEMAP


class Failure(NamedTuple):
    """Why a communicator failed.

    Attributes:
        error: the class of what is raised.
        text: who failed whom.
        hint: what else it may have been; "" if nothing.
    """

    error: type[CollectiveError]
    text: str
    hint: str = ""


class Board:
    """The board of one communicator. Collective: every rank makes it at once.

    Attributes:
        address: of rank 0's record, as this process' kernels see it.
    """

    def __init__(self, exchange: StoreExchange, channel: IpcChannel):
        self._rank = exchange.rank
        self._size = exchange.size
        self._step = 0
        with ExitStack() as undo:
            fd = -1
            with exchange.agreed("making the status board"):
                if self._rank == 0:
                    fd = os.memfd_create("numba_symm board", os.MFD_CLOEXEC)
                    undo.callback(os.close, fd)
                    os.ftruncate(fd, mmap.PAGESIZE)
            with ExitStack() as undo_map:
                with exchange.agreed("mapping the status board"):
                    received = channel.broadcast_fds(0, fd)
                    try:
                        memory = mmap.mmap(received, mmap.PAGESIZE)
                    finally:
                        os.close(received)
                    undo_map.callback(memory.close)
                    undo_map.callback(self._let_go)
                    words = ctypes.c_uint64 * self._size
                    self._records: Any = words.from_buffer(memory)
                    self._steps: Any = words.from_buffer(memory, 8 * self._size)
                    self.address = ctypes.addressof(self._records)
                    if not SIMULATED:
                        self.address = _register(self.address, undo_map)
                self._undo = undo_map.pop_all()

    def failure(self) -> Failure | None:
        """Return why the communicator failed, or None while it has not."""
        record = self._records[self._rank]
        return describe(record) if record else None

    def gate(self, timeout: float = 0) -> Failure | None:
        """Wait until every rank is here or one has failed; return why it failed.

        Collective, and decided alike on all ranks that are here: a rank votes to go
        on once all are here, to stop if it sees a failure first; all go on if all
        have voted so. So no rank is left waiting in MPI for one that has failed.

        Args:
            timeout: seconds until this rank gives the others up; 0: never.
        """
        failure = self.failure()
        if failure is not None:
            return failure
        arrived = self._step = self._step + 3
        go, stop = arrived + 1, arrived + 2
        self._steps[self._rank] = arrived
        vote = stop  # also if this rank is interrupted
        try:
            if self._all_arrive(arrived, timeout):
                vote = go
        finally:
            self._steps[self._rank] = vote
        while True:
            steps = list(self._steps)
            if stop in steps:
                return self.failure() or Failure(RankLeft, "a rank was interrupted")
            if all(step == go or step > stop for step in steps):
                return None
            time.sleep(_POLL_SECONDS)

    def _all_arrive(self, arrived: int, timeout: float) -> bool:
        deadline = time.monotonic() + timeout if timeout else math.inf
        while self.failure() is None:
            absent = [rank for rank, step in enumerate(self._steps) if step < arrived]
            if not absent:
                return True
            if time.monotonic() > deadline:
                self._report(_CLOSE << 56 | self._rank << 48 | absent[0] << 40)
            time.sleep(_POLL_SECONDS)
        return False

    def abandon(self) -> None:
        """Make every rank's waiting kernels leave: this rank will not come."""
        self._report(_ABANDONED << 56 | self._rank << 48)

    def _report(self, record: int) -> None:
        if self._records is None:  # closed
            return
        for rank in range(self._size):
            if not self._records[rank]:
                self._records[rank] = record

    def close(self) -> None:
        """Give the board up, once no kernel uses it. Local and idempotent."""
        self._undo.close()

    def _let_go(self) -> None:
        """Drop what keeps the map from being closed."""
        self._records = self._steps = None


def _register(address: int, undo: ExitStack) -> int:
    """Let GPUs reach a page of host memory; return where they see it."""
    driver.call("cuMemHostRegister", address, mmap.PAGESIZE, _DEVICEMAP)
    undo.callback(driver.call, "cuMemHostUnregister", address)
    return int(driver.call("cuMemHostGetDevicePointer", address, 0))


def describe(record: int) -> Failure:
    """Return what a record says; ``signals.wait_record`` says what its bits are."""
    operation, rank, peer = record >> 56, record >> 48 & 0xFF, record >> 40 & 0xFF
    place, epoch = record >> 24 & 0xFFFF, record & 0xFFFFFF
    if operation == _ABANDONED:
        return Failure(RankLeft, f"rank {rank} left after an error of its own")
    if operation == _CLOSE:
        text = f"rank {rank} waited for rank {peer} in close"
        return Failure(CollectiveTimeout, text, _DIFFERED)
    if operation == signals.MISMATCH:
        return Failure(
            CallMismatch,
            f"rank {rank}'s call differs from rank {peer}'s: operation, count, dtype, "
            "op, root or where the output lies (the same part of the same symmetric "
            "block on all ranks, or in no block on any; in place on all, or on none); "
            "what any rank's symmetric memory held there may be lost",
        )
    if operation == signals.CALL_MISMATCH:
        return Failure(
            CallMismatch,
            f"rank {rank}'s call differs from rank {peer}'s: operation, count, dtype, "
            "op or root; Communicator(…, debug=True) says in what",
        )
    if operation == signals.TRANSFER_MISMATCH:
        return Failure(
            CallMismatch,
            f"rank {rank} receives another number of bytes than rank {peer} sends it: "
            "the two calls' counts or dtypes differ, or their order does",
        )
    name, kind = _OPERATIONS[operation]
    at = f"{kind} {place}, epoch {epoch}" if epoch else f"{kind} {place}"
    text = f"rank {rank} waited for rank {peer} in {name}, {at}"
    return Failure(CollectiveTimeout, text, _HINTS.get(operation, _DIFFERED))
