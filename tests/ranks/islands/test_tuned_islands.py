"""What starts cost between islands: measured by tune, and used by all ranks."""

import dataclasses

import numba_symm as ns
from numba_symm.bench import tune
from numba_symm.collectives import tuned
from numba_symm.collectives.islands import measured, sizes
from tests.ranks.helpers import check_works, needs_peers

pytestmark = needs_peers


def test_what_rank_0_has_measured_is_used(world, tmp_path, monkeypatch, capfd):
    """Limits of algorithms are not measured: one island would use them."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # one for each rank
    monkeypatch.setenv("NUMBA_SYMM_ISLAND_SIZE", "1")
    monkeypatch.setattr(tune, "_gpus", lambda comm: comm.size)
    with ns.Communicator(world, timeout=60) as comm:
        name, engine = comm.device.name, comm._calls.members.engine.name
        assert comm._calls.binder._site.sizes == sizes.DEFAULT
    if world.rank:
        measured.write(name, engine, measured.Starts(7, 7))
    assert tune.main(["--largest", "1K"]) == 0
    found = world.bcast(measured.read(name, engine))
    with ns.Communicator(world, timeout=60) as comm:
        used = comm._calls.binder._site.sizes
        check_works(comm)
    assert used == dataclasses.replace(sizes.DEFAULT, **found._asdict())
    assert (world.rank == 0) == ("an exchange starts in" in capfd.readouterr().out)
    assert not tuned.file().exists()
