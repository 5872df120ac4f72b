"""Ranks of mpi4py's spelling that stop or die: the others raise.

mpirun starts them, and lets the others continue.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from numba_symm.command import launcher, runner
from tests.interrupts import Interrupt
from tests.test_lost_islands import possible
from tests.test_mpirun import environment, run

TIMEOUT = 1.0


def played(name, folder, ranks=2):
    """Return what rank 0 of a program has written."""
    program = [__file__, name, str(folder)]
    command = launcher.mpirun_command(ranks, program, launcher.find_mpirun())
    command.insert(1, "--continuous")  # after a rank has died
    log = folder / "mpirun.txt"
    run(command, environment(ranks), log)
    return json.loads((folder / "0.json").read_text())


def test_a_rank_that_holds_a_windows_lock(tmp_path):
    """While it is stopped, and after it was killed, as its memory and its fences."""
    stopped, interrupted, *killed = played("holds", tmp_path)
    kind, text, seconds = stopped
    assert kind == "CollectiveTimeout", text
    assert "rank 0 waited for rank 1 in Accumulate, which changes the memory" in text
    assert seconds >= TIMEOUT
    assert interrupted[0] == "Interrupt", interrupted
    *killed, freed = killed
    for kind, text, seconds in killed:
        assert kind == "RankLeft", text
        assert seconds < 5
    for _, text, _ in killed[:2]:
        assert re.match("Accumulate: rank 1 ended while it changed the memory", text)
    for _, text, _ in killed[2:]:
        assert "rank 1 has ended without freeing the window" in text
    assert freed[0] == "", freed


def holds(world):
    from numba import cuda

    from numba_symm import mpi

    comm = mpi.Comm(world, timeout=TIMEOUT)
    window = mpi.Win.Allocate_device(8, 8, comm=comm)
    x = cuda.to_device(np.ones(1))
    window.Fence()
    window.Accumulate(x, 0)
    window.Fence()
    process = world.bcast(os.getpid(), 1)
    if world.rank == 1:
        with window._locks.held(0, "Accumulate"):
            os.kill(process, signal.SIGSTOP)
    while (state := state_of(process)) != "T":
        assert state != "Z", "rank 1 ended before it stopped"
        time.sleep(0.01)

    def accumulate():
        window.Accumulate(x, 0)

    def handler(number, frame):
        raise Interrupt

    yield attempted(accumulate)
    window._locks._seconds = 60
    signal.signal(signal.SIGUSR1, handler)
    me = threading.get_ident()
    threading.Timer(0.2, lambda: signal.pthread_kill(me, signal.SIGUSR1)).start()
    yield attempted(accumulate)
    os.kill(process, signal.SIGKILL)
    while state_of(process) != "Z":
        time.sleep(0.01)
    yield attempted(accumulate)
    yield attempted(accumulate)
    for name in ("Accumulate", "Put", "Get"):
        yield attempted(lambda name=name: getattr(window, name)(x, 1))
    yield attempted(window.Fence)
    yield attempted(lambda: window.Start(window.Get_group()))
    yield attempted(window.Free)


def state_of(process):
    """Return the letter of a process's state, Z if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended before, or meanwhile
        return "Z"
    return text.rpartition(")")[2].split()[0]


ENDED = [
    ("Comm", "rank 1 has ended without closing the communicator; rank 0 waited for it"),
    ("Dup", "rank 1 has ended without closing its communicators"),
    ("Allocate", "rank 1 has ended without closing the communicator; rank 0 waited"),
    ("Recv", "rank 1 has ended without closing the communicator; rank 0 waited for it"),
]


def test_a_rank_that_dies_while_others_wait_for_it(tmp_path):
    """Rank 1 ends within ``Comm``, and rank 2 within ``Dup``."""
    if not possible(3):
        pytest.skip("needs 3 GPUs")
    for (call, expected), found in zip(ENDED, played("dies", tmp_path, 3), strict=True):
        kind, text, seconds = found
        assert kind == "RankLeft", (call, text)
        assert text.startswith(expected), call
        assert seconds < 300, call


def dies(world):
    from numba import cuda

    from numba_symm import mpi
    from numba_symm.launch.store import StoreExchange
    from numba_symm.mpi import posts

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def made(other):
        pair = world.Create_group(world.group.Incl([0, other]))
        return mpi.Comm(pair, timeout=600)

    all_gather = StoreExchange.all_gather

    def die_at(exchange, value, what, *rest):
        if what == "contexts":
            die()
        return all_gather(exchange, value, what, *rest)

    if world.rank == 1:
        StoreExchange.all_gather = die_at
        made(1)
    elif world.rank == 2:
        comm = made(2)
        posts.apart = die
        comm.Dup()
    yield attempted(lambda: made(1))
    comm, x = made(2), cuda.to_device(np.ones(1))
    yield attempted(comm.Dup)
    yield attempted(lambda: mpi.Win.Allocate_device(8, 8, comm=comm))
    yield attempted(lambda: comm.Recv(x, 1))


def attempted(call):
    """Return the class and the text of the library's error, and the seconds."""
    begin = time.monotonic()
    try:
        call()
    except BaseException as error:
        found = error.__cause__ or error
        return type(found).__name__, str(found), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def play(name, folder):
    from mpi4py import MPI

    found = list(globals()[name](MPI.COMM_WORLD))
    (Path(folder) / f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        play(*sys.argv[1:])
    except BaseException as error:
        runner.show_alone(error)
    finally:
        os._exit(0)  # MPI's own end would wait for the lost rank
