"""The ranks that mpirun started see each other."""

import os


def test_every_rank_sees_all_others(world):
    assert world.allgather(world.rank) == list(range(world.size))


def test_the_size_is_the_one_asked_for(world):
    asked = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"]
    assert world.allgather(int(asked)) == [world.size] * world.size


def test_ranks_are_processes_of_their_own(world):
    assert len(set(world.allgather(os.getpid()))) == world.size
