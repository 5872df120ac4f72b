"""mpi4py's communicators, whose buffer calls take device arrays."""

import atexit
import sys
import warnings
from typing import Any, Self

from mpi4py import MPI

from numba_symm.collectives.communicator import Communicator, inside
from numba_symm.errors import ClosedError, CollectiveError
from numba_symm.launch import devices
from numba_symm.launch.tagged import TaggedComm
from numba_symm.mpi import (
    collectives,
    jobs,
    messages,
    progress,
    reductions,
    wraps,
)
from numba_symm.mpi.buffers import of_host
from numba_symm.mpi.errors import FREED, MPIError, refusal
from numba_symm.mpi.forms import forms, of_objects
from numba_symm.mpi.life import Life
from numba_symm.mpi.messages import Post
from numba_symm.mpi.p2p import Messages
from numba_symm.mpi.reading import translated
from numba_symm.mpi.words import Words
from numba_symm.streams import SideStream


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
        self._life.wraps += 1
        return True

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

    @translated
    def Dup(self, info: MPI.Info | None = None) -> Any:
        """Return a new communicator of the same ranks."""
        return self._wrapped(self.host.Dup(info), kind=type(self))

    @translated
    def Clone(self) -> Any:
        """Return a new communicator of the same ranks."""
        return self._wrapped(self.host.Clone(), kind=type(self))

    @translated
    def Dup_with_info(self, info: MPI.Info) -> Any:
        """Return a new communicator of the same ranks, with hints."""
        return self._wrapped(self.host.Dup_with_info(info), kind=type(self))

    @translated
    def Idup(self, info: MPI.Info | None = None) -> tuple[Any, MPI.Request]:
        """Return a new communicator of the same ranks, and a request that is done."""
        return self.Dup(info), MPI.Request()

    @translated
    def Idup_with_info(self, info: MPI.Info) -> tuple[Any, MPI.Request]:
        """Return a new communicator of the same ranks, and a request that is done."""
        return self.Dup_with_info(info), MPI.Request()

    @translated
    def Create(self, group: MPI.Group) -> Any:
        """Return a new communicator of a group of ranks. Collective over all ranks."""
        return self._wrapped(self.host.Create(group))

    @translated
    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return a new communicator of the ranks that pass the same color."""
        return self._wrapped(self.host.Split(color, key))

    @translated
    def Split_type(
        self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL
    ) -> Any:
        """Return a new communicator of the ranks that share something."""
        return self._wrapped(self.host.Split_type(split_type, key, info))

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
        wraps.forget(self)
        if life.made is not None:
            life.watched = life.made
        try:
            if life.failure is None:
                progress.hurry_all(self.post)  # a peer may still receive these
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
    for comm in reversed(list(_open)):
        try:
            comm._close()  # waits for all ranks of the communicator
        except CollectiveError as error:
            text = f"at the end of the program: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=1)
