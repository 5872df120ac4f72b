"""mpi4py's communicators, whose buffer calls take device arrays."""

import atexit
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from mpi4py import MPI

from numba_symm.board import Failure
from numba_symm.cache import Cache
from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.errors import ClosedError, CollectiveError
from numba_symm.launch import devices
from numba_symm.launch.tagged import TaggedComm
from numba_symm.memory.allocator import SymmetricMemoryAllocator
from numba_symm.mpi import (
    collectives,
    jobs,
    messages,
    progress,
    reductions,
    rooms,
    shortcuts,
    wraps,
)
from numba_symm.mpi.errors import FREED, MPIError, refusal, translated
from numba_symm.mpi.forms import forms, of_objects
from numba_symm.mpi.messages import Post
from numba_symm.mpi.p2p import Messages
from numba_symm.streams import SideStream

_open: list["Device"] = []
"""Those with a communicator that the end of the program closes, in order."""


class Device(Messages):
    """The calls on device arrays; what is not here is mpi4py's own.

    Attributes:
        synchronizes: whether blocking calls wait until their arrays may be used.
    """

    rank: int
    size: int
    synchronizes = True
    _plain: type[Any] = MPI.Intracomm
    _owned = False
    _freed = False
    _wraps = 0  # calls of Comm, or of the method that made it, less those of Free
    _watched: Communicator | None = None
    """The library's communicator whose failures count while this one has none.

    It is the parent's, or after ``Free`` the one that was closed.
    """

    def _begin(
        self,
        options: dict[str, Any],
        synchronize: bool,
        owned: bool,
        allocator: SymmetricMemoryAllocator | None = None,
    ) -> None:
        self._given = {**options, "synchronize": synchronize}
        self._options = dict(options)
        self.synchronizes = synchronize
        self._owned = owned
        self._made: Communicator | None = None
        self._side: SideStream | None = None
        self.shortcuts = Cache(shortcuts.MOST)
        self.host = self._plain(self)
        """The communicator of mpi4py, whose methods take host arrays only."""
        origin = self.host
        if allocator is None:  # before MPI duplicates anything, because it may fail
            allocator = self.communicator.allocator
            # If this fails, all ranks make another communicator before they repeat
            # this. So they then duplicate the same one, although some may not have
            # begun to duplicate this one.
            own = inside(self.communicator).ranks.comm
            assert isinstance(own, TaggedComm)  # because ``host`` is mpi4py's
            origin = own.mpi
        stream = options.get("stream")
        given = stream, self._check, self._enter, options.get("timeout")
        self.post = Post(origin, allocator, *given)

    @property
    def communicator(self) -> Communicator:
        """The library's communicator. All ranks make it together when it is needed."""
        if self._freed:
            raise MPIError(MPI.ERR_COMM, FREED)
        if self._made is None:
            self._made = Communicator(self.host, **self._options)
            self._options["device"] = self._made.device.ordinal
            _open.append(self)
        return self._made

    @property
    def side(self) -> SideStream:
        """The stream of nonblocking collectives, which run beside other calls."""
        if self._side is None:
            self._side = SideStream(1)
        return self._side

    def _check(self) -> None:
        """Raise if the library's communicator has failed.

        Until it is made, the parent's counts in its place, if ``_watched`` is set.
        Otherwise a rank would wait for a message of a rank that has left.
        """
        if self._made is not None:
            self._made.check()
        elif self._watched is not None:
            with suppress(ClosedError):  # the program may close the parent first
                self._watched.check()
            if self._failure is not None:  # the parent failed before it was closed
                raise self._failure.exception()

    @property
    def _failure(self) -> Failure | None:
        """The failure that :meth:`_check` raises, if this rank knows of one."""
        found = self._watched if self._made is None else self._made
        return None if found is None else inside(found).ranks.known_failure

    def _enter(self, what: str) -> None:
        """Make the rank's GPU current in this thread, or raise."""
        devices.enter_thread(self._options["device"], what)

    def _wrapped(self, comm: Any, owned: bool = True) -> Any:
        """Return a communicator of mpi4py as one of this module; ``Free`` frees both.

        Args:
            comm: a new communicator.
            owned: False: ``Free`` does not free mpi4py's.
        """
        if not comm or comm.is_inter:
            return comm
        kind = _KINDS[type(comm)]
        made: Any = kind.__new__(kind, comm)
        options, allocator = dict(self._options), self.post.allocator
        made._begin(options, self.synchronizes, owned, allocator)
        made._given = self._given
        own, failed = self.post.islands[self.rank], self._failure is not None
        if not made._find_islands(own, failed):
            made._watched = self._watched if self._made is None else self._made
        made._wraps = 1
        wraps.note(made)
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
                wraps.check_equal(self._given, given)
        except (CollectiveError, ClosedError):
            return False
        self._wraps += 1
        return True

    def _find_islands(self, own: int, failed: bool = False) -> bool:
        """Find the islands of all ranks, from this rank's. Collective.

        Return whether any rank knows of a failure of the parent. If so, its failures
        count on no rank, because a rank that raises would leave others waiting.
        """
        found = self.post.gather((own, failed))
        self.post.islands = [each for each, _ in found]
        return any(failed for _, failed in found)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise ValueError("cannot pickle a communicator; make one in each process")

    # Communicators.

    @translated
    def Dup(self, info: MPI.Info | None = None) -> Any:
        """Return a new communicator of the same ranks."""
        return self._wrapped(self.host.Dup(info))

    Clone = Dup

    def Dup_with_info(self, info: MPI.Info) -> Any:
        """Return a new communicator of the same ranks, with hints."""
        return self._wrapped(self.host.Dup_with_info(info))

    def Idup(self, info: MPI.Info | None = None) -> tuple[Any, MPI.Request]:
        """Return a new communicator of the same ranks, and a request that is done."""
        return self.Dup(info), MPI.Request()

    def Idup_with_info(self, info: MPI.Info) -> tuple[Any, MPI.Request]:
        """Return a new communicator of the same ranks, and a request that is done."""
        return self.Dup_with_info(info), MPI.Request()

    def Create(self, group: MPI.Group) -> Any:
        """Return a new communicator of a group of ranks. Collective over all ranks."""
        return self._wrapped(self.host.Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Return a new communicator of a group of ranks. Collective over these."""
        return self._wrapped(self.host.Create_group(group, tag))

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return a new communicator of the ranks that pass the same color."""
        return self._wrapped(self.host.Split(color, key))

    def Split_type(
        self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL
    ) -> Any:
        """Return a new communicator of the ranks that share something."""
        return self._wrapped(self.host.Split_type(split_type, key, info))

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

    @translated
    def Free(self) -> None:
        """Close the communicator. Collective. After a failure, it waits for no rank.

        If ``Comm`` was called several times with one communicator of mpi4py, the last
        ``Free`` closes. The communicator that was passed to ``Comm`` is not freed.
        """
        if self._freed:
            raise MPIError(MPI.ERR_COMM, FREED)
        self._wraps -= 1
        if self._wraps > 0:
            return
        self._freed = True
        wraps.forget(self)
        if self._made is not None:
            self._watched = self._made
        try:
            if self._failure is None:
                progress.hurry_all(self.post)  # a peer may still receive these
            self._close()
            if self._failure is None:
                self.post.free()
        finally:
            if self._failure is not None:
                self.post.give_up()
        if self._failure is not None:
            return
        if self._owned:
            self._plain.Free(self)
            self.host = self._plain()  # it had the handle that was freed

    Disconnect = Free

    def _close(self) -> None:
        made, self._made = self._made, None
        side, self._side = self._side, None
        self.shortcuts.clear()
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
        if self._made is None:
            self.host.Barrier()
            return
        job = collectives.barrier(self)
        job.start()
        job.wait()

    Bcast, Ibcast, Bcast_init = forms("Bcast", collectives.bcast)
    Gather, Igather, Gather_init = forms("Gather", collectives.gather)
    Gatherv, Igatherv, Gatherv_init = forms("Gatherv", collectives.gatherv)
    Scatter, Iscatter, Scatter_init = forms("Scatter", collectives.scatter)
    Scatterv, Iscatterv, Scatterv_init = forms("Scatterv", collectives.scatterv)
    Allgather, Iallgather, Allgather_init = forms("Allgather", collectives.allgather)
    Allgatherv, Iallgatherv, Allgatherv_init = forms(
        "Allgatherv", collectives.allgatherv
    )
    Alltoall, Ialltoall, Alltoall_init = forms("Alltoall", collectives.alltoall)
    Alltoallv, Ialltoallv, Alltoallv_init = forms("Alltoallv", collectives.alltoallv)
    Alltoallw, Ialltoallw, Alltoallw_init = forms("Alltoallw", collectives.alltoallw)
    Reduce, Ireduce, Reduce_init = forms("Reduce", reductions.reduce)
    Allreduce, Iallreduce, Allreduce_init = forms("Allreduce", reductions.allreduce)
    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = forms(
        "Reduce_scatter_block", reductions.reduce_scatter_block
    )
    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = forms(
        "Reduce_scatter", reductions.reduce_scatter
    )
    Scan, Iscan, Scan_init = forms("Scan", reductions.scan)
    Exscan, Iexscan, Exscan_init = forms("Exscan", reductions.exscan)


for _name in (
    *("bcast", "gather", "scatter", "allgather", "alltoall"),
    *("reduce", "allreduce", "scan", "exscan"),
    *("send", "bsend", "ssend", "isend", "ibsend", "issend"),
    *("recv", "irecv", "sendrecv"),
):
    setattr(Device, _name, of_objects(_name))


class Comm(Device, MPI.Intracomm):  # type: ignore[misc]
    """An intracommunicator of mpi4py, whose buffer calls take device arrays too.

    It has the handle, the ranks and the attributes of ``comm``. mpi4py makes the calls
    with host arrays or with objects, and has all other methods. Construction is
    collective; it binds this rank to a GPU. A second call with the same communicator
    returns the same object, until it was freed as often, or has failed.

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

    @translated
    def __new__(cls, comm: Any = None, synchronize: bool = True, **options: Any) -> Any:
        """Return an object with the communicator's handle, if possible the first."""
        if isinstance(comm, MPI.Comm) and comm and comm.is_inter:
            raise refusal(
                MPI.ERR_COMM,
                "Comm: expected an intracommunicator, got an intercommunicator; pass "
                "comm.Merge()",
            )
        found = wraps.find(comm)
        if found is not None:
            given = {**options, "synchronize": synchronize}
            if found._serves_again(given):
                return found
        return super().__new__(cls, comm)

    @translated
    def __init__(self, comm: MPI.Intracomm, synchronize: bool = True, **options: Any):
        if self._wraps:  # an earlier call has made it
            return
        self._begin(options, synchronize, owned=False)
        parts = self.communicator.islands
        own = [number for number, part in enumerate(parts) if self.rank in part]
        self._find_islands(own[0])
        self._wraps = 1
        wraps.note(self)


_KINDS: dict[type, Any] = {MPI.Intracomm: Comm}
"""The class here for each class of mpi4py; ``topologies.py`` adds its own."""


def add_kind(kind: type[Device]) -> None:
    """From now on, wrap communicators of mpi4py's class as objects of ``kind``."""
    _KINDS[kind._plain] = kind


def close_all() -> None:
    """Close all communicators. The end of the program does it, too."""
    _close_all()


@atexit.register
def _close_all() -> None:
    """Close what is open, in reverse order, as MPI does at the end of a program.

    It closes nothing after an exception, because the other ranks may not come. They get
    an error that names the exception.
    """
    try:
        if getattr(sys, "last_value", None) is None and not MPI.Is_finalized():
            _close_open()
    finally:
        progress.stop()


def _close_open() -> None:
    messages.settle_all()
    rooms.give_back_all()
    for comm in reversed(list(_open)):
        try:
            comm._close()  # waits for all ranks of the communicator
        except CollectiveError as error:
            text = f"at the end of the program: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=1)
