"""Status boards of ranks that threads play."""

import ctypes
from contextlib import ExitStack

from numba_symm.device import polling
from numba_symm.launch.board import Board
from numba_symm.launch.fds import IpcChannel
from numba_symm.launch.store import StoreExchange
from tests.threads import run_ranks


def record(operation, rank=1, peer=2, place=5, epoch=0):
    """Pack a record as a kernel does."""
    return polling.wait_record.py_func(operation, rank, peer, place, epoch)


def on_ranks(n, play, run=run_ranks):
    """Run ``play(board, comm)`` on ``n`` ranks, each with its board."""

    def with_board(comm):
        exchange = StoreExchange(comm, "test", 10.0)
        with ExitStack() as undo:
            with IpcChannel(exchange) as channel:
                made = Board(exchange, channel, undo)
            with exchange.agreed("registering"):
                made.register()
            return play(made, comm)

    return run(n, with_board)


def store(address, rank, value):
    ctypes.c_uint64.from_address(address + 8 * rank).value = value
