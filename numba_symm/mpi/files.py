"""Files of mpi4py, which read and write host memory only."""

from mpi4py import MPI

from numba_symm.mpi.buffers import of_host
from numba_symm.mpi.kinds import Kind

ADVICE = "a file takes no others; copy the array to the host"


class File(MPI.File, metaclass=Kind):
    """A file; the methods are those of ``mpi4py.MPI.File``. They refuse device arrays.

    MPI would read their addresses as those of host memory.
    """

    _plain = MPI.File


for _name in dir(MPI.File):
    if _name.lower().lstrip("i").startswith(("read", "write")):
        setattr(File, _name, of_host(getattr(MPI.File, _name), ADVICE))
