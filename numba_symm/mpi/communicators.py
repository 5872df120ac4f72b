"""The classes of communicators, which stand for mpi4py's of the same names."""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from numba_symm.arguments import shown
from numba_symm.launch import ranks
from numba_symm.mpi import reductions, wraps
from numba_symm.mpi.buffers import of_host
from numba_symm.mpi.comm import Device, add_kinds, kind_of
from numba_symm.mpi.errors import MPITypeError
from numba_symm.mpi.forms import forms, of_objects
from numba_symm.mpi.kinds import Kind
from numba_symm.mpi.life import Life
from numba_symm.mpi.reading import translated

_stray: Device | None = None
"""Makes objects of communicators that no method of a communicator here has made."""


def adopt_strays(world: Device) -> None:
    """From now on, all ranks make objects of those, as of the communicator's own."""
    global _stray
    _stray = world


def _adopted(comm: Any) -> Any:
    """Return an object for a new communicator of ranks of this program."""
    return comm if _stray is None else _stray._wrapped(comm)


def _known(comm: Any) -> Any:
    """Return an object of a communicator of mpi4py, if one was made of it."""
    if comm and comm.is_inter:
        return Intercomm(comm)
    found = wraps.find(comm)
    return comm if found is None else _another(found, type(found))


def _another(first: Any, cls: Any) -> Any:
    """Return another object of a communicator of this module. Local.

    After ``install``, ``Comm(comm)`` returns one, too. A program that was ported calls
    ``Free`` as often as ``Comm``, and one of mpi4py does not, so it counts.
    """
    if cls is Comm:
        first._life.wraps += 1
    kind = type(first) if cls is Comm else cls
    if issubclass(kind._plain, MPI.Topocomm):
        kind._plain(first)  # mpi4py's error, if it has another topology
    made = MPI.Comm.__new__(kind, first)
    made._share(first)
    return made


class Comm(Device, MPI.Comm, metaclass=Kind):  # type: ignore[misc]
    """A communicator of mpi4py, whose buffer calls take device arrays too.

    It has the handle, the ranks and the attributes of ``comm``. mpi4py makes the calls
    with host arrays or with objects, and has all other methods. ``Comm`` returns an
    object of the class for ``comm``, such as :class:`Intracomm`. Construction is
    collective; it binds this rank to a GPU. A second call with the same communicator
    returns the same object, unless it has failed, or ``Free`` was called as often as
    ``Comm``.

    ``Intracomm``, the classes for grids and graphs, and a program's subclasses return a
    new object of their own class. If ``comm`` is a communicator of this module, the new
    object is made locally and stands for the same communicator, as in mpi4py. Without a
    communicator, all of them return a null communicator.

    Blocking calls wait for the stream that the array names, else for ``stream``. So
    their arrays may be used when they return. Within a capture they return immediately.

    Args:
        comm: the communicator of mpi4py.
        synchronize: False: blocking collectives return when they are enqueued, so
            the arrays may be used by later work of that stream only.
        options: ``device``, ``timeout``, ``stream``, ``debug``, ``multiprocessors``,
            ``requests``, as for :class:`numba_symm.Communicator`. The communicators
            that are made of this one have the same.

    Attributes:
        communicator: the library's communicator, for calls that MPI does not have.
        host: the communicator of mpi4py.

    Raises:
        MPI.Exception: on all ranks.
    """

    _plain = MPI.Comm

    # All is made here, because a subclass for mpi4py need not call ``__init__``.
    @translated
    def __new__(cls, comm: Any = None, synchronize: bool = True, **options: Any) -> Any:
        """Return an object with the communicator's handle, if possible the first."""
        if comm is not None and not isinstance(comm, MPI.Comm):
            raise MPITypeError(
                MPI.ERR_COMM,
                f"{cls.__name__}: expected a communicator of mpi4py, got {shown(comm)};"
                " pass MPI.COMM_WORLD, for example",
            )
        if not comm:
            return MPI.Comm.__new__(cls, comm)
        ranks.refuse_unusable(comm)
        if comm.is_inter and issubclass(cls, Intercomm):
            return Intercomm.__new__(cls, comm)  # mpi4py's pkl5 calls this method
        if comm.is_inter:
            raise MPITypeError(
                MPI.ERR_COMM,
                f"{cls.__name__}: expected an intracommunicator, got an "
                "intercommunicator; pass comm.Merge()",
            )
        given = {**options, "synchronize": synchronize}
        found = wraps.find(comm)
        if found is not None and cls is Comm and _stray is None:
            if found._serves_again(given):
                return found
        elif isinstance(comm, Device) or found is not None:
            first = comm if isinstance(comm, Device) else found
            if options or not synchronize:
                wraps.check_equal(first._given, given)
            return _another(first, cls)
        if issubclass(cls._plain, MPI.Topocomm):
            cls._plain(comm)  # mpi4py's error, if it has another topology
        made = MPI.Comm.__new__(kind_of(comm) if cls is Comm else cls, comm)
        made._begin(options, synchronize, owned=False)
        made.post.open(False)  # no later call fails before all ranks return
        made._life.wraps = 1
        wraps.note(made)
        return made

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """Return the communicator of a handle."""
        return _known(MPI.Comm.fromhandle(handle))

    @classmethod
    def fromint(cls, arg: int) -> Any:
        """Return the communicator of an integer of MPI's ABI."""
        return _known(MPI.Comm.fromint(arg))

    @classmethod
    def f2py(cls, arg: int) -> Any:
        """Return the communicator of a handle of Fortran."""
        return _known(MPI.Comm.f2py(arg))


class Intracomm(Comm, MPI.Intracomm):  # type: ignore[misc]
    """A communicator of one group of ranks."""

    _plain = MPI.Intracomm

    @translated
    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Return a new communicator of a group of ranks. Collective over these."""
        self.post.check_message("Create_group", 0, tag)
        return self._wrapped(self.host.Create_group(group, tag))

    @classmethod
    def Create_from_group(cls, *args: Any, **options: Any) -> Any:
        """Return a communicator of a group; after ``install``, for device arrays."""
        return _adopted(MPI.Intracomm.Create_from_group(*args, **options))

    @translated
    def Create_intercomm(
        self,
        local_leader: int,
        peer_comm: MPI.Intracomm,
        remote_leader: int,
        tag: int = 0,
    ) -> Any:
        """Return an intercommunicator, whose calls take host arrays only."""
        self.post.check_message("Create_intercomm", local_leader, tag)
        create = self.host.Create_intercomm
        return self._wrapped(create(local_leader, peer_comm, remote_leader, tag))

    def Create_cart(
        self,
        dims: Sequence[int],
        periods: Sequence[bool] | None = None,
        reorder: bool = False,
    ) -> Any:
        """Return a new communicator whose ranks are a grid."""
        return self._wrapped(self.host.Create_cart(dims, periods, reorder))

    def Create_graph(
        self, index: Sequence[int], edges: Sequence[int], reorder: bool = False
    ) -> Any:
        """Return a new communicator whose ranks are the nodes of a graph."""
        return self._wrapped(self.host.Create_graph(index, edges, reorder))

    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int],
        destinations: Sequence[int],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Return a new communicator of a graph, of which each rank names its edges."""
        create = self.host.Create_dist_graph_adjacent
        return self._wrapped(create(sources, destinations, *args, **options))

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Return a new communicator of a graph, of which each rank names some edges."""
        create = self.host.Create_dist_graph
        return self._wrapped(create(sources, degrees, destinations, *args, **options))

    Scan, Iscan, Scan_init = forms("Scan", reductions.scan)
    Exscan, Iexscan, Exscan_init = forms("Exscan", reductions.exscan)


for _name in ("scan", "exscan"):
    setattr(Intracomm, _name, of_objects(_name))


ADVICE = "an intercommunicator takes no others; call the method of comm.Merge()"


class Intercomm(Comm, MPI.Intercomm):  # type: ignore[misc]
    """A communicator of two groups of ranks. Its calls take host arrays only.

    ``Merge`` returns one that takes device arrays, if both groups are of this program.
    """

    _plain = MPI.Intercomm

    @translated
    def __new__(cls, comm: Any = None) -> Any:
        """Return an object with the communicator's handle."""
        if comm is not None and comm != MPI.COMM_NULL and not comm.is_inter:
            raise MPITypeError(
                MPI.ERR_COMM,
                "Intercomm: expected an intercommunicator, got an intracommunicator; "
                "pass a result of Create_intercomm",
            )
        made = MPI.Comm.__new__(cls, comm)
        if isinstance(comm, Intercomm) and isinstance(comm, Device):
            made._begin_inter(comm)
        elif comm:  # of mpi4py's
            made._begin_inter(None)
        return made

    def _begin_inter(self, parent: Device | None) -> None:
        self._of_program = parent is not None
        self._options = self._given = {} if parent is None else parent._options
        self.host, self._life = MPI.Intercomm(self), Life(owned=parent is not None)

    @translated
    def Merge(self, high: bool = False) -> Any:
        """Return a communicator of both groups."""
        made = self.host.Merge(high)
        return _adopted(made) if self._of_program else made

    @translated
    def Free(self) -> None:
        """Free the communicator. Collective."""
        MPI.Intercomm.Free(self)
        self.host = MPI.Intercomm()

    @translated
    def Disconnect(self) -> None:
        """Wait for the messages of this rank, and free the communicator. Collective."""
        MPI.Intercomm.Disconnect(self)
        self.host = MPI.Intercomm()


_MADE_HERE = (
    *("Free", "Disconnect", "Dup", "Clone", "Dup_with_info", "Idup", "Idup_with_info"),
    *("Create", "Split", "Split_type", "free"),
)

for _name in dir(Device):
    if _name[0] != "_" and _name not in _MADE_HERE and hasattr(MPI.Intercomm, _name):
        setattr(Intercomm, _name, of_host(getattr(MPI.Intercomm, _name), ADVICE))


add_kinds(Comm, Intracomm, Intercomm)
