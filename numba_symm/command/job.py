"""What ``numba-symm info`` shows of a job of several ranks: islands, shared GPUs."""

from rich.console import Console
from rich.markup import escape

from numba_symm.collectives.communicator import Communicator
from numba_symm.errors import SymmError
from numba_symm.islands import Islands
from numba_symm.launch import devices, ranks


def report(console: Console) -> None:
    """Print, on rank 0, the job's islands and how many ranks share a GPU. Collective.

    Does nothing in a process that no launcher has started on several ranks.
    """
    if ranks.launched_size() < 2:
        return
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        with Communicator(world) as comm:
            islands = comm._calls.island
            text = f"one, {ranks.name_ranks(range(comm.size))}"
            if isinstance(islands, Islands):
                text = islands.described()
            most = max(devices.sharers(islands.gpus).values())
            text += f"; up to {most} ranks on a GPU" if most > 1 else ""
    except SymmError as error:
        text = f"none: {error}"
    if world.rank == 0:
        console.print(f"[bold]Islands[/]  {escape(text)}", soft_wrap=True)
