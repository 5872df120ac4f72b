"""mpi4py's spelling, for device arrays.

A program of mpi4py changes its import and one line::

    from numba_symm import mpi as MPI

    comm = MPI.Comm(MPI.COMM_WORLD)

Its device arrays then stay on the GPUs, and its host arrays go to mpi4py. Names that
are not here are those of ``mpi4py.MPI``. Importing this module starts MPI, as importing
``mpi4py.MPI`` does. :func:`install` replaces ``mpi4py.MPI`` with it, for programs and
packages that cannot be edited.
"""

from typing import TYPE_CHECKING, Any

from mpi4py import MPI as _MPI

from numba_symm.mpi.comm import Cartcomm as Cartcomm
from numba_symm.mpi.comm import Comm as Comm
from numba_symm.mpi.comm import Distgraphcomm as Distgraphcomm
from numba_symm.mpi.comm import Graphcomm as Graphcomm
from numba_symm.mpi.comm import Intercomm as Intercomm
from numba_symm.mpi.comm import Intracomm as Intracomm
from numba_symm.mpi.comm import Topocomm as Topocomm
from numba_symm.mpi.errors import MPIError as MPIError
from numba_symm.mpi.host_only import Attach_buffer as Attach_buffer
from numba_symm.mpi.host_only import Datatype as Datatype
from numba_symm.mpi.host_only import File as File
from numba_symm.mpi.host_only import Finalize as Finalize
from numba_symm.mpi.host_only import Free_mem as Free_mem
from numba_symm.mpi.host_only import Init as Init
from numba_symm.mpi.host_only import Init_thread as Init_thread
from numba_symm.mpi.host_only import Op as Op
from numba_symm.mpi.host_only import Session as Session
from numba_symm.mpi.host_only import _sizeof as _sizeof
from numba_symm.mpi.host_only import constant as _constant
from numba_symm.mpi.host_only import install as install
from numba_symm.mpi.pending import Message as Message
from numba_symm.mpi.started import Prequest as Prequest
from numba_symm.mpi.started import Request as Request
from numba_symm.mpi.win import Win as Win

_NAMES = [name for name in dir(_MPI) if name[0] != "_"]

if TYPE_CHECKING:  # they keep the names above, and read the others from mpi4py's types
    from mpi4py.MPI import *  # type: ignore[assignment] # noqa: F403
else:
    globals().update(
        {
            name: _constant(getattr(_MPI, name))
            for name in (*_NAMES, "_typedict", "_typedict_c", "_typedict_f")
            if name not in globals()
        }
    )
    __all__ = [*_NAMES, "MPIError", "install"]

    def __getattr__(name: str) -> Any:
        return getattr(_MPI, name)
