"""mpi4py's spelling, for device arrays.

A program of mpi4py changes its import and one line::

    from numba_symm import mpi as MPI

    comm = MPI.Comm(MPI.COMM_WORLD)

Its device arrays then stay on the GPUs, and its host arrays go to mpi4py. Names that
are not here are those of ``mpi4py.MPI``. Importing this module starts MPI, as importing
``mpi4py.MPI`` does. :func:`install` puts it in the place of ``mpi4py.MPI``, for
programs and packages that nobody edits.
"""

from typing import Any

from mpi4py import MPI as _MPI

from numba_symm.mpi.comm import Comm
from numba_symm.mpi.errors import MPIError
from numba_symm.mpi.in_place import Finalize, Init, Init_thread, install
from numba_symm.mpi.p2p import Attach_buffer, Detach_buffer
from numba_symm.mpi.pending import Message
from numba_symm.mpi.requests import Prequest, Request
from numba_symm.mpi.topologies import Cartcomm, Distgraphcomm, Graphcomm
from numba_symm.mpi.win import Win

__all__ = [
    "Attach_buffer",
    "Cartcomm",
    "Comm",
    "Detach_buffer",
    "Distgraphcomm",
    "Finalize",
    "Graphcomm",
    "Init",
    "Init_thread",
    "MPIError",
    "Message",
    "Prequest",
    "Request",
    "Win",
    "install",
]


def __getattr__(name: str) -> Any:
    return getattr(_MPI, name)
