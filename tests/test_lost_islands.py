"""Ranks of several islands that stop or die: the ranks of all islands raise.

They are started by mpirun, which lets the others continue. On 2 GPUs, 2 ranks are
islands of one, unless ranks may share a GPU.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from numba_symm.command import cli, launcher, runner
from numba_symm.errors import DeviceError
from tests.test_mpirun import environment, run


def possible(ranks):
    try:
        cli.simulation_needed(ranks)
    except DeviceError:  # too few GPUs
        return False
    return True


RANKS = 4 if possible(4) else 2
LOST = RANKS - 1
TIMEOUT = 2.0
SOON = 300.0  # seconds, half of a timeout that never passes


def written(folder, name):
    """Return what a rank has written, or show what the job has printed."""
    file = folder / f"{name}.json"
    assert file.exists(), (folder / "mpirun.txt").read_text()
    return json.loads(file.read_text())


@pytest.mark.parametrize("how", ["stopped", "killed", "ended", "raises"])
def test_a_lost_rank_is_an_error_on_all_islands(how, tmp_path):
    if how == "ended" and RANKS == 2:
        pytest.skip("needs another rank of the island, which notices it")
    program = [__file__, how, str(tmp_path)]
    command = launcher.mpirun_command(RANKS, program, launcher.find_mpirun())
    command.insert(1, "--continuous")  # after a rank has died
    environ = environment(RANKS) | {"NUMBA_SYMM_ISLAND_SIZE": str(RANKS // 2)}
    run(command, environ, tmp_path / "mpirun.txt")
    found = {rank: written(tmp_path, rank) for rank in range(RANKS) if rank != LOST}
    for kind, text, ranks, seconds in found.values():
        if how == "raises":
            assert kind == "RankLeft", text
            assert f"rank {LOST} left with ValueError: enough" in text
            assert ranks == [LOST]
            assert seconds < SOON  # nobody waits for the deadline
        elif how == "ended":  # where nobody has a deadline
            assert kind == "RankLeft", text
            assert re.match(r"rank 3 on .+ has ended without closing", text), text
            assert "rank 2 waited for it in empty" in text
            assert ranks == [LOST]
        elif (
            how == "killed" and "and NCCL reports: " in text
        ):  # a closed connection of NCCL
            assert kind == "RankLeft", text
            assert ranks[1:] == [LOST], text
        elif how == "killed" and kind == "RankLeft" and "waited for it" not in text:
            assert text.startswith(f"rank {LOST} has ended without closing the "), text
            assert ranks == [LOST]
            assert "rebuild()" in text
        else:
            assert kind == "CollectiveTimeout", text
            assert ranks[1:] == [LOST], text
            assert re.match(r"rank \d waited for ranks? [\d, ]+ on ", text), text
            assert "If that rank was not late, its call differs" in text


def test_a_rank_that_dies_before_its_vote_ends_the_wait(tmp_path):
    """All ranks have arrived, so the others wait for its vote only."""
    program = [__file__, "no vote", str(tmp_path)]
    command = launcher.mpirun_command(2, program, launcher.find_mpirun())
    command.insert(1, "--continuous")
    environ = environment(2) | {"NUMBA_SYMM_ISLAND_SIZE": "1"}
    environ["NUMBA_SYMM_TIMEOUT"] = str(TIMEOUT)
    run(command, environ, tmp_path / "mpirun.txt")
    kind, text, ranks, seconds = written(tmp_path, 0)
    assert kind == "CollectiveTimeout", text
    assert re.match(r"rank 0 waited for rank 1( on .+)? in ", text), text
    assert "(timeout: 2 s)" in text
    assert ranks == [0, 1]
    assert seconds >= TIMEOUT


DEATHS = {
    1: ("MPI", "rank 0 waited for other ranks in Communicator (set-up"),
    2: ("store", "rank 0 waited for rank 1 on .+ in Communicator (set-up"),
    3: ("engine", "rank 0 waited for rank 1 on .+ in Communicator (timeout: 1 s)"),
}
"""Where rank 1 of a pair dies, and what rank 0 raises."""


def test_a_rank_that_dies_in_construction_ends_the_wait(tmp_path):
    """Rank 0 makes a communicator with each of the others, which die one by one."""
    ranks = 1 + len(DEATHS)
    if not possible(ranks):
        pytest.skip("needs 4 GPUs")
    program = [__file__, "dies", str(tmp_path)]
    command = launcher.mpirun_command(ranks, program, launcher.find_mpirun())
    command.insert(1, "--continuous")
    environ = environment(ranks) | {"NUMBA_SYMM_ISLAND_SIZE": "1"}
    environ |= {"NUMBA_SYMM_SETUP_TIMEOUT": "1", "NUMBA_SYMM_ENGINE": "mpi"}
    run(command, environ, tmp_path / "mpirun.txt")
    for other, (_, expected) in DEATHS.items():
        kind, text, seconds = written(tmp_path, other)
        assert kind == "CollectiveTimeout", text
        assert re.match(expected.replace("(", r"\(").replace(")", r"\)"), text), text
        assert seconds >= 1


def dies(folder):
    from mpi4py import MPI

    import numba_symm as ns
    from numba_symm.engines.mpi import MpiEngine
    from numba_symm.launch.store import StoreExchange

    world, all_gather = MPI.COMM_WORLD, StoreExchange.all_gather

    def die(*given):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_at(exchange, value, what, *given):
        if what == "finding GPUs: outcome":
            die()
        return all_gather(exchange, value, what, *given)

    for other, (where, _) in DEATHS.items():
        mine = world.rank in (0, other)
        pair = world.Create_group(world.group.Incl([0, other])) if mine else None
        if world.rank == other:
            if where == "store":
                StoreExchange.all_gather = die_at
            elif where == "engine":
                MpiEngine.exchange = die
            pair.barrier()
            if where == "MPI":
                die()
            ns.Communicator(pair, timeout=1)
        elif world.rank == 0:
            pair.barrier()
            begin = time.monotonic()
            try:
                ns.Communicator(pair, timeout=1)
            except ns.SymmError as error:
                found = type(error).__name__, str(error), time.monotonic() - begin
                (Path(folder) / f"{other}.json").write_text(json.dumps(found))
    os._exit(0)


def does_not_vote(folder):
    from mpi4py import MPI

    import numba_symm as ns
    from numba_symm.launch.waiting import Wait

    def die(wait, seconds):
        os.kill(os.getpid(), signal.SIGKILL)

    world = MPI.COMM_WORLD
    comm = ns.Communicator(world)
    world.barrier()
    if world.rank == 1:
        Wait.for_answers = die
    begin = time.monotonic()
    try:
        comm.zeros(4)
    except ns.SymmError as error:
        found = type(error).__name__, str(error), error.ranks, time.monotonic() - begin
        (Path(folder) / f"{world.rank}.json").write_text(json.dumps(found))
    os._exit(0)


def test_mpi_may_be_finalized_before_the_communicator_is_closed(tmp_path):
    program = [__file__, "finalized", str(tmp_path)]
    command = launcher.mpirun_command(2, program, launcher.find_mpirun())
    environ = environment(2) | {"NUMBA_SYMM_ISLAND_SIZE": "1"}
    code = run(command, environ, tmp_path / "mpirun.txt")
    assert code == 0, (tmp_path / "mpirun.txt").read_text()
    for rank in range(2):
        said = written(tmp_path, rank)
        assert said == ["ExchangeError: MPI has been finalized"]  # close adds none


def finalized(folder):
    from mpi4py import MPI

    import numba_symm as ns

    rank, said = MPI.COMM_WORLD.rank, []
    comm = ns.Communicator(MPI.COMM_WORLD, timeout=TIMEOUT)
    x = comm.zeros(300, "float32")
    comm.all_reduce(x)
    MPI.Finalize()
    time.sleep(0.2)  # several looks of the watchdog
    for call in (lambda: comm.all_reduce(x), comm.close):
        try:
            call()
        except ns.SymmError as error:
            said.append(f"{type(error).__name__}: {error}".partition(",")[0])
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said))


def play(how, folder):
    if "NUMBA_SYMM_ALLOW_OVERLAPPING_DEVICES" in os.environ:
        # Otherwise NCCL refuses ranks that share a GPU.
        os.environ["NCCL_HOSTID"] = os.environ["OMPI_COMM_WORLD_RANK"]
    if how == "finalized":
        finalized(folder)
        return
    if how == "no vote":
        does_not_vote(folder)
    if how == "dies":
        dies(folder)

    from mpi4py import MPI

    import numba_symm as ns

    world = MPI.COMM_WORLD
    pids = world.allgather(os.getpid())
    comm = ns.Communicator(world, timeout=2 * SOON if how == "raises" else TIMEOUT)
    x = comm.zeros(300, "float32")
    comm.all_reduce(x)
    comm.synchronize()
    world.barrier()
    begin = time.monotonic()
    if world.rank == LOST:
        if how == "raises":
            with comm:
                raise ValueError("enough")
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    said = None
    while said is None:
        try:
            if how == "ended":
                comm.empty(4)
            comm.all_reduce(x)
            comm.synchronize()
        except ns.CollectiveError as error:
            kind = type(error).__name__
            said = kind, str(error), error.ranks, time.monotonic() - begin
    comm.close()
    (Path(folder) / f"{world.rank}.json").write_text(json.dumps(said))
    others = [Path(folder) / f"{r}.json" for r in range(RANKS) if r != LOST]
    while not all(path.exists() for path in others):
        time.sleep(0.05)
    if how == "stopped" and world.rank == 0:
        os.kill(pids[LOST], signal.SIGKILL)


if __name__ == "__main__":
    try:
        play(*sys.argv[1:])
    except ValueError:
        pass
    except BaseException as error:
        runner.show_alone(error)
    finally:
        os._exit(0)  # MPI's own end would wait for the lost rank
