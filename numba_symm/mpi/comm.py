"""The classes of communicators, which stand for mpi4py's, also grids and graphs.

Communicators whose ranks are a grid or a graph, and collectives of neighbours.

Such a collective is one exchange of all ranks, in which a rank sends to its neighbours
only. What a rank sends to one neighbour several times (in a periodic grid of one or
two ranks, or over several edges) is matched as MPI defines.
"""

import atexit
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, Self

from mpi4py import MPI

from numba_symm.arguments import shown
from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.errors import ClosedError, CollectiveError
from numba_symm.gpu.streams import SideStream
from numba_symm.launch import devices, ranks
from numba_symm.launch.ranks import TaggedComm
from numba_symm.mpi import buffers, collectives, jobs, posts, waited
from numba_symm.mpi.buffers import Items, Kind, message, of_host
from numba_symm.mpi.collectives import exchanged
from numba_symm.mpi.datatypes import like, translated
from numba_symm.mpi.errors import FREED, MPIError, MPITypeError, refusal
from numba_symm.mpi.jobs import Build, Job, forms, of_objects
from numba_symm.mpi.p2p import Messages
from numba_symm.mpi.posts import Post
from numba_symm.mpi.waited import Life
from numba_symm.mpi.words import Words


def _numbers(comm: MPI.Comm, there: MPI.Comm) -> list[int]:
    """Return the number in another communicator of each rank of ``comm``. Local."""
    group, other = comm.Get_group(), there.Get_group()
    found = MPI.Group.Translate_ranks(group, range(group.size), other)
    group.Free()
    other.Free()
    return list(found)


_open: list["Device"] = []
"""Those with a communicator that the end of the program closes, in order."""

SHARED = ("_given", "_life", "_options", "host", "post", "synchronizes")
"""What all objects of one communicator have."""


class Device(Messages):
    """The calls on device arrays; what is not here is mpi4py's own.

    Attributes:
        synchronizes: whether blocking calls wait until their arrays may be used.
    """

    rank: int
    size: int
    synchronizes = True
    _plain: type[Any]
    _life: Life
    _given: dict[str, Any]
    _options: dict[str, Any]

    def _begin(
        self,
        options: dict[str, Any],
        synchronize: bool,
        owned: bool,
        parent: "Device | None" = None,
    ) -> None:
        self._given = {**options, "synchronize": synchronize}
        self._options = dict(options)
        self.synchronizes = synchronize
        self._life = life = Life(owned)
        self.host = self._plain(self)
        """The communicator of mpi4py, whose methods take host arrays only."""
        origin = self.host
        if parent is not None:
            post, numbers = parent.post, _numbers(origin, parent.host)
            life.descend(parent._life, numbers)
            words = post.words
            islands = [post.islands[number] for number in numbers]
            places = [post.places[number] for number in numbers]
        else:  # before MPI duplicates anything, because it may fail
            parts = self.communicator.islands
            where = {
                rank: (number, place)
                for number, part in enumerate(parts)
                for place, rank in enumerate(part)
            }
            islands = [where[rank][0] for rank in range(self.size)]
            places = [where[rank][1] for rank in range(self.size)]
            # If this fails, all ranks make another communicator before they repeat
            # this. So they then duplicate the same one, although some may not have
            # begun to duplicate this one.
            ranks = inside(self.communicator).ranks
            assert isinstance(ranks.comm, TaggedComm)  # because ``host`` is mpi4py's
            origin = ranks.comm.mpi
            with ranks.set_up("Comm"):
                words = Words(ranks, self.communicator.allocator)
        self.post = Post(
            origin,
            words,
            islands,
            places,
            stream=options.get("stream"),
            check=life.check,
            failed=life.has_failed,
            enter=self._enter,
            timeout=options.get("timeout"),
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse a call of a null communicator, which has no attributes."""
        if name in SHARED:
            raise refusal(
                MPI.ERR_COMM,
                "expected a communicator, got MPI.COMM_NULL; pass one that this "
                "process belongs to, such as MPI.COMM_WORLD",
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def _share(self, first: "Device") -> None:
        """Become another object of the same communicator."""
        for name in SHARED:
            setattr(self, name, getattr(first, name))

    @property
    def communicator(self) -> Communicator:
        """The library's communicator. All ranks make it together when it is needed."""
        life = self._life
        if life.freed:
            raise MPIError(MPI.ERR_COMM, FREED)
        if life.made is None:
            life.made = Communicator(self.host, **self._options)
            self._options["device"] = life.made.device.ordinal
            _open.append(self)
        return life.made

    @property
    def side(self) -> SideStream:
        """The stream of nonblocking collectives, which run beside other calls."""
        if self._life.side is None:
            self._life.side = SideStream(1)
        return self._life.side

    def _enter(self, what: str) -> None:
        """Make the rank's GPU current in this thread, or raise."""
        devices.enter_thread(self._options["device"], what)

    @translated
    def _wrapped(self, comm: Any, owned: bool = True, kind: Any = None) -> Any:
        """Return a communicator of mpi4py as one of this module; ``Free`` frees both.

        Args:
            comm: a new communicator.
            owned: False: ``Free`` does not free mpi4py's.
            kind: its class; None: the one that stands for mpi4py's.
        """
        if not comm:
            return comm
        kind = kind or kind_of(comm)
        made: Any = MPI.Comm.__new__(kind, comm)
        if comm.is_inter:
            made._begin_inter(self)
            return made
        made._begin(self._options, self.synchronizes, owned, self)
        made._given = self._given
        life = self._life
        failed = made.post.open(life.failure is not None)
        # If a rank knows of a failure of the parent, its failures count on no rank,
        # because a rank that raises would leave others waiting.
        if not any(failed):
            made._life.watched = life.made or life.watched
        made._life.wraps = 1
        waited.note(made)
        return made

    def _serves_again(self, given: dict[str, Any]) -> bool:
        """Count one more call of ``Comm`` with this communicator. Collective.

        Returns:
            False, on all ranks: it has failed or was closed.

        Raises:
            SymmError: on all ranks, if one passes other options than the first call.
        """
        try:
            island = inside(self.communicator).ranks
            with island.set_up("Comm"), island.exchange.agreed("Comm"):
                waited.check_equal(self._given, given)
        except (CollectiveError, ClosedError):
            return False
        self._life.wraps += 1
        return True

    def __repr__(self) -> str:
        found = vars(self)  # and not MPI, which may be finalized
        name, ranks = f"numba_symm.mpi.{type(self).__name__}", ""
        if "post" in found:
            ranks = f": rank {self.post.rank} of {len(self.post.islands)}"
            ranks += ", which was freed" * self._life.freed
        return f"<{name}{ranks}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        name = self._life.name if "_life" in vars(self) else "COMM_NULL"
        if not name:
            raise ValueError("cannot pickle a communicator; make one in each process")
        constant = _named(name)
        return (_named, (name,)) if self is constant else (type(self), (constant,))

    # Communicators.

    Dup: Any
    Dup_with_info: Any

    @translated
    def Idup(self, info: MPI.Info | None = None) -> tuple[Any, MPI.Request]:
        """Return a new communicator of the same ranks, and a request that is done."""
        return self.Dup(info), MPI.Request()

    @translated
    def Idup_with_info(self, info: MPI.Info) -> tuple[Any, MPI.Request]:
        """Return a new communicator of the same ranks, and a request that is done."""
        return self.Dup_with_info(info), MPI.Request()

    @translated
    def Free(self) -> None:
        """Close the communicator. Collective. After a failure, it waits for no rank.

        If ``Comm`` was called several times with one communicator of mpi4py, the last
        ``Free`` closes. The communicator that was passed to ``Comm`` is not freed.
        """
        life = self._life
        if life.freed:
            raise MPIError(MPI.ERR_COMM, FREED)
        if life.name and (life.wraps == 1 or self is _named(life.name)):
            raise refusal(
                MPI.ERR_COMM,
                f"Free: expected a communicator that the program made, got {life.name},"
                " which lives as long as the program; omit the call",
            )
        life.wraps -= 1
        if life.wraps > 0:
            return
        life.freed = True
        waited.forget(self)
        if life.made is not None:
            life.watched = life.made
        try:
            self._close()
            if life.failure is None:
                self.post.free()
        finally:
            if life.failure is not None:
                self.post.give_up()
        if life.failure is not None:
            return
        if life.owned:
            type(self.host).Free(self)
            self.host = type(self.host)()  # it had the handle that was freed

    Disconnect = Free

    def free(self) -> None:
        """Do as :meth:`Free`, but nothing for a null or a predefined communicator."""
        if self and not self._life.name:
            self.Free()

    def _close(self) -> None:
        life = self._life
        made, life.made = life.made, None
        side, life.side = life.side, None
        try:
            if made is not None:
                _open.remove(self)
                made.close()
        finally:
            if side is not None:
                side.close()
                jobs.let_go()

    # Collectives.

    @translated
    def Barrier(self) -> None:
        """Wait for all ranks, and for the earlier work of their streams."""
        if self._life.made is None:
            self.host.Barrier()
            return
        job = collectives.barrier(self)
        job.start()
        job.wait()


def making(plain: Any, same: bool = False) -> Any:
    """Return a method of mpi4py as one that makes a communicator of this module.

    Args:
        plain: the method.
        same: whether the result has the class of the object.
    """

    def method(self: Device, *args: Any) -> Any:
        return self._wrapped(plain(self.host, *args), kind=type(self) if same else None)

    return like(plain, method)


def add_forms(kind: type[Device], name: str, build: Build) -> None:
    """Add the three methods of a collective to a class."""
    for method in forms(name, build):
        setattr(kind, method.__name__, method)


for _name in ("Dup", "Clone", "Dup_with_info"):
    setattr(Device, _name, making(getattr(MPI.Comm, _name), same=True))
for _name in ("Create", "Split", "Split_type"):
    setattr(Device, _name, making(getattr(MPI.Comm, _name)))
for _name in (
    *("Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv"),
    *("Alltoall", "Alltoallv", "Alltoallw", "Reduce", "Allreduce"),
    *("Reduce_scatter_block", "Reduce_scatter"),
):
    add_forms(Device, _name, getattr(collectives, _name.lower()))
for _name, _advice in (
    ("Psend_init", "use several messages"),
    ("Precv_init", "use several messages"),
    ("Iagree", "pass a flag on the host"),
    ("Attach_buffer", "Bsend of a device array needs no buffer"),
):
    setattr(Device, _name, of_host(getattr(MPI.Comm, _name), _advice))
for _name in (
    *("bcast", "gather", "scatter", "allgather", "alltoall"),
    *("reduce", "allreduce"),
    *("send", "bsend", "ssend", "isend", "ibsend", "issend"),
    *("recv", "irecv", "sendrecv"),
):
    setattr(Device, _name, of_objects(_name))


_KINDS: dict[type, Any] = {}
"""The class here for each class of mpi4py; the modules of the classes add them."""


def add_kinds(*kinds: Any) -> None:
    """From now on, wrap communicators of mpi4py's classes as objects of these."""
    for kind in kinds:
        _KINDS[kind._plain] = kind


def kind_of(comm: Any) -> Any:
    """Return the class here of a communicator of mpi4py."""
    return next(_KINDS[each] for each in type(comm).__mro__ if each in _KINDS)


def _named(name: str) -> Any:
    """Return what has the name of one of mpi4py's constants in this process."""
    return getattr(sys.modules["mpi4py.MPI"], name)


@atexit.register
def close_all() -> None:
    """Close what is open, in reverse order, as MPI does at the end of a program.

    It closes nothing after an exception, because the other ranks may not come. They get
    an error that names the exception.
    """
    if getattr(sys, "last_value", None) is not None or MPI.Is_finalized():
        return
    posts.settle_all()
    for comm in reversed(list(_open)):
        try:
            comm._close()  # waits for all ranks of the communicator
        except CollectiveError as error:
            text = f"at the end of the program: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=1)


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
    found = waited.find(comm)
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
        found = waited.find(comm)
        if found is not None and cls is Comm and _stray is None:
            if found._serves_again(given):
                return found
        elif isinstance(comm, Device) or found is not None:
            first = comm if isinstance(comm, Device) else found
            if options or not synchronize:
                waited.check_equal(first._given, given)
            return _another(first, cls)
        if issubclass(cls._plain, MPI.Topocomm):
            cls._plain(comm)  # mpi4py's error, if it has another topology
        made = MPI.Comm.__new__(kind_of(comm) if cls is Comm else cls, comm)
        made._begin(options, synchronize, owned=False)
        made.post.open(False)  # no later call fails before all ranks return
        made._life.wraps = 1
        waited.note(made)
        return made


def _from_mpis(name: str) -> Any:
    """Return mpi4py's class method of that name, whose result may be known here."""
    plain = getattr(MPI.Comm, name)

    def method(cls: Any, given: Any) -> Any:
        return _known(plain(given))

    return classmethod(functools.update_wrapper(method, plain))


for _name in ("fromhandle", "fromint", "f2py"):
    setattr(Comm, _name, _from_mpis(_name))


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

    Create_cart = making(MPI.Intracomm.Create_cart)
    Create_graph = making(MPI.Intracomm.Create_graph)
    Create_dist_graph_adjacent = making(MPI.Intracomm.Create_dist_graph_adjacent)
    Create_dist_graph = making(MPI.Intracomm.Create_dist_graph)


for _name in ("scan", "exscan"):
    setattr(Intracomm, _name, of_objects(_name))
    add_forms(Intracomm, _name.capitalize(), getattr(collectives, _name))


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


def _freeing(plain: Any) -> Any:
    """Return a method of mpi4py after which there is no communicator."""

    def method(self: Intercomm) -> None:
        plain(self)
        self.host = MPI.Intercomm()

    return like(plain, method)


for _name in ("Free", "Disconnect"):
    setattr(Intercomm, _name, _freeing(getattr(MPI.Intercomm, _name)))


_MADE_HERE = (
    *("Free", "Disconnect", "Dup", "Clone", "Dup_with_info", "Idup", "Idup_with_info"),
    *("Create", "Split", "Split_type", "free"),
)

for _name in dir(Device):
    if _name[0] != "_" and _name not in _MADE_HERE and hasattr(MPI.Intercomm, _name):
        setattr(Intercomm, _name, of_host(getattr(MPI.Intercomm, _name), ADVICE))


add_kinds(Comm, Intracomm, Intercomm)


Items_of = Callable[[Any, int], list[Items]]
"""Returns the items that an argument names, for so many neighbours."""


def _each(spec: Any, number: int) -> list[Items]:
    return [message(spec)] * number


def _blocks(spec: Any, number: int) -> list[Items]:
    found = message(spec, number)
    each = found.number
    return [found.items(block * each, each) for block in range(number)]


def _vector(spec: Any, number: int) -> list[Items]:
    return buffers.vector(spec, number).parts


def _with_neighbours(name: str, sent: Items_of, received: Items_of) -> Build:
    """Return what makes the job of a collective between neighbours."""

    @collectives.of_arrays
    def build(comm: Any, sendbuf: Any, recvbuf: Any) -> Job:
        sources, destinations = comm.host.inoutedges
        incoming = received(recvbuf, len(sources))
        return _between(comm, name, sent(sendbuf, len(destinations)), incoming)

    return build


def _between(comm: Any, what: str, outgoing: list[Items], incoming: list[Items]) -> Job:
    """Return the job of messages to the destinations and from the sources."""
    sources, destinations = comm.host.inoutedges
    sends: list[list[Items]] = [[] for _ in range(comm.size)]
    receives: list[list[Items]] = [[] for _ in range(comm.size)]
    for rank, part in zip(destinations, outgoing, strict=True):
        if rank != MPI.PROC_NULL:
            sends[rank].append(part)
    order = list(range(len(sources)))
    if comm.host.topology == MPI.CART:
        # What a rank sends downwards, its neighbour there receives from above.
        order = [edge ^ 1 for edge in order]
    for edge in order:
        if sources[edge] != MPI.PROC_NULL:
            receives[sources[edge]].append(incoming[edge])
    return exchanged(comm, what, sends, receives)


class Topocomm(Intracomm, MPI.Topocomm):  # type: ignore[misc]
    """A communicator with neighbours, and the collectives between them."""

    _plain = MPI.Topocomm


for _name, *_items in (
    ("Neighbor_allgather", _each, _blocks),
    ("Neighbor_allgatherv", _each, _vector),
    ("Neighbor_alltoall", _blocks, _blocks),
    ("Neighbor_alltoallv", _vector, _vector),
    ("Neighbor_alltoallw", buffers.typed, buffers.typed),
):
    add_forms(Topocomm, _name, _with_neighbours(_name, *_items))
for _name in ("neighbor_allgather", "neighbor_alltoall"):
    setattr(Topocomm, _name, of_objects(_name))


class Cartcomm(Topocomm, MPI.Cartcomm):  # type: ignore[misc]
    """A communicator whose ranks are a grid, made by ``Comm.Create_cart``."""

    _plain = MPI.Cartcomm
    Sub = making(MPI.Cartcomm.Sub)


class Graphcomm(Topocomm, MPI.Graphcomm):  # type: ignore[misc]
    """A communicator whose ranks are a graph, made by ``Comm.Create_graph``."""

    _plain = MPI.Graphcomm


class Distgraphcomm(Topocomm, MPI.Distgraphcomm):  # type: ignore[misc]
    """A communicator of a graph, made by ``Comm.Create_dist_graph`` and its like."""

    _plain = MPI.Distgraphcomm


add_kinds(Topocomm, Cartcomm, Graphcomm, Distgraphcomm)
