"""Communicators after a failure: of all ranks, or of those that are left.

mpirun starts the ranks, with ULFM or without it.
"""

import gc
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from numba_symm.command import launcher, runner
from tests.test_lost_islands import possible
from tests.test_mpirun import ROOT, environment, run

CYCLES = 50


def played(name, folder, ranks, flags=("--with-ft", "ulfm"), **variables):
    """Return what each rank of a program has written, by rank."""
    if not possible(ranks):
        pytest.skip("too few GPUs")
    program = [__file__, name, str(folder)]
    command = launcher.mpirun_command(ranks, program, launcher.find_mpirun(), flags)
    log = folder / "mpirun.txt"
    run(command, environment(ranks) | variables, log)
    found = {rank: folder / f"{rank}.json" for rank in range(ranks)}
    found = {rank: json.loads(f.read_text()) for rank, f in found.items() if f.exists()}
    assert found, log.read_text()
    return found


def total(comm):
    """Return the result of an all-reduce of each rank's number plus 1."""
    from numba import cuda

    x = cuda.to_device(np.full(5, comm.rank + 1, np.float32))
    y = comm.all_reduce(x)
    comm.synchronize()
    return y.copy_to_host().tolist()


def failed(comm):
    """Wait until a communicator has failed; return the error's class and text."""
    import numba_symm as ns

    end = time.monotonic() + 300
    try:
        while time.monotonic() < end:
            comm.check()
            time.sleep(0.005)
    except ns.CollectiveError as error:
        return type(error).__name__, str(error)
    raise TimeoutError


def attempt(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def leftovers():
    gc.collect()
    fds = len(list(Path("/proc/self/fd").iterdir()))
    return fds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # MiB


def interrupt(*_):
    raise KeyboardInterrupt


def leaves(world, comm, patches):
    """Rank 1 leaves each rebuild at another place, and all leave; all try it again."""
    import numba_symm as ns

    found = []
    for place, name in patches:
        if comm.rank == 0:
            comm.abort()
        assert failed(comm)[0] == "Aborted"
        world.Barrier()
        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1:
                patch.setattr(place, name, interrupt)
            else:
                time.sleep(0.2)  # so rank 1 waits, and the others come to its wait
            try:
                comm.rebuild()
            except (KeyboardInterrupt, ns.SymmError) as error:
                text = f"{type(error).__name__}: {error}"
                found.append((name, text, time.monotonic() - began))
        comm = comm.rebuild()
        assert total(comm) == [6.0] * 5
        world.Barrier()  # before rank 0 aborts it
    return comm, found


def check_leaving(rank, found, places):
    left = "RankLeft: rank 1 left rebuild with KeyboardInterrupt"
    for place, (name, text, seconds) in zip(places, found, strict=True):
        assert place == name
        assert text.startswith("KeyboardInterrupt" if rank == 1 else left)
        assert seconds < 300


PLACES = ["pause", "_shrink", "made_of"]


def survive(world):
    """Rebuild a communicator again and again; then one rank dies, and another one."""
    import numba_symm as ns
    from numba_symm.collectives.islands import construction, rebuilding
    from numba_symm.launch.waiting import Wait

    comm = ns.Communicator(world, timeout=600)
    owners = Wait, rebuilding._Steps, construction
    comm, left_by_interrupt = leaves(world, comm, zip(owners, PLACES, strict=True))
    seen = []
    for cycle in range(CYCLES):
        if comm.rank == cycle % comm.size:
            comm.abort(f"cycle {cycle}")
        assert failed(comm)[0] == "Aborted"
        old, comm = comm, comm.rebuild()
        assert total(comm) == [6.0] * 5
        old.close()
        world.Barrier()  # before the next rank aborts it
        if cycle in (4, CYCLES - 1):
            seen.append(leftovers())
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    died = attempt(lambda: comm.zeros(3))
    comm = comm.rebuild()
    left = [comm.rank, comm.size, total(comm)]
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(lambda: comm.zeros(3))
    with comm.rebuild() as last:
        return seen, died, left, [last.size, total(last)], left_by_interrupt


def test_survivors_continue_and_nothing_leaks(tmp_path):
    found = played("survive", tmp_path, 3)
    assert set(found) == {2}  # the others have died
    seen, died, left, last, interrupted = found[2]
    check_leaving(2, interrupted, PLACES)
    (fds, memory), (fds_after, memory_after) = seen
    assert fds_after == fds
    assert memory_after - memory < 20
    assert died.startswith("RankLeft: rank 1 has ended without closing the ")
    assert left == [1, 2, [3.0] * 5]
    assert last == [1, [1.0] * 5]


def dies_meanwhile(world):
    """Several islands: a rank dies, and another one while the others rebuild."""
    import numba_symm as ns
    from numba_symm.collectives.islands import rebuilding

    comm = ns.Communicator(world, timeout=3)
    islands = [comm.islands, total(comm)]
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    error = attempt(lambda: comm.zeros(3))
    if world.rank == 1:
        made = rebuilding._construct

        def construct(*args):
            made(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        rebuilding._construct = construct
    with comm.rebuild() as left:
        return islands, error, left.rank, left.islands, total(left)


def test_a_death_on_other_islands_and_one_in_the_rebuild(tmp_path):
    found = played("dies_meanwhile", tmp_path, 4, NUMBA_SYMM_ISLAND_SIZE="2")
    assert set(found) == {0, 2}
    for number, rank in enumerate(found):
        islands, error, now, left, result = found[rank]
        assert islands == [[[0, 1], [2, 3]], [10.0] * 5]
        assert re.match("(RankLeft|CollectiveTimeout): ", error)
        assert now == number
        assert [each for part in left for each in part] == [0, 1]
        assert result == [3.0] * 5


def raises(world):
    """A rank ends by an error; under --survive, the other one continues."""
    import numba_symm as ns

    comm = ns.Communicator(world, timeout=600)
    if world.rank == 1:
        raise ValueError("rank 1 has had enough")
    died = attempt(lambda: comm.zeros(3))
    with comm.rebuild() as left:
        return died, left.size, total(left)


def test_an_error_of_one_rank_ends_only_that_rank(tmp_path):
    if not possible(2):
        pytest.skip("too few GPUs")
    command = [sys.executable, "-m", "numba_symm.command.cli", "run", "--survive"]
    command += ["-n", "2", __file__, "raises", str(tmp_path)]
    log = tmp_path / "mpirun.txt"
    assert run(command, environment(2), log) == 0, log.read_text()
    died, size, result = json.loads((tmp_path / "0.json").read_text())
    assert died.startswith("RankLeft: rank 1 has ended without closing the ")
    assert (size, result) == (1, [1.0] * 5)
    text = log.read_text()
    assert re.search(r"^rank 1:\nTraceback .*\n(  .*\n)+ValueError: rank 1", text, re.M)
    assert "runner.py" not in text  # only the program's own frames
    assert "was killed by signal" not in text  # the error says more
    assert not (tmp_path / "1.json").exists()


def ends_badly(world):
    """No rank ends well: one is killed, and the other one has an error."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("rank 0 has an error")


def test_a_job_without_a_rank_that_ends_well_fails(tmp_path):
    command = [sys.executable, "-m", "numba_symm.command.cli", "run", "--survive"]
    command += ["-n", "2", "--simulate", __file__, "ends_badly", str(tmp_path)]
    log = tmp_path / "mpirun.txt"
    assert run(command, environment(2), log) == 1, log.read_text()
    assert "rank 0 has an error\n" in log.read_text()
    killed = r"^rank 1: process \d+ was killed by signal 9 \(Killed\)$"
    assert re.search(killed, log.read_text(), re.M), log.read_text()
    assert "numba-symm run: no rank has ended without an error\n" in log.read_text()


def is_killed(world):
    """A signal kills rank 1; the other rank's errors name the signal, then it goes on.

    Its kernel waits in one call, and its host in the other one.
    """
    import numba_symm as ns

    comms = [ns.Communicator(world, timeout=2), ns.Communicator(world, timeout=2)]
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    died = [attempt(lambda: total(comms[0])), attempt(lambda: comms[1].zeros(3))]
    with comms[1].rebuild() as left:
        return died, total(left)


def test_errors_name_the_signal_that_has_killed_a_rank(tmp_path):
    if not possible(2):
        pytest.skip("too few GPUs")
    command = [sys.executable, "-m", "numba_symm.command.cli", "run", "--survive"]
    command += ["-n", "2", __file__, "is_killed", str(tmp_path)]
    log = tmp_path / "mpirun.txt"
    assert run(command, environment(2), log) == 0, log.read_text()
    shown = r"rank 1: process (\d+) was killed by signal 9"
    (pid,) = re.findall(shown, log.read_text())
    died, result = json.loads((tmp_path / "0.json").read_text())
    assert result == [1.0] * 5
    for text in died:
        assert text.startswith(
            f"RankLeft: rank 1 (pid {pid}) was killed by signal 9; rank 0 waited for"
        )
        assert "rebuild() returns a communicator of the remaining ranks" in text


def test_training_that_loses_a_rank_ends_as_without_that(tmp_path):
    if not possible(3):
        pytest.skip("too few GPUs")
    command = [sys.executable, "-m", "numba_symm.command.cli", "run", "--survive"]
    command += ["-n", "3", str(ROOT / "examples/survivors.py")]
    log = tmp_path / "mpirun.txt"
    code = run(command, environment(3), log)
    text = log.read_text()
    assert code == 0, text
    assert "after 12 steps" in text  # in the middle, by the death
    assert "ranks: 3 at first, 2 in the end\n" in text
    assert "all good\n" in text


def abort_within(comm, world):
    with comm:
        world.Barrier()
        if world.rank == 0:
            comm.abort()
        failed(comm)
        comm.check()


MOMENTS = ["before", "begun", "made", "gathered", "constructed"]
"""When rank 1 is interrupted: in ``Communicator(world)``, before it begins the
duplicate, after that, and when the others have it; in ``rebuild``, before it has all
values, and before the construction."""


def interrupted(world, comm, folder):
    """Interrupt rank 1 at each moment, rebuild, and make a communicator of all."""
    import numba_symm as ns
    from numba_symm.collectives.islands import construction, rebuilding
    from numba_symm.launch import locks
    from numba_symm.launch.waiting import Wait

    made_of, pause, found = construction.made_of, Wait.pause, []
    for moment in MOMENTS:
        mark = Path(folder, f"rank 0 has the duplicate, {moment}")

        def arrive(*given, mark=mark):
            mark.touch()
            return made_of(*given)

        def until_made(wait, absent, mark=mark):
            while not mark.exists():
                pause(wait, absent)
            interrupt()

        def play(comm=comm, moment=moment):
            with comm:
                if moment in MOMENTS[3:]:
                    comm.abort()
                    comm.rebuild()
                elif world.rank != 1:
                    time.sleep(0.2)
                    if moment == "begun":  # so only rank 1 has begun
                        failed(comm)
                        comm.check()
                ns.Communicator(world)

        places = {
            "before": (locks, "duplicate", interrupt),
            "begun": (Wait, "pause", interrupt),
            "made": (Wait, "pause", until_made),
            "gathered": (rebuilding._Steps, "_value_of", interrupt),
            "constructed": (rebuilding, "_construct", interrupt),
        }
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 0:
                patch.setattr(construction, "made_of", arrive)
            elif world.rank == 1:
                patch.setattr(*places[moment])
            began = time.monotonic()
            try:
                play()
            except KeyboardInterrupt:
                text = "KeyboardInterrupt"
            except ns.SymmError as error:
                text = f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - began
        comm = comm.rebuild()
        with ns.Communicator(world) as whole:
            found.append([text, seconds, total(whole), total(comm)])
    return comm, found


def alone(world):
    """Without ULFM, the same ranks continue; other rebuilds are refused."""
    import numba_symm as ns

    comm = ns.Communicator(world, timeout=600)
    comm, interrupts = interrupted(world, comm, sys.argv[2])
    child = comm.split(comm.rank % 2)
    refused = [attempt(comm.rebuild)]
    child.abort()
    refused.append(attempt(child.rebuild))
    ended = attempt(lambda: abort_within(comm, world))
    assert ended.startswith("Aborted: ")
    again = comm.rebuild()  # after the with block has closed it
    results = total(again)
    refused.append(attempt(comm.rebuild))
    again.close()
    refused.append(attempt(again.rebuild))
    comm = ns.Communicator(world, timeout=600)
    world.Barrier()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(lambda: comm.zeros(3))
    return interrupts, refused, results, attempt(comm.rebuild)


def test_without_ulfm_the_same_ranks_continue(tmp_path):
    limit = {"NUMBA_SYMM_SETUP_TIMEOUT": "600"}
    found = played("alone", tmp_path, 3, ["--continuous"], **limit)
    assert set(found) == {0, 1}
    for rank, (interrupts, refused, results, dead) in found.items():
        for moment, (text, seconds, *sums) in zip(MOMENTS, interrupts, strict=True):
            kind = "KeyboardInterrupt" if rank == 1 else "RankLeft: rank 1 left"
            assert text.startswith(kind), (moment, text)
            assert seconds < 300, (moment, text)
            assert sums == [[6.0] * 5] * 2, moment
        works, child, rebuilt, closed = refused
        assert works.startswith("ArgumentError: rebuild: expected a communicator that")
        assert "rebuild: expected a communicator with all ranks of MPI's" in child
        assert rebuilt.startswith("ClosedError: rebuild: the communicator was rebuilt")
        assert closed.startswith("ClosedError: ")
        assert results == [6.0] * 5
        assert dead == (
            "ExchangeError: rebuild: expected an MPI that continues after a rank has "
            "died, got one that does not, and rank 2 ended; start the job with "
            "`numba-symm run --survive`, or with `mpirun --with-ft ulfm`"
        )


if __name__ == "__main__":
    runner.show_errors_whole()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found = globals()[sys.argv[1]](world)
    Path(sys.argv[2], f"{world.rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # MPI cannot be finalized without the ranks that have died
