"""What ``numba-symm info`` shows of a job of several ranks: islands, shared GPUs."""

from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.errors import SymmError
from numba_symm.launch import devices, ranks


def islands() -> str | None:
    """Return the job's islands, and how many ranks share a GPU. Collective.

    None: no launcher has started this process on several ranks.
    """
    if ranks.launched_size() < 2:
        return None
    from mpi4py import MPI

    try:
        with Communicator(MPI.COMM_WORLD) as comm:
            found = inside(comm).ranks
            most = max(devices.sharers(found.gpus).values())
            return found.described() + (
                f"; up to {most} ranks on a GPU" if most > 1 else ""
            )
    except SymmError as error:
        return f"none: {error}"
