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

from numba_symm.command import cli
from tests.interrupts import Interrupt
from tests.test_mpirun import environment, run

TIMEOUT = 1.0


def played(name, folder):
    """Return what rank 0 of a program of two ranks has written."""
    command = cli.mpirun_command(2, [__file__, name, str(folder)], cli.find_mpirun())
    command.insert(1, "--continuous")  # after a rank has died
    log = folder / "mpirun.txt"
    code = run(command, environment(2), log, 100)
    assert code is not None, log.read_text()
    return json.loads((folder / "0.json").read_text())


def test_a_rank_that_holds_a_windows_lock(tmp_path):
    """While it is stopped, and after it was killed."""
    stopped, interrupted, *killed = played("holds", tmp_path)
    kind, text, seconds = stopped
    assert kind == "CollectiveTimeout", text
    assert "rank 0 waited for rank 1 in Accumulate, which changes the memory" in text
    assert TIMEOUT <= seconds < 10 * TIMEOUT
    assert interrupted[0] == "Interrupt", interrupted
    for kind, text, _ in killed:
        assert kind == "RankLeft", text
        assert re.match("Accumulate: rank 1 ended while it changed the memory", text)


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
    state = Path(f"/proc/{process}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "T":
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
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    yield attempted(accumulate)
    yield attempted(accumulate)


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
    finally:
        os._exit(0)  # MPI's own end would wait for the lost rank
